"""Collectives in graphs of torch.compile: their operator of `torch.library`, and the names by which graphs know groups.

[Note: collectives in graphs]
For the compiler a function that `in_graphs` decorates has another body, which puts a call of the function into the
graph, with a text in place of the group. Later stages of the compiler run that call on tensors that have no elements.
It takes the general path: checks, views of the tensors and the gradient are what they are without a compiler, and
become part of the graph. In place of the engine's run, `execute` calls the operator, which does it when the graph runs.

Operators run in the order of the program, and also where nothing takes their results: other ranks wait for them. The
compiler knows that they have effects. Inductor doesn't keep the order of such operators in all versions of torch, so
each also takes the result of the one before it, which it doesn't read.

Checkpoints keep the results of these operators, for the compiler can't compute again what has effects.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch.utils.checkpoint import CheckpointPolicy

from ferrodist.backends.base import Backend
from ferrodist.backends.collective_op import CollectiveKind, CollectiveOp
from ferrodist.backends.process_group import group_in_graphs
from ferrodist.backends.weak import find_weakly
from ferrodist.collectives.reduce_op import PremultipliedSum, ReduceOp
from ferrodist.torch_private.autograd import current_graph_task
from ferrodist.torch_private.compilers import (
    allow_in_graphs,
    find_tracer,
    has_effects,
    inlined_as,
    outside_of_compiler,
    run_while_tracing,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_Function = TypeVar("_Function", bound="Callable[..., Any]")

_functions: dict[str, Callable[..., Any]] = {}

_SIMPLE = (ReduceOp, int, float, list, tuple, type(None))
"""The types of arguments, but for tensors and the group, that a call in a graph may have."""


def in_graphs(function: _Function) -> _Function:
    """Let graphs of torch.compile contain calls of a collective; see [Note: collectives in graphs].

    Returns ``function`` itself, which only a compiler sees otherwise: eager calls pay nothing.
    """
    function_name = function.__name__
    _functions[function_name] = function

    def call(*args: Any, group: Backend | None = None, out: Any = None, **options: Any) -> Any:
        chosen = group_in_graphs(group)
        group_name = chosen.graph_name if isinstance(chosen, Backend) and _prepare_compiler() else ""
        is_simple = all(isinstance(value, _SIMPLE) for value in (*args[1:], *options.values()))
        if not args or not group_name or not is_simple or not (out is None or isinstance(out, torch.Tensor)):
            return _call_outside(function_name, *args, group=group, out=out, **options)
        args = tuple(_as_text(value) for value in args)
        options = {name: _as_text(value) for name, value in options.items()}
        if out is None:
            return _call_in_graph(function_name, group_name, *args, **options)
        _call_in_graph(function_name, group_name, *args, out=out, **options)
        return out

    return inlined_as(call, function)


@outside_of_compiler
def _call_outside(function_name: str, *args: Any, **options: Any) -> Any:
    """Call a collective that a graph can't contain, between two graphs."""
    return _functions[function_name](*args, **options)


def _call_in_graph(function_name: str, group_name: str, *args: Any, **options: Any) -> Any:
    """Call a collective, as a graph that Dynamo has traced does."""
    args = tuple(ReduceOp(value) if isinstance(value, str) else value for value in args)
    options = {name: ReduceOp(value) if isinstance(value, str) else value for name, value in options.items()}
    return _functions[function_name](*args, group=_find_group(group_name), **options)


def _as_text(value: Any) -> Any:
    """An argument in a graph, where reductions are texts."""
    return value.value if isinstance(value, ReduceOp) else value


@run_while_tracing
def _prepare_compiler() -> bool:
    """Let graphs contain calls and their operator; the compiler calls this while it traces."""
    allow_in_graphs([_call_in_graph])
    has_effects(torch.ops.ferrodist.collective.default)
    return True


def _find_group(name: str) -> Backend:
    group = find_weakly(name)
    if not isinstance(group, Backend):
        raise RuntimeError(f"a compiled graph is of a group that is gone ({name}): compile it again")  # noqa: TRY004
    return group


# The operator.


_last_results: WeakKeyDictionary[Any, dict[bool, torch.Tensor]] = WeakKeyDictionary()
"""The result of the last operator in each graph that is being traced, in its forward and in its backward."""


def in_program_order(call: Callable[[torch.Tensor | None], torch.Tensor]) -> torch.Tensor:
    """The result of an operator that takes the last one's result, so that a graph sends in the program's order."""
    tracer, is_backward = find_tracer(), current_graph_task() != -1
    if tracer is None:
        return call(None)
    last_results = _last_results.setdefault(tracer, {})
    nodes = tracer.graph.nodes
    num_before = len(nodes)
    result = last_results[is_backward] = call(last_results.get(is_backward))
    for node in islice(reversed(nodes), len(nodes) - num_before):
        if "recompute" in node.meta and not is_backward:  # a checkpoint's
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return result


def add_to_graph(op: CollectiveOp, group: Backend) -> None:
    """Put a call into the graph that is being traced; its ``out`` stands for the result."""
    has_factor = isinstance(op.reduction, PremultipliedSum)
    result = in_program_order(
        lambda last: torch.ops.ferrodist.collective(
            op.source,
            last,
            group.graph_name,
            op.kind.value,
            "" if op.reduction is None else str(op.reduction),
            op.reduction.factor if has_factor else 1.0,
            op.root,
            list(op.counts),
            list(op.recv_counts),
            op.unit,
            op.dim,
            op.timeout,
            0 if op.out is None else op.out.numel(),
        )
    )
    if op.out is not None:
        op.out.copy_(result)


_library = torch.library.Library("ferrodist", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "collective(Tensor source, Tensor? after, str group, str kind, str reduction, float factor, int root,"
    " SymInt[] counts, SymInt[] recv_counts, SymInt unit, int dim, float timeout, SymInt size) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def define_operator(run: Callable[[CollectiveOp, Backend], None]) -> None:
    """Give the operator the function that runs a call in a group."""

    def collective(  # noqa: PLR0917 - as the operator's schema
        source: torch.Tensor,
        _after: torch.Tensor | None,
        group: str,
        kind: str,
        reduction: str,
        factor: float,
        root: int,
        counts: Sequence[int],
        recv_counts: Sequence[int],
        unit: int,
        dim: int,
        timeout: float,
        size: int,
    ) -> torch.Tensor:
        found = _find_group(group)
        result = source.new_empty(size)
        is_given = CollectiveKind(kind) is not CollectiveKind.REDUCE or found.rank == root
        op = CollectiveOp(
            kind=CollectiveKind(kind),
            source=source.contiguous(),
            out=result if is_given else None,
            reduction=_reduction(reduction, factor),
            root=root,
            counts=counts,
            recv_counts=recv_counts,
            unit=unit,
            dim=dim,
            timeout=timeout,
        )
        run(op, found)
        return result

    _library.impl("collective", collective, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]


def _reduction(name: str, factor: float) -> ReduceOp | PremultipliedSum | None:
    if not name:
        return None
    return PremultipliedSum(factor) if name == str(PremultipliedSum(factor)) else ReduceOp(name)


def _fake_collective(source: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """The result's shape, of which the operator's last argument is the size."""
    return source.new_empty(arguments[-1])


torch.library.register_fake("ferrodist::collective", _fake_collective, lib=_library)
