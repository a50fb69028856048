"""Memory that torch asks a group for."""

from __future__ import annotations

import gc

import pytest
import torch

from ferrodist.errors import UnsupportedOpError
from ferrodist.testing import run_ranks
from ferrodist.torch_backend.buffer_pool import BufferPool
from ferrodist.torch_backend.process_group import FerrodistProcessGroup


def test_memory_is_reused():
    """Memory is reused once no tensor has it any more, also no view of the first one."""
    pool = BufferPool()
    first = pool.empty(1000, torch.float32)
    address = first.data_ptr()
    part = first.view(10, 100)[3].fill_(7.0)
    del first
    gc.collect()
    other = pool.empty(1000, torch.float32)
    assert other.data_ptr() != address
    other.zero_()
    assert (part == 7.0).all()
    del part
    gc.collect()
    assert pool.empty(2000, torch.int16).data_ptr() == address  # of another type, and as much in large pages
    assert pool.empty(3 << 20, torch.uint8).data_ptr() != address


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_memory_of_any_type(dtype):
    """It is a plain tensor, on a large page's border."""
    tensor = BufferPool().empty(5, dtype)
    assert (tensor.dtype, tensor.shape, tensor.device) == (dtype, (5,), torch.device("cpu"))
    assert tensor.data_ptr() % 4096 == 0
    tensor.copy_(torch.ones(5).to(dtype))
    assert torch.equal(tensor.to(torch.complex64), torch.ones(5, dtype=torch.complex64))
    assert BufferPool().empty(0, dtype).shape == (0,)


def test_a_group_lends_memory_of_the_host():
    """And says so. What it has tensor lives on without it."""

    def program(group):
        made = FerrodistProcessGroup(group)
        assert made.supports_tensor_alloc(torch.device("cpu"))
        assert not made.supports_tensor_alloc(torch.device("meta"))
        with pytest.raises(UnsupportedOpError, match=r"no memory on meta: use torch\.empty"):
            made.allocate_tensor(4, dtype=torch.float32, device=torch.device("meta"))
        tensor = made.allocate_tensor(4, dtype=torch.float32, device=torch.device("cpu")).fill_(1.0)
        made.allreduce(tensor).wait()
        made.shutdown()
        return tensor.tolist()

    assert run_ranks(program, 2) == [[2.0] * 4] * 2
