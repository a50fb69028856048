"""An agent's part of remote objects: it makes them elsewhere, and passes references to them on.

Calls of these names are the agents' own; `ObjectCalls` serves them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import secrets
import threading
from typing import TYPE_CHECKING, Any, Protocol

from ferrodist.collectives.nested_values import Extension
from ferrodist.deadline import Deadline, check_timeout
from ferrodist.errors import DistributedError, DistributedTimeoutError
from ferrodist.rpc.errands import Errands
from ferrodist.rpc.messages import EXTENSIONS, OWN_NAMES, PICKLED, REFERENCE_MARK, Call, Failure, error_of
from ferrodist.rpc.passing import Passing
from ferrodist.rpc.reference_tables import Held, Kept, Tables, kept_of, part_of
from ferrodist.rpc.references import ReferenceId, RRef

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from ferrodist.rpc.futures import Future
    from ferrodist.rpc.messages import Content
    from ferrodist.rpc.outcome import Outcome

__all__ = ["CREATE", "FETCH", "METHOD", "REGISTER", "RELEASE", "RemoteObjects", "Requester"]

CREATE = f"{OWN_NAMES}create"
"""(id, function, arguments, keywords): have a function make an object."""

FETCH = f"{OWN_NAMES}to_here"
"""(object): give a copy."""

METHOD = f"{OWN_NAMES}RRef."
"""Followed by the method's name. (id, object, arguments, keywords): call it; with an id, its result is an object."""

REGISTER = f"{OWN_NAMES}register"
"""(rank, objects): references are about to be sent to a rank."""

RELEASE = f"{OWN_NAMES}release"
"""(rank, objects): a rank has fewer references. It has no answer."""

_TOKEN_BITS = 63


class Requester(Protocol):
    """What an agent does for its remote objects."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def world_size(self) -> int:
        """How many ranks there are."""

    @property
    def timeout(self) -> float:
        """Seconds a call may take that names no timeout itself."""

    def call_async(self, to: int, call: Call, seconds: float) -> Future:
        """Call a function."""

    def start(self, to: int, call: Call, seconds: float) -> Future:
        """Call one of the agents' own, however many calls have no result."""

    def send_unanswered(self, to: int, call: Call) -> None:
        """Call one that does not answer."""

    def resting(self) -> AbstractContextManager[None]:
        """Within it a thread waits for what calls bring."""


class RemoteObjects:
    """Makes remote objects, and knows what references there are here.

    Args:
        caller: The agent.
        allow_pickle: Whether anything else may be in messages, too.

    Attributes:
        rank: This rank.
        world_size: How many ranks there are.
        tables: What references there are.
        errands: Sends what comes when they end.
        extensions: For each rank, what may be in messages from it, and to it.
        marks: Of these.
    """

    def __init__(self, caller: Requester, *, allow_pickle: bool) -> None:
        self._caller = caller
        self.rank = caller.rank
        self.world_size = caller.world_size
        self.errands = Errands(f"ferrodist-rpc-{self.rank}-references")
        self.tables = Tables(self, self.errands, self._release_held)
        last = (PICKLED,) if allow_pickle else ()
        self.extensions = {peer: (*EXTENSIONS, self.extension_for(peer), *last) for peer in range(self.world_size)}
        self.marks = tuple(extension.mark for extension in self.extensions[self.rank])
        self._incarnation = secrets.randbits(_TOKEN_BITS)
        self._numbers = itertools.count()
        self._packing = threading.local()

    def extension_for(self, peer: int) -> Extension:
        """How references travel to a rank, within `pack`, and from it."""
        return Extension(
            mark=REFERENCE_MARK,
            take_apart=self._take_apart,
            put_together=functools.partial(self._put_together, peer),
        )

    def pack(
        self, peer: int, write: Callable[[Any, Sequence[Extension]], Content], value: Any
    ) -> tuple[Content, Passing | None]:
        """Write something to a rank down; references in it are for what is returned beside it to send.

        Args:
            peer: The rank.
            write: `pack_call` or `pack_result`.
            value: What it takes.

        Raises:
            TypeError: Something in it can't travel; it is named.
        """
        packing = self._packing
        packing.references = None
        try:
            content = write(value, self.extensions[peer])
            return content, None if packing.references is None else Passing(self, peer, packing.references)
        finally:
            packing.references = None

    def create(self, to: int, name: str, rest: tuple[Any, ...], timeout: float | None) -> RRef:
        """Have an object made.

        Args:
            to: Its owner.
            name: Of the call that makes it.
            rest: The call's arguments after the object's id.
            timeout: Of the call.
        """
        id_ = ReferenceId(to, self.rank, self._incarnation, next(self._numbers))
        if to != self.rank:
            return self.tables.hold(id_, self._call(to, name, (tuple(id_), *rest), timeout))
        _, handle = self.tables.keep(id_)
        assert handle is not None
        self._call(to, name, (tuple(id_), *rest), timeout)
        return handle

    def keep(self, value: Any) -> RRef:
        """Have an object of this rank."""
        kept, handle = self.tables.keep(ReferenceId(self.rank, self.rank, self._incarnation, next(self._numbers)))
        assert handle is not None
        kept.outcome.set(value)
        return handle

    def local_value(self, reference: RRef, timeout: float | None) -> Any:
        """See `RRef.local_value`."""
        kept = kept_of(reference)
        seconds = self._caller.timeout if timeout is None else check_timeout(timeout)
        with self._caller.resting():
            found = kept.outcome.wait(Deadline(seconds).remaining())
        if not found:
            raise DistributedTimeoutError(
                f"the object is not made yet, after {seconds:g} s: pass a longer timeout", ranks=(self.rank,)
            )
        if isinstance(found[0], Failure):
            raise error_of("local_value", self.rank, found[0])
        return found[0]

    def fetch(self, reference: RRef, timeout: float | None) -> Future:
        """See `RRef.to_here`."""
        return self._call(reference.owner, FETCH, (reference,), timeout)

    def call_method(
        self, reference: RRef, name: str, arguments: tuple[Any, ...], keywords: dict[str, Any], *, timeout: float | None
    ) -> Future:
        """See `RRef.rpc_async`."""
        call = (None, reference, arguments, keywords)
        return self._call(reference.owner, f"{METHOD}{name}", call, timeout)

    def create_by_method(
        self, reference: RRef, name: str, arguments: tuple[Any, ...], keywords: dict[str, Any], *, timeout: float | None
    ) -> RRef:
        """See `RRef.remote`."""
        return self.create(reference.owner, f"{METHOD}{name}", (reference, arguments, keywords), timeout)

    def joined(self, peer: int) -> None:
        """A rank may have references again."""
        self.tables.joined(peer)

    def lost(self, peer: int) -> None:
        """A rank has no references any more."""
        self.tables.lost(peer)

    def close(self) -> None:
        """Forget everything."""
        self.errands.close()
        self.tables.clear()

    def _call(self, to: int, name: str, arguments: tuple[Any, ...], timeout: float | None) -> Future:
        seconds = self._caller.timeout if timeout is None else check_timeout(timeout)
        return self._caller.call_async(to, Call(name, arguments, {}), seconds)

    # What `Passing` needs.

    def unsent(self, reference: RRef) -> Outcome[BaseException | None] | None:
        """What is done when the owner is sure to hear of the object before it hears of what is sent from now on."""
        part = part_of(reference)
        if isinstance(part, Kept) or part.creation is None:
            return None
        sent = part.creation.sent
        return None if sent is None or sent.look() == [None] else sent

    def register(self, owner: int, peer: int, counts: Mapping[ReferenceId, int], deadline: Deadline) -> Future:
        """Tell an owner that references are about to be sent to a rank."""
        return self._caller.start(owner, Call(REGISTER, (peer, _plain(counts)), {}), deadline.remaining())

    def release(self, owner: int, user: int, counts: Mapping[ReferenceId, int]) -> None:
        """Tell an owner that a rank has fewer references; one that can't be told has lost this rank."""
        with contextlib.suppress(DistributedError):
            self._caller.send_unanswered(owner, Call(RELEASE, (user, _plain(counts)), {}))

    def _release_held(self, held: Held) -> None:
        creation = held.creation
        if creation is not None and not creation.done():  # the owner may not have heard of it yet
            creation.add_done_callback(lambda _: self.errands.put(functools.partial(self._release_held, held)))
            return
        self.release(held.id.owner, self.rank, {held.id: held.count})

    def _take_apart(self, value: Any) -> tuple[int, ...] | None:
        if not isinstance(value, RRef):
            return None
        if value._objects is not self:  # noqa: SLF001 - users have no use for it
            raise TypeError(f"{value!r} is of another agent: a reference is passed on by the agent that has it")
        if self._packing.references is None:
            self._packing.references = []
        self._packing.references.append(value)
        return tuple(part_of(value).id)

    def _put_together(self, peer: int, plain: Any) -> RRef:
        id_ = ReferenceId.of(plain, self.world_size)
        if id_.owner == self.rank:
            return self.tables.own(id_)
        return self.tables.arrived(id_, is_counted=peer != self.rank)


def _plain(counts: Mapping[ReferenceId, int]) -> list[Any]:
    return [(*id_, count) for id_, count in counts.items()]
