"""torchrun's options that ``ferrodist run`` has no use for, or has under another name."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

_OUTPUT = (
    "the ranks' output goes to the launcher's own, each line with its rank; 2>&1 | tee FILE keeps it, and"
    " grep '^\\[rank 0\\]' FILE shows one rank's"
)

_REFUSED = {
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
"""What to do instead of each of these."""

_IGNORED = ("--monitor-interval", "--start-method", "--event-log-handler")
"""Settings of how torchrun itself works. They take a value and change nothing here."""


def spellings(*names: str) -> list[str]:
    """Long options with hyphens and with underscores, as torchrun has them; short ones as they are."""
    both = [
        each for name in names for each in (name, f"--{name[2:].replace('-', '_')}" if name.startswith("--") else name)
    ]
    return list(dict.fromkeys(both))


def add_torchrun_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options, which the help does not show."""
    for names, advice in _REFUSED.items():
        parser.add_argument(*spellings(*names), action=_Refusal, advice=advice)
    for name in _IGNORED:
        parser.add_argument(*spellings(name), help=argparse.SUPPRESS)


class _Refusal(argparse.Action):
    """Ends the parsing, by an error that says what to do instead."""

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
