"""The table of supported types, operations and engines, made from the code: ``docs/support.md``.

::

    python tools/docs/support_table.py                          # to standard output
    python tools/docs/support_table.py --write docs/support.md
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from pages import format_table, write_page

import ferrodist as fd
from ferrodist.collectives.reduce_op import DTYPES, Op, PremultipliedSum, ReduceOp, check_reduction

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.backends.base import Backend

YES = "yes"
_NO = "-"

OPERATIONS: dict[str, Op] = {**{op.name: op for op in ReduceOp}, "premultiplied_sum": PremultipliedSum(0.5)}
"""The columns of the first table."""

_HEAD = """# What works with what

Generated from the code by `make support`; a test compares the two and tries every cell.
"""

_REDUCTIONS = """## Element types and reductions

`allreduce`, `reduce`, `reduce_scatter` and their variants. A number refers to the reason below the
table; such a call raises `TypeError` before anything is sent. All other operations (broadcast,
gather, scatter, all-to-all, messages) take all of these types, and no others.
"""

_COLLECTIVES = """## Collectives

*grad*: differentiable (`reduce_scatter` with sums and means, `allreduce` and `reduce` with all but
the bitwise operations). *out*: takes `out=`. *dim*: takes `dim=`. *async*: has an asynchronous
variant, which returns a `PendingCollective`. *coalesced*: several of them inside `coalesce` are
sent as one.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """The facts about a collective that the code does not show.

    Args:
        result: The result, and the ranks that get it.
        uneven: The sizes that may differ between ranks.
        call: A call with a tensor on a group of one rank; None where the tensor is the only argument.
        carries_tensors: Whether it takes tensors.
    """

    result: str
    uneven: str = _NO
    call: Callable[[torch.Tensor], object] | None = None
    carries_tensors: bool = True


_ROWS: dict[str, _Row] = {
    "allreduce": _Row(result="all ranks: the reduction"),
    "reduce": _Row(result="one rank: the reduction"),
    "broadcast": _Row(result="all ranks: one rank's tensor"),
    "all_gather": _Row(result="all ranks: all tensors, concatenated"),
    "all_gather_uneven": _Row(result="all ranks: all tensors, concatenated", uneven="any, along dim"),
    "gather": _Row(result="one rank: all tensors, concatenated", uneven="any, along dim"),
    "scatter": _Row(result="each rank: its shard of one tensor", uneven="first ranks one more"),
    "reduce_scatter": _Row(result="each rank: its shard of the reduction", uneven="first ranks one more"),
    "reduce_scatter_tensor": _Row(
        result="each rank: its shard of the reduction",
        uneven="first ranks one more",
        call=lambda x: fd.reduce_scatter_tensor(torch.empty_like(x), x),
    ),
    "all_to_all": _Row(result="each rank: a part of each tensor"),
    "all_to_all_single_uneven": _Row(
        result="each rank: a part of each tensor",
        uneven="by counts",
        call=lambda x: fd.all_to_all_single_uneven(x, [len(x)], [len(x)]),
    ),
    "barrier": _Row(result="nothing", carries_tensors=False),
    "all_gather_object": _Row(result="all ranks: all objects", uneven="any", carries_tensors=False),
    "broadcast_object": _Row(result="all ranks: one rank's object", uneven="any", carries_tensors=False),
    "gather_object": _Row(result="one rank: all objects", uneven="any", carries_tensors=False),
    "scatter_object": _Row(result="each rank: one of one rank's objects", uneven="any", carries_tensors=False),
}


def undefined_reason(dtype: torch.dtype, op: Op) -> str | None:
    """The reason why ``op`` is not defined for ``dtype``, or None when it is."""
    try:
        check_reduction(dtype, op)
    except TypeError as error:
        return str(error).partition("is not defined: ")[2]
    return None


def render() -> str:
    """Render the page."""
    group = fd.SimulatedBackend.create_group(1)[0]
    with fd.use_group(group):
        collectives = _collectives_table(group)
    group.close()
    return f"{_HEAD}\n{_REDUCTIONS}\n{_reductions_table()}\n{_COLLECTIVES}\n{collectives}"


def _reductions_table() -> str:
    reasons: list[str] = []
    rows = []
    for dtype in DTYPES:
        cells = []
        for op in OPERATIONS.values():
            reason = undefined_reason(dtype, op)
            if reason is not None and reason not in reasons:
                reasons.append(reason)
            cells.append(YES if reason is None else str(reasons.index(reason) + 1))
        rows.append([str(dtype).removeprefix("torch."), *cells])
    notes = "".join(f"{number}. {reason}.\n" for number, reason in enumerate(reasons, 1))
    return f"{format_table(['', *OPERATIONS], rows)}\n{notes}"


def _collectives_table(group: Backend) -> str:
    rows = []
    for name, row in _ROWS.items():
        parameters = inspect.signature(getattr(fd, name)).parameters
        started = f"async_{name}" if hasattr(fd, f"async_{name}") else None
        cells = [
            _cell(is_so=row.carries_tensors and _has_gradient(row.call or getattr(fd, name))),
            _cell(is_so="out" in parameters),
            _cell(is_so="dim" in parameters),
            _NO if started is None else YES,
            _cell(is_so=started is not None and _are_coalesced(started, group)),
        ]
        rows.append([f"`{name}`", row.result, row.uneven, *cells])
    return format_table(["", "result", "sizes that differ", "grad", "out", "dim", "async", "coalesced"], rows)


def _cell(*, is_so: bool) -> str:
    return YES if is_so else _NO


def _has_gradient(call: Callable[[torch.Tensor], object]) -> bool:
    try:
        result = call(torch.ones(4, requires_grad=True))
    except RuntimeError:  # its out= excludes autograd
        return False
    return isinstance(result, torch.Tensor) and result.requires_grad


def _are_coalesced(name: str, group: Backend) -> bool:
    """Whether two of a kind take no more sequence numbers of the group than one."""
    return _num_sequence_numbers(name, 2, group) == _num_sequence_numbers(name, 1, group)


def _num_sequence_numbers(name: str, count: int, group: Backend) -> int:
    first = group.verifier.reserve()
    with fd.coalesce(group):
        pending = [getattr(fd, name)(torch.ones(4)) for _ in range(count)]
    for handle in pending:
        handle.wait()
    return group.verifier.reserve() - first


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the page."""
    write_page("tools/docs/support_table.py", render, arguments)


if __name__ == "__main__":
    main()
