"""``ferrodist run``: from command-line arguments to a `LaunchSpec`, and from that to running ranks."""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import sys
import uuid
from typing import TYPE_CHECKING, Any

from ferrodist.launch.failure_report import failure_report, stop_report
from ferrodist.launch.mpi import PmiServer, run_mpiexec
from ferrodist.launch.output import print_warning
from ferrodist.launch.process_watch import SignalInbox
from ferrodist.launch.spec import (
    DEFAULT_TIMEOUT_BEFORE_KILL,
    LOOPBACK,
    Attempt,
    LaunchSpec,
    MpiLauncher,
    ProgramKind,
    rank_environment,
    reserved_port,
    usable_cores,
    with_stack_dumps,
)
from ferrodist.launch.torchrun_options import add_torchrun_arguments, spellings
from ferrodist.launch.worker_group import GroupOutcome, RankProcess, Sinks, WorkerGroup
from ferrodist.rendezvous.secret import make_secret

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_STDOUT, _STDERR = 1, 2


def launch(spec: LaunchSpec) -> int:
    """Run the ranks of this host until they end, and restart them as the spec allows.

    Forwards SIGINT, SIGTERM, SIGHUP and SIGUSR2 to the ranks when called in the main thread, and SIGUSR1 to those that
    it does not kill: Python programs print their stacks, or run their own handler. The first rank of the host reads
    this process's standard input, the others the null device. Blocks until all ranks have ended and been reaped;
    reports failures on standard error.

    Args:
        spec: The launch.

    Returns:
        The launcher's exit code: 0 if every rank succeeded, else that of the rank that failed first, or 128 + N if
        signal N ended it; 1 if the ranks succeeded but their output could not be written (a closed pipe is not a
        failure).

    Raises:
        RankFailedError: A process could not be started.
    """
    if spec.mpi is MpiLauncher.MPIEXEC:
        return run_mpiexec(spec, usable_cores())
    secret = spec.secret or make_secret()
    run_id = spec.run_id or (uuid.uuid4().hex if spec.nnodes == 1 else "none")
    max_attempts = spec.max_restarts + 1
    with _sinks(spec) as sinks, SignalInbox() as inbox:
        for restart_count in range(max_attempts):
            with contextlib.nullcontext(spec.master_port) if spec.master_port else reserved_port() as port:
                address = spec.master_addr or LOOPBACK
                attempt = Attempt(
                    master_addr=address, master_port=port, run_id=run_id, secret=secret, restart_count=restart_count
                )
                outcome = _run_attempt(spec, attempt, inbox, sinks)
            restarts = outcome.first_failure is not None and outcome.stopped_by is None
            _report(outcome, restart_count + 1, max_attempts)
            if not restarts:
                break
    if outcome.output_error is not None:
        print_warning(f"ferrodist: the output of the ranks is not whole: {outcome.output_error}\n")
        return outcome.exit_code or 1
    return outcome.exit_code


def _run_attempt(spec: LaunchSpec, attempt: Attempt, inbox: SignalInbox, sinks: Sinks) -> GroupOutcome:
    cores = usable_cores()
    command = spec.command()
    with PmiServer(spec.world_size) if spec.mpi is MpiLauncher.PMI else contextlib.nullcontext() as pmi:
        ranks = (
            RankProcess(
                rank=spec.global_rank(local_rank),
                command=command,
                environment={
                    **rank_environment(spec, attempt, local_rank, base=with_stack_dumps(os.environ), cores=cores),
                    **(pmi.environment(local_rank) if pmi is not None else {}),
                },
                owns_stdin=local_rank == 0,
                descriptors=(pmi.descriptor(local_rank),) if pmi is not None else (),
            )
            for local_rank in range(spec.nproc_per_node)
        )
        with WorkerGroup(ranks, timeout_before_kill=spec.timeout_before_kill, inbox=inbox, sinks=sinks) as group:
            return group.run()


@contextlib.contextmanager
def _sinks(spec: LaunchSpec) -> Iterator[Sinks]:
    """Duplicate the launcher's own streams, so that no file opened later takes over their descriptors."""
    if sys.stdout is not None:
        with contextlib.suppress(OSError):  # the next write reports it
            sys.stdout.flush()
    # None: the program was started with this stream closed, and another file may have its number by now.
    stdout = _duplicate(None if sys.__stdout__ is None else _STDOUT)
    stderr = _duplicate(None if sys.__stderr__ is None else _STDERR)
    try:
        alone_on_terminal = spec.world_size == 1 and os.isatty(stdout)
        yield Sinks(stdout=stdout, stderr=stderr, prefixed=not alone_on_terminal)
    finally:
        os.close(stdout)
        os.close(stderr)


def _duplicate(descriptor: int | None) -> int:
    if descriptor is not None:
        with contextlib.suppress(OSError):  # closed meanwhile
            return os.dup(descriptor)
    return os.open(os.devnull, os.O_WRONLY)


def _report(outcome: GroupOutcome, attempt: int, max_attempts: int) -> None:
    if outcome.first_failure is not None:
        text = failure_report(outcome, host=socket.gethostname(), attempt=attempt, max_attempts=max_attempts)
        if outcome.stopped_by is None and attempt < max_attempts:
            text += f"ferrodist: starting all ranks again (attempt {attempt + 1} of {max_attempts})\n"
    elif outcome.stopped_by is not None and outcome.exit_code != 0:
        text = stop_report(outcome)
    else:
        return
    print_warning(text)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``ferrodist run``, spelled as torchrun's, with hyphens or underscores."""

    def option(name: str, kind: Callable[[str], Any], metavar: str, text: str, *aliases: str) -> None:
        parser.add_argument(*spellings(name, *aliases), type=kind, metavar=metavar, help=text)

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
    option("--timeout-before-kill", float, "S", "seconds between asking ranks to end and SIGKILL (default 5)")
    parser.add_argument(
        "--mpi",
        choices=[launcher.value for launcher in MpiLauncher],
        help="the ranks are an MPI's: mpiexec has its own mpiexec start them; pmi starts MPICH's without one",
    )
    parser.add_argument("--standalone", action="store_true", help="one host, the default; as torchrun's")
    parser.add_argument("-m", "--module", action="store_true", help="the program is a module, as in python -m")
    parser.add_argument(
        "--no-python", "--no_python", action="store_true", help="the program is an executable, not Python"
    )
    add_torchrun_arguments(parser)
    # Not a positional followed by REMAINDER: that positional would swallow a "--" meant for the program.
    parser.add_argument(
        "command",
        nargs=argparse.PARSER,
        metavar="program",
        help="what to run, and its arguments, left untouched",
    )


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
    if arguments.module and arguments.no_python:
        raise ValueError("--module and --no-python exclude each other; give the one that fits the program")
    nnodes = 1 if arguments.nnodes is None else arguments.nnodes
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
    grace = arguments.timeout_before_kill
    return LaunchSpec(
        program=command[0],
        arguments=tuple(command[1:]),
        kind=ProgramKind.EXECUTABLE if arguments.no_python else python_kind,
        nproc_per_node=1 if arguments.nproc_per_node is None else arguments.nproc_per_node,
        nnodes=nnodes,
        node_rank=arguments.node_rank,
        master_addr=address,
        master_port=port,
        max_restarts=arguments.max_restarts or 0,
        timeout=arguments.timeout,
        timeout_before_kill=DEFAULT_TIMEOUT_BEFORE_KILL if grace is None else grace,
        run_id=arguments.rdzv_id,
        mpi=None if arguments.mpi is None else MpiLauncher(arguments.mpi),
    )


def _split_endpoint(endpoint: str) -> tuple[str, int]:
    host, colon, port = endpoint.rpartition(":")
    if not colon or not host or not port.isdecimal():
        raise ValueError(f"--rdzv-endpoint must be HOST:PORT, not {endpoint!r}")
    if len(port) > len("65535") or not 1 <= int(port) <= 65535:
        raise ValueError(f"--rdzv-endpoint must have a port of 1 to 65535, not {port[:20]}")
    return host.removeprefix("[").removesuffix("]"), int(port)
