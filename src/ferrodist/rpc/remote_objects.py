"""An agent's part of remote objects: it makes them elsewhere, and passes references to them on.

Calls of these names are the agents' own; `ObjectCalls` serves them.

Which methods of objects other ranks may call.

What agents call of each other on behalf of remote objects.
"""

from __future__ import annotations

import functools
import itertools
import secrets
import threading
from typing import TYPE_CHECKING, Any, Protocol

from ferrodist.collectives.pytree import LeafCodec
from ferrodist.collectives.serialization import PackedValue
from ferrodist.deadline import Deadline, check_timeout
from ferrodist.errors import DistributedTimeoutError, GroupClosedError, RpcError, describe_error
from ferrodist.rpc.executor import Errands
from ferrodist.rpc.messages import (
    EXTENSIONS,
    EXTENSIONS_BESIDE_PICKLES,
    OWN_NAMES,
    PICKLED,
    REFERENCE_MARK,
    Call,
    Failure,
    FailureKind,
    error_of,
    pack_result,
    unpack_result,
)
from ferrodist.rpc.refcount_protocol import CountCalls, Counting, Passing, Telling
from ferrodist.rpc.refcount_tables import Kept, kept_of, part_of
from ferrodist.rpc.rref import ReferenceId, RRef

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from contextlib import AbstractContextManager

    from ferrodist.rpc.future import Future, Outcome
    from ferrodist.rpc.messages import Content
    from ferrodist.rpc.server import Answer


def find_method(value: Any, name: str, classes: Collection[type]) -> Callable[..., Any]:
    """A method of an object: a public one that its class has, where that class, or one above it, may be used.

    Args:
        value: The object.
        name: Of the method.
        classes: Which were registered; ``object`` is not meant by that, or everything would be.

    Raises:
        RpcError: There is none that may be called.
    """
    kind = type(value)
    if not any(base in classes for base in kind.__mro__ if base is not object):
        raise RpcError(
            f"methods of {kind.__name__} can't be called: register its class with its owner's agent, as in"
            f" agent.register({kind.__name__!r}, {kind.__name__})"
        )
    if name.startswith("_"):
        raise RpcError(f"{name!r} is no public method, and only those are called from other ranks")
    # Not getattr: what an object has for itself, or its metaclass for the class, is no method.
    found: Any = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)
    is_method = callable(found) or isinstance(found, (classmethod, functools.partialmethod))
    if not is_method or isinstance(found, type):
        raise RpcError(f"{kind.__name__} has no method {name!r}")
    bound: Callable[..., Any] = found.__get__(value, kind) if hasattr(found, "__get__") else found
    return bound


CREATE = f"{OWN_NAMES}create"
"""(id, function, arguments, keywords): have a function make an object."""

FETCH = f"{OWN_NAMES}to_here"
"""(object): give a copy."""

METHOD = f"{OWN_NAMES}RRef."
"""Followed by the method's name. (id, object, arguments, keywords): call it; with an id, its result is an object."""

_TOKEN_BITS = 63
_NUM_WITH_TICKET = len(ReferenceId._fields) + 1


class Requester(Telling, Protocol):
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
        counting: What references there are, of which other ranks are told.
        errands: Does what comes when they end.
        extensions: For each rank, what may be in messages from it, and to it.
        marks: Of these.
    """

    def __init__(self, caller: Requester, *, allow_pickle: bool) -> None:
        self._caller = caller
        self.rank = caller.rank
        self.world_size = caller.world_size
        self.errands = Errands(f"ferrodist-rpc-{self.rank}-references")
        self.counting = Counting(self, caller, self.errands)
        self._tables = self.counting.tables
        first, last = (EXTENSIONS_BESIDE_PICKLES, (PICKLED,)) if allow_pickle else (EXTENSIONS, ())
        self.extensions = {peer: (*first, self.extension_for(peer), *last) for peer in range(self.world_size)}
        self.marks = tuple(extension.tag for extension in self.extensions[self.rank])
        self._incarnation = secrets.randbits(_TOKEN_BITS)
        self._numbers = itertools.count()
        self._packing = threading.local()
        self._is_closed = False

    def extension_for(self, peer: int) -> LeafCodec:
        """How references travel to a rank, within `pack`, and from it."""
        return LeafCodec(
            tag=REFERENCE_MARK,
            encode=functools.partial(self._take_apart, peer),
            decode=functools.partial(self._put_together, peer),
        )

    def pack(
        self, peer: int, write: Callable[[Any, Sequence[LeafCodec]], Content], value: Any
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
        packing.references = packing.ticket = None
        try:
            content = write(value, self.extensions[peer])
            if packing.references is None:
                return content, None
            return content, Passing(self, peer, packing.references, packing.ticket)
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
        self._check_open()
        id_ = ReferenceId(to, self.rank, self._incarnation, next(self._numbers))
        if to != self.rank:
            return self._tables.hold(id_, self._call(to, name, (tuple(id_), *rest), timeout))
        _, handle = self._tables.keep(id_)
        assert handle is not None
        self._call(to, name, (tuple(id_), *rest), timeout)
        return handle

    def keep(self, value: Any) -> RRef:
        """Have an object of this rank."""
        self._check_open()
        kept, handle = self._tables.keep(ReferenceId(self.rank, self.rank, self._incarnation, next(self._numbers)))
        assert handle is not None
        kept.outcome.set(value)
        return handle

    def local_value(self, reference: RRef, timeout: float | None) -> Any:
        """See `RRef.local_value`."""
        kept = kept_of(reference)
        seconds = self._caller.timeout if timeout is None else check_timeout(timeout)
        with self._caller.resting():
            found = kept.outcome.wait(Deadline(seconds).remaining())
        if isinstance(next(iter(found), None), Failure):
            self._check_open()
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

    def refuse(self) -> None:
        """Make nothing more, and let nobody wait for what is being made."""
        self._is_closed = True
        self._tables.clear()

    @property
    def is_closed(self) -> bool:
        """Whether the agent is being closed, or was."""
        return self._is_closed

    def _check_open(self) -> None:
        if self._is_closed:
            raise GroupClosedError("the agent was closed")

    def close(self) -> None:
        """Forget everything."""
        self.errands.close()
        self._tables.clear()

    def _call(self, to: int, name: str, arguments: tuple[Any, ...], timeout: float | None) -> Future:
        seconds = self._caller.timeout if timeout is None else check_timeout(timeout)
        return self._caller.call_async(to, Call(name, arguments, {}), seconds)

    # What `Passing` needs.

    def unsent(self, reference: RRef) -> Outcome[BaseException | None] | None:
        """What is done when the owner is sure to hear of the object before it hears of what is sent from now on."""
        part = part_of(reference)
        if isinstance(part, Kept) or part.creation is None:
            return None
        sent = part.creation._sent  # noqa: SLF001 - users have no use for it
        return None if sent is None or sent.look() == [None] else sent

    def _take_apart(self, peer: int, value: Any) -> tuple[int, ...] | None:
        if not isinstance(value, RRef):
            return None
        if value._objects is not self:  # noqa: SLF001 - users have no use for it
            raise TypeError(f"is {value!r} of another agent: a reference is passed on by the agent that has it")
        packing = self._packing
        if packing.references is None:
            packing.references = []
        packing.references.append(value)
        id_ = part_of(value).id
        if not self._is_of_third_rank(id_, peer):
            return tuple(id_)
        if packing.ticket is None:
            packing.ticket = self.counting.make_ticket()
        return (*id_, packing.ticket)

    def _put_together(self, peer: int, plain: Any) -> RRef:
        if isinstance(plain, tuple) and len(plain) == _NUM_WITH_TICKET and type(plain[-1]) is int:
            id_, passage = ReferenceId.of(plain[:-1], self.world_size), (peer, plain[-1])
        else:
            id_, passage = ReferenceId.of(plain, self.world_size), None
        if self._is_of_third_rank(id_, peer) == (passage is None):
            raise ValueError("what should name a remote object does not")
        if id_.owner == self.rank:
            return self._tables.own(id_)
        return self._tables.arrived(id_, passage, is_counted=peer != self.rank)

    def _is_of_third_rank(self, id_: ReferenceId, peer: int) -> bool:
        return peer != self.rank and id_.owner not in (self.rank, peer)


class Server(Protocol):
    """What an agent does for these calls."""

    def submit(self, call: Call, answer: Answer, function: Callable[..., Any] | None = None) -> None:
        """Have a worker call a function: that of the call's name, or another one."""

    def classes(self) -> Collection[type]:
        """The classes that were registered."""


class ObjectCalls:
    """Serves these calls, in the thread that receives them: none waits, and none takes a worker to itself.

    So they are served while all workers wait for them. What belongs to an object is known here before the next message
    of that rank is looked at.

    Args:
        objects: What is called.
        server: The agent.
    """

    def __init__(self, objects: RemoteObjects, server: Server) -> None:
        self._objects = objects
        self._server = server
        self._counts = CountCalls(objects.counting.tables, objects.rank, objects.world_size)

    def serve(self, peer: int, call: Call, answer: Answer) -> None:
        """Serve a call whose name begins with `OWN_NAMES`."""
        try:
            if not self._counts.serve(peer, call, answer):
                self._serve(peer, call, answer)
        except (RpcError, ValueError) as error:
            answer(_refused(str(error)))

    def _serve(self, peer: int, call: Call, answer: Answer) -> None:
        match call.name, call.arguments:
            case str(name), (RRef() as target,) if name == FETCH:
                kept_of(target).outcome.when_set(
                    lambda found: self._objects.errands.put(functools.partial(self._give, peer, found, answer))
                )
            case str(name), (id_, str(function), tuple(arguments), dict(keywords)) if name == CREATE:
                if function.startswith(OWN_NAMES):
                    raise ValueError(f"{function!r} is no function that can be called")
                made = Call(function, arguments, keywords)
                self._server.submit(made, self._settling(self._new(peer, id_), answer))
            case str(name), (id_, RRef() as target, tuple(arguments), dict(keywords)) if name.startswith(METHOD):
                made = Call(name, arguments, keywords)
                kept = kept_of(target)
                then = answer if id_ is None else self._settling(self._new(peer, id_), answer)
                kept.outcome.when_set(lambda found: self._call_method(found, made, then))
            case _:
                raise ValueError("it is no call of these agents")

    def _new(self, peer: int, plain: Any) -> Kept:
        id_ = ReferenceId.of(plain, self._objects.world_size)
        if id_.owner != self._objects.rank or id_.creator != peer:
            raise ValueError(f"rank {peer} can't name an object so")
        if peer == self._objects.rank:
            return kept_of(self._objects.counting.tables.own(id_))
        kept, _ = self._objects.counting.tables.keep(id_, peer)
        return kept

    def _settling(self, kept: Kept, answer: Answer) -> Answer:
        def settle(found: Any) -> None:
            kept.outcome.set(found)
            answer(found if isinstance(found, Failure) else None)

        return settle

    def _give(self, peer: int, found: Any, answer: Answer) -> None:
        try:
            if peer == self._objects.rank and not isinstance(found, Failure):
                # What has no way to go is to be a copy all the same.
                content, _ = self._objects.pack(peer, pack_result, found)
                content = content.copy() if isinstance(content, PackedValue) else content
                found = unpack_result(content, peer, self._objects.extensions[peer])
            answer(found)
        except Exception as error:  # noqa: BLE001 - it may change meanwhile; whoever waits is to know
            answer(Failure(FailureKind.UNENCODABLE, type(error).__name__, describe_error(error), ""))

    def _call_method(self, found: Any, call: Call, then: Answer) -> None:
        if isinstance(found, Failure):
            then(found)
            return
        try:
            method = find_method(found, call.name.removeprefix(METHOD), self._server.classes())
        except RpcError as error:
            then(_refused(str(error)))
            return
        self._server.submit(call, then, method)


def _refused(text: str) -> Failure:
    return Failure(FailureKind.UNKNOWN, "", text, "")
