"""The conformance suite over the backends of this version, and over sub-groups of them."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import pytest
import torch

from ferrodist.backends.process_group import use_group
from ferrodist.backends.subgroup import SubBackend
from ferrodist.collectives.engines import reference
from ferrodist.collectives.reduce_op import ReduceOp, fold
from ferrodist.testing import run_ranks
from ferrodist.testing.conformance.collectives import reductions
from ferrodist.testing.conformance.collectives.suite import COLLECTIVE_CHECKS, check_collectives
from ferrodist.testing.conformance.harness import public_functions

if TYPE_CHECKING:
    from ferrodist.backends.base import Backend
    from ferrodist.testing.conformance.collectives.oracle import CollectiveCheck

_TIMEOUT = 60.0
_MEMBERS = [3, 1, 0]

_GROUPS = [
    *(("simulated", size, None) for size in (1, 4)),
    ("tcp-threads", 3, None),
    *(("native-threads", size, None) for size in (1, 2, 3, 5)),
    ("gloo-threads", 3, None),
    *((backend, 4, _MEMBERS) for backend in ("simulated", "native-threads")),
]
"""Everything that the messages between ranks go through, and the sizes at which the engine's ways differ."""


def _name(group: tuple[str, int, list[int] | None]) -> str:
    backend, world_size, members = group
    return f"{backend}-{world_size}" + ("-sub" if members else "")


@pytest.fixture(autouse=True)
def _one_thread_a_rank():
    """Ranks are threads already: more of torch's would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("check", COLLECTIVE_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("group", _GROUPS, ids=_name)
def test_collectives_conform(group: tuple[str, int, list[int] | None], check: CollectiveCheck) -> None:
    """Every check passes on every backend, group size, and sub-group."""
    backend, world_size, members = group

    def on_rank(world: Backend) -> None:
        if members is None:
            check(world)
        elif world.rank in members:
            with use_group(SubBackend(world, members)) as sub:
                check(sub)
                sub.close()

    run_ranks(on_rank, world_size, backend=backend, timeout=_TIMEOUT)


def test_check_collectives_runs_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """check_collectives runs each check once and lists all that fail, by name and rule."""
    ran = []

    def run(check: CollectiveCheck) -> None:
        ran.append(check)
        if "dtype" in check.__name__:
            raise AssertionError("so it is")

    with pytest.raises(AssertionError, match="movement_of_every_dtype: Elements of every dtype arrive") as caught:
        check_collectives(run)
    assert ran == list(COLLECTIVE_CHECKS)
    assert "allreduce_of_every_dtype_and_operation" in str(caught.value)
    assert "late_ranks" not in str(caught.value)


def _reversed_fold(op, inputs, factors=None):
    return fold(op, list(reversed(inputs)), None if factors is None else list(reversed(factors)))


def _fold_in_own_precision(op, inputs, factors=None):
    if inputs[0].dtype is torch.float16 and op is ReduceOp.SUM:
        return sum(inputs[1:], inputs[0].clone())
    return fold(op, inputs, factors)


def _mean_by_reciprocal(op, inputs, factors=None):
    if op is ReduceOp.MEAN and inputs[0].dtype is torch.float32:
        return fold(ReduceOp.SUM, inputs) * (1 / len(inputs))
    return fold(op, inputs, factors)


def _last_zero_wins(op, inputs, factors=None):
    if op is ReduceOp.MAX and inputs[0].dtype is torch.float64:
        return torch.stack(inputs).amax(0)
    return fold(op, inputs, factors)


def _float_factor(op, inputs, factors=None):
    rounded = None if factors is None else [float(torch.tensor(factor)) for factor in factors]
    return fold(op, inputs, rounded)


def _saturating_integers(op, inputs, factors=None):
    if op is ReduceOp.SUM and inputs[0].dtype is torch.int8:
        return fold(op, [tensor.to(torch.int32) for tensor in inputs]).clamp(-128, 127).to(torch.int8)
    return fold(op, inputs, factors)


def _torch_complex_sum(op, inputs, factors=None):
    if op is ReduceOp.SUM and inputs[0].is_complex():
        accumulator = inputs[0].clone()
        for tensor in inputs[1:]:
            accumulator.add_(tensor)
        return accumulator
    return fold(op, inputs, factors)


@pytest.mark.parametrize(
    "wrong",
    [
        _reversed_fold,
        _fold_in_own_precision,
        _mean_by_reciprocal,
        _last_zero_wins,
        _float_factor,
        _saturating_integers,
        _torch_complex_sum,
    ],
    ids=lambda function: function.__name__.strip("_"),
)
def test_the_suite_finds_wrong_arithmetic(wrong, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine whose arithmetic differs in one rule fails the suite."""
    monkeypatch.setattr(reference, "fold", wrong)
    failed = []
    for check in public_functions(reductions):
        try:
            run_ranks(check, 3, timeout=_TIMEOUT)
        except Exception:
            failed.append(check.__name__)
            break
    assert failed


def test_checks_are_programs_of_a_rank() -> None:
    """Every check has a name of its own, states its rule, and takes the group of a rank."""
    assert len({check.__name__ for check in COLLECTIVE_CHECKS}) == len(COLLECTIVE_CHECKS)
    for check in COLLECTIVE_CHECKS:
        assert check.__doc__, check.__name__
        assert [*inspect.get_annotations(check).values()] == ["Backend", "None"], check.__name__
