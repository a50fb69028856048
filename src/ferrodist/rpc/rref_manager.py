"""Remote objects: `RRefManager` makes and uses them, `RRefService` serves the calls for those of this rank."""

from __future__ import annotations

import functools
import itertools
import secrets
import threading
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from ferrodist.collectives.pytree import LeafCodec
from ferrodist.collectives.serialization import PackedValue
from ferrodist.deadline import Deadline, check_timeout
from ferrodist.errors import DistributedTimeoutError, GroupClosedError, RpcError, describe_error
from ferrodist.rpc.executor import Executor, SerialExecutor
from ferrodist.rpc.messages import (
    OWN_NAMES,
    REFERENCE_TAG,
    Call,
    Content,
    Failure,
    FailureKind,
    ValueCodec,
    error_of,
    pack_result,
    unpack_result,
)
from ferrodist.rpc.refcount_protocol import RefCountClient, RefCountServer, RRefTransfer
from ferrodist.rpc.rref import FETCH, METHOD, OwnedObject, ReferenceId, RRef, invalid_id_error, owned_object
from ferrodist.rpc.server import NOT_INTERNAL, RpcServer, refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from ferrodist.rpc.client import RpcClient
    from ferrodist.rpc.future import Future
    from ferrodist.rpc.peer import IncomingCall

CREATE = f"{OWN_NAMES}create"
"""(id, function, arguments, keywords): the internal call that has a function make an object."""

_TOKEN_BITS = 63
_LENGTH_WITH_TRANSFER_ID = len(ReferenceId._fields) + 1


class RRefManager(ValueCodec):
    """The remote objects that a rank makes and uses; packs and unpacks values with references."""

    def __init__(self, rank: int, world_size: int, timeout: float, executor: Executor, *, allow_pickle: bool) -> None:
        codecs = {
            peer: LeafCodec(
                tag=REFERENCE_TAG,
                encode=functools.partial(self._pack_reference, peer),
                decode=functools.partial(self._unpack_reference, peer),
            )
            for peer in range(world_size)
        }
        super().__init__(codecs, allow_pickle=allow_pickle)
        self.rank = rank
        self.world_size = world_size
        self._timeout = timeout
        self._executor = executor
        self.tasks = SerialExecutor(f"ferrodist-rpc-{rank}-references")
        self.refcounts = RefCountClient(self, self.tasks)
        self._table = self.refcounts.table
        self._client: RpcClient
        self._agent_token = secrets.randbits(_TOKEN_BITS)
        self._numbers = itertools.count()
        self._packing = threading.local()
        self._is_closed = False

    def bind(self, client: RpcClient, server: RpcServer) -> None:
        """Make calls with this client, and serve those of other ranks from this server."""
        self._client = self.refcounts.client = client
        RefCountServer(self._table, self.rank, self.world_size, server)
        RRefService(self, server)

    @override
    def pack(
        self, peer: int, write: Callable[[Any, Sequence[LeafCodec]], Content], value: Any
    ) -> tuple[Content, RRefTransfer | None]:
        packing = self._packing
        packing.references = packing.transfer_id = None
        try:
            content = write(value, self.leaf_codecs[peer])
            if packing.references is None:
                return content, None
            transfer_id = packing.transfer_id or 0
            is_loopback = peer == self.rank
            return content, RRefTransfer(self.refcounts, peer, packing.references, transfer_id, is_loopback=is_loopback)
        finally:
            packing.references = None

    def create(self, owner: int, name: str, arguments_after_id: tuple[Any, ...], timeout: float | None) -> RRef:
        """Have an owner make an object by an internal call; its first argument is the object's id."""
        id_ = self._next_id(owner)
        owned, handle = self._table.add(id_) if owner == self.rank else (None, None)
        creation = self.call(owner, name, (tuple(id_), *arguments_after_id), timeout)
        if owned is None or handle is None:
            return self._table.create(id_, creation)
        for error in [] if creation._sent is None else creation._sent.peek():  # it was not sent
            owned.value.set(Failure(FailureKind.EXPIRED, type(error).__name__, str(error), ""))
        return handle

    def own(self, value: Any) -> RRef:
        """A reference to an object of this rank."""
        owned, handle = self._table.add(self._next_id(self.rank))
        assert handle is not None
        owned.value.set(value)
        return handle

    def local_value(self, reference: RRef, timeout: float | None) -> Any:
        """An object of this rank, once it is made; see `RRef.local_value`."""
        owned = owned_object(reference)
        seconds = self._timeout if timeout is None else check_timeout(timeout)
        found = owned.value.peek()
        if not found:
            with self._executor.waiting():
                found = owned.value.wait(Deadline(seconds).remaining())
        if isinstance(next(iter(found), None), Failure):
            self._check_open()
        if not found:
            raise DistributedTimeoutError(
                f"the object is not made yet, after {seconds:g} s: pass a longer timeout", ranks=(self.rank,)
            )
        if isinstance(found[0], Failure):
            raise error_of("local_value", self.rank, found[0])
        return found[0]

    def call(self, owner: int, name: str, arguments: tuple[Any, ...], timeout: float | None) -> Future:
        """Make an internal call."""
        seconds = self._timeout if timeout is None else check_timeout(timeout)
        return self._client.call_async(owner, Call(name, arguments, {}), seconds)

    def stop(self) -> None:
        """Make nothing more, and let no thread wait for objects that are being made."""
        self._is_closed = True
        self._table.clear()

    def close(self) -> None:
        """Forget everything."""
        self.tasks.close()
        self._table.clear()

    def _next_id(self, owner: int) -> ReferenceId:
        self._check_open()
        return ReferenceId(owner, self.rank, self._agent_token, next(self._numbers))

    def _check_open(self) -> None:
        if self._is_closed:
            raise GroupClosedError("the agent was closed")

    # References in messages.

    def _pack_reference(self, peer: int, value: Any) -> tuple[int, ...] | None:
        if not isinstance(value, RRef):
            return None
        if value._manager is not self:
            raise TypeError(f"is {value!r} of another agent: a reference is passed on by the agent that has it")
        packing = self._packing
        if packing.references is None:
            packing.references = []
        packing.references.append(value)
        id_ = value._record.id
        if not self._is_third_owner(id_, peer):
            return tuple(id_)
        if packing.transfer_id is None:
            packing.transfer_id = next(self.refcounts.transfer_ids)
        return (*id_, packing.transfer_id)

    def _unpack_reference(self, peer: int, plain: Any) -> RRef:
        if isinstance(plain, tuple) and len(plain) == _LENGTH_WITH_TRANSFER_ID and type(plain[-1]) is int:
            id_, key = ReferenceId.parse(plain[:-1], self.world_size), (peer, plain[-1])
        else:
            id_, key = ReferenceId.parse(plain, self.world_size), None
        if self._is_third_owner(id_, peer) == (key is None):
            raise invalid_id_error(plain)
        if id_.owner == self.rank:
            return self._table.own_reference(id_)
        return self._table.receive(id_, key, is_counted=peer != self.rank)

    def _is_third_owner(self, id_: ReferenceId, peer: int) -> bool:
        return peer != self.rank and id_.owner not in (self.rank, peer)


class RRefService:
    """Serves the internal calls for objects of this rank, in the thread that receives them.

    None of them waits, or takes a worker to itself, so they are served while all workers wait for them. An object is
    known here before the next message of that rank is handled.
    """

    def __init__(self, manager: RRefManager, server: RpcServer) -> None:
        self._manager = manager
        self._table = manager.refcounts.table
        self._server = server
        for name in (CREATE, FETCH):
            server.register_internal(name, self._serve)
        server.register_internal(METHOD, self._serve, is_prefix=True)

    def _serve(self, incoming: IncomingCall, call: Call) -> None:
        peer = incoming.peer.rank
        match call.name, call.arguments:
            case str(name), (RRef() as target,) if name == FETCH:
                owned_object(target).value.add_callback(
                    lambda value: self._manager.tasks.submit(functools.partial(self._send_copy, incoming, value))
                )
            case str(name), (id_, str(function), tuple(arguments), dict(keywords)) if name == CREATE:
                if function.startswith(OWN_NAMES):
                    raise ValueError(f"{function!r} is no function that can be called")
                incoming.on_result = functools.partial(_set_object, self._new_object(peer, id_))
                self._server.submit(incoming, Call(function, arguments, keywords))
            case str(name), (id_, RRef() as target, tuple(arguments), dict(keywords)) if name.startswith(METHOD):
                owned = owned_object(target)
                if id_ is not None:
                    incoming.on_result = functools.partial(_set_object, self._new_object(peer, id_))
                method = Call(name, arguments, keywords)
                owned.value.add_callback(lambda value: self._call_method(incoming, value, method))
            case _:
                raise ValueError(NOT_INTERNAL)

    def _new_object(self, peer: int, plain: Any) -> OwnedObject:
        id_ = ReferenceId.parse(plain, self._manager.world_size)
        if id_.owner != self._manager.rank or id_.creator != peer:
            raise ValueError(f"rank {peer} can't name an object so")
        if peer == self._manager.rank:
            return owned_object(self._table.own_reference(id_))
        owned, _ = self._table.add(id_, peer)
        return owned

    def _send_copy(self, incoming: IncomingCall, value: Any) -> None:
        peer = incoming.peer.rank
        try:
            if peer == self._manager.rank and not isinstance(value, Failure):  # a copy, without a network too
                content, _ = self._manager.pack(peer, pack_result, value)
                content = content.copy() if isinstance(content, PackedValue) else content
                value = unpack_result(content, peer, self._manager.leaf_codecs[peer])
            self._server.respond(incoming, value)
        except Exception as error:  # noqa: BLE001 - it may change meanwhile; the caller is to know
            failure = Failure(FailureKind.UNENCODABLE, type(error).__name__, describe_error(error), "")
            self._server.respond(incoming, failure)

    def _call_method(self, incoming: IncomingCall, value: Any, call: Call) -> None:
        if isinstance(value, Failure):
            self._server.respond(incoming, value)
            return
        try:
            method = find_method(value, call.name.removeprefix(METHOD), self._server.registry.classes())
        except RpcError as error:
            self._server.respond(incoming, refusal(str(error)))
            return
        self._server.submit(incoming, call, method)


def _set_object(owned: OwnedObject, result: Any) -> Any:
    """Make a function's result an object; returns the response to the call."""
    owned.value.set(result)
    return result if isinstance(result, Failure) else None


def find_method(value: Any, name: str, classes: Collection[type]) -> Callable[..., Any]:
    """A public method of an object's class, where that class or one of its bases is registered; else RpcError."""
    kind = type(value)
    if not any(base in classes for base in kind.__mro__ if base is not object):
        raise RpcError(
            f"methods of {kind.__name__} can't be called: register its class with its owner's agent, as in"
            f" agent.register({kind.__name__!r}, {kind.__name__})"
        )
    if name.startswith("_"):
        raise RpcError(f"{name!r} is no public method, and only those are called from other ranks")
    # Not getattr: attributes of the instance, or of the metaclass, are no methods.
    found: Any = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)
    is_method = callable(found) or isinstance(found, (classmethod, functools.partialmethod))
    if not is_method or isinstance(found, type):
        raise RpcError(f"{kind.__name__} has no method {name!r}")
    bound: Callable[..., Any] = found.__get__(value, kind) if hasattr(found, "__get__") else found
    return bound
