"""The agreement of ranks on the unit to gather next, in a method such as ``generate`` that they may run differently.

[Note: rounds]
A forward gathers units in an order that is the same on all ranks, so each gather is one collective. In a method the
ranks' orders differ: their sequences end at different lengths, or one has nothing to do. So each rank asks before it
gathers. A round is one exchange of a few bytes, in which each rank tells what it wants: a unit, nothing any more (it is
done), or to end because its call failed. All ranks see the same requests and choose the same unit by the same rule, and
all gather it; those that wanted another one free it again, and ask again. A rank that is done takes part until all are:
the round in which all are done is the end of the method, which no rank leaves before.

The unit chosen is the one that the first rank wants that is not done. Where ranks call the same layers in turn, it
comes to the units that the others want within one pass through the model, and from then on they want the same. A rank
that has waited for as many rounds as there are units goes first: so ranks that want quite different units alternate.

A call that fails on one rank ends on all: the others learn it in their next round, which each of them reaches, and
raise there. The group stays usable. Each round has the group's timeout, which is that of one rank between two units,
not of the method.
"""

from __future__ import annotations

import enum
import struct
from typing import TYPE_CHECKING

from ferrodist.collectives.engines.host import share_bytes
from ferrodist.collectives.objects import all_gather_object
from ferrodist.errors import CollectiveMismatchError, RankFailedError, add_error_context, describe_error, to_utf8
from ferrodist.parallel.fsdp.unit import UnitState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from ferrodist.backends.base import Backend
    from ferrodist.parallel.fsdp.config import ShardAxes
    from ferrodist.parallel.fsdp.unit import Unit

_REQUEST = struct.Struct("<iI?Q")  # unit or status, replica, whether a backward may follow, digest of the trace
_NAME_BYTES = 96  # of a method's name that ranks compare


class _Status(enum.IntEnum):
    """The status of a rank that requests no unit."""

    DONE = -1
    FAILED = -2


class _Requests:
    """All ranks' requests and statuses in a round."""

    def __init__(self, records: Sequence[bytes]) -> None:
        fields = [_REQUEST.unpack(record) for record in records]
        self.wanted: list[int] = [wanted for wanted, _, _, _ in fields]
        self.replicas: list[int] = [replica for _, replica, _, _ in fields]
        self.backward_may_follow = any(may_follow for _, _, may_follow, _ in fields)
        self.digests: list[int] = [digest for _, _, _, digest in fields]


class MethodRounds:
    """The rounds of one call of a method, on this rank; see [Note: rounds].

    ``aborting`` is a block that aborts the groups at an error in it: after one in a collective, ranks are out of step.
    """

    def __init__(
        self, name: str, units: Sequence[Unit], axes: ShardAxes, aborting: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._name, self._units, self._aborting = name, units, aborting
        self._group: Backend = axes.world
        self._replica = 0 if axes.replicate is None else axes.replicate.rank
        self._num_rounds_waited = [0] * axes.world.world_size
        self.failure: RankFailedError | None = None  # of other ranks
        self.num_rounds = 0
        """Number of rounds so far, the same on all ranks."""

    def begin(self) -> None:
        """Check that all ranks call the same method, else raise CollectiveMismatchError on all; a collective."""
        own = to_utf8(self._name).encode()[:_NAME_BYTES]
        with self._aborting(), self._in_method("the beginning"):
            names = share_bytes(self._group, "begin_method", own, self._group.timeout)
        if any(name != names[0] for name in names):
            rank = next(rank for rank, name in enumerate(names) if name != names[0])
            first, other = (name.decode(errors="replace") for name in (names[0], names[rank]))
            raise CollectiveMismatchError(
                f"the ranks of group {self._group.name!r} called different methods of an FSDP model: rank 0 called"
                f" {first}(), rank {rank} {other}(). Every rank must call the same; a rank that has nothing to do calls"
                " join_forward_method().",
                ranks=(rank,),
            )

    def gather(self, unit: Unit) -> None:
        """Gather a unit with all ranks of its shard group, after those that are before it in the order of rounds.

        Raises:
            RankFailedError: The method failed on another rank.
        """
        if self.failure is not None:  # the program has caught it
            raise self.failure
        while True:
            requests = self._exchange(unit.index)
            self._check_failed(requests, None)
            chosen = self._choose(requests)
            assert chosen is not None, "this rank wants one"
            with self._aborting():
                _take_part(chosen, keeps=chosen is unit)
            if chosen is unit:
                return

    def finish(self, error: Exception | None, *, backward_may_follow: bool, digest: int) -> None:
        """Take part in the other ranks' gathers until all ranks are done; this rank's call is, with this error or none.

        ``digest`` is one of the forward's trace, which must be the same on all ranks if a backward may follow on any.

        Raises:
            RankFailedError: The method failed on another rank, and not on this one.
            CollectiveMismatchError: On every rank: a backward may follow, and the ranks called different units.
        """
        if self.failure is not None:
            if error is None:
                raise self.failure
            return
        status = _Status.DONE if error is None else _Status.FAILED
        while True:
            requests = self._exchange(status, backward_may_follow=backward_may_follow, digest=digest)
            if self._check_failed(requests, error):
                return
            if all(wanted == _Status.DONE for wanted in requests.wanted):
                break
            chosen = self._choose(requests)
            if chosen is not None:  # else other replicas go on
                with self._aborting():
                    _take_part(chosen, keeps=False)
        if requests.backward_may_follow and len(set(requests.digests)) > 1:
            rank = next(rank for rank, one in enumerate(requests.digests) if one != requests.digests[0])
            raise CollectiveMismatchError(
                f"{self._name}() of an FSDP model gave a result that requires grad, but ranks 0 and {rank} of group"
                f" {self._group.name!r} called different units, or other numbers of times, and the backward needs the"
                " same on all: call it under torch.no_grad(), or make the ranks' calls alike",
                ranks=(rank,),
            )

    def _exchange(self, wanted: int, *, backward_may_follow: bool = False, digest: int = 0) -> _Requests:
        """One round."""
        record = _REQUEST.pack(wanted, self._replica, backward_may_follow, digest)
        with self._aborting(), self._in_method(f"round {self.num_rounds}"):
            records = share_bytes(self._group, "next_unit", record, self._group.timeout)
        self.num_rounds += 1
        return _Requests(records)

    def _choose(self, requests: _Requests) -> Unit | None:
        """The unit that this replica gathers in a round; None if its ranks are done."""
        waiting = [
            rank
            for rank, (wanted, replica) in enumerate(zip(requests.wanted, requests.replicas, strict=True))
            if wanted >= 0 and replica == self._replica
        ]
        if not waiting:
            return None
        longest = max(waiting, key=lambda rank: self._num_rounds_waited[rank])  # the first of several
        first = longest if self._num_rounds_waited[longest] >= len(self._units) else waiting[0]
        chosen = requests.wanted[first]
        for rank in waiting:
            self._num_rounds_waited[rank] = 0 if requests.wanted[rank] == chosen else self._num_rounds_waited[rank] + 1
        return self._units[chosen]

    def _check_failed(self, requests: _Requests, error: Exception | None) -> bool:
        """Return whether this rank's call failed; raise RankFailedError if only others' did. All ranks call this."""
        if _Status.FAILED not in requests.wanted:
            return False
        text = None if error is None else to_utf8(describe_error(error))
        with self._aborting(), self._in_method("the end after a failure"):
            texts = all_gather_object(text, group=self._group)
        failed = tuple(rank for rank, text in enumerate(texts) if text is not None)
        self.failure = RankFailedError(
            f"{self._name}() of an FSDP model failed on rank {failed[0]} of group {self._group.name!r}, and ends on all"
            f" ranks: {texts[failed[0]]}. Every rank must call it anew; the shards are intact.",
            ranks=failed,
        )
        if error is None:
            raise self.failure
        return True

    def _in_method(self, where: str) -> AbstractContextManager[None]:
        return add_error_context(
            lambda: f"Rank {self._group.rank} was in {self._name}() of an FSDP model ({where}).",
            "Every rank must call the method, or join_forward_method() if it has nothing to do.",
        )


def _take_part(unit: Unit, *, keeps: bool) -> None:
    """Gather a unit with the other ranks, and free it again unless this rank has use for it."""
    if unit.state is UnitState.GATHERED:  # this rank is inside of its call, and another one begins one
        unit.free()
        keeps = True
    unit.finish_gather()
    if not keeps:
        unit.free()
