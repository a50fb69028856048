"""The ``ferrodist`` command.

`_COMMANDS` lists the subcommands. Their functions import modules that need torch when they run, so that ``run`` and
``secret`` start without torch.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

from ferrodist.bench.cli import add_bench_arguments, bench_options, run_bench
from ferrodist.cli.checkpoint import add_ckpt_arguments, run_ckpt
from ferrodist.cli.doctor import add_doctor_arguments, run_doctor
from ferrodist.demo.cli import add_demo_arguments, demo_options, run_demo
from ferrodist.errors import DistributedError
from ferrodist.installation import describe_missing, installed_version
from ferrodist.launch.cluster import lone_host_warning
from ferrodist.launch.dry_run import describe_launch
from ferrodist.launch.launcher import launch
from ferrodist.launch.options import add_run_arguments, spec_from_arguments
from ferrodist.launch.terminal import discard_buffer, print_warning, write_stdout
from ferrodist.rendezvous.secret import make_secret

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from _typeshed import SupportsWrite

_T = TypeVar("_T")


class UsageError(Exception):
    """The arguments are wrong; the message says what to do."""


class _Parser(argparse.ArgumentParser):
    """Reports wrong usage in one line instead of a page, and fails if its output can't be written."""

    def error(self, message: str) -> NoReturn:
        print_warning(f"{self.prog}: {message} (see '{self.prog} --help')\n")
        raise SystemExit(2)

    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        """Print help and version; argparse's own method ignores write errors."""
        if message:
            write_stdout(message, file)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the process's exit code.

    It is the command's own; 1 for a failure, also to write (quietly, if the reader of the output has left); 2 for wrong
    usage; 130 for Ctrl-C.
    """
    try:
        try:
            return _run_command(argv)
        finally:
            if sys.stdout is not None:  # None: started with standard output closed
                sys.stdout.flush()  # here, where a failure can be reported; at exit it would be a traceback
    except BrokenPipeError:
        discard_buffer(sys.stdout)
        return 1
    except OSError as error:
        discard_buffer(sys.stdout)
        print_warning(f"ferrodist: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130


def _run_command(argv: Sequence[str] | None) -> int:
    arguments, unknown = build_parser().parse_known_args(argv)
    if unknown:
        arguments.parser.error(_unrecognized(arguments.parser, unknown))
    try:
        code: int = arguments.handler(arguments)
    except UsageError as error:
        arguments.parser.error(str(error))
    except DistributedError as error:
        print_warning(f"ferrodist: {error}\n")
        return 1
    return code


def _unrecognized(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> str:
    """Return the message for unknown arguments, with similar options of the command."""
    options = [option for option in parser._option_string_actions if option.startswith("--")]  # noqa: SLF001 - argparse has no public list
    likely: list[str] = []
    for given in (each.partition("=")[0] for each in unknown if each.startswith("--")):
        longer = [option for option in options if option.startswith(given)]
        likely += longer[:1] or difflib.get_close_matches(given, options, 1)
    hint = f"; is it {' or '.join(dict.fromkeys(likely))}?" if likely else ""
    return f"unrecognized arguments: {' '.join(unknown)}{hint}"


class _PrintCompletion(argparse.Action):
    """Prints a script that completes the command's options in a shell, and ends the process."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,  # noqa: ARG002 - argparse's signature
        values: Any,
        option_string: str | None = None,  # noqa: ARG002
    ) -> NoReturn:
        if missing := describe_missing("--print-completion", "completion", {"shtab": "shtab"}):
            parser.error(missing.strip().removeprefix("ferrodist: "))
        shtab = importlib.import_module("shtab")
        write_stdout(shtab.complete(build_parser(), values) + "\n")
        raise SystemExit(0)


def _add_completion(parser: argparse.ArgumentParser, *names: str) -> None:
    parser.add_argument(
        *names,
        action=_PrintCompletion,
        choices=("bash", "zsh", "tcsh"),
        help="print a script for a shell that completes commands and options, and end",
    )


def build_parser() -> argparse.ArgumentParser:
    """Build the parser with all subcommands."""
    # No abbreviations: they would claim a script's own options, and break scripts when an option is added.
    parser = _Parser(prog="ferrodist", description="Distributed training for PyTorch.", allow_abbrev=False)
    version = installed_version() or "(not installed: run from its source tree)"
    parser.add_argument("--version", action="version", version=f"ferrodist {version}")
    _add_completion(parser, "--print-completion")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_Parser)
    for name, (add_arguments, run, text, description, usage) in _COMMANDS.items():
        subparser = commands.add_parser(name, help=text, description=description, usage=usage, allow_abbrev=False)
        if name == "run":  # as torchrun's
            _add_completion(subparser, "--print-completion", "--print_completion")
        for leaf in add_arguments(subparser) or [subparser]:
            leaf.set_defaults(handler=run, parser=leaf)
    return parser


class _Command(NamedTuple):
    """A subcommand; ``add_arguments`` returns its own subcommands' parsers, if it has any."""

    add_arguments: Callable[[argparse.ArgumentParser], Sequence[argparse.ArgumentParser] | None]
    run: Callable[[argparse.Namespace], int]
    help: str
    description: str
    usage: str | None = None


def _usage_errors(function: Callable[[argparse.Namespace], _T], arguments: argparse.Namespace) -> _T:
    try:
        return function(arguments)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _run(arguments: argparse.Namespace) -> int:
    spec = _usage_errors(spec_from_arguments, arguments)
    if arguments.nnodes is None and not arguments.standalone and (warning := lone_host_warning(os.environ)):
        print_warning(warning)
    if arguments.dry_run:
        write_stdout(describe_launch(spec))
        return 0
    return launch(spec)


def _print_secret(_arguments: argparse.Namespace) -> int:
    write_stdout(make_secret() + "\n")
    return 0


_COMMANDS = {
    "run": _Command(
        add_run_arguments,
        _run,
        "start a program as several ranks",
        "Start a program as several ranks, with torchrun's options and variables.",
        "%(prog)s [options] [-m | --no-python] program [arguments ...]",
    ),
    "secret": _Command(
        lambda _: None,
        _print_secret,
        "print a new job secret",
        "Print a new secret; set FERRODIST_SECRET to it on every host of a job.",
    ),
    "demo": _Command(
        add_demo_arguments,
        lambda arguments: run_demo(_usage_errors(demo_options, arguments)),
        "train a small network on several ranks",
        "Train a small network on 1 rank and on several, compare, and plot. Needs the extra 'demo'.",
    ),
    "bench": _Command(
        add_bench_arguments,
        lambda arguments: run_bench(_usage_errors(bench_options, arguments)),
        "measure it beside gloo, MPICH and Open MPI",
        "Measure collectives, messages, asynchronous operations and group making beside gloo, MPICH and Open MPI,"
        " on one host and on two that are emulated; or over the MPI, UCC or NCCL of this machine. Needs the extra"
        " 'bench'.",
    ),
    "ckpt": _Command(
        add_ckpt_arguments,
        lambda arguments: _usage_errors(run_ckpt, arguments),
        "look at checkpoints, check, compare, reshard and convert them",
        "Look at checkpoints, check and compare them, write them for other numbers of ranks, convert them.",
    ),
    "doctor": _Command(
        add_doctor_arguments,
        run_doctor,
        "show which backends this machine has, and why not others",
        "Show what is there for ferrodist on this machine: backends, engines and GPUs, their versions, and why"
        " something can't be used.",
    ),
}
