"""Looking up a name of torch's that may not be there."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from ferrodist.errors import UnsupportedOpError
from ferrodist.torch_private.versions import describe_version

__all__ = ["look_up", "missing_error"]


def look_up(owner: object, name: str, feature: str) -> Any:
    """Return an attribute of torch's, or a function in its place that raises.

    Args:
        owner: The module or class that has the attribute.
        name: Its name.
        feature: What can't be done without it, for the error: "gradients of a backward that is in progress".
    """
    found = getattr(owner, name, None)
    if found is not None:
        return found

    def raise_missing(*_: object, **__: object) -> NoReturn:
        raise missing_error(f"{getattr(owner, '__name__', owner)}.{name}", feature)

    return raise_missing


def missing_error(name: str, feature: str) -> UnsupportedOpError:
    """Make the error for a name that this torch lacks."""
    return UnsupportedOpError(
        f"torch {torch.__version__} has no {name}, without which there is no {feature}: this torch"
        f" {describe_version(torch.__version__)}"
    )
