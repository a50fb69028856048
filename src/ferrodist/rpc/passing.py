"""References that are sent: what must be before the message goes, and after it could not go."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, Protocol

from ferrodist.errors import DistributedTimeoutError, PeerLostError, RpcError
from ferrodist.rpc.outcome import Outcome
from ferrodist.rpc.reference_parts import part_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.deadline import Deadline
    from ferrodist.rpc.counting import Counting
    from ferrodist.rpc.errands import Errands
    from ferrodist.rpc.futures import Future
    from ferrodist.rpc.references import ReferenceId, RRef

__all__ = ["Passing", "Sender"]


class Sender(Protocol):
    """What is needed of who sends references."""

    rank: int
    counting: Counting
    errands: Errands

    def unsent(self, reference: RRef) -> Outcome[BaseException | None] | None:
        """What is done when the owner is sure to hear of the object before it hears of what is sent from now on."""


class Passing:
    """The references in one message.

    The receiver is counted at their owners before the message goes (see `[Note: counts of references]`, and
    `[Note: references that third ranks send]`). Where that takes a message to an owner, this one goes when the answer
    is there, and nobody waits for that: calls may be made in threads that bring answers.

    Args:
        objects: Of the agent that sends.
        peer: The rank that it goes to.
        references: They, each as often as it is there.
        ticket: Of the message, where there are some whose owners are neither of the two.
    """

    def __init__(self, objects: Sender, peer: int, references: list[RRef], ticket: int | None) -> None:
        self._objects = objects
        self._peer = peer
        self._ticket = ticket
        self._references = references
        self._has_ended = False
        self._own: Counter[ReferenceId] = Counter()
        self._foreign: dict[int, Counter[ReferenceId]] = {}
        for reference in references:
            id_ = part_of(reference).id
            if reference.is_owner:
                self._own[id_] += 1
            elif id_.owner != peer:
                self._foreign.setdefault(id_.owner, Counter())[id_] += 1

    def send(
        self, transmit: Callable[[], None], failed: Callable[[BaseException], None], deadline: Deadline
    ) -> Outcome[BaseException | None] | None:
        """Send the message, now or soon.

        Args:
            transmit: Does that.
            failed: Called where it could not be sent soon.
            deadline: Until when owners may take to answer.

        Returns:
            None if it has been sent; otherwise what will be why it could not be, or None.

        Raises:
            Exception: It could not be sent now.
        """
        if self._peer == self._objects.rank:  # who receives has them
            transmit()
            return None
        unsent = [each for each in map(self._objects.unsent, self._references) if each is not None]
        if not (unsent or self._foreign):
            self._transmit(transmit)
            return None
        sent: Outcome[BaseException | None] = Outcome()

        def end(error: BaseException | None) -> None:
            if error is not None:
                failed(error)
            sent.set(error)

        # An owner must hear of an object that it makes before it hears of references to it.
        _after([each.when_set for each in unsent], lambda: self._register(unsent, transmit, end, deadline))
        return sent

    def forget(self, _: object = None) -> None:
        """Keep the references no more: the call has ended, whether it was sent or not."""
        self._has_ended = True
        self._references.clear()

    def _register(
        self,
        unsent: Sequence[Outcome[BaseException | None]],
        transmit: Callable[[], None],
        end: Callable[[BaseException | None], None],
        deadline: Deadline,
    ) -> None:
        error = next((error for each in unsent for error in each.look() if error is not None), None)
        if error is not None or self._has_ended:
            end(error or _given_up())
            return
        calls: dict[int, Future] = {}
        try:
            for owner, counts in self._foreign.items():
                assert self._ticket is not None
                calls[owner] = self._objects.counting.register(owner, self._peer, self._ticket, counts, deadline)
        except ValueError as too_large:  # to be told of, for the limit of messages
            self._give_back()
            end(too_large)
            return
        # The answers' thread is not to be held up by what may be a large message.
        _after(
            [call.add_done_callback for call in calls.values()],
            lambda: self._objects.errands.put(lambda: self._finish(calls, transmit, end)),
        )

    def _finish(
        self,
        calls: dict[int, Future],
        transmit: Callable[[], None],
        end: Callable[[BaseException | None], None],
    ) -> None:
        errors = {owner: error for owner, call in calls.items() if (error := self._error_of(owner, call)) is not None}
        for owner, error in errors.items():
            if not isinstance(error, DistributedTimeoutError):  # of those one doesn't know
                del self._foreign[owner]
        error = next(iter(errors.values()), _given_up() if self._has_ended else None)
        try:
            if error is None:
                self._transmit(transmit)
            else:
                self._give_back()
        except Exception as found:  # noqa: BLE001 - it is the caller's
            error = found
        end(error)

    def _error_of(self, owner: int, call: Future) -> BaseException | None:
        error = call.exception()
        if error is None and call.result() is not True:
            return PeerLostError(
                f"rank {self._peer} can't be sent references to objects of rank {owner}, which has lost it, or knows"
                " that it was started again",
                ranks=(self._peer,),
            )
        return error

    def _transmit(self, transmit: Callable[[], None]) -> None:
        tables = self._objects.counting.tables
        try:
            connection = tables.count(self._peer, self._own)
        except BaseException:
            self._give_back()
            raise
        try:
            transmit()
        except BaseException:
            tables.uncount(self._peer, self._own, connection)
            self._give_back()
            raise

    def _give_back(self) -> None:
        for owner in self._foreign:
            assert self._ticket is not None
            self._objects.counting.unregister(owner, self._ticket)


def _given_up() -> RpcError:
    return RpcError("the call had ended before it could be sent: references in it were to be registered first")


def _after(events: Sequence[Callable[[Callable[[object], None]], object]], then: Callable[[], None]) -> None:
    """Call something when all have been: now, or in the thread that sees the last one.

    Args:
        events: Each is given what is to be called then.
        then: The something.
    """
    lock, left = threading.Lock(), len(events)

    def one_more(_: object) -> None:
        nonlocal left
        with lock:
            left -= 1
            is_last = not left
        if is_last:
            then()

    if not events:
        then()
    for when in events:
        when(one_more)
