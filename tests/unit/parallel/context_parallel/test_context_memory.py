"""Memory of attention over ranks, in bytes of the tensors that exist at once."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ferrodist as fd
from ferrodist.parallel.context_parallel import layout
from ferrodist.testing import run_ranks

LENGTH, HEADS, SIZE = 1024, 4, 64
ATTENTION = {"ring": fd.ring_attention, "ulysses": fd.ulysses_attention}


class Live(TorchDispatchMode):
    """Adds up the tensors that this thread has made and that still exist."""

    def __init__(self):
        super().__init__()
        self._live, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        # Views are of what is counted, or of another rank's buffer, whose message this thread moves.
        is_view = any(each.alias_info is not None for each in func._schema.returns)
        for x in () if is_view else tree_leaves(result):
            if isinstance(x, torch.Tensor):
                self._live[StorageWeakRef(x.untyped_storage())] = x.untyped_storage().nbytes()
        self._live = {ref: nbytes for ref, nbytes in self._live.items() if not ref.expired()}
        self.peak = max(self.peak, sum(self._live.values()))
        return result


def peaks(length, attend):
    """Peaks of a forward and of a backward, of attention between projections, which keep what they must."""
    with Live() as live:
        x, grad = torch.randn(1, length, HEADS * SIZE).requires_grad_(), torch.randn(1, length, HEADS * SIZE)
        q, k, v = ((x * scale).view(1, length, HEADS, SIZE).transpose(1, 2) for scale in (1, 2, 3))
        output = attend(q, k, v).transpose(1, 2).reshape(x.shape)
        del q, k, v
        forward, live.peak = live.peak, 0
        torch.autograd.grad(output, x, grad)
    return forward, live.peak


@pytest.mark.parametrize("method", ATTENTION)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_rank_needs_its_share_of_memory(monkeypatch, method, num_ranks):
    """What travels is small beside a rank's own tokens: else more ranks would not take longer sequences."""
    monkeypatch.setattr(layout, "MIN_PIECE", 32)
    alone = peaks(LENGTH, lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True))
    attend = ATTENTION[method]

    def program(group):
        return peaks(LENGTH // num_ranks, lambda *inputs: attend(*inputs, group=group, causal=True))

    for forward, backward in run_ranks(program, num_ranks):
        # Ulysses has the caller's inputs and those by heads at once, which are all that backward keeps.
        assert forward * num_ranks < alone[0] * (1.2 if method == "ring" else 1.9)
        assert backward * num_ranks < alone[1] * 1.25


@pytest.mark.parametrize("method", ATTENTION)
def test_backward_frees_the_inputs(method):
    """A node of the graph that outlives its backward must not keep them, nor one whose tensors a checkpoint drops."""

    def program(group):
        x = torch.randn(1, 2, 8, 4).requires_grad_()
        inputs = [x * 2 for _ in range(3)]
        refs = [StorageWeakRef(each.untyped_storage()) for each in inputs]
        output = ATTENTION[method](*inputs, group=group)
        del inputs
        output.sum().backward()
        return output.grad_fn is not None and all(ref.expired() for ref in refs)

    assert all(run_ranks(program, 2))
