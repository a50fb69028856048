"""torchrun's options that ``ferrodist run`` does not have, or has under another name."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

_OUTPUT = (
    "the ranks' output goes to the launcher's own, each line with its rank; 2>&1 | tee FILE keeps it, and"
    " grep '^\\[rank 0\\]' FILE shows one rank's"
)

_UNSUPPORTED = {
    ("--log-dir",): _OUTPUT,
    ("--redirects", "-r"): _OUTPUT,
    ("--tee", "-t"): _OUTPUT,
    ("--logs-specs",): _OUTPUT,
    ("--local-ranks-filter",): _OUTPUT,
    ("--duplicate-stdout-filters",): _OUTPUT,
    ("--duplicate-stderr-filters",): _OUTPUT,
    ("--rdzv-conf",): "--timeout S is ours for how long ranks wait for each other",
    ("--shutdown-timeout",): "--timeout-before-kill S is ours",
    ("--signals-to-handle",): "SIGINT, SIGTERM and SIGHUP end the ranks, SIGUSR1 and SIGUSR2 are passed on to them",
    ("--local-addr",): "--master-addr HOST is ours, for the address of rank 0's host",
    ("--role",): "ranks have no roles, and ROLE_NAME is always 'default'",
    ("--run-path",): "give the path of the script, or -m and the name of a module",
    ("--numa-binding",): "ranks are not bound; --no-python numactl ... python program.py binds them",
    ("--virtual-local-rank",): "LOCAL_RANK is a rank's number on its host, and CUDA_VISIBLE_DEVICES is left alone",
}
"""The advice for each of these options."""

_IGNORED_OPTIONS = ("--monitor-interval", "--start-method", "--event-log-handler")
"""Options of torchrun's own operation. They take a value and change nothing here."""


def spellings(*names: str) -> list[str]:
    """Return the spellings of long options, with hyphens and with underscores as torchrun has them."""
    both = [
        each for name in names for each in (name, f"--{name[2:].replace('-', '_')}" if name.startswith("--") else name)
    ]
    return list(dict.fromkeys(both))


def add_torchrun_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options, hidden from the help."""
    for names, advice in _UNSUPPORTED.items():
        parser.add_argument(*spellings(*names), action=_UnsupportedOption, advice=advice)
    for name in _IGNORED_OPTIONS:
        parser.add_argument(*spellings(name), help=argparse.SUPPRESS)


class _UnsupportedOption(argparse.Action):
    """Ends the parsing with an error that says what to do instead."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, advice: str) -> None:
        super().__init__(option_strings, dest, nargs="?", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        self._advice = advice

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,  # noqa: ARG002 - argparse's signature
        values: str | Sequence[Any] | None,  # noqa: ARG002
        option_string: str | None = None,
    ) -> None:
        parser.error(f"{option_string} is an option of torchrun's: {self._advice}")
