"""`RRefTransfer`: the references in one message, which are counted at their owners before it is sent."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING

from typing_extensions import override

from ferrodist.errors import DistributedTimeoutError, PeerLostError, RpcError
from ferrodist.rpc.future import Future, OneShot
from ferrodist.rpc.messages import ReferenceTransfer
from ferrodist.rpc.rref_records import OwnedObject, record_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.deadline import Deadline
    from ferrodist.rpc.executor import SerialExecutor
    from ferrodist.rpc.refcount_protocol import RefCountClient
    from ferrodist.rpc.rref import ReferenceId, RRef


class RRefTransfer(ReferenceTransfer):
    """The references in one message.

    The receiver is counted at their owners before the message goes (see [Note: reference counts] and [Note: references
    from third ranks]). Where that takes a message to an owner, this one is sent when the response is there, and no
    thread waits for that: calls may be made in threads that receive responses.
    """

    def __init__(
        self,
        refcounts: RefCountClient,
        tasks: SerialExecutor,
        peer: int,
        references: list[RRef],
        fork_id: int | None,
        *,
        is_loopback: bool,
    ) -> None:
        self._refcounts = refcounts
        self._tasks = tasks
        self._is_loopback = is_loopback
        self._peer = peer
        self._fork_id = fork_id
        self._references = references
        self._has_ended = False
        self._own: Counter[ReferenceId] = Counter()
        self._by_third_owner: dict[int, Counter[ReferenceId]] = {}
        for reference in references:
            id_ = record_of(reference).id
            if reference.is_owner:
                self._own[id_] += 1
            elif id_.owner != peer:
                self._by_third_owner.setdefault(id_.owner, Counter())[id_] += 1

    @override
    def send(
        self, transmit: Callable[[], None], on_error: Callable[[BaseException], None], deadline: Deadline
    ) -> OneShot[BaseException | None] | None:
        if self._is_loopback:  # the receiver has the references
            transmit()
            return None
        unsent = [each for each in map(_unsent_creation, self._references) if each is not None]
        if not (unsent or self._by_third_owner):
            self._transmit(transmit)
            return None
        sent: OneShot[BaseException | None] = OneShot()

        def end(error: BaseException | None) -> None:
            if error is not None:
                on_error(error)
            sent.set(error)

        # An owner must know of an object that it makes before it receives references to it.
        _after_all([each.add_callback for each in unsent], lambda: self._register(unsent, transmit, end, deadline))
        return sent

    @override
    def forget(self, _: object = None) -> None:
        self._has_ended = True
        self._references.clear()

    def _register(
        self,
        unsent: Sequence[OneShot[BaseException | None]],
        transmit: Callable[[], None],
        end: Callable[[BaseException | None], None],
        deadline: Deadline,
    ) -> None:
        error = next((error for each in unsent for error in each.peek() if error is not None), None)
        if error is not None or self._has_ended:
            end(error or _given_up_error())
            return
        calls: dict[int, Future] = {}
        try:
            for owner, counts in self._by_third_owner.items():
                assert self._fork_id is not None
                calls[owner] = self._refcounts.register(owner, self._peer, self._fork_id, counts, deadline)
        except ValueError as too_large:  # REGISTER, for the limit of messages
            self._unregister()
            end(too_large)
            return
        # The thread that receives responses must not be held up by what may be a large message.
        _after_all(
            [call.add_done_callback for call in calls.values()],
            lambda: self._tasks.submit(lambda: self._finish(calls, transmit, end)),
        )

    def _finish(
        self, calls: dict[int, Future], transmit: Callable[[], None], end: Callable[[BaseException | None], None]
    ) -> None:
        errors = {owner: error for owner, call in calls.items() if (error := self._error_of(owner, call)) is not None}
        for owner, error in errors.items():
            if not isinstance(error, DistributedTimeoutError):  # then it is unknown whether they are registered
                del self._by_third_owner[owner]
        error = next(iter(errors.values()), _given_up_error() if self._has_ended else None)
        try:
            if error is None:
                self._transmit(transmit)
            else:
                self._unregister()
        except Exception as raised:  # noqa: BLE001 - it is the caller's
            error = raised
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
        table = self._refcounts.table
        try:
            connection = table.count(self._peer, self._own)
        except BaseException:
            self._unregister()
            raise
        try:
            transmit()
        except BaseException:
            table.uncount(self._peer, self._own, connection)
            self._unregister()
            raise

    def _unregister(self) -> None:
        for owner in self._by_third_owner:
            assert self._fork_id is not None
            self._refcounts.unregister(owner, self._fork_id)


def _unsent_creation(reference: RRef) -> OneShot[BaseException | None] | None:
    """The sending of the call that makes an object, where the owner may not know of the object yet."""
    record = record_of(reference)
    if isinstance(record, OwnedObject) or record.creation is None:
        return None
    sent = record.creation._sent
    return None if sent is None or sent.peek() == [None] else sent


def _given_up_error() -> RpcError:
    return RpcError("the call had ended before it could be sent: references in it were to be registered first")


def _after_all(events: Sequence[Callable[[Callable[[object], None]], object]], then: Callable[[], None]) -> None:
    """Call a function once, after all events have fired: now, or in the thread of the last one."""
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
    for add_callback in events:
        add_callback(one_more)
