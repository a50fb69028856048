"""The command line of ``ferrodist run``: torchrun's options, and a `LaunchSpec` from their values."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ferrodist.launch.cluster import INDEX_VARIABLE, find_hosts
from ferrodist.launch.cpu_binding import BindPolicy
from ferrodist.launch.host_limits import usable_cores
from ferrodist.launch.rank_logs import PREFIX_VARIABLE, LogOptions, StreamChoice, split_filters
from ferrodist.launch.signals import STOP_SIGNALS
from ferrodist.launch.spec import DEFAULT_ROLE, DEFAULT_TIMEOUT_BEFORE_KILL, LaunchSpec, MpiLauncher, ProgramKind
from ferrodist.launch.torchrun_variables import take_variables

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_UNSUPPORTED = {
    ("--logs-specs",): "--log-dir, --redirects and --tee are there, and classes of torch's elastic are not loaded",
    ("--rdzv-conf",): "--timeout S is ours for how long ranks wait for each other",
    ("--local-addr",): "--master-addr HOST is ours, for the address of rank 0's host",
    ("--numa-binding",): "--bind numa and --bind core are ours",
}
"""Options of torchrun's that ``ferrodist run`` does not have, or has under another name, with the advice for each."""

_FILES = {"bash": "_shtab_compgen_files", "zsh": "_files", "tcsh": "f"}
"""shtab's marks of an argument that is a file, for scripts of completion."""

_IGNORED_OPTIONS = ("--monitor-interval", "--start-method", "--event-log-handler")
"""Options of torchrun's own operation. They take a value and change nothing here."""


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``ferrodist run``, spelled as torchrun's, with hyphens or underscores."""

    def option(name: str, kind: Callable[[str], Any], metavar: str, text: str, *aliases: str) -> None:
        parser.add_argument(*_spellings(name, *aliases), type=kind, metavar=metavar, help=text)

    option("--nproc-per-node", _num_ranks, "N", "ranks on this host (default 1); auto: one for each usable core")
    option("--nnodes", _num_hosts, "N", "hosts in the job (default 1)")
    option("--node-rank", int, "N", "this host's number, from 0")
    option("--master-addr", str, "HOST", "where rank 0 listens; needed with several hosts")
    option("--master-port", int, "PORT", "rank 0's port; needed with several hosts, else a free one")
    option("--rdzv-endpoint", str, "HOST:PORT", "--master-addr and --master-port in one")
    option("--rdzv-id", str, "NAME", "name of the job, the same on all hosts", "--run-id")
    option("--rdzv-backend", _rendezvous_backend, "NAME", "c10d or static, as torchrun's; the ranks meet in one way")
    option("--max-restarts", int, "N", "start all ranks again up to N times after a failure (default 0)")
    option("--timeout", float, "S", "seconds that ranks wait for each other by default (FERRODIST_TIMEOUT, or 1800)")
    option(
        "--timeout-before-kill",
        float,
        "S",
        "seconds between asking ranks to end and SIGKILL (default 5)",
        "--shutdown-timeout",
    )
    option("--signals-to-handle", _signals, "LIST", "signals that end the ranks (default SIGINT,SIGTERM,SIGHUP)")
    option("--role", str, "NAME", "the ranks' ROLE_NAME (default 'default')")
    _add_log_arguments(option)
    parser.add_argument(
        "--mpi",
        choices=[launcher.value for launcher in MpiLauncher],
        help="the ranks are an MPI's: mpiexec has its own mpiexec start them; pmi starts MPICH's without one",
    )
    parser.add_argument(
        "--bind",
        choices=[policy.value for policy in BindPolicy],
        default=BindPolicy.NONE.value,
        help="CPUs of each rank: those of a NUMA node (numa), cores of its own (core), or all (none, the default)",
    )
    parser.add_argument(
        *_spellings("--virtual-local-rank"),
        action="store_true",
        help="each rank has LOCAL_RANK 0, and in CUDA_VISIBLE_DEVICES its own GPU alone",
    )
    parser.add_argument(*_spellings("--dry-run"), action="store_true", help="print what would be started, and end")
    parser.add_argument("--standalone", action="store_true", help="one host, the default; as torchrun's")
    parser.add_argument("-m", "--module", action="store_true", help="the program is a module, as in python -m")
    parser.add_argument(
        "--no-python", "--no_python", action="store_true", help="the program is an executable, not Python"
    )
    parser.add_argument(*_spellings("--run-path"), action="store_true", help="the program is a script, the default")
    _add_torchrun_arguments(parser)
    # Not a positional followed by REMAINDER: that positional would swallow a "--" meant for the program.
    command: Any = parser.add_argument(
        "command",
        nargs=argparse.PARSER,
        metavar="program",
        help="what to run, and its arguments, left untouched",
    )
    command.complete = _FILES


def _add_log_arguments(option: Callable[..., None]) -> None:
    """Declare the options for the ranks' output."""
    option("--log-dir", _folder, "DIR", "folder in which each job has one for its log files (default: temporary)")
    streams = "1 (stdout), 2 (stderr) or 3 (both), or local ranks' as in 0:3,1:2"
    option("--redirects", _streams, "STREAMS", f"streams that go to log files alone: {streams}", "-r")
    option("--tee", _streams, "STREAMS", "streams that go to log files, too; as --redirects", "-t")
    option("--local-ranks-filter", _local_ranks, "LIST", "local ranks whose output is shown, as 0,2 (default all)")
    for stream in ("stdout", "stderr"):
        text = f"texts, with commas: lines of {stream} that contain one also go to a file filtered_{stream}.log"
        option(f"--duplicate-{stream}-filters", split_filters, "LIST", text)
    option(
        "--log-line-prefix-template",
        str,
        "TEXT",
        "prefix of shown lines (default '[rank ${rank}] '); also ${local_rank}, ${role_name} and ${hostname}",
    )


def _folder(text: str) -> Path | None:
    return Path(text) if text else None


def _streams(text: str) -> StreamChoice:
    try:
        return StreamChoice.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _local_ranks(text: str) -> frozenset[int] | None:
    if not text:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and len(word) < len("1000000000") for word in words):
        raise argparse.ArgumentTypeError(f"invalid value: {text!r}; give local ranks with commas, as 0,2")
    return frozenset(map(int, words))


def _signals(text: str) -> frozenset[signal.Signals]:
    found = set()
    for word in text.split(","):
        name = word.strip().upper()
        if name not in signal.Signals.__members__:
            raise argparse.ArgumentTypeError(f"there is no signal {word.strip()!r}; give names as SIGTERM,SIGUSR1")
        if signal.Signals[name] in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGPIPE):
            raise argparse.ArgumentTypeError(f"{name} can't end the ranks; leave it out")
        found.add(signal.Signals[name])
    return frozenset(found)


def _num_ranks(text: str) -> int:
    if text in ("auto", "cpu"):
        return usable_cores()
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"invalid value: {text!r}; give a number, or auto or cpu for one rank on each usable core"
        ) from None


def _num_hosts(text: str) -> int:
    minimum, colon, maximum = text.partition(":")
    if colon and minimum != maximum:
        raise argparse.ArgumentTypeError(
            f"{text} is an elastic range, but a job of ferrodist has the same hosts from start to end; give one number"
        )
    try:
        return int(minimum)
    except ValueError:
        raise argparse.ArgumentTypeError(f"invalid value: {text!r}; give the number of hosts") from None


def _rendezvous_backend(text: str) -> str:
    if text not in ("c10d", "static"):
        raise argparse.ArgumentTypeError(f"there is no {text!r}; leave the option out, or give c10d or static")
    return text


def spec_from_arguments(arguments: argparse.Namespace) -> LaunchSpec:
    """Convert parsed arguments to a spec."""
    take_variables(arguments, {name: advice for names, advice in _UNSUPPORTED.items() for name in names})
    if arguments.run_path:  # as torchrun's, which takes precedence
        if arguments.module:
            raise ValueError("--module and --run-path exclude each other; give the one that fits the program")
        arguments.no_python = False
    if arguments.module and arguments.no_python:
        raise ValueError("--module and --no-python exclude each other; give the one that fits the program")
    step = find_hosts(os.environ) if arguments.nnodes is None and not arguments.standalone else None
    nnodes = 1 if arguments.nnodes is None else arguments.nnodes
    if nnodes > 1 and arguments.node_rank is None and os.environ.get(INDEX_VARIABLE, "").isdecimal():
        arguments.node_rank = int(os.environ[INDEX_VARIABLE])
    if arguments.standalone and nnodes != 1:
        raise ValueError(f"--standalone is for one host, but --nnodes is {nnodes}; leave one of them out")
    # Python versions differ in whether they drop a "--" before the program.
    command = arguments.command[arguments.command[0] == "--" :]
    if not command:
        raise ValueError("there is nothing after --; name the program to run")
    python_kind = ProgramKind.MODULE if arguments.module else ProgramKind.SCRIPT
    address, port = arguments.master_addr, arguments.master_port
    if arguments.rdzv_endpoint is not None:
        if address is not None or port is not None:
            raise ValueError("--rdzv-endpoint is the same as --master-addr and --master-port; give one or the other")
        address, port = _split_endpoint(arguments.rdzv_endpoint)
    run_id, node_rank, source = arguments.rdzv_id, arguments.node_rank, ""
    if step is not None:
        nnodes, source = step.num_hosts, "Slurm"
        node_rank = step.host if node_rank is None else node_rank
        address = step.first_host if address is None else address
        port = step.port if port is None else port
        run_id = step.name if run_id is None else run_id
    grace = arguments.timeout_before_kill
    return LaunchSpec(
        program=command[0],
        arguments=tuple(command[1:]),
        kind=ProgramKind.EXECUTABLE if arguments.no_python else python_kind,
        nproc_per_node=1 if arguments.nproc_per_node is None else arguments.nproc_per_node,
        nnodes=nnodes,
        node_rank=node_rank,
        master_addr=address,
        master_port=port,
        max_restarts=arguments.max_restarts or 0,
        timeout=arguments.timeout,
        timeout_before_kill=DEFAULT_TIMEOUT_BEFORE_KILL if grace is None else grace,
        run_id=run_id,
        mpi=None if arguments.mpi is None else MpiLauncher(arguments.mpi),
        bind=BindPolicy(arguments.bind),
        logs=_log_options(arguments),
        role=arguments.role or DEFAULT_ROLE,
        virtual_local_rank=arguments.virtual_local_rank,
        stop_signals=STOP_SIGNALS if arguments.signals_to_handle is None else arguments.signals_to_handle,
        place_source=source,
    )


def _log_options(arguments: argparse.Namespace) -> LogOptions:
    template = arguments.log_line_prefix_template
    return LogOptions(
        folder=arguments.log_dir,
        redirects=arguments.redirects or StreamChoice(),
        tee=arguments.tee or StreamChoice(),
        shown_ranks=arguments.local_ranks_filter,
        stdout_filters=arguments.duplicate_stdout_filters or (),
        stderr_filters=arguments.duplicate_stderr_filters or (),
        prefix=template or os.environ.get(PREFIX_VARIABLE) or None,
    )


def _split_endpoint(endpoint: str) -> tuple[str, int]:
    host, colon, port = endpoint.rpartition(":")
    if not colon or not host or not port.isdecimal():
        raise ValueError(f"--rdzv-endpoint must be HOST:PORT, not {endpoint!r}")
    if len(port) > len("65535") or not 1 <= int(port) <= 65535:
        raise ValueError(f"--rdzv-endpoint must have a port of 1 to 65535, not {port[:20]}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _spellings(*names: str) -> list[str]:
    """Return the spellings of long options, with hyphens and with underscores as torchrun has them."""
    both = [
        each for name in names for each in (name, f"--{name[2:].replace('-', '_')}" if name.startswith("--") else name)
    ]
    return list(dict.fromkeys(both))


def _add_torchrun_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of torchrun that are refused or ignored, hidden from the help."""
    for names, advice in _UNSUPPORTED.items():
        parser.add_argument(*_spellings(*names), action=_UnsupportedOption, advice=advice)
    for name in _IGNORED_OPTIONS:
        parser.add_argument(*_spellings(name), help=argparse.SUPPRESS)


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
