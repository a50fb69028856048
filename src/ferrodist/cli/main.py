"""The ``ferrodist`` command.

Each subcommand is a small function that adds a parser and names its handler; `_COMMANDS` lists them. Handlers import
modules that need torch themselves, so that ``run`` and ``secret`` start without torch.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.metadata
import sys
from typing import TYPE_CHECKING, NoReturn

from ferrodist.bench import add_bench_arguments, bench_options, run_bench
from ferrodist.cli.checkpoint import add_ckpt_arguments, run_ckpt
from ferrodist.cli.doctor import add_doctor_arguments, run_doctor
from ferrodist.demo import add_demo_arguments, demo_options, run_demo
from ferrodist.errors import DistributedError
from ferrodist.launch.launcher import add_run_arguments, launch, spec_from_arguments
from ferrodist.launch.output import discard_buffer, print_warning, write_stdout
from ferrodist.rendezvous.secret import make_secret

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from _typeshed import SupportsWrite

    Subcommands = argparse._SubParsersAction["_Parser"]  # noqa: SLF001 - argparse has no public name for it


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
    """Run one command.

    Returns:
        The process's exit code: the command's own; 1 for a failure, also to write (quietly, if the reader of the output
        has left); 2 for wrong usage; 130 for Ctrl-C.
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
    options = [option for option in parser._option_string_actions if option.startswith("--")]  # noqa: SLF001 - as above
    likely: list[str] = []
    for given in (each.partition("=")[0] for each in unknown if each.startswith("--")):
        longer = [option for option in options if option.startswith(given)]
        likely += longer[:1] or difflib.get_close_matches(given, options, 1)
    hint = f"; is it {' or '.join(dict.fromkeys(likely))}?" if likely else ""
    return f"unrecognized arguments: {' '.join(unknown)}{hint}"


def build_parser() -> argparse.ArgumentParser:
    """Build the parser with all subcommands."""
    # No abbreviations: they would claim a script's own options, and break scripts when an option is added.
    parser = _Parser(prog="ferrodist", description="Distributed training for PyTorch.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"ferrodist {_version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_Parser)
    for add_command in _COMMANDS:
        add_command(commands)
    return parser


def _version() -> str:
    try:
        return importlib.metadata.version("ferrodist")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed: run from its source tree)"


def _add_run(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "run",
        help="start a program as several ranks",
        description="Start a program as several ranks, with torchrun's options and variables.",
        usage="%(prog)s [options] [-m | --no-python] program [arguments ...]",
        allow_abbrev=False,
    )
    add_run_arguments(parser)
    parser.set_defaults(handler=_run, parser=parser)


def _run(arguments: argparse.Namespace) -> int:
    try:
        spec = spec_from_arguments(arguments)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return launch(spec)


def _add_secret(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "secret",
        help="print a new job secret",
        description="Print a new secret; set FERRODIST_SECRET to it on every host of a job.",
        allow_abbrev=False,
    )
    parser.set_defaults(handler=_secret, parser=parser)


def _secret(_arguments: argparse.Namespace) -> int:
    write_stdout(make_secret() + "\n")
    return 0


def _add_demo(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "demo",
        help="train a small network on several ranks",
        description="Train a small network on 1 rank and on several, compare, and plot. Needs the extra 'demo'.",
        allow_abbrev=False,
    )
    add_demo_arguments(parser)
    parser.set_defaults(handler=_demo, parser=parser)


def _demo(arguments: argparse.Namespace) -> int:
    try:
        options = demo_options(arguments)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return run_demo(options)


def _add_bench(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure it beside gloo, MPICH and Open MPI",
        description="Measure collectives, messages, asynchronous operations and group making beside gloo, MPICH and"
        " Open MPI, on one host and on two that are emulated; or over the MPI, UCC or NCCL of this machine. Needs the"
        " extra 'bench'.",
        allow_abbrev=False,
    )
    add_bench_arguments(parser)
    parser.set_defaults(handler=_bench, parser=parser)


def _bench(arguments: argparse.Namespace) -> int:
    try:
        options = bench_options(arguments)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return run_bench(options)


def _add_ckpt(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "ckpt",
        help="look at checkpoints, check, compare, reshard and convert them",
        description="Look at checkpoints, check and compare them, write them for other numbers of ranks, convert them.",
        allow_abbrev=False,
    )
    for subparser in add_ckpt_arguments(parser):
        subparser.set_defaults(handler=_ckpt, parser=subparser)


def _ckpt(arguments: argparse.Namespace) -> int:
    try:
        return run_ckpt(arguments)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _add_doctor(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "doctor",
        help="show which backends this machine has, and why not others",
        description="Show what is there for ferrodist on this machine: backends, engines and GPUs, their versions, and"
        " why something can't be used.",
        allow_abbrev=False,
    )
    add_doctor_arguments(parser)
    parser.set_defaults(handler=run_doctor, parser=parser)


_COMMANDS: tuple[Callable[[Subcommands], None], ...] = (
    _add_run,
    _add_secret,
    _add_demo,
    _add_bench,
    _add_ckpt,
    _add_doctor,
)
