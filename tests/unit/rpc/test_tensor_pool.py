"""`TensorPool`, the memory that large tensors are received into."""

import gc

import pytest
import torch

from ferrodist.rpc import RpcAgent
from ferrodist.rpc.large_messages import TensorPool
from ferrodist.testing import run_ranks

SIZE = 2 << 20


MAKES = [
    lambda tensor: tensor,
    lambda tensor: tensor[10:20],
    lambda tensor: tensor.numpy(),
    lambda tensor: tensor.view(torch.int32),
    lambda tensor: memoryview(tensor.numpy()),
]
"""Whatever may be made of a tensor and keeps its memory."""


@pytest.mark.parametrize("make", MAKES)
def test_memory_in_use_is_not_reused(make):
    """Memory is reused only once nothing made of the tensor is left."""
    pool = TensorPool()
    tensor = pool.make((SIZE,), torch.uint8)
    address = tensor.data_ptr()
    kept = make(tensor)
    del tensor
    gc.collect()
    others = [pool.make((SIZE,), torch.uint8) for _ in range(3)]
    assert address not in [each.data_ptr() for each in others]
    del kept
    gc.collect()
    assert pool.make((SIZE,), torch.uint8).data_ptr() == address


def test_free_memory_is_bounded():
    """Free memory is limited in bytes, whatever the sizes; tensors that are too large or too small are never
    pooled."""
    pool = TensorPool(3 * SIZE)
    for sizes in ([SIZE] * 5, [SIZE + 1] * 2, [2 * SIZE, 2 * SIZE], [4 * SIZE, 10]):
        tensors = [pool.make((size,), torch.uint8) for size in sizes]
        del tensors
        gc.collect()
        kept = [memory.nbytes for each in pool._free.values() for memory in each]
        assert sum(kept) == pool._num_free_bytes <= 3 * SIZE
        assert kept


@pytest.mark.parametrize("backend", ["simulated", "native"])
def test_results_are_not_overwritten(backend):
    """Results, and views and arrays of them, keep their values whatever is received later."""

    def make(number):
        return torch.full((SIZE // 4,), float(number))

    def program(group):
        agent = RpcAgent(group, {"make": make})
        group.barrier()
        try:
            if group.rank:
                return
            held = []
            for number in range(12):
                tensor = agent.rpc_sync(1, "make", number)
                held.append((number, MAKES[number % 3](tensor)))
                del tensor
                agent.rpc_sync(1, "make", -1)
            for number, part in held:
                assert part.min() == part.max() == number
        finally:
            group.barrier()
            agent.close()

    run_ranks(program, 2, backend=backend)
