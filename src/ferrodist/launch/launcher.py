"""`launch`: runs the ranks of a `LaunchSpec` on this host, and restarts them."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import uuid
from typing import TYPE_CHECKING

from ferrodist.errors import RankFailedError
from ferrodist.launch.cpu_binding import BindPolicy, bind_ranks, describe_binding
from ferrodist.launch.failure_report import failure_report, stop_report
from ferrodist.launch.host_limits import usable_cores
from ferrodist.launch.mpiexec import run_mpiexec
from ferrodist.launch.pmi_server import PmiServer
from ferrodist.launch.rank_environment import LOOPBACK, Attempt, rank_environment, reserved_port, with_stack_dumps
from ferrodist.launch.rank_logs import JobLogs, Streams
from ferrodist.launch.signals import SignalInbox
from ferrodist.launch.spec import LaunchSpec, MpiLauncher
from ferrodist.launch.terminal import print_warning
from ferrodist.launch.worker_group import GroupOutcome, RankProcess, Sinks, WorkerGroup
from ferrodist.rendezvous.secret import make_secret
from ferrodist.resource_limits import naming_limits

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

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
    bound = bind_ranks(spec.bind, spec.nproc_per_node)
    if spec.bind is not BindPolicy.NONE:
        print_warning(f"ferrodist: --bind {spec.bind.value}: {describe_binding(bound, spec.global_rank(0))}\n")
    ranks = [spec.global_rank(local_rank) for local_rank in range(spec.nproc_per_node)]
    logs = JobLogs(spec.logs, run_id=run_id, role=spec.role, ranks=ranks)
    if logs.folder is not None:
        print_warning(f"ferrodist: logs are in {logs.folder}\n")
    output_error: OSError | None = None
    with _sinks(spec) as sinks, SignalInbox(spec.stop_signals) as inbox:
        for restart_count in range(max_attempts):
            with contextlib.nullcontext(spec.master_port) if spec.master_port else reserved_port() as port:
                address = spec.master_addr or LOOPBACK
                attempt = Attempt(
                    master_addr=address, master_port=port, run_id=run_id, secret=secret, restart_count=restart_count
                )
                outcome = _run_attempt(spec, attempt, bound, inbox=inbox, sinks=sinks, logs=logs)
            output_error = output_error or outcome.output_error
            restarts = outcome.first_failure is not None and outcome.stopped_by is None
            failed = outcome.first_failure
            folder = None if failed is None else logs.folder_of(restart_count, failed.rank - spec.global_rank(0))
            _report(outcome, restart_count + 1, max_attempts, folder)
            if not restarts:
                break
    if output_error is not None:
        print_warning(f"ferrodist: the output of the ranks is not whole: {output_error}\n")
        return outcome.exit_code or 1
    return outcome.exit_code


def _run_attempt(
    spec: LaunchSpec,
    attempt: Attempt,
    bound: Sequence[frozenset[int]],
    *,
    inbox: SignalInbox,
    sinks: Sinks,
    logs: JobLogs,
) -> GroupOutcome:
    cores = usable_cores()
    command = spec.command()
    with naming_limits("the ranks could not be started", kind=RankFailedError):
        server = PmiServer(spec.world_size) if spec.mpi is MpiLauncher.PMI else contextlib.nullcontext()
        files = logs.attempt(attempt.restart_count)
    with server as pmi, files:
        ranks = (
            RankProcess(
                rank=spec.global_rank(local_rank),
                command=command,
                environment={
                    **rank_environment(
                        spec,
                        attempt,
                        local_rank,
                        base=with_stack_dumps(os.environ),
                        cores=cores,
                        cpus=bound[local_rank],
                    ),
                    **(pmi.environment(local_rank) if pmi is not None else {}),
                    **files.environment(local_rank),
                },
                owns_stdin=local_rank == 0,
                descriptors=(pmi.descriptor(local_rank),) if pmi is not None else (),
                cpus=bound[local_rank],
                prefix=spec.logs.prefix_of(spec.global_rank(local_rank), local_rank, spec.role),
                stdout=files.output(local_rank, Streams.STDOUT),
                stderr=files.output(local_rank, Streams.STDERR),
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
        yield Sinks(stdout=stdout, stderr=stderr, prefixed=not alone_on_terminal or spec.logs.needs_pipes)
    finally:
        os.close(stdout)
        os.close(stderr)


def _duplicate(descriptor: int | None) -> int:
    if descriptor is not None:
        with contextlib.suppress(OSError):  # closed meanwhile
            return os.dup(descriptor)
    return os.open(os.devnull, os.O_WRONLY)


def _report(outcome: GroupOutcome, attempt: int, max_attempts: int, logs: Path | None) -> None:
    if outcome.first_failure is not None:
        text = failure_report(outcome, host=socket.gethostname(), attempt=attempt, max_attempts=max_attempts, logs=logs)
        if outcome.stopped_by is None and attempt < max_attempts:
            text += f"ferrodist: starting all ranks again (attempt {attempt + 1} of {max_attempts})\n"
    elif outcome.stopped_by is not None and outcome.exit_code != 0:
        text = stop_report(outcome)
    else:
        return
    print_warning(text)
