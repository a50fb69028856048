"""Operators of `torch.library` that move shards between ranks in graphs of torch.compile.

Where the compiler traces a program, shards are fake: they have a shape and no elements. Then `redistribute_local` and
the check of plain tensors put one of these operators into the graph, which moves the elements when the graph runs. An
operator names its specs by a text, since a graph has numbers and texts alone; the text has all that its results depend
on, for torch caches compiled graphs by it. Operators that send run in the order of the program, as all collectives in
graphs do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

import torch

from ferrodist.collectives.graphs import in_program_order

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.mesh import DeviceMesh
    from ferrodist.tensor.spec import DTensorSpec

_ATTACHMENT = "tensor.traced"
"""The group attachment that keeps alive what graphs name, as long as the group."""


class _Move(NamedTuple):
    """A redistribution that a graph contains."""

    source: DTensorSpec
    target: DTensorSpec


class _Named:
    """An object that a graph names by a text."""

    __slots__ = ("__weakref__", "value")

    def __init__(self, value: Any) -> None:
        self.value = value


_named: WeakValueDictionary[str, _Named] = WeakValueDictionary()


def name_for_graphs(text: str, value: Any, mesh: DeviceMesh) -> str:
    """The text by which graphs name a value, as long as the group of its mesh lives; equal values have equal texts."""
    kept: dict[str, _Named] = mesh.parent.attachments.setdefault(_ATTACHMENT, {})
    text = f"{text} on {mesh.identity}"
    if text not in kept:
        kept[text] = _named[text] = _Named(value)
    return text


def find_named(text: str) -> Any:
    """The value that a graph names by a text."""
    found = _named.get(text)
    if found is None:
        raise RuntimeError(f"a compiled graph is of a group that is gone: compile it again ({text})")
    return found.value


def traced_redistribute(local: torch.Tensor, source: DTensorSpec, target: DTensorSpec) -> torch.Tensor:
    """Redistribute a shard when the graph runs."""
    name = name_for_graphs(
        f"{source} of strides {source.stride} to {target.placements}", _Move(source, target), source.mesh
    )
    return in_program_order(lambda last: torch.ops.ferrodist.redistribute(local, last, name))


def traced_check(tensor: torch.Tensor, operator: object, mesh: DeviceMesh) -> torch.Tensor:
    """A plain tensor that counts as replicated; the ranks compare it when the graph runs."""
    name = name_for_graphs("mesh", mesh, mesh)
    return in_program_order(lambda last: torch.ops.ferrodist.check_replicated(tensor, last, str(operator), name))


def traced_generator_check(tensor: torch.Tensor, operator: object, mesh: DeviceMesh) -> torch.Tensor:
    """The tensor, of which something is drawn next; the ranks compare torch's generators when the graph runs."""
    name = name_for_graphs("mesh", mesh, mesh)
    return in_program_order(lambda last: torch.ops.ferrodist.check_generators(tensor, last, str(operator), name))


def traced_bounds(indices: torch.Tensor, end: int, ignored: int | None, message: str) -> torch.Tensor:
    """The indices; when the graph runs, IndexError for one that is neither ``ignored`` nor from 0 to ``end`` - 1."""
    result: torch.Tensor = torch.ops.ferrodist.check_bounds(indices, end, ignored, message)
    return result


def _run_bounds(indices: torch.Tensor, end: int, ignored: int | None, message: str) -> torch.Tensor:
    wrong = (indices < 0) | (indices >= end)
    if ignored is not None:
        wrong &= indices != ignored
    if wrong.any():
        raise IndexError(message.format(indices[wrong][0].item()))
    return indices.clone()


def _fake_redistribute(local: torch.Tensor, _after: torch.Tensor | None, name: str) -> torch.Tensor:
    move: _Move = find_named(name)
    return local.new_empty(move.target.local_shape)


def _fake_check(tensor: torch.Tensor, *_: object) -> torch.Tensor:
    return tensor.clone()


_library = torch.library.Library("ferrodist", "DEF")  # type: ignore[no-untyped-call]
for _signature in (
    "redistribute(Tensor local, Tensor? after, str name) -> Tensor",
    "check_replicated(Tensor tensor, Tensor? after, str operator, str name) -> Tensor",
    "check_generators(Tensor tensor, Tensor? after, str operator, str name) -> Tensor",
    "check_bounds(Tensor indices, int end, int? ignored, str message) -> Tensor",
):
    _library.define(_signature, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]


def _implement(operator: str, run: Callable[..., torch.Tensor], fake: Callable[..., torch.Tensor]) -> None:
    _library.impl(operator, run, "CPU")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"ferrodist::{operator}", fake, lib=_library)


_implement("check_bounds", _run_bounds, _fake_check)


def define_operators(
    redistribute: Callable[[torch.Tensor, DTensorSpec, DTensorSpec], torch.Tensor],
    check: Callable[[str, torch.Tensor, DeviceMesh], None],
) -> None:
    """Give the operators the functions that compute them; these are of modules that import this one."""

    def run_redistribute(local: torch.Tensor, _after: torch.Tensor | None, name: str) -> torch.Tensor:
        move: _Move = find_named(name)
        result = redistribute(local, move.source, move.target).contiguous()
        return result.clone() if result is local else result

    def run_check(tensor: torch.Tensor, _after: torch.Tensor | None, operator: str, name: str) -> torch.Tensor:
        mesh: DeviceMesh = find_named(name)
        if tensor.numel():
            check(operator, tensor, mesh)
        return tensor.clone()

    _implement("redistribute", run_redistribute, _fake_redistribute)
    _implement("check_replicated", run_check, _fake_check)


def define_generator_check(check: Callable[[DeviceMesh, torch.Generator | None, str], None]) -> None:
    """Give the operator of `traced_generator_check` its function, as `define_operators`."""

    def run(tensor: torch.Tensor, _after: torch.Tensor | None, operator: str, name: str) -> torch.Tensor:
        check(find_named(name), None, operator)
        return tensor.clone()

    _implement("check_generators", run, _fake_check)
