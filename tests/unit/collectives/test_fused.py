"""allreduce_add_rms_norm: the bits of its parts, gradients, graphs and errors."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

import ferrodist as fd
from ferrodist.backends.native import is_native_available
from ferrodist.backends.native.binding import compiled
from ferrodist.testing import run_ranks

_NATIVE = pytest.param(
    "native-threads",
    marks=pytest.mark.skipif(not is_native_available(), reason="this installation was built without the native engine"),
)
BACKENDS = ["simulated", _NATIVE]
EPS = 1e-5


def inputs(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """A rank's tensor, and the residual and the weight of all."""
    own, shared = (torch.Generator().manual_seed(seed) for seed in (rank, 99))
    tensor = torch.randn(shape, generator=own)
    return [tensor.to(dtype), *(torch.randn(size, generator=shared).to(dtype) for size in (shape, shape[-1:]))]


def unfused(tensor, residual, weight, eps=EPS):
    total = fd.allreduce(tensor) + residual
    return functional.rms_norm(total, weight.shape, weight, eps), total


def same(ones, others) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_bits_of_the_parts(backend, num_ranks, dtype):
    """Results of all sizes: inline, of one segment and of several; inputs stay as they are."""

    def program(group):
        for shape in [(3,), (1, 1, 512), (5, 700), (80, 1000), (0, 4), (2, 0)]:
            given = inputs(group.rank, shape, dtype)
            before = [one.clone() for one in given]
            found = fd.allreduce_add_rms_norm(*given, EPS)
            assert same(found, unfused(*given)), shape
            assert same(given, before)

    run_ranks(program, num_ranks, backend=backend)


def test_plain_calls_take_the_fast_path(monkeypatch):
    """Whatever the fast path can't do takes the general one, with the same bits, and so may one rank alone."""
    if not is_native_available():
        pytest.skip("this installation was built without the native engine")
    took: list[bool] = []
    fast = compiled.fast_allreduce_add

    def seen(*arguments):
        result = fast(*arguments)
        took.append(result is not None)
        return result

    class Module:
        def __getattr__(self, name):
            return seen if name == "fast_allreduce_add" else getattr(compiled, name)

    monkeypatch.setattr("ferrodist.collectives.fused.compiled", Module())

    def program(group):
        tensor, residual, weight = inputs(group.rank, (4, 6))
        expected = unfused(tensor, residual, weight)
        strided = tensor.t().contiguous().t()
        assert same(fd.allreduce_add_rms_norm(strided if group.rank else tensor, residual, weight, EPS), expected)
        assert same(fd.allreduce_add_rms_norm(tensor, residual.t().contiguous().t(), weight, EPS), expected)
        assert same(fd.allreduce_add_rms_norm(tensor, tensor, weight, EPS), unfused(tensor, tensor, weight))
        assert same(fd.allreduce_add_rms_norm(tensor, residual, weight), unfused(tensor, residual, weight, None))

    run_ranks(program, 2, backend="native-threads")
    assert sorted(took) == [False] * 3 + [True] * 5


def test_gradients():
    """Those of the parts, whatever takes gradients."""

    def program(group):
        for wanted in range(1, 8):
            gradients = []
            for function in (fd.allreduce_add_rms_norm, unfused):
                given = inputs(group.rank, (3, 8))
                leaves = [one.requires_grad_() for place, one in enumerate(given) if wanted >> place & 1]
                normalized, total = function(*given, EPS)
                gradients.append(torch.autograd.grad((normalized * 2 + total).square().sum(), leaves))
            assert same(*gradients), wanted

    run_ranks(program, 2, backend="simulated")


def test_graphs_have_the_operator():
    """A compiled function is one graph with the collective's operator in it."""

    def program(group):
        targets = []

        def backend(graph, _):
            targets.extend(str(node.target) for node in graph.graph.nodes)
            return graph.forward

        given = inputs(group.rank, (3, 8))
        expected = fd.allreduce_add_rms_norm(*given, EPS, group=group)
        compiled_call = torch.compile(
            lambda *one: fd.allreduce_add_rms_norm(*one, EPS, group=group), backend=backend, fullgraph=True
        )
        assert same(compiled_call(*given), expected)
        assert any("_call_in_graph" in target for target in targets)

    run_ranks(program, 1, backend="simulated")


@pytest.mark.parametrize(
    ("error", "message", "place", "value"),
    [
        (TypeError, "residual must be a tensor, not None", 1, None),
        (TypeError, "weight is torch.float64 on cpu, and tensor torch.float32", 2, torch.ones(8, dtype=torch.float64)),
        (
            TypeError,
            "tensor must have a dtype of floating point",
            0,
            torch.ones(3, 8, dtype=torch.int64),
        ),
        (ValueError, r"last dim of tensor \(3, 8\), and has shape \(7,\)", 2, torch.ones(7)),
        (ValueError, r"residual must have tensor's shape \(3, 8\), and has \(8,\)", 1, torch.ones(8)),
        (ValueError, "weight must have an element for each feature", 0, torch.tensor(1.0)),
        (TypeError, "eps must be a number or None, not 'small'", 3, "small"),
        (TypeError, "weight is torch.float32 on meta", 2, torch.ones(8, device="meta")),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_wrong_arguments(error, message, place, value, backend):
    """Errors name the argument, before anything is sent."""

    def program(group):
        given = [*inputs(group.rank, (3, 8)), EPS]
        given[place] = value
        with pytest.raises(error, match=message):
            fd.allreduce_add_rms_norm(*given)
        assert same(fd.allreduce_add_rms_norm(*inputs(group.rank, (3, 8)), EPS), unfused(*inputs(group.rank, (3, 8))))

    run_ranks(program, 2, backend=backend)


def test_mismatched_calls():
    """A rank with another number of elements is an error on all, as of allreduce."""

    def program(group):
        with pytest.raises(fd.CollectiveMismatchError):
            fd.allreduce_add_rms_norm(*inputs(group.rank, (3, 8 + group.rank)), EPS)

    run_ranks(program, 2, backend="simulated")
