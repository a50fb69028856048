"""The processes of one peer: started, asked, ended."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import time
from typing import TYPE_CHECKING, Any, NoReturn

from ferrodist.bench.channel import Channel, ChannelClosedError
from ferrodist.bench.environments import EnvironmentUnavailableError
from ferrodist.bench.starting import rank_environment, start_commands

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from typing_extensions import Self

    from ferrodist.bench.hosts import EmulatedHosts
    from ferrodist.bench.peers import Peer

_POLL_SECONDS = 0.1
_SECONDS_TO_LEAVE = 5.0
_KEPT_CHARACTERS = 400


class PeerFailedError(Exception):
    """The peer can't be started, or has ended; the message says why."""


class RankGroup:
    """The ranks of one peer, each a process that waits for what to do; a context that ends them.

    Args:
        peer: Whose.
        num_ranks: How many.
        folder: Empty, and its own.
        timeout: Seconds in which all must have joined, once they can start.
        tell: Called with what is done, when it takes long.
        hosts: Over which they are spread; None is this one.

    Raises:
        PeerFailedError: They have not.
    """

    def __init__(
        self,
        peer: Peer,
        num_ranks: int,
        *,
        folder: Path,
        timeout: float,
        tell: Callable[[str], None],
        hosts: EmulatedHosts | None = None,
    ) -> None:
        self.peer = peer
        self.num_ranks = num_ranks
        self.versions: dict[str, str] = {}
        self.command: list[str] = []
        self._log = folder / "log"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ranks: list[int] = []  # pidfds: an MPI's launcher has ranks that are no children of ours
        self._channels: list[Channel] = []
        socket_path = folder / "socket"
        try:
            commands = start_commands(peer, num_ranks, socket_path=socket_path, folder=folder, tell=tell, hosts=hosts)
        except EnvironmentUnavailableError as error:
            raise PeerFailedError(str(error)) from None
        self.command = commands[0]
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(socket_path))
            listener.listen(num_ranks)
            try:
                self._start(commands, rank_environment(os.environ, peer, hosts))
                self._meet(listener, time.monotonic() + timeout)
            except BaseException:
                self.kill()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_alive(self) -> bool:
        """Whether it can be asked."""
        return bool(self._channels)

    def ask(self, message: dict[str, Any], timeout: float) -> list[dict[str, Any]]:
        """Send all ranks the same, and collect their answers by rank.

        Args:
            message: What to do.
            timeout: Seconds until all must have answered.

        Raises:
            PeerFailedError: One has failed, ended or not answered; none of them can be used any more.
        """
        if not self.is_alive:
            raise PeerFailedError("it has failed before")
        end = time.monotonic() + timeout
        answers: dict[int, dict[str, Any]] = {}
        try:
            with selectors.DefaultSelector() as selector:
                for rank, channel in enumerate(self._channels):
                    channel.send(message)
                    selector.register(channel, selectors.EVENT_READ, rank)
                while len(answers) < self.num_ranks:
                    ready = selector.select(max(0, end - time.monotonic()))
                    if not ready:
                        missing = sorted(set(range(self.num_ranks)) - set(answers))
                        self._give_up(f"ranks {missing} did not answer to {message['do']!r} within {timeout:g} s")
                    for key, _ in ready:
                        answers[key.data] = self._receive(self._channels[key.data], end)
                        selector.unregister(self._channels[key.data])
        except ChannelClosedError:
            self._give_up("a rank has ended")
        return [answers[rank] for rank in range(self.num_ranks)]

    def close(self) -> None:
        """Let the ranks leave their group, and end those that don't."""
        for channel in self._channels:
            with contextlib.suppress(ChannelClosedError):
                channel.send({"do": "end"})
        end = time.monotonic() + _SECONDS_TO_LEAVE
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0, end - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """End the ranks, whatever they are doing."""
        for rank in self._ranks:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(rank, signal.SIGKILL)
            os.close(rank)
        for process in self._processes:
            if process.poll() is None:
                process.terminate()  # a launcher ends its ranks then
                try:
                    process.wait(_SECONDS_TO_LEAVE)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        for channel in self._channels:
            channel.close()
        self._channels.clear()
        self._ranks.clear()

    def _start(self, commands: list[list[str]], environment: dict[str, str]) -> None:
        with self._log.open("ab") as log:
            for command in commands:
                process = subprocess.Popen(  # noqa: S603 - a fixed command
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    start_new_session=True,  # Ctrl-C is for the driver
                )
                self._processes.append(process)

    def _meet(self, listener: socket.socket, end: float) -> None:
        """Wait until every rank has connected and joined its group."""
        joined: dict[int, Channel] = {}
        listener.settimeout(_POLL_SECONDS)
        while len(self._channels) < self.num_ranks:
            try:
                sock = listener.accept()[0]
            except TimeoutError:
                if any(process.poll() is not None for process in self._processes):
                    self._give_up("a rank has ended before it joined")
                if time.monotonic() > end:
                    self._give_up("the ranks have not started in time")
                continue
            self._channels.append(Channel(sock))
        try:
            for channel in self._channels:
                self._ranks.append(os.pidfd_open(self._receive(channel, end)["pid"]))
            for channel in self._channels:
                hello = self._receive(channel, end)
                self.versions = hello["versions"]
                joined[hello["rank"]] = channel
        except ChannelClosedError:
            self._give_up("a rank has ended before it joined")
        if sorted(joined) != list(range(self.num_ranks)):
            self._give_up(f"the ranks are {sorted(joined)}, not 0 to {self.num_ranks - 1}")
        self._channels = [joined[rank] for rank in range(self.num_ranks)]

    def _receive(self, channel: Channel, end: float) -> dict[str, Any]:
        try:
            answer = channel.receive(max(1e-6, end - time.monotonic()))
        except TimeoutError:
            self._give_up("a rank did not answer in time")
        if "failed" in answer:
            self._give_up(answer["failed"], with_log=False)
        return answer

    def _give_up(self, reason: str, *, with_log: bool = True) -> NoReturn:
        """End the ranks, and raise with what they said last."""
        self.kill()
        said = self._last_words() if with_log else ""
        raise PeerFailedError(f"{reason}: {said}" if said else reason)

    def _last_words(self) -> str:
        text = self._log.read_text(encoding="utf-8", errors="replace") if self._log.exists() else ""
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return " | ".join(lines[-3:])[-_KEPT_CHARACTERS:]
