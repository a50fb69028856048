"""Memory that torch asks a group for."""

from __future__ import annotations

import gc

import pytest
import torch

from ferrodist.errors import UnsupportedOpError
from ferrodist.testing import run_ranks
from ferrodist.torch_backend.process_group import BufferPool, FerrodistProcessGroup


def test_memory_is_lent_again():
    """When no tensor is in it any more, also none that was made of the one that was lent."""
    memory = BufferPool()
    first = memory.lend(1000, torch.float32)
    place = first.data_ptr()
    part = first.view(10, 100)[3].fill_(7.0)
    del first
    gc.collect()
    other = memory.lend(1000, torch.float32)
    assert other.data_ptr() != place
    other.zero_()
    assert (part == 7.0).all()
    del part
    gc.collect()
    assert memory.lend(2000, torch.int16).data_ptr() == place  # of another type, and as much in large pages
    assert memory.lend(3 << 20, torch.uint8).data_ptr() != place


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_memory_of_any_type(dtype):
    """It is a plain tensor, on a large page's border."""
    lent = BufferPool().lend(5, dtype)
    assert (lent.dtype, lent.shape, lent.device) == (dtype, (5,), torch.device("cpu"))
    assert lent.data_ptr() % 4096 == 0
    lent.copy_(torch.ones(5).to(dtype))
    assert torch.equal(lent.to(torch.complex64), torch.ones(5, dtype=torch.complex64))
    assert BufferPool().lend(0, dtype).shape == (0,)


def test_a_group_lends_memory_of_the_host():
    """And says so. What it has lent lives on without it."""

    def program(group):
        made = FerrodistProcessGroup(group)
        assert made.supports_tensor_alloc(torch.device("cpu"))
        assert not made.supports_tensor_alloc(torch.device("meta"))
        with pytest.raises(UnsupportedOpError, match=r"no memory on meta: use torch\.empty"):
            made.allocate_tensor(4, dtype=torch.float32, device=torch.device("meta"))
        lent = made.allocate_tensor(4, dtype=torch.float32, device=torch.device("cpu")).fill_(1.0)
        made.allreduce(lent).wait()
        made.shutdown()
        return lent.tolist()

    assert run_ranks(program, 2) == [[2.0] * 4] * 2
