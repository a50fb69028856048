"""Calls of an operator of torch's operator database on distributed tensors, compared with the plain operator.

`check_operator` makes a few small samples of an operator, gives their tensors many combinations of placements, and runs
each on ranks that are threads: the function with its gradients, with ``out=``, and in place. Partial tensors are sums
of shards that are no part of the tensor (twice it, and its negative), so that an operator which is not linear shows.

What operators draw at random, or leave uninitialised, is compared by shape, dtype and local shape alone.
"""

from __future__ import annotations

import hashlib
import itertools
import linecache
import random
import threading
import warnings
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from operator_comparison import differences, gather, is_made_by_torch, layout_problem, make_out, spread
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import ferrodist as fd
from ferrodist.errors import RankFailedError, UnsupportedOpError
from ferrodist.tensor import fallback
from ferrodist.tensor.ops import random as random_rules
from ferrodist.tensor.placement import Partial, Replicate, Shard
from ferrodist.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ferrodist.mesh import DeviceMesh
    from ferrodist.tensor.placement import Placement

DTYPES = (torch.float32, torch.int64, torch.complex64)

_MAX_SAMPLES = {torch.float32: 2, torch.int64: 1, torch.complex64: 1}
_MAX_ELEMENTS = 4096  # of all tensors of a sample
_MAX_COMBINATIONS = {2: 8, 3: 4}  # of placements, by the number of ranks, for each sample
_MAX_WRITING = 3  # of them also with ``out=`` and in place
_NOT_FOR_THREADS = ("nn.functional.linear_cross_entropychunked_none",)
_PATIENCE = 10.0  # seconds after which ranks that have ended a call take the others for stuck


class Mode(Enum):
    """The form in which an operator is called."""

    FUNCTION = "function"
    OUT = "out="
    IN_PLACE = "in place"


class Outcome(Enum):
    """What became of calls; of several calls the last one here counts."""

    NOT_RUN = "not run"
    RULE = "by rule"
    FALLBACK = "by fallback"
    REFUSED = "refused"
    ERROR = "error"
    WRONG = "wrong"


_ORDER = list(Outcome)


@dataclass
class ModeResult:
    """The outcome of all calls in one form, how many there were, and the reason of the worst."""

    outcome: Outcome = Outcome.NOT_RUN
    num_calls: int = 0
    reason: str = ""

    def add(self, outcome: Outcome, reason: str) -> None:
        """Add a call."""
        self.num_calls += 1
        if _ORDER.index(outcome) > _ORDER.index(self.outcome):
            self.outcome, self.reason = outcome, reason


@dataclass
class _Sample:
    """A call of an operator with plain tensors, and what it gives."""

    call: Callable[..., Any]
    leaves: list[Any]  # of the arguments
    structure: Any
    processed: Callable[[Any], Any]  # what of the results is determinate, for gradients
    is_determinate: bool
    expected: list[Any]
    gradients: list[torch.Tensor | None] | None  # of the tensors that require grad; None: not differentiable
    cotangents: list[torch.Tensor]
    num_outs: int = 0  # for `Mode.OUT`

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]


@dataclass
class _Case:
    """A sample with placements for its tensors, in one form; each rank adds its outcome."""

    sample: _Sample
    placements: Sequence[Placement]
    mode: Mode
    outcomes: list[tuple[Outcome, str]] = field(default_factory=list)

    def describe(self) -> str:
        """The shapes and the placements, for reasons."""
        tensors = zip(self.sample.tensors, self.placements, strict=True)
        return " ".join(f"{str(one.dtype)[6:]}{list(one.shape)}:{_short(where)}" for one, where in tensors)


def _short(placement: Placement) -> str:
    return f"S({placement.dim})" if isinstance(placement, Shard) else "R" if placement == Replicate() else "P"


def check_operator(info: Any, thoroughness: int = 1) -> dict[str, ModeResult]:
    """Run an entry of torch's operator database; returns the result by the name of the form.

    ``thoroughness``: How many times as many samples and combinations of placements to try as usual.
    """
    results = {mode.value: ModeResult() for mode in Mode}
    if info.name + info.variant_test_name in _NOT_FOR_THREADS:
        results[Mode.FUNCTION.value].reason = "torch's function holds a lock, so that ranks that are threads can't meet"
        return results
    with (
        warnings.catch_warnings(),
        # Ranks that are threads share one generator, so that its states differ.
        mock.patch.object(random_rules, "check_generators"),
        mock.patch.object(fallback, "check_generators"),
    ):
        warnings.simplefilter("ignore")
        for dtype in DTYPES:
            if not info.supports_dtype(dtype, "cpu"):
                continue
            samples = list(_make_samples(info, dtype, _MAX_SAMPLES[dtype] * thoroughness))
            for count, most in _MAX_COMBINATIONS.items():
                seed = f"{info.name} {count}"
                cases = [case for sample in samples for case in _cases(sample, seed, most * thoroughness)]
                _run_cases(cases, count)
                for case in cases:
                    outcome, reason = max(case.outcomes, key=lambda one: _ORDER.index(one[0]))
                    where = f"{case.describe()} on {count} ranks: " if outcome is not Outcome.RULE else ""
                    results[case.mode.value].add(outcome, where + reason)
    function = results[Mode.FUNCTION.value]
    if not function.num_calls:
        function.reason = "no small sample of float32, int64 or complex64 with a tensor argument"
    return results


def _make_samples(info: Any, dtype: torch.dtype, wanted: int) -> Iterator[tuple[_Sample, Mapping[Mode, _Sample]]]:
    """Some small samples, each with its forms that write."""
    torch.manual_seed(0)
    requires_grad = dtype is not torch.int64 and info.supports_autograd
    try:
        given = list(itertools.islice(info.sample_inputs("cpu", dtype, requires_grad=requires_grad), 80))
    except Exception:  # noqa: BLE001 - the database has samples that need other packages
        return
    small = [one for one in given if _is_usable(one)]
    chosen = [small[at * (len(small) - 1) // max(wanted - 1, 1)] for at in range(wanted)] if small else []
    for one in dict.fromkeys(map(id, chosen)):
        sample = next(other for other in chosen if id(other) == one)
        made = _make_sample(info, sample, Mode.FUNCTION)
        if made is not None:
            writing = {mode: _make_sample(info, sample, mode) for mode in (Mode.OUT, Mode.IN_PLACE)}
            yield made, {mode: form for mode, form in writing.items() if form is not None}


def _is_usable(sample: Any) -> bool:
    leaves, _ = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    is_plain = all(one.layout is torch.strided and one.device.type == "cpu" for one in tensors)
    return bool(tensors) and is_plain and sum(one.numel() for one in tensors) <= _MAX_ELEMENTS


def _call_in_form(info: Any, mode: Mode) -> Callable[..., Any] | None:
    """The operator as a function of the sample's input, positional and named arguments, and outs."""
    if mode is Mode.OUT:
        return _call_with_out(info.op) if info.supports_out else None
    if mode is Mode.IN_PLACE:
        in_place = info.inplace_variant
        return None if in_place is None else _call_in_place(in_place)
    return lambda first, args, named, _: info.op(first, *args, **named)


def _call_with_out(operator: Callable[..., Any]) -> Callable[..., Any]:
    def call(first: Any, args: Any, named: Any, outs: list[Any]) -> Any:
        operator(first, *args, **named, out=outs[0] if len(outs) == 1 else tuple(outs))
        return outs

    return call


def _call_in_place(in_place: Callable[..., Any]) -> Callable[..., Any]:
    def call(first: Any, args: Any, named: Any, _: list[Any]) -> Any:
        target = first.clone()
        in_place(target, *args, **named)
        return target

    return call


def _make_sample(info: Any, sample: Any, mode: Mode) -> _Sample | None:
    """A sample with its plain results; None if torch does not take it."""
    call = _call_in_form(info, mode)
    if call is None or (mode is Mode.IN_PLACE and not isinstance(sample.input, torch.Tensor)):
        return None
    leaves, structure = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    leaves = [_own(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    if mode is Mode.OUT:
        leaves = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    outs: list[torch.Tensor] = []
    try:
        if mode is Mode.OUT:
            outs = _tensors(info.op(*_unpack(leaves, structure)[:1], *sample.args, **sample.kwargs))
        with _DrawingMode() as drawing:  # type: ignore[no-untyped-call]
            call(*_unpack(leaves, structure), [torch.zeros_like(out) for out in outs])
        # Not in the mode, in which torch ignores conjugate bits inside of operators.
        result = call(*_unpack(leaves, structure), [torch.zeros_like(out) for out in outs])
    except Exception:  # noqa: BLE001 - torch refuses the call, so there is nothing to compare
        return None
    if mode is Mode.OUT and not outs:
        return None
    made = _Sample(
        call=call,
        leaves=leaves,
        structure=structure,
        processed=sample.output_process_fn_grad,
        is_determinate=not (_is_uninitialised(info.name) or drawing.has_drawn),
        expected=[one.detach() if isinstance(one, torch.Tensor) else one for one in pytree.tree_leaves(result)],
        gradients=None,
        cotangents=[],
        num_outs=len(outs),
    )
    if mode is not Mode.OUT:
        _differentiate_plain(made, result)
    return made


def _own(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return plain.requires_grad_(tensor.requires_grad)


def _is_uninitialised(name: str) -> bool:
    return name.startswith(("empty", "new_empty", "resize"))


def _unpack(leaves: Sequence[Any], structure: Any) -> tuple[Any, Any, Any]:
    first, args, named = pytree.tree_unflatten(list(leaves), structure)
    return first, args, named


class _DrawingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether an operator draws random numbers."""

    has_drawn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.has_drawn = self.has_drawn or torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _tensors(value: Any) -> list[torch.Tensor]:
    return [one for one in pytree.tree_leaves(value) if isinstance(one, torch.Tensor)]


def _differentiable(processed: Callable[[Any], Any], result: Any) -> list[torch.Tensor]:
    return [one for one in _tensors(processed(result)) if one.requires_grad]


def _differentiate_plain(sample: _Sample, result: Any) -> None:
    """Set the gradients of a sample, if torch has some."""
    wanted = [one for one in sample.tensors if one.requires_grad]
    try:
        outputs = _differentiable(sample.processed, result)
        if not outputs or not wanted:
            return
        generator = torch.Generator().manual_seed(3)
        made = [torch.randn(one.shape, generator=generator, dtype=torch.float64) for one in outputs]
        sample.cotangents = [grad.to(one.dtype) for grad, one in zip(made, outputs, strict=True)]
        sample.gradients = list(torch.autograd.grad(outputs, wanted, sample.cotangents, allow_unused=True))
    except Exception:  # noqa: BLE001 - torch does not differentiate it
        sample.gradients = None


def _cases(made: tuple[_Sample, Mapping[Mode, _Sample]], seed: str, most: int) -> Iterator[_Case]:
    sample, writing = made
    combinations = _combinations([_choices(one) for one in sample.tensors], seed, most)
    for placements in combinations:
        yield _Case(sample, placements, Mode.FUNCTION)
    for mode, form in writing.items():
        for placements in _spread_evenly(combinations, _MAX_WRITING):
            yield _Case(form, placements, mode)


def _spread_evenly(values: Sequence[Any], most: int) -> list[Any]:
    count = min(most, len(values))
    return [values[at * (len(values) - 1) // max(count - 1, 1)] for at in range(count)]


def _choices(tensor: torch.Tensor) -> list[Placement]:
    shards: list[Placement] = [Shard(dim) for dim in range(tensor.dim())]
    return [Replicate(), *shards, *([] if tensor.dtype is torch.bool else [Partial()])]


def _combinations(choices: Sequence[Sequence[Placement]], seed: str, most: int) -> list[tuple[Placement, ...]]:
    """Combinations of placements: all, or those of one tensor beside replicated ones, and random ones."""
    total = 1
    for one in choices:
        total *= len(one)
    if total <= most:
        return list(itertools.product(*choices))
    found = [tuple(one[0] for one in choices)]  # all replicated
    for index, one in enumerate(choices):
        found += [tuple(new if at == index else Replicate() for at in range(len(choices))) for new in one[1:]]
    generator = random.Random(int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=4).digest(), "big"))  # noqa: S311
    found = _spread_evenly(found, most * 2 // 3)
    while len(found) < most:
        found.append(tuple(generator.choice(one) for one in choices))
    return list(dict.fromkeys(found))


def _run_cases(cases: Sequence[_Case], num_ranks: int) -> None:
    """Run cases one after the other on groups of threads, in a new group after one in which ranks disagree."""
    left = list(cases)
    while left:
        try:
            run_ranks(_program, num_ranks, left, threading.Barrier(num_ranks), timeout=300.0)
        except RankFailedError as error:  # noqa: PERF203 - a group that has failed stays so
            done = next(at for at, case in enumerate(left) if len(case.outcomes) < num_ranks)
            found = [one for one in left[done].outcomes if one[0] is not Outcome.RULE]
            last_line = str(error.__cause__ or error).strip().splitlines()[-1]
            reason = f"the ranks disagree: {found[0][1] if found else last_line}"
            left[done].outcomes.append((Outcome.ERROR, reason))
            left = left[done + 1 :]
        else:
            return


def _program(group: Any, cases: Sequence[_Case], barrier: threading.Barrier) -> None:
    mesh = fd.DeviceMesh(group, (-1,))
    for case in cases:
        case.outcomes.append(_attempt(case, mesh))
        try:
            barrier.wait(_PATIENCE)
        except threading.BrokenBarrierError:
            raise RuntimeError("a rank does not end the call") from None


def _attempt(case: _Case, mesh: DeviceMesh) -> tuple[Outcome, str]:
    outcome, reason = _try_once(case, mesh)
    if outcome is not Outcome.REFUSED:
        return outcome, reason
    with fd.allow_replication():
        again, why = _try_once(case, mesh)
    return (Outcome.FALLBACK, reason) if again is Outcome.RULE else (again, why)


def _try_once(case: _Case, mesh: DeviceMesh) -> tuple[Outcome, str]:
    try:
        problem = _compare(case, mesh)
    except Exception as error:  # noqa: BLE001 - whatever an operator raises is its outcome
        first_line = (str(error).strip().splitlines() or [""])[0]
        return (Outcome.REFUSED if _is_refusal(error) else Outcome.ERROR), f"{type(error).__name__}: {first_line}"
    return (Outcome.WRONG, problem) if problem else (Outcome.RULE, "")


def _is_refusal(error: Exception) -> bool:
    """Return whether ferrodist raised an error on purpose."""
    if isinstance(error, UnsupportedOpError):
        return True
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    if frame is None:
        return False
    path = frame.tb_frame.f_code.co_filename
    return "ferrodist" in path and linecache.getline(path, frame.tb_lineno).strip().startswith("raise")


def _compare(case: _Case, mesh: DeviceMesh) -> str:
    """The difference between a distributed call and the plain one, or an empty text."""
    sample = case.sample
    placements = iter(case.placements)
    leaves = [
        spread(leaf, mesh, next(placements)) if isinstance(leaf, torch.Tensor) else leaf for leaf in sample.leaves
    ]
    outs = [make_out(one, mesh, case.placements) for one in sample.expected[: sample.num_outs]]
    result = sample.call(*_unpack(leaves, sample.structure), outs)
    found = pytree.tree_leaves(result)
    full = [gather(one) for one in found]
    problem = layout_problem([one for one in found if not is_made_by_torch(one)]) or differences(
        full, sample.expected, only_shapes=not sample.is_determinate
    )
    if problem and sample.is_determinate and case.mode is Mode.FUNCTION and sample.gradients is not None:
        # Such as singular vectors, whose signs are not determined.
        rebuilt = pytree.tree_unflatten(full, pytree.tree_structure(result))
        original = pytree.tree_unflatten(sample.expected, pytree.tree_structure(result))
        problem = differences(_tensors(sample.processed(rebuilt)), _tensors(sample.processed(original)))
    if problem or sample.gradients is None:
        return problem
    outputs = _differentiable(sample.processed, result)
    if len(outputs) != len(sample.cotangents):
        return f"{len(outputs)} results require grad, and {len(sample.cotangents)} of the plain ones"
    cotangents = [fd.distribute(grad, mesh, Replicate(), src=None) for grad in sample.cotangents]
    wanted = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    gradients = torch.autograd.grad(outputs, wanted, cotangents, allow_unused=True)
    problem = layout_problem([one for one in gradients if not is_made_by_torch(one)]) or differences(
        [gather(one) for one in gradients], sample.gradients, only_shapes=not sample.is_determinate
    )
    return f"gradient: {problem}" if problem else ""
