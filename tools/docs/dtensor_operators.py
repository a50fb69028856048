"""The operators of distributed tensors and their strategies, as a page: ``docs/dtensor-operators.md``.

::

    python tools/docs/dtensor_operators.py                                    # to standard output
    python tools/docs/dtensor_operators.py --write docs/dtensor-operators.md
"""

from __future__ import annotations

import contextlib
import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from operator_samples import SAMPLES, SampleFactory, bind_sample
from pages import format_table, wrap, write_page

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

Strategies = dict[Operator, tuple[str, list[str]]]
"""By operator: the shapes of a call, and its strategies along one mesh axis."""

_DATABASE_PATH = Path(__file__).parents[2] / "docs/operators.json"

_HEAD = """# Operators of distributed tensors

Generated from the code by `make support`; a test compares the two.

The operators are those of `torch.ops.aten`, to which torch's functions, modules and gradients
decompose. Each returns the same result as for plain tensors, whatever the placements of its
inputs. A *strategy* is a combination of placements that needs no communication:
`(4,6) (6,8): S(0), R -> S(0)` means that for inputs of these shapes the first may be `Shard(0)`
while the second is `Replicate()`, and the result is then `Shard(0)`. Inputs that match no strategy
are redistributed to the one that costs the fewest bytes. A mesh of several axes has a strategy for
each axis.

`S(d)` is `Shard(d)`, `R` is `Replicate()`, `P` is `Partial()`, and `P(max)` is
`Partial(ReduceOp.MAX)`; `P(any)` is partial by any operation, the same for inputs and outputs.
The operators of a row have the same strategies, shown for one call for each number of distributed
inputs. An operator without its overload (`add`, not `add.Tensor`) stands for all its overloads.
"""

_SUBSTITUTES = """## Computed by other operators

{names}

So are all operators that torch itself decomposes (`torch.matmul`, `einsum`, `linear`,
`cross_entropy`), and the `out=` variants of all operators above: the result is copied to `out`,
which must have the result's shape.
"""

_REPLICATED_ONLY = """## Replicated tensors only

The shape of these results depends on the elements, so that ranks could not know the shapes of
their shards. They are computed where all inputs are replicated, and raise `UnsupportedOpError`
for sharded ones, unless operators without a rule may be computed on replicated tensors; so does
indexing by a mask that selects elements. Writing one value by a mask works with all placements.

{table}
`torch.as_strided` describes memory, and is refused unless the tensor is replicated. All other
operators raise `UnsupportedOpError`, unless the program allows them to be computed on replicated
tensors: by `fd.allow_replication()`, or in a model of `fd.parallelize(..., fallback="replicate")`,
which is the default.
"""

_DATABASE = """## torch's operator database

{counts}

Each was called with the database's own small samples of float32, int64 and complex64, their tensors
sharded along each dim, replicated and partial, in up to 8 combinations on 2 ranks and 4 on 3: the
function with its gradients, with `out=`, and in place; and compared with the plain operator. What
is drawn at random was compared by its shape. `make operators` runs it; [the file](operators.json)
has all outcomes and reasons. "By fallback" means that at least one of the calls needs
`fd.allow_replication()`, or a model of `parallelize`, and is right there.

{table}
"""

_NOT_SHOWN = """## Not shown here

{names}
"""


def render() -> str:
    """Render the page."""
    group = fd.SimulatedBackend.create_group(1)[0]
    with torch.random.fork_rng(devices=[]):
        strategies = collect_strategies(DeviceMesh(group, (1,)))
    group.close()
    parts = [_HEAD, *[_render_family(family, strategies) for family in FAMILIES if family.RULES]]
    without_rule = f"These have no rule and are computed by operators that have one: {_listed(DECOMPOSITIONS)}."
    parts.append(_SUBSTITUTES.format(names=wrap(without_rule)))
    table = format_table(["", "instead"], _merge([(f"`{name}`", instead) for name, instead in DATA_DEPENDENT.values()]))
    parts.append(_REPLICATED_ONLY.format(table=table))
    parts.append(_render_database())
    if not_shown := set(RULES) - set(strategies):
        without_sample = f"These have a rule, but no sample call reaches them: {_listed(not_shown)}."
        parts.append(_NOT_SHOWN.format(names=wrap(without_sample)))
    return "\n".join(parts)


def _render_database() -> str:
    report = json.loads(_DATABASE_PATH.read_text(encoding="utf-8"))
    by_outcome: dict[str, list[str]] = {}
    for name, record in report["operators"].items():
        by_outcome.setdefault(record["outcome"], []).append(name)
    without = by_outcome.pop("not run", [])
    total = sum(map(len, by_outcome.values()))
    counts = (
        f"torch {report['torch']}'s operator database has {total} operators that take tensors of these dtypes, and"
        f" {len(without)} others. {len(by_outcome['by rule'])} are right by rules alone,"
        f" {len(by_outcome.get('by fallback', []))} more with the fallback."
    )
    rows = [(outcome, str(len(names)), _shown(outcome, names)) for outcome, names in sorted(by_outcome.items())]
    table = format_table(["outcome", "operators", "which"], rows)
    return _DATABASE.format(counts=wrap(counts), table=table)


def _shown(outcome: str, names: Sequence[str]) -> str:
    return "all others" if outcome == "by rule" else ", ".join(f"`{name}`" for name in sorted(names))


def collect_strategies(mesh: DeviceMesh) -> Strategies:
    """The strategies of all operators that samples reach, forward and backward, on a mesh of one rank.

    Strategies may depend on the placements of the inputs, so each sample runs with each placement; those of calls of
    the same shapes are collected.
    """
    strategies: Strategies = {}
    with _collecting(strategies):
        placements: tuple[Placement, ...] = (Replicate(), Shard(0), Shard(1), Shard(2), Partial())
        for sample, placement in itertools.product(SAMPLES, placements):
            # Not every operator can write to a tensor of any placement.
            with contextlib.suppress(UnsupportedOpError):
                _differentiate(sample(SampleFactory(mesh, placement)))
        for operator in sorted(set(RULES) - set(strategies), key=str):
            for dtype in (torch.float32, torch.int64, torch.bool):
                if operator not in strategies:  # else it has accepted another dtype
                    for placement in placements:
                        _call_by_schema(operator, SampleFactory(mesh, placement), dtype)
    return strategies


@contextlib.contextmanager
def _collecting(strategies: Strategies) -> Iterator[None]:
    """Within the block, calls that select a strategy add theirs."""
    select = dispatch._select  # noqa: SLF001 - all calls with rules pass here
    in_backward: set[Operator] = set()

    def record(call: OpCall, rule: OpRule) -> Any:
        selected = select(call, rule)
        fresh = OpCall(call.operator, call.arguments, call.mesh)
        shapes = " ".join(str(layout.shape).replace(" ", "").replace(",)", ")") for layout in fresh.inputs)
        # Calls in backward passes are shown only for operators that have no other.
        if torch._C._current_graph_task_id() == -1:  # noqa: SLF001 - there is no public way to ask
            if call.operator in in_backward:
                in_backward.remove(call.operator)
                del strategies[call.operator]
        elif call.operator not in strategies:
            in_backward.add(call.operator)
        known, found = strategies.setdefault(call.operator, (shapes, []))
        if shapes == known:
            found += [strategy for strategy in map(_describe, rule.strategies(fresh, 0)) if strategy not in found]
        return selected

    with mock.patch.object(dispatch, "_select", record):
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
        # Outside inference mode torch would decompose composite operators. Operators that need other dtypes or numbers
        # than these are listed as not shown.
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


def _join_folds(strategies: Sequence[str]) -> list[str]:
    """Join strategies that exist for each kind of partial tensor."""
    by_any: dict[str, list[str]] = {}
    for strategy in strategies:
        general = strategy
        for fold in (*_OTHER_FOLDS, "P(mean)"):
            general = general.replace(fold, "P")
        by_any.setdefault(general, []).append(strategy)
    joined = []
    for general, found in by_any.items():
        has_all = {general.replace("P", fold) for fold in _OTHER_FOLDS} <= set(found)
        joined += [general.replace("P", "P(any)")] if has_all and "P" in general else found
    return joined


def _render_family(family: ModuleType, strategies: Strategies) -> str:
    heading = (family.__doc__ or "").partition("\n")[0].rstrip(".")
    rows = []
    by_rule: dict[int, list[Operator]] = {}
    for operator, rule in family.RULES.items():
        by_rule.setdefault(id(rule), []).append(operator)
    for operators in by_rule.values():
        shown: dict[int, str] = {}
        for operator in operators:
            if operator in strategies:
                shapes, found = strategies[operator]
                shown.setdefault(shapes.count("("), f"{shapes}: {'; '.join(_join_folds(found))}")
        rows.append((operators, "<br>".join(shown[count] for count in sorted(shown))))
    merged: dict[str, list[Operator]] = {}
    for operators, text in rows:
        merged.setdefault(text, []).extend(operators)
    cells = [[_listed(operators), text or "not shown"] for text, operators in merged.items()]
    return f"## {heading}\n\n{format_table(['operators', 'strategies'], cells)}"


def _listed(operators: Iterable[Operator]) -> str:
    """The operators' names, without overloads where all overloads that have a rule are listed."""
    ours = set(operators)
    names = set()
    for operator in ours:
        packet = operator.overloadpacket
        overloads = {other for other in RULES if other.overloadpacket is packet}
        names.add(packet.__name__ if overloads <= ours else f"{packet.__name__}.{operator._overloadname}")  # noqa: SLF001
    return ", ".join(f"`{name}`" for name in sorted(names))


def _merge(rows: Iterable[Sequence[str]]) -> list[Sequence[str]]:
    return list(dict.fromkeys(map(tuple, rows)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the page."""
    write_page("tools/docs/dtensor_operators.py", render, arguments)


if __name__ == "__main__":
    main()
