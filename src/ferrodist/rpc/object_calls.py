"""What agents call of each other on behalf of remote objects."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Protocol

from ferrodist.collectives.letters import Parcel
from ferrodist.errors import RpcError, describe_error
from ferrodist.rpc.count_calls import CountCalls
from ferrodist.rpc.messages import OWN_NAMES, Call, Failure, FailureKind, pack_result, unpack_result
from ferrodist.rpc.methods import find_method
from ferrodist.rpc.reference_parts import Kept, kept_of
from ferrodist.rpc.references import ReferenceId, RRef
from ferrodist.rpc.remote_objects import CREATE, FETCH, METHOD

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from ferrodist.rpc.remote_objects import RemoteObjects
    from ferrodist.rpc.serving import Answer

__all__ = ["ObjectCalls", "Server"]


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
                content = content.copy() if isinstance(content, Parcel) else content
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
