"""Claims on parameters that a wrapper has changed for good, so that no other wrapper takes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

_claims = WeakIdKeyDictionary()


def claim_parameters(parameters: Iterable[torch.Tensor], owner: str) -> None:
    """Mark parameters as an owner's for as long as they live, which may be longer than the owner does."""
    for parameter in parameters:
        _claims[parameter] = owner


def describe_claim(parameters: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """The claim on the first of these named parameters that has one, as a clause for messages, or None."""
    for name, parameter in parameters:
        if parameter in _claims:
            return f"parameter {name!r} belongs to {_claims[parameter]}"
    return None
