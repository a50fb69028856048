"""`MessageDispatcher`: takes all messages of peers; `RpcServer`: serves their calls, and sends the results."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedError, PeerLostError, ProtocolError, RpcError, describe_error
from ferrodist.resource_limits import limit_text
from ferrodist.rpc.messages import (
    OWN_NAMES,
    Call,
    Content,
    Failure,
    FailureKind,
    MessageKind,
    ValueCodec,
    pack_failure,
    pack_plain_result,
    pack_result,
    unpack_call,
)
from ferrodist.rpc.peer import IncomingCall, MessageHandler, Peer
from ferrodist.wording import counted, with_article

if TYPE_CHECKING:
    from ferrodist.rpc.client import RpcClient
    from ferrodist.rpc.executor import Executor
    from ferrodist.rpc.statistics import RpcMetrics

    InternalHandler = Callable[[IncomingCall, Call], object]


serving_agent: contextvars.ContextVar[Any] = contextvars.ContextVar("ferrodist-rpc-agent")
"""The agent whose call a thread, or a coroutine, serves."""

NOT_INTERNAL = "it is not an internal call of agents: do all ranks run the same version of ferrodist?"

_MAX_INTERNAL_CALLS = 100  # internal calls beside those in a window: one for each response with references

_MAX_FAILURE_CHARACTERS, _MAX_TYPE_NAME_CHARACTERS = 300, 40
"""Lengths to which a failure is cut that can't be sent as it is: a frame has room for them, whatever the limit."""


class FunctionRegistry:
    """The functions that may be called, by name; raises as `register`, and TypeError if they are not in a mapping."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        self.functions: dict[str, Callable[..., Any]] = {}
        if not isinstance(functions, Mapping):
            raise TypeError(
                f"functions are given by their names, as in {{'add': add}}, not as"
                f" {with_article(type(functions).__name__)}"
            )
        for name, function in functions.items():
            self.register(name, function)

    def register(self, name: str, function: Callable[..., Any]) -> None:
        """Register a function; see `RpcAgent.register`."""
        if not isinstance(name, str) or not callable(function):
            raise TypeError(f"register(name, function) takes a text and a function, not {name!r} and {function!r}")
        if not name:
            raise ValueError("the name of a function is empty: give it one by which others call it")
        if name.startswith(OWN_NAMES):
            raise ValueError(f"names that begin with {OWN_NAMES!r} are the agents' own: take another one")
        if self.functions.setdefault(name, function) is not function:
            raise ValueError(f"there is a function {name!r} already: take another name")

    def classes(self) -> set[type]:
        """The registered classes."""
        return {function for function in list(self.functions.values()) if isinstance(function, type)}


class MessageDispatcher(MessageHandler):
    """Handles the messages of peers: their calls are for the server, and responses to this rank's for the client."""

    def __init__(self, server: RpcServer, client: RpcClient) -> None:
        self._server = server
        self._client = client

    @override
    def on_message(self, peer: Peer, kind: MessageKind, call_id: int, content: Content) -> None:
        if kind is MessageKind.RESULT or kind is MessageKind.FAILURE:
            self._client.on_response(peer.rank, call_id, kind, content)
        else:
            self._server.on_request(peer, kind, call_id, content)

    @override
    def on_cancelled_message(self, peer: Peer, call_id: int, content: Content) -> None:
        self._server.refuse_cancelled(peer, call_id, content)

    @override
    def on_undecodable(self, peer: Peer, kind: MessageKind, call_id: int, error: DistributedError) -> None:
        failure = Failure(FailureKind.UNDECODABLE, "", str(error), "")
        if kind in (MessageKind.CALL, MessageKind.INTERNAL_CALL):
            self._server.refuse(peer, call_id, failure)
        else:
            self._client.on_response(peer.rank, call_id, MessageKind.FAILURE, pack_failure(failure))


class RpcServer:
    """Serves the calls of peers, and sends the results."""

    def __init__(
        self,
        registry: FunctionRegistry,
        executor: Executor,
        codec: ValueCodec,
        metrics: RpcMetrics,
        *,
        max_outstanding: int,
        timeout: float,
    ) -> None:
        self.registry = registry
        self._executor = executor
        self._codec = codec
        self._metrics = metrics
        self._max_incoming = 2 * max_outstanding + _MAX_INTERNAL_CALLS
        self._timeout = timeout
        self._internal: dict[str, InternalHandler] = {}
        self._internal_prefixes: dict[str, InternalHandler] = {}
        self.serving: set[IncomingCall] = set()  # calls of users' functions that are not answered
        self._is_closing = False

    def register_internal(self, name: str, handler: InternalHandler, *, is_prefix: bool = False) -> None:
        """Have internal calls of a name, or of all names with a prefix, handled in the thread that receives them.

        The handler, or something it starts, is to `respond`. It must not block; its RpcError or ValueError is the
        response.
        """
        (self._internal_prefixes if is_prefix else self._internal)[name] = handler

    def close(self) -> None:
        """Send no more failures: what fails now does so as the agent closes, which callers are about to learn."""
        self._is_closing = True

    # Messages.

    def on_request(self, peer: Peer, kind: MessageKind, call_id: int, content: Content) -> None:
        """Take a call or a notice, or cancel a call."""
        if kind is MessageKind.CALL or kind is MessageKind.INTERNAL_CALL:
            incoming = IncomingCall(peer, call_id, content)
            if self._accept(incoming):
                serve = self.submit if kind is MessageKind.CALL else self._serve_internal
                serve(incoming)
        elif kind is MessageKind.NOTICE:
            self._serve_internal(IncomingCall(peer, None, content))
        else:
            assert kind is MessageKind.CANCEL
            call = peer.incoming.get(call_id)
            if call is not None:
                call.cancel()

    def refuse_cancelled(self, peer: Peer, call_id: int, content: Content) -> None:
        """Refuse a call that was cancelled while its tensors were on their way."""
        self._discard(peer, content)
        self._metrics.count("failed")
        text = "the call's tensors were on their way until its caller had given up"
        self._send_response(peer, call_id, Failure(FailureKind.EXPIRED, "", text, ""))

    def refuse(self, peer: Peer, call_id: int, failure: Failure) -> None:
        """Answer a call that was not taken."""
        self._send_response(peer, call_id, failure)

    def _accept(self, incoming: IncomingCall) -> bool:
        """Add a call to those of its peer; refuse it if they are too many."""
        peer, call_id = incoming.peer, incoming.call_id
        assert call_id is not None
        if len(peer.incoming) >= self._max_incoming:
            assert incoming.content is not None
            self._discard(peer, incoming.content)
            calls = counted(len(peer.incoming), "call")
            text = f"rank {peer.rank} has {calls} here without a result, as many as may be"
            self._send_response(peer, call_id, Failure(FailureKind.OVERLOADED, "", text, ""))
            return False
        if peer.incoming.setdefault(call_id, incoming) is not incoming:
            raise ProtocolError(f"rank {peer.rank} made call {call_id} twice", ranks=(peer.rank,))
        return True

    def _unpack(self, peer: Peer, content: Content) -> Call:
        return unpack_call(content, peer.rank, self._codec.leaf_codecs[peer.rank])

    def _discard(self, peer: Peer, content: Content) -> None:
        """Drop a call: references in it have been counted for this rank, and are given back."""
        with contextlib.suppress(ProtocolError, PeerLostError):
            self._unpack(peer, content)

    # Internal calls.

    def _serve_internal(self, incoming: IncomingCall) -> None:
        """Handle an internal call, and send the responses once the lock is released.

        A send may run receive callbacks of the same peer in this thread, which then holds the lock already.
        """
        peer = incoming.peer
        with peer.internal_lock:
            if peer.is_lost:
                return
            outer, peer.internal_thread = peer.internal_thread, threading.get_ident()
            try:
                self._handle_internal(incoming)
            finally:
                peer.internal_thread = outer
                responses: list[tuple[int, Any]] = []
                if outer is None:
                    responses, peer.deferred = peer.deferred, responses
        for call_id, value in responses:
            self._send_response(peer, call_id, value)

    def _handle_internal(self, incoming: IncomingCall) -> None:
        try:
            call = self._take_call(incoming)
        except (ProtocolError, PeerLostError) as error:
            self.respond(incoming, Failure(FailureKind.UNDECODABLE, "", str(error), ""))
            return
        name = call.name
        handler = self._internal.get(name)
        if handler is None:
            handler = next((each for prefix, each in self._internal_prefixes.items() if name.startswith(prefix)), None)
        if handler is None:
            self.respond(incoming, refusal(NOT_INTERNAL))
            return
        try:
            handler(incoming, call)
        except (RpcError, ValueError) as error:
            self.respond(incoming, refusal(str(error)))

    # Calls of users' functions.

    def submit(
        self, incoming: IncomingCall, call: Call | None = None, function: Callable[..., Any] | None = None
    ) -> None:
        """Have a worker serve a call.

        Args:
            incoming: The call, packed.
            call: The call to serve in place of the packed one.
            function: The function to call in place of the registered one.
        """
        incoming.call, incoming.function = call, function
        incoming.is_submitted = True
        self.serving.add(incoming)
        self._executor.submit(functools.partial(self._run, incoming))

    def _run(self, incoming: IncomingCall) -> None:
        """Serve a call, in this thread."""
        try:
            call = self._take_call(incoming)
        except Exception as error:  # noqa: BLE001 - it is the caller's
            self.respond(incoming, Failure(FailureKind.UNDECODABLE, "", str(error), ""))
            return
        function = incoming.function or self.registry.functions.get(call.name)
        if function is None:
            known = ", ".join(sorted(self.registry.functions)) or "none"
            text = f"there is no function {call.name!r} here: register it; those registered: {known}"
            self.respond(incoming, Failure(FailureKind.UNKNOWN, "", text, ""))
            return
        if incoming.is_cancelled:
            text = f"{call.name!r} waited for its turn until its caller had given up"
            self.respond(incoming, Failure(FailureKind.EXPIRED, "", text, ""))
            return
        try:
            value = function(*call.arguments, **call.keywords)
            is_awaitable = inspect.isawaitable(value)
        except BaseException as error:  # noqa: BLE001 - it is the caller's, and no reason for this thread to end
            self.respond(incoming, failure_of(error))
            return
        if is_awaitable:
            self._run_coroutine(incoming, value)
        else:
            self.respond(incoming, value)

    def _take_call(self, incoming: IncomingCall) -> Call:
        """The call, which is the function's alone from now on, with its tensors."""
        call, incoming.call = incoming.call, None
        if call is not None:
            return call
        content, incoming.content = incoming.content, None
        assert content is not None
        return self._unpack(incoming.peer, content)

    def _run_coroutine(self, incoming: IncomingCall, awaitable: Any) -> None:
        """Answer a call with the result of an awaitable."""

        async def await_and_respond() -> None:
            try:
                value = await awaitable
            except BaseException as error:  # noqa: BLE001 - it is the caller's, and no reason for the loop to end
                value = failure_of(error)
            self.respond(incoming, value)

        coroutine = await_and_respond()
        try:
            future = self._executor.event_loop.run(coroutine)
        except RuntimeError as error:
            coroutine.close()
            if inspect.iscoroutine(awaitable):
                awaitable.close()
            self.respond(incoming, refusal(limit_text(error) or str(error)))
        else:
            incoming.on_cancel(functools.partial(self._executor.event_loop.cancel, future))

    # Responses.

    def respond(self, incoming: IncomingCall, value: Any) -> None:
        """Answer a call with a value or a `Failure`; does not raise."""
        if incoming.is_submitted:
            self._metrics.count("failed" if isinstance(value, Failure) else "served")
        try:
            if incoming.on_result is not None:
                value = incoming.on_result(value)
        finally:  # calls that follow from it are being served by now, and the caller's has not ended
            self.serving.discard(incoming)
        incoming.function = incoming.on_result = None
        if incoming.call_id is not None:
            incoming.peer.incoming.pop(incoming.call_id, None)
            self._send_response(incoming.peer, incoming.call_id, value)

    def _send_response(self, peer: Peer, call_id: int, value: Any) -> None:
        if peer.internal_thread == threading.get_ident():
            peer.deferred.append((call_id, value))
            return
        if isinstance(value, Failure):
            if not self._is_closing:
                self._send_failure(peer, call_id, value)
            return
        try:
            content: Content | None = pack_plain_result(value)
            transfer = None
            if content is None:
                content, transfer = self._codec.pack(peer.rank, pack_result, value)
            if transfer is None:
                peer.send(MessageKind.RESULT, call_id, content)
                return
            send = functools.partial(peer.send, MessageKind.RESULT, call_id, content)
            sent = transfer.send(send, functools.partial(self._send_unsendable, peer, call_id), Deadline(self._timeout))
            if sent is not None:
                sent.add_callback(transfer.forget)
        except (TypeError, ValueError, DistributedError) as error:
            self._send_unsendable(peer, call_id, error)
        except Exception as error:  # noqa: BLE001 - a value of the user's may raise anything when it is looked at
            self._send_unsendable(peer, call_id, TypeError(f"the result can't travel: {describe_error(error)}"))

    def _send_unsendable(self, peer: Peer, call_id: int, error: BaseException) -> None:
        """Send why a result can't be sent: it is of another type, or too large, or the caller is gone."""
        self._send_failure(peer, call_id, Failure(FailureKind.UNENCODABLE, type(error).__name__, str(error), ""))

    def _send_failure(self, peer: Peer, call_id: int, failure: Failure) -> None:
        with contextlib.suppress(DistributedError):  # the caller is gone
            try:
                peer.send(MessageKind.FAILURE, call_id, pack_failure(failure))
            except Exception:  # noqa: BLE001 - a traceback may be too large, or text that can't be encoded
                escaped = failure.text[:_MAX_FAILURE_CHARACTERS].encode("ascii", "backslashreplace")
                text = escaped[:_MAX_FAILURE_CHARACTERS].decode("ascii")
                short = Failure(failure.kind, failure.type_name[:_MAX_TYPE_NAME_CHARACTERS], text, "")
                peer.send(MessageKind.FAILURE, call_id, pack_failure(short))


def failure_of(error: BaseException) -> Failure:
    """The failure that a caller receives for its function's exception."""
    frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
    name = type(error).__name__
    try:
        text = "".join(traceback.format_exception(type(error), error, frames))
        return Failure(FailureKind.RAISED, name, describe_error(error), text)
    except BaseException:  # noqa: BLE001 - raised by the exception's own text
        return Failure(FailureKind.RAISED, name, f"{name}, whose text can't be had", "")


def refusal(text: str) -> Failure:
    """The failure of a call that can't be carried out here."""
    return Failure(FailureKind.UNKNOWN, "", text, "")
