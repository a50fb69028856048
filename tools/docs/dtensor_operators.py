"""Which operators distributed tensors have, as a page that is made from the code: ``docs/dtensor-operators.md``.

::

    python tools/docs/dtensor_operators.py                                    # to standard output
    python tools/docs/dtensor_operators.py --write docs/dtensor-operators.md
"""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from operator_samples import SAMPLES, SampleFactory, bind_sample
from pages import format_table, write_page

import ferrodist as fd
from ferrodist.errors import UnsupportedOpError
from ferrodist.mesh import DeviceMesh
from ferrodist.tensor import dispatch
from ferrodist.tensor.fallback import DATA_DEPENDENT
from ferrodist.tensor.op_strategy import OpCall
from ferrodist.tensor.ops.table import DECOMPOSITIONS, FAMILIES, RULES
from ferrodist.tensor.placement import Partial, Replicate, Shard

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from types import ModuleType

    from ferrodist.tensor.op_strategy import OpRule, OpStrategy
    from ferrodist.tensor.placement import Placement

Operator = torch._ops.OpOverload  # noqa: SLF001 - operators have no public class

Ways = dict[Operator, tuple[str, list[str]]]
"""By operator the shapes of a call, and the ways of computing it along one axis."""

_HEAD = """# Operators of distributed tensors

Made from the code by `python tools/docs/dtensor_operators.py --write docs/dtensor-operators.md`; a test compares the
two.

Operators are those of `torch.ops.aten`, to which torch's functions, modules and gradients come down. Each gives what it
gives of plain tensors, however its inputs lie: a *way* is one in which they are computed in parts. `(4,6) (6,8): S(0),
R -> S(0)` says that with inputs of these shapes the first may be `Shard(0)` where the second is `Replicate()`;
the result is `Shard(0)` then. Inputs that lie in none of the ways are brought to lie in that which takes the fewest
bytes. A mesh of several axes takes a way for each of them.

`S(d)` is `Shard(d)`, `R` is `Replicate()`, `P` is `Partial()`, and `P(max)` is `Partial(ReduceOp.MAX)`; `P(any)` is
partial by any operation, the same throughout. The operators of a row have the same ways, shown for one call for each
number of distributed inputs. An operator without its overload (`add`, not `add.Tensor`) stands for all of them.
"""

_SUBSTITUTES = """## Computed by other operators

These have no rule and are computed by operators that have one: {names}.

So is every operator that torch itself computes by others (`torch.matmul`, `einsum`, `linear`, `cross_entropy`), and the
form with `out=` of every operator above: its result is copied to `out`, which must be of the result's shape.
"""

_PICKS = """## Of whole tensors only

The shape of what these give depends on the elements, so that ranks could not know the shape of their parts. They are
computed where all inputs are whole on every rank, and raise `UnsupportedOpError` for divided ones; so is indexing by a
mask that picks elements. To write one value by a mask is no such case.

{table}
`torch.as_strided` is of memory, and is refused where a tensor is not whole on each rank. All other operators raise
`UnsupportedOpError`, unless the program allows them to be computed on whole tensors: `fd.allow_replication()`.
"""

_UNTRIED = """## Not tried here

These have a rule, and no sample reached them: {names}.
"""


def render() -> str:
    """The whole page."""
    group = fd.SimulatedBackend.create_group(1)[0]
    with torch.random.fork_rng(devices=[]):
        ways = collect_ways(DeviceMesh(group, (1,)))
    group.close()
    parts = [_HEAD, *[_render_family(family, ways) for family in FAMILIES if family.RULES]]
    parts.append(_SUBSTITUTES.format(names=_listed(DECOMPOSITIONS)))
    table = format_table(["", "instead"], _merge([(f"`{name}`", instead) for name, instead in DATA_DEPENDENT.values()]))
    parts.append(_PICKS.format(table=table))
    if untried := set(RULES) - set(ways):
        parts.append(_UNTRIED.format(names=_listed(untried)))
    return "\n".join(parts)


def collect_ways(mesh: DeviceMesh) -> Ways:
    """The ways of all operators that samples reach, forward and backward, on a mesh of one rank.

    Choices may depend on how inputs lie, so each sample is tried with inputs placed in each way; those count that a
    call of the same shapes has.
    """
    ways: Ways = {}
    with _collected(ways):
        placements: tuple[Placement, ...] = (Replicate(), Shard(0), Shard(1), Shard(2), Partial())
        for sample, placement in itertools.product(SAMPLES, placements):
            # Not every operator can write to a tensor that lies anyhow.
            with contextlib.suppress(UnsupportedOpError):
                _differentiate(sample(SampleFactory(mesh, placement)))
        for operator in sorted(set(RULES) - set(ways), key=str):
            for dtype in (torch.float32, torch.int64, torch.bool):
                if operator not in ways:  # else it has taken another dtype
                    for placement in placements:
                        _call_by_schema(operator, SampleFactory(mesh, placement), dtype)
    return ways


@contextlib.contextmanager
def _collected(ways: Ways) -> Iterator[None]:
    """Inside, calls that are decided anew add their ways."""
    decide = dispatch._select  # noqa: SLF001 - where all calls that rules decide come by
    of_gradients: set[Operator] = set()

    def note(call: OpCall, rule: OpRule) -> Any:
        recipe = decide(call, rule)
        fresh = OpCall(call.operator, call.arguments, call.mesh)
        shapes = " ".join(str(layout.shape).replace(" ", "").replace(",)", ")") for layout in fresh.inputs)
        # Calls of gradients are shown of operators that have no other.
        if torch._C._current_graph_task_id() == -1:  # noqa: SLF001 - there is no public way to ask
            if call.operator in of_gradients:
                of_gradients.remove(call.operator)
                del ways[call.operator]
        elif call.operator not in ways:
            of_gradients.add(call.operator)
        known, found = ways.setdefault(call.operator, (shapes, []))
        if shapes == known:
            found += [way for way in map(_describe, rule.strategies(fresh, 0)) if way not in found]
        return recipe

    with mock.patch.object(dispatch, "_select", note):
        yield


def _differentiate(result: Any) -> None:
    results = result if isinstance(result, list | tuple) else [result]
    for one in results:
        if isinstance(one, torch.Tensor) and one.requires_grad:
            torch.autograd.backward(one, torch.ones_like(one), retain_graph=True)


def _call_by_schema(operator: Operator, new: SampleFactory, dtype: torch.dtype) -> None:
    tensors = (new(4, 6, dtype=dtype).detach() for _ in itertools.count())
    arguments = bind_sample(operator, tensors)
    if arguments is not None:
        positional, named = arguments
        # Else torch takes operators apart that are made of others, where autograd could be asked for. What takes other
        # dtypes or numbers than these is listed as one that no sample reached.
        with (
            torch.inference_mode(),
            contextlib.suppress(UnsupportedOpError, RuntimeError, TypeError, ValueError, IndexError, AssertionError),
        ):
            operator(*positional, **named)


def _describe(choice: OpStrategy) -> str:
    inputs, outputs = (", ".join(map(_shorten, placements)) for placements in (choice.inputs, choice.outputs))
    return f"{inputs} -> {outputs}"


def _shorten(placement: Placement) -> str:
    return repr(placement).replace("Shard", "S").replace("Replicate()", "R").replace("Partial", "P").replace("P()", "P")


_OTHER_FOLDS = ("P(min)", "P(max)", "P(product)")


def _join_folds(ways: Sequence[str]) -> list[str]:
    """Ways that are there for each kind of partial tensor, as one."""
    by_any: dict[str, list[str]] = {}
    for way in ways:
        general = way
        for fold in (*_OTHER_FOLDS, "P(mean)"):
            general = general.replace(fold, "P")
        by_any.setdefault(general, []).append(way)
    joined = []
    for general, found in by_any.items():
        has_all = {general.replace("P", fold) for fold in _OTHER_FOLDS} <= set(found)
        joined += [general.replace("P", "P(any)")] if has_all and "P" in general else found
    return joined


def _render_family(family: ModuleType, ways: Ways) -> str:
    heading = (family.__doc__ or "").partition("\n")[0].rstrip(".")
    rows = []
    by_rule: dict[int, list[Operator]] = {}
    for operator, rule in family.RULES.items():
        by_rule.setdefault(id(rule), []).append(operator)
    for operators in by_rule.values():
        shown: dict[int, str] = {}
        for operator in operators:
            if operator in ways:
                shapes, found = ways[operator]
                shown.setdefault(shapes.count("("), f"{shapes}: {'; '.join(_join_folds(found))}")
        rows.append((operators, "<br>".join(shown[count] for count in sorted(shown))))
    merged: dict[str, list[Operator]] = {}
    for operators, text in rows:
        merged.setdefault(text, []).extend(operators)
    cells = [[_listed(operators), text or "not tried"] for text, operators in merged.items()]
    return f"## {heading}\n\n{format_table(['operators', 'ways'], cells)}"


def _listed(operators: Iterable[Operator]) -> str:
    """Names, of packets for operators that have all overloads with a rule here."""
    ours = set(operators)
    names = set()
    for operator in ours:
        packet = operator.overloadpacket
        alike = {other for other in RULES if other.overloadpacket is packet}
        names.add(packet.__name__ if alike <= ours else f"{packet.__name__}.{operator._overloadname}")  # noqa: SLF001
    return ", ".join(f"`{name}`" for name in sorted(names))


def _merge(rows: Iterable[Sequence[str]]) -> list[Sequence[str]]:
    return list(dict.fromkeys(map(tuple, rows)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the page."""
    write_page("tools/docs/dtensor_operators.py", render, arguments)


if __name__ == "__main__":
    main()
