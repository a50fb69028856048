"""What other ranks tell of references, as who is told takes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ferrodist.rpc.counting import CONFIRM, LOST, MET, REGISTER, RELEASE, SETTLE, UNREGISTER
from ferrodist.rpc.references import ReferenceId
from ferrodist.rpc.registrations import Registration

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.rpc.messages import Call
    from ferrodist.rpc.reference_tables import Tables
    from ferrodist.rpc.registrations import Passage

__all__ = ["CountCalls"]

_NUM_IN_PASSAGE = 2


class CountCalls:
    """Serves the calls that `Counting` makes, in the thread that receives them.

    Args:
        tables: Of this rank.
        rank: It.
        world_size: How many ranks there are.
    """

    def __init__(self, tables: Tables, rank: int, world_size: int) -> None:
        self._tables = tables
        self._rank = rank
        self._world_size = world_size

    def serve(self, peer: int, call: Call, answer: Callable[[Any], None]) -> bool:
        """Serve a call of another rank's, if it is one of these.

        Raises:
            RpcError: An object is not here any more.
            ValueError: No agent makes such a call.
        """
        match call.name, call.arguments:
            case str(name), (ticket, int(user), int(incarnation), list(items)) if name == REGISTER:
                self._check_other(user, peer)
                counts = self._counts(items)
                self._tables.register(Registration((peer, _whole(ticket)), user, incarnation, counts, answer))
                return True
            case str(name), (ticket,) if name == UNREGISTER:
                self._tables.unregister((peer, _whole(ticket)))
            case str(name), (list(arrived), list(settled)) if name == CONFIRM:
                came = [self._came(item) for item in arrived]
                self._tables.confirm(peer, came, [self._passage(item) for item in settled])
            case str(name), (list(items),) if name == RELEASE:
                self._tables.release(peer, self._counts(items))
            case str(name), (int(registrar), list(tickets)) if name == SETTLE:
                self._check_other(registrar, peer)
                self._tables.refuse(peer, registrar, [_whole(ticket) for ticket in tickets])
            case str(name), (int(user), ticket) if name == LOST:
                self._check_other(user, peer)
                self._tables.settle(peer, user, _whole(ticket))
            case str(name), () if name == MET:
                self._tables.met(peer)
            case str(name), _:
                if name in _NAMES:
                    raise ValueError("it says nothing of references")
                return False
        answer(None)  # to whoever asks for one
        return True

    def _check_other(self, rank: int, peer: int) -> None:
        """See that a rank is neither the one that says something of it, nor this one."""
        if not (0 <= rank < self._world_size) or rank in (peer, self._rank):
            raise ValueError("it says nothing of a third rank")

    def _counts(self, items: list[Any]) -> dict[ReferenceId, int]:
        counts: dict[ReferenceId, int] = {}
        for item in items:
            if not (isinstance(item, tuple) and item and type(item[-1]) is int and item[-1] > 0):
                raise ValueError("it is no number of references")
            counts[ReferenceId.of(item[:-1], self._world_size)] = item[-1]
        return counts

    def _came(self, item: Any) -> tuple[Passage, ReferenceId]:
        if isinstance(item, tuple):
            return self._passage(item[:_NUM_IN_PASSAGE]), ReferenceId.of(item[_NUM_IN_PASSAGE:], self._world_size)
        raise ValueError("it names nothing that came")

    def _passage(self, item: Any) -> Passage:
        if isinstance(item, tuple) and len(item) == _NUM_IN_PASSAGE:
            return _whole(item[0]), _whole(item[1])
        raise ValueError("it names no message")


_NAMES = frozenset({CONFIRM, LOST, MET, REGISTER, RELEASE, SETTLE, UNREGISTER})


def _whole(value: Any) -> int:
    if type(value) is int:
        return value
    raise ValueError(f"{value!r} is no number")
