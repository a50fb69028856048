"""torchrun's options in environment variables: PET_NNODES for ``--nnodes``, and so on."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

PREFIX = "PET_"

_OWN_OPTIONS = {"--bind", "--mpi", "--timeout", "--timeout-before-kill", "--run-id", "--dry-run"}
"""Options that torchrun does not have."""

_KINDS = {"module", "no_python", "run_path"}
_ENDPOINT, _MASTER = "rdzv_endpoint", {"master_addr", "master_port"}
"""Options of which one stands for two others."""


def take_variables(arguments: argparse.Namespace, refused: Mapping[str, str]) -> None:
    """Set options that are not given from torchrun's variables; 1 and 0 stand for an option without a value.

    Args:
        arguments: The parsed arguments, with their ``parser``.
        refused: Options of torchrun's that are not there, and what to do instead.

    Raises:
        ValueError: A variable has a wrong value, or belongs to an option that is refused.
    """
    given = {name for name, value in vars(arguments).items() if value is not None and value is not False}
    options: Mapping[str, argparse.Action] = arguments.parser._option_string_actions  # noqa: SLF001 - nothing public
    for option, action in options.items():
        name = PREFIX + option.removeprefix("--").replace("-", "_").upper()
        text = os.environ.get(name)
        if not text or option in _OWN_OPTIONS or "_" in option or _is_decided(action.dest, given):
            continue
        if option in refused:
            raise ValueError(f"{name} is a variable of torchrun's: {refused[option]}")
        setattr(arguments, action.dest, _convert(action, name, text))


def _is_decided(dest: str, given: set[str]) -> bool:
    """Return whether an option is given on the command line, or one that excludes it, also by another variable."""
    if dest in _KINDS:
        return bool(given & _KINDS)
    if dest == _ENDPOINT:
        return bool(given & {_ENDPOINT, *_MASTER})
    has_endpoint = _ENDPOINT in given or (not given & _MASTER and bool(os.environ.get(PREFIX + _ENDPOINT.upper())))
    return dest in given or (dest in _MASTER and has_endpoint)


def _convert(action: argparse.Action, name: str, text: str) -> object:
    if action.nargs == 0:
        if text not in ("0", "1"):
            raise ValueError(f"{name} must be 1 or 0, not {text!r}")
        return text == "1"
    try:
        return text if not callable(action.type) else action.type(text)
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise ValueError(f"{name}={text!r}: {error}") from None
