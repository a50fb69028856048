"""Operators of `torch.library` for what graphs of torch.compile can't contain: moves of shards between ranks.

Where the compiler traces a program, shards are fake: they have a shape and no elements. Then `redistribute_local` and
the check of plain tensors put one of these operators into the graph, which moves the elements when the graph runs. An
operator names its specs by a text, since a graph has numbers and texts alone; the text has all that its results depend
on, for torch caches compiled graphs by it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakValueDictionary

import torch

from ferrodist.torch_private.compilers import is_traced

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.mesh import DeviceMesh
    from ferrodist.tensor.spec import DTensorSpec

__all__ = ["CHECK", "REDISTRIBUTE", "define_operators", "is_traced", "traced_check", "traced_redistribute"]

_ATTACHMENT = "tensor.traced"
"""The group attachment that keeps alive what graphs name, as long as the group."""


class _Move(NamedTuple):
    """A redistribution that a graph contains."""

    source: DTensorSpec
    target: DTensorSpec


class _Named:
    """What a graph names by a text."""

    __slots__ = ("__weakref__", "value")

    def __init__(self, value: _Move | DeviceMesh) -> None:
        self.value = value


_named: WeakValueDictionary[str, _Named] = WeakValueDictionary()


def _name(text: str, value: _Move | DeviceMesh, mesh: DeviceMesh) -> str:
    kept: dict[str, _Named] = mesh.parent.attachments.setdefault(_ATTACHMENT, {})
    text = f"{text} on {mesh.identity}"
    if text not in kept:
        kept[text] = _named[text] = _Named(value)
    return text


def _find(text: str) -> _Move | DeviceMesh:
    found = _named.get(text)
    if found is None:
        raise RuntimeError(f"a compiled graph is of a group that is gone: compile it again ({text})")
    return found.value


def traced_redistribute(local: torch.Tensor, source: DTensorSpec, target: DTensorSpec) -> torch.Tensor:
    """Redistribute a shard when the graph runs."""
    name = _name(f"{source} of strides {source.stride} to {target.placements}", _Move(source, target), source.mesh)
    result: torch.Tensor = torch.ops.ferrodist.redistribute(local, name)
    return result


def traced_check(tensor: torch.Tensor, operator: object, mesh: DeviceMesh) -> torch.Tensor:
    """A plain tensor that counts as replicated; the ranks compare it when the graph runs."""
    result: torch.Tensor = torch.ops.ferrodist.check_replicated(tensor, str(operator), _name("mesh", mesh, mesh))
    return result


def _fake_redistribute(local: torch.Tensor, name: str) -> torch.Tensor:
    move = _find(name)
    assert isinstance(move, _Move), "it is named so"
    return local.new_empty(move.target.local_shape)


def _fake_check(tensor: torch.Tensor, operator: str, name: str) -> torch.Tensor:
    del operator, name
    return tensor.clone()


_library = torch.library.Library("ferrodist", "DEF")
_library.define("redistribute(Tensor local, str name) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_library.define(
    "check_replicated(Tensor tensor, str operator, str name) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)

REDISTRIBUTE = "redistribute"
CHECK = "check_replicated"


def define_operators(
    redistribute: Callable[[torch.Tensor, DTensorSpec, DTensorSpec], torch.Tensor],
    check: Callable[[str, torch.Tensor, DeviceMesh], None],
) -> None:
    """Give the operators the functions that compute them; these are of modules that import this one."""

    def run_redistribute(local: torch.Tensor, name: str) -> torch.Tensor:
        move = _find(name)
        assert isinstance(move, _Move), "it is named so"
        result = redistribute(local, move.source, move.target).contiguous()
        return result.clone() if result is local else result

    def run_check(tensor: torch.Tensor, operator: str, name: str) -> torch.Tensor:
        mesh = _find(name)
        assert not isinstance(mesh, _Move), "it is named so"
        if tensor.numel():
            check(operator, tensor, mesh)
        return tensor.clone()

    for operator, run, fake in (
        (REDISTRIBUTE, run_redistribute, _fake_redistribute),
        (CHECK, run_check, _fake_check),
    ):
        _library.impl(operator, run, "CPU")
        torch.library.register_fake(f"ferrodist::{operator}", fake, lib=_library)
