"""The backend whose ranks are threads of one process: no ports and no processes, and the same contract."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from typing_extensions import override

from ferrodist.backends.mailbox import EAGER_LIMIT, Message
from ferrodist.backends.mailbox_backend import MailboxBackend, Send
from ferrodist.errors import DistributedError, InvalidWorldSizeError
from ferrodist.torch_private.operators import create_operators

if TYPE_CHECKING:
    from collections.abc import Sequence


class SimulatedBackend(MailboxBackend):
    """A rank of a group whose ranks are threads of this process.

    It has `TcpBackend`'s deadlines, errors and sub-groups, and large messages wait for their receiver likewise, so that
    a program which hangs or fails there does so here. Make groups with `create_group`.
    """

    def __init__(
        self, rank: int, peers: Sequence[SimulatedBackend], world_size: int, *, timeout: float | None, name: str
    ) -> None:
        super().__init__(rank, world_size, timeout=timeout, name=name)
        self._peers = peers
        self._arrivals: dict[Send, Message] = {}

    @classmethod
    def create_group(
        cls, world_size: int, *, timeout: float | None = None, name: str = "world"
    ) -> list[SimulatedBackend]:
        """Make a group. The first one in a process takes up to 0.6 s, for torch's operators.

        Args:
            world_size: Number of ranks, at least 1.
            timeout: Default of blocking calls' ``timeout``, in seconds; None takes FERRODIST_TIMEOUT's, or
                `DEFAULT_COLLECTIVE_TIMEOUT`.
            name: The group's name in error messages.

        Returns:
            The handle of each rank, for one thread each.
        """
        if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
            raise InvalidWorldSizeError(f"a group needs a world size of at least 1, not {world_size!r}")
        if world_size > 1:
            create_operators()  # before the ranks' threads would
        peers: list[SimulatedBackend] = []
        peers.extend(cls(rank, peers, world_size, timeout=timeout, name=name) for rank in range(world_size))
        return peers

    @override
    def close(self, timeout: float | None = None) -> None:
        del timeout
        if self._close_groups():
            self._leave_groups()
            self._run_close_callbacks()

    def _start_send(self, send: Send) -> None:
        peer = self._peers[send.peer]
        size = len(send.data)
        if size <= EAGER_LIMIT:
            message = Message(self.rank, send.tag, size)
            peer._accept(message)  # noqa: SLF001 - the ranks are one mechanism
            if size:
                peer._mailbox.write_bytes(message, send.data)  # noqa: SLF001
            self._finish_send(send)
            return
        message = Message(self.rank, send.tag, size, grant=partial(self._move, send))
        self._arrivals[send] = message
        peer._accept(message)  # noqa: SLF001

    def _move(self, send: Send) -> None:
        """Move an offered message for which a receive is posted; runs in the thread that came second."""
        message = self._arrivals.pop(send, None)
        if message is not None:
            self._peers[send.peer]._mailbox.write_bytes(message, send.data)  # noqa: SLF001
            self._finish_send(send)

    def _take_back(self, send: Send) -> bool:
        message = self._arrivals.pop(send, None)
        if message is None:
            return False
        self._peers[send.peer]._mailbox.withdraw(message)  # noqa: SLF001
        return True

    def _notify_abort(self, group_id: int, members: tuple[int, ...], error: DistributedError) -> None:
        for rank in members:
            if rank != self.rank:
                self._peers[rank].fail_group(group_id, error)

    def _notify_left(self, group_id: int, members: tuple[int, ...]) -> None:
        for rank in members:
            if rank != self.rank:
                self._peers[rank].peer_left(group_id, self.rank)
