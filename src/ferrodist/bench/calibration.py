"""The measurement of the model's constants: runs `probes` on this host, and between emulated ones."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
from typing import TYPE_CHECKING

from ferrodist.bench.cases import Case, Operation, Peer
from ferrodist.bench.environments import PeerFailedError, run_command
from ferrodist.bench.model import Constants
from ferrodist.bench.targets import RankGroup

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ferrodist.bench.environments import EmulatedHosts

_PROBES = [sys.executable, "-m", "ferrodist.bench.probes"]
_TIMEOUT_SECONDS = 60.0
_PORT = 29_601  # free: the networks are our own
_CALL_BATCHES = 9


def measure_constants(folder: Path, log: Callable[[str], None]) -> Constants:
    """The constants of this host; ``folder`` is created. PeerFailedError says why they can't be measured."""
    probed = json.loads(run_command(_PROBES, timeout=_TIMEOUT_SECONDS, title="the probes of the model"))
    alone = RankGroup(Peer.NATIVE, 1, folder=folder, max_seconds=_TIMEOUT_SECONDS, log=log)
    try:
        runner = alone.open_runner(Case(Operation.ALL_GATHER, 1, size_bytes=8))
        call = statistics.median(runner.run(runner.num_calls) for _ in range(_CALL_BATCHES))
    finally:
        alone.close()
    return Constants(processors=len(os.sched_getaffinity(0)), call=call, **probed)


def measure_network(constants: Constants, hosts: EmulatedHosts) -> Constants:
    """The constants with those of the network between two hosts; PeerFailedError as above."""
    receiver = subprocess.Popen(  # noqa: S603 - a fixed command
        [*hosts.command_prefix(1), *_PROBES, "receive", str(_PORT)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert receiver.stdout is not None
        if not receiver.stdout.readline():
            raise PeerFailedError("the receiver of the model's probes did not start")
        command = [*hosts.command_prefix(0), *_PROBES, "send", hosts.addresses[1], str(_PORT)]
        probed = json.loads(run_command(command, timeout=_TIMEOUT_SECONDS, title="the probes of the network"))
    finally:
        receiver.kill()
        receiver.communicate()
    return dataclasses.replace(constants, **probed)
