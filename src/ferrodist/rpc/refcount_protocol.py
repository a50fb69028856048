"""The internal calls by which ranks keep reference counts: `RefCountClient` makes them, `RefCountServer` serves them.

`RRefTransfer` counts the references in one message at their owners before the message is sent.

[Note: references from third ranks]
Rank S sends rank R a reference to an object of rank O. Each message with such references is a transfer, and carries a
number of S's, its *transfer id*. A process of a rank is named by its incarnation. A connection that breaks counts as
the death of each for the other.

    S -> O   REGISTER     these references are about to go to that process of R, with this transfer id; O answers
    S -> R   the message; its transfer id is in it
    R -> O   CONFIRM      these have arrived
    R -> O   RELEASE      R has no reference to it any more, of so many that arrived

    and when something fails:

    S -> O   UNREGISTER   the message was not sent
    S -> O   LOST         S has lost its connection to R
    O -> R   SETTLE       confirm what has arrived of that transfer, and accept no more of it
    R -> O   MET          R has O's connection; O may answer what S registered for this process of R

Registered references are a `PendingTransfer` at O, which keeps their objects alive until one of these cases confirms or
drops it; each message names the transfer id, so that it affects no other transfer:

- R confirms: its counts at O grow by as much. Notices come in order, so a RELEASE finds what was confirmed before.
- S has not sent it: the rank, or the call, was gone when O answered. S says so: UNREGISTER.
- R dies: O loses it, and with it all that was registered for that process. What is registered for a process that has
  been lost or replaced is refused; S then raises, and sends nothing. For one that O has not met yet the answer waits:
  O gives it when R says MET, as both know then of the connection that the counts belong to.
- S dies before O has answered: nothing was sent, O forgets it.
- S dies after that: only R can tell whether the message arrived. O asks: SETTLE. From then on R refuses what arrives
  with the transfer id, and its next CONFIRM says so, behind references that arrived before. O forgets the rest. So
  R has a reference that is counted, or a message that it does not accept, whose sender is gone.
- S and R lose each other, and both live: S says so to the owners where it has registered R: LOST, and O asks R.
  Transfer ids grow, so that what S registers for the next connection is not meant.
- O dies: S can't register, or R has a reference to nothing; the next process of O knows no such object.

All that R gives back was counted in the connection by which it goes: the sender of counts first looks the connection up
and then the counts, of which those of earlier connections are void. So nothing is taken off the counts of another
process, nor of another connection.
"""

from __future__ import annotations

import copy
import functools
import itertools
import secrets
import threading
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from typing_extensions import override

from ferrodist.errors import DistributedError, DistributedTimeoutError, PeerLostError, RpcError
from ferrodist.rpc.future import Future, OneShot
from ferrodist.rpc.messages import MET, OWN_NAMES, Call, ReferenceTransfer
from ferrodist.rpc.peer_manager import PeerListener
from ferrodist.rpc.refcount_tables import PendingTransfer, RRefTable, TransferKey
from ferrodist.rpc.rref import OwnedObject, ReferenceId, RRef, RRefOperations, UserRRef

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ferrodist.deadline import Deadline
    from ferrodist.rpc.client import RpcClient
    from ferrodist.rpc.executor import SerialExecutor
    from ferrodist.rpc.peer import IncomingCall
    from ferrodist.rpc.server import RpcServer

REGISTER = f"{OWN_NAMES}register"
"""(transfer id, rank, incarnation, objects): references are about to be sent there. The response: whether they may."""

UNREGISTER = f"{OWN_NAMES}unregister"
"""(transfer id): they were not sent. A notice, like the following ones."""

CONFIRM = f"{OWN_NAMES}confirm"
"""((rank, transfer id, object)s, (rank, transfer id)s): these have arrived; of those messages no more will."""

RELEASE = f"{OWN_NAMES}release"
"""(objects): the caller has fewer references."""

SETTLE = f"{OWN_NAMES}settle"
"""(rank, transfer ids): confirm what has arrived of a rank's messages, and accept no more of them."""

LOST = f"{OWN_NAMES}lost"
"""(rank, transfer id): the caller has lost a rank; what it has sent there, up to this transfer id, may not arrive."""

_TRANSFER_ID_BITS = 62
_MAX_PER_MESSAGE = 32  # which keeps messages small, whatever the limit


class RefCountClient(PeerListener):
    """An agent's reference counts, and the calls that keep those of other ranks up to date."""

    client: RpcClient  # set by `RRefManager`, which is made before it

    def __init__(self, manager: RRefOperations, tasks: SerialExecutor) -> None:
        self.tasks = tasks
        self.table = RRefTable(manager, tasks, self)
        # One for each message with references that owners have to know of; no other agent of this rank has the same.
        self.transfer_ids = itertools.count(secrets.randbits(_TRANSFER_ID_BITS))
        self._owners: dict[int, set[int]] = {}  # by rank: owners of references registered for it
        self._lock = threading.Lock()

    def register(
        self, owner: int, peer: int, transfer_id: int, counts: Mapping[ReferenceId, int], deadline: Deadline
    ) -> Future:
        """Register references at their owner before they are sent to a rank; the result is whether they may be."""
        with self._lock:
            self._owners.setdefault(peer, set()).add(owner)
        items = [(*id_, count) for id_, count in counts.items()]
        arguments = (transfer_id, peer, self.table.incarnation(peer), items)
        return self.client.call_internal(owner, Call(REGISTER, arguments, {}), deadline.remaining())

    def unregister(self, owner: int, transfer_id: int) -> None:
        """Tell an owner that references were not sent; one that can't be told has lost this rank."""
        self._notify(owner, UNREGISTER, lambda: (transfer_id,))

    @override
    def on_joined(self, rank: int, incarnation: int) -> None:
        self.table.joined(rank, incarnation)

    @override
    def on_lost(self, rank: int, error: PeerLostError) -> None:
        with self._lock:
            owners = self._owners.pop(rank, set())
        arguments = (rank, next(self.transfer_ids))
        for owner in owners - {rank}:
            self.tasks.submit(functools.partial(self._notify, owner, LOST, lambda: arguments))
        self.table.lost(rank)

    # See `RefCountSender`.

    def send_release(self, user_rref: UserRRef) -> None:
        """Give back references to an object, once its owner is sure to know of it."""
        creation = user_rref.creation
        if creation is not None and not creation.done():
            creation.add_done_callback(lambda _: self.tasks.submit(functools.partial(self.send_release, user_rref)))
            return

        def make_arguments() -> tuple[Any, ...] | None:
            count = self.table.give_back(user_rref)
            return ([(*user_rref.id, count)],) if count else None

        owner = user_rref.id.owner
        self.send_confirmations(owner)  # references must be confirmed before: an older task may have led here
        self._notify(owner, RELEASE, make_arguments)

    def send_confirmations(self, owner: int) -> None:
        """Confirm all references that have arrived, and messages that are settled."""
        is_more = True

        def make_arguments() -> tuple[Any, ...] | None:
            nonlocal is_more
            arrived, settled = self.table.take_confirmations(owner, _MAX_PER_MESSAGE)
            is_more = bool(arrived or settled)
            return ([(*key, *id_) for key, id_ in arrived], settled) if is_more else None

        while is_more and self._notify(owner, CONFIRM, make_arguments):
            pass

    def send_settle(self, user: int) -> None:
        """Ask a rank what has arrived."""
        for sender, transfer_ids in self.table.unsettled(user).items():
            for start in range(0, len(transfer_ids), _MAX_PER_MESSAGE):
                arguments = (sender, transfer_ids[start : start + _MAX_PER_MESSAGE])
                self._notify(user, SETTLE, functools.partial(tuple, arguments))

    def _notify(self, rank: int, name: str, make_arguments: Callable[[], tuple[Any, ...] | None]) -> bool:
        """Send a notice; False if the rank is not connected: it has lost this one, and what was counted is void."""
        try:
            self.client.notify(rank, name, make_arguments)
        except DistributedError:
            return False
        return True


_Counted = tuple[int, int, int, int, Annotated[int, msgspec.Meta(gt=0)]]
"""An object's id, and a number of references."""

_ARGUMENTS: dict[str, Any] = {  # the types of each message's arguments, for msgspec
    REGISTER: tuple[int, int, int, list[_Counted]],
    UNREGISTER: tuple[int],
    CONFIRM: tuple[list[tuple[int, int, int, int, int, int]], list[TransferKey]],
    RELEASE: tuple[list[_Counted]],
    SETTLE: tuple[int, list[int]],
    LOST: tuple[int, int],
    MET: tuple[()],
}


class RefCountServer:
    """Serves the calls that `RefCountClient` makes."""

    def __init__(self, table: RRefTable, rank: int, world_size: int, server: RpcServer) -> None:
        self._table = table
        self._rank = rank
        self._world_size = world_size
        self._server = server
        for name in _ARGUMENTS:
            server.register_internal(name, self._serve)

    def _serve(self, incoming: IncomingCall, call: Call) -> None:
        """Serve a call; raises RpcError if an object is not here, and ValueError if no agent makes such a call."""
        peer = incoming.peer.rank
        name, arguments = call.name, msgspec.convert(call.arguments, _ARGUMENTS[call.name])
        if name == REGISTER:
            transfer_id, user, incarnation, items = arguments
            self._check_third_rank(user, peer)
            respond = functools.partial(self._server.respond, incoming)
            self._table.register(PendingTransfer((peer, transfer_id), user, incarnation, self._counts(items), respond))
            return
        if name == UNREGISTER:
            self._table.unregister((peer, *arguments))
        elif name == CONFIRM:
            arrived, settled = arguments
            received = [((sender, transfer_id), self._parse(*id_)) for sender, transfer_id, *id_ in arrived]
            self._table.confirm(peer, received, settled)
        elif name == RELEASE:
            self._table.release(peer, self._counts(*arguments))
        elif name == SETTLE:
            sender, transfer_ids = arguments
            self._check_third_rank(sender, peer)
            self._table.refuse_transfers(peer, sender, transfer_ids)
        elif name == LOST:
            user, transfer_id = arguments
            self._check_third_rank(user, peer)
            self._table.settle(peer, user, transfer_id)
        else:
            self._table.met(peer)
        self._server.respond(incoming, None)

    def _check_third_rank(self, rank: int, peer: int) -> None:
        if not (0 <= rank < self._world_size) or rank in (peer, self._rank):
            raise ValueError(f"rank {rank} is not a third rank: do all ranks run the same version of ferrodist?")

    def _parse(self, *plain: int) -> ReferenceId:
        return ReferenceId.parse(plain, self._world_size)

    def _counts(self, items: list[_Counted]) -> dict[ReferenceId, int]:
        return {self._parse(*id_): count for *id_, count in items}


class RRefTransfer(ReferenceTransfer):
    """The references in one message.

    The receiver is counted at their owners before the message goes (see [Note: reference counts] and [Note: references
    from third ranks]). Where that takes a message to an owner, this one is sent when the response is there, and no
    thread waits for that: calls may be made in threads that receive responses.
    """

    def __init__(
        self,
        refcounts: RefCountClient,
        peer: int,
        references: list[RRef],
        transfer_id: int,
        *,
        is_loopback: bool,
    ) -> None:
        self._refcounts = refcounts
        self._is_loopback = is_loopback
        self._peer = peer
        self._transfer_id = transfer_id  # used if an owner is a third rank
        self._references = references
        self._has_ended = False
        self._own: Counter[ReferenceId] = Counter()
        self._by_third_owner: dict[int, Counter[ReferenceId]] = {}
        for reference in references:
            id_ = reference._record.id
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
            # A copy: where it is raised, its frames hold the references whose creation holds the original.
            end(_given_up_error() if error is None else _copy_error(error))
            return
        calls: dict[int, Future] = {}
        try:
            for owner, counts in self._by_third_owner.items():
                calls[owner] = self._refcounts.register(owner, self._peer, self._transfer_id, counts, deadline)
        except ValueError as too_large:  # REGISTER, for the limit of messages
            self._unregister()
            end(too_large)
            return
        # The thread that receives responses must not be held up by what may be a large message.
        _after_all(
            [call.add_done_callback for call in calls.values()],
            lambda: self._refcounts.tasks.submit(lambda: self._finish(calls, transmit, end)),
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
                f" that rank {self._peer} was started again: send them when the two are connected",
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
            self._refcounts.unregister(owner, self._transfer_id)


def _unsent_creation(reference: RRef) -> OneShot[BaseException | None] | None:
    """The sending of the call that makes an object, where the owner may not know of the object yet."""
    record = reference._record
    if isinstance(record, OwnedObject) or record.creation is None:
        return None
    sent = record.creation._sent
    return None if sent is None or sent.peek() == [None] else sent


def _copy_error(error: BaseException) -> BaseException:
    """The same error without a traceback."""
    return error.fresh() if isinstance(error, DistributedError) else copy.copy(error)


def _given_up_error() -> RpcError:
    return RpcError(
        "the call had ended, by its timeout or cancelled, while the references in its arguments were being registered"
        " at their owners, so it was never sent: pass a larger timeout"
    )


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
