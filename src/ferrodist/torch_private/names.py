"""Look-up of private names that a torch may lack."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from ferrodist.errors import UnsupportedOpError
from ferrodist.torch_private.versions import describe_version


def look_up(owner: object, name: str, feature: str) -> Any:
    """Return a private attribute of torch's, or a function that raises that it is missing, which ``feature`` needs."""
    found = getattr(owner, name, None)
    if found is not None:
        return found

    def raise_missing(*_: object, **__: object) -> NoReturn:
        raise missing_error(f"{getattr(owner, '__name__', owner)}.{name}", feature)

    return raise_missing


def missing_error(name: str, feature: str) -> UnsupportedOpError:
    """The error for a name that this torch lacks."""
    return UnsupportedOpError(
        f"torch {torch.__version__} has no {name}, without which there is no {feature}: this torch"
        f" {describe_version(torch.__version__)}"
    )
