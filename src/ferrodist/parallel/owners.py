"""Parameters that a wrapper has changed for good, so that no other takes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

__all__ = ["claim_parameters", "describe_owner"]

_owners = WeakIdKeyDictionary()


def claim_parameters(parameters: Iterable[torch.Tensor], owner: str) -> None:
    """Say for as long as the parameters live, which may be longer than their owner does, what has them."""
    for parameter in parameters:
        _owners[parameter] = owner


def describe_owner(parameters: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """A sentence about the first of these named parameters that was claimed; None when none was."""
    for name, parameter in parameters:
        if parameter in _owners:
            return f"parameter {name!r} belongs to {_owners[parameter]}"
    return None
