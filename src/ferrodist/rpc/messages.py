"""Messages between agents: calls, results and failures, how they are packed, and the frames that carry them.

[Note: plain content]
Most calls and results have neither tensors nor nested values: those are packed by msgspec at once, into bytes. All
others become a `PackedValue` (`collectives/serialization.py`).

[Note: frames]
A message begins with a frame of `FRAME_BYTES`, for which the receiver has always posted a receive. Content that fits is
in the frame; larger content is a message of its own, received once the frame has come, and so is each large tensor.
Their tags have the message's call id, so that frames need not wait for them, nor they for each other.

    kind of message: u8 | form: u8 | flags: u16 | bytes of the content: u32 | call id: u64 | content, if it fits
"""

from __future__ import annotations

import dataclasses
import enum
import pickle
import struct
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from ferrodist.collectives.arguments import check_tensor
from ferrodist.collectives.pytree import LeafCodec
from ferrodist.collectives.reduce_op import check_dtype
from ferrodist.collectives.serialization import PackedValue
from ferrodist.errors import DistributedTimeoutError, PeerLostError, ProtocolError, RpcError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ferrodist.deadline import Deadline
    from ferrodist.rpc.future import OneShot

Content = bytes | PackedValue
"""The content of a message, beside its kind and call id: see [Note: plain content]."""


class MessageKind(enum.IntEnum):
    """The kind of a message."""

    CALL = 0
    RESULT = 1
    FAILURE = 2
    CANCEL = 3  # the caller of a call waits no more
    INTERNAL_CALL = 4  # a call of one agent by another one, which is handled in the thread that receives it
    NOTICE = 5  # an internal call without a response, which is handled after everything sent before it


OWN_NAMES = "ferrodist."
"""Prefix of the names of internal calls, which users can't register.

Both sides of a connection make the two below. `rref.py` and `rref_manager.py` have those for objects,
`refcount_protocol.py` those for reference counts, and `shutdown.py` those of draining.
"""

ANNOUNCE_NAME = "ferrodist.hello"
"""(name): the name of the calling rank, for calls by name. A notice."""

MET = "ferrodist.met"
"""(): the first message on a connection; references registered for the caller may be sent from now on. A notice."""

NO_CALL_ID = 0
"""The call id of a `NOTICE`."""


class FailureKind(enum.IntEnum):
    """Why a call has no result."""

    RAISED = 0  # the function raised an exception
    UNKNOWN = 1  # there is no function of that name
    UNDECODABLE = 2  # the message could not be unpacked
    UNENCODABLE = 3  # the result can't be sent
    EXPIRED = 4  # the call was given up before it began, or before it ended
    OVERLOADED = 5  # the caller has too many calls without a result


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a function: the function's name, and the arguments."""

    name: str
    arguments: Sequence[Any]
    keywords: dict[str, Any]


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """The reason why a call has no result: its kind, and the exception's type, text and traceback."""

    kind: FailureKind
    type_name: str
    text: str
    traceback: str


_ARRAYS = frozenset({np.ndarray, np.memmap})
"""Array types that are no more than their elements; masked arrays, matrices and users' subclasses are."""


def _take_array(value: Any) -> torch.Tensor | None:
    if not isinstance(value, np.ndarray):
        return None
    if type(value) not in _ARRAYS:
        raise TypeError(
            f"is of type {type(value).__name__}, of which only the elements would arrive: pass numpy.asarray(...) of"
            " it, and what else belongs to it beside that"
        )
    try:
        array = np.ascontiguousarray(value).reshape(value.shape)
        tensor = torch.from_numpy(array if array.flags.writeable else array.copy())  # torch warns of read-only ones
        check_dtype(tensor.dtype)
    except (TypeError, ValueError):  # of a type, or an order of bytes, that tensors don't have
        raise TypeError(f"is a numpy array of {value.dtype}, which does not go from rank to rank: convert it") from None
    return tensor


def _take_array_or_leave(value: Any) -> torch.Tensor | None:
    try:
        return _take_array(value)
    except TypeError:
        return None


def _put_array(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.numpy()
    raise ValueError("an array that is no tensor")


ARRAY_CODEC = LeafCodec(tag="array", encode=_take_array, decode=_put_array)
"""Sends numpy arrays as tensors."""

REFERENCE_TAG = "rref"
"""The tag of references. Their codec differs by agent and peer."""


def _take_object(value: Any) -> bytes | None:
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return None
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise TypeError(f"can't be pickled: {error}") from error


_PICKLE_CODEC = LeafCodec(tag="pickle", encode=_take_object, decode=pickle.loads)
"""Pickles all other values. It is the last codec, and used only where callers are trusted with everything."""

_PLAIN = frozenset({type(None), bool, int, float, str, bytes})
_ENCODE = msgspec.msgpack.Encoder().encode
_DECODE_CALL = msgspec.msgpack.Decoder(tuple[str, list[Any], dict[str, Any]]).decode
_DECODE_RESULT = msgspec.msgpack.Decoder().decode
_DECODE_FAILURE = msgspec.msgpack.Decoder(Failure).decode


def _are_plain(values: Iterable[Any]) -> bool:
    for value in values:  # noqa: SIM110 - `all` takes three times as long for one
        if type(value) not in _PLAIN:
            return False
    return True


def _check_tensor(tensor: torch.Tensor) -> None:
    if tensor.is_nested:
        raise TypeError("is a nested tensor: pass tensor.unbind()")
    try:
        check_tensor(tensor, "it")
    except (TypeError, NotImplementedError) as error:
        raise TypeError(f"is a tensor that does not go from rank to rank: {error}") from None


def _locate_argument(call: Call, text: str) -> str:
    """An error's text, with the position as the caller wrote it."""
    prefixes = {"[1]": "argument ", "[2]": "keyword "}
    if call.name.startswith(OWN_NAMES):  # the last two arguments are the function's own
        last = len(call.arguments) - 1
        prefixes = {f"[1][{last - 1}]": "argument ", f"[1][{last}]": "keyword "}
    for prefix, kind in prefixes.items():
        if text.startswith(f"{prefix}["):
            return kind + text.removeprefix(prefix)
    return text.lstrip()


def pack_plain_call(call: Call) -> bytes | None:
    """Pack a call whose arguments are all plain; None for others."""
    if _are_plain(call.arguments) and _are_plain(call.keywords.values()):
        try:
            return _ENCODE((call.name, call.arguments, call.keywords))
        except (OverflowError, UnicodeEncodeError):
            pass  # an integer of more than 64 bits, or half of a surrogate pair, which `pack_call` names
    return None


def pack_call(call: Call, leaf_codecs: Sequence[LeafCodec]) -> Content:
    """Pack a call; raises TypeError with the position of a value that can't be sent."""
    content = pack_plain_call(call)
    if content is not None:
        return content
    value = [call.name, tuple(call.arguments), call.keywords]
    try:
        return PackedValue.of(value, "", leaf_codecs, _check_tensor)
    except TypeError as error:
        title = call.name.removeprefix(OWN_NAMES)
        raise TypeError(f"the call of {title!r}: {_locate_argument(call, str(error))}") from None


def unpack_call(content: Content, src: int, leaf_codecs: Sequence[LeafCodec]) -> Call:
    """Unpack a call; raises ProtocolError for other content, and PeerLostError if a reference in it is refused."""
    try:
        if isinstance(content, bytes):
            call = Call(*_DECODE_CALL(content))
            if _are_plain(call.arguments) and _are_plain(call.keywords.values()):
                return call
        else:
            match content.open(leaf_codecs):
                case [str(name), tuple(arguments), dict(keywords)]:
                    return Call(name, arguments, keywords)
    except PeerLostError:  # a reference is refused
        raise
    except Exception as error:
        raise _protocol_error(f"call: {error}", src) from error
    raise _protocol_error("call", src)


def pack_plain_result(value: Any) -> bytes | None:
    """Pack a plain result; None for others."""
    if type(value) in _PLAIN:
        try:
            return _ENCODE(value)
        except (OverflowError, UnicodeEncodeError):
            pass  # as above
    return None


def pack_result(value: Any, leaf_codecs: Sequence[LeafCodec]) -> Content:
    """Pack a function's result; raises TypeError with the position of a value that can't be sent."""
    content = pack_plain_result(value)
    return PackedValue.of(value, "the result", leaf_codecs, _check_tensor) if content is None else content


def unpack_result(content: Content, src: int, leaf_codecs: Sequence[LeafCodec]) -> Any:
    """Unpack a result; raises as `unpack_call`."""
    try:
        if not isinstance(content, bytes):
            return content.open(leaf_codecs)
        value = _DECODE_RESULT(content)
        if type(value) in _PLAIN:
            return value
    except PeerLostError:
        raise
    except Exception as error:
        raise _protocol_error(f"result: {error}", src) from error
    raise _protocol_error("result", src)


def pack_failure(failure: Failure) -> bytes:
    """Pack a failure."""
    return _ENCODE(failure)


def unpack_failure(content: Content, src: int) -> Failure:
    """Unpack a failure; raises ProtocolError for other content."""
    try:
        if isinstance(content, bytes):
            return _DECODE_FAILURE(content)
    except Exception as error:
        raise _protocol_error(f"failure: {error}", src) from error
    raise _protocol_error("failure", src)


def error_of(name: str, peer: int, failure: Failure) -> Exception:
    """The exception that a failed call raises."""
    if failure.kind is FailureKind.EXPIRED:
        return DistributedTimeoutError(f"rank {peer}: {failure.text}", ranks=(peer,))
    how = "{} failed on rank {}" if failure.kind is FailureKind.RAISED else "the call of {} on rank {}"
    return RpcError(
        f"{how.format(repr(name.removeprefix(OWN_NAMES)), peer)}: {failure.text}",
        ranks=(peer,),
        type_name=failure.type_name,
        traceback=failure.traceback,
    )


def _protocol_error(what: str, src: int) -> ProtocolError:
    return ProtocolError(f"rank {src} sent something that is not a {what}", ranks=(src,))


class ReferenceTransfer(ABC):
    """The references in a message, whose owners may have to know of them before it is sent: an `RRefTransfer`."""

    @abstractmethod
    def send(
        self, transmit: Callable[[], None], on_error: Callable[[BaseException], None], deadline: Deadline
    ) -> OneShot[BaseException | None] | None:
        """Send the message, now or soon.

        Returns None if it was sent at once, and raises if it can't be. Otherwise the result is set to None when it was
        sent, or to the error, with which `on_error` is called first.
        """

    @abstractmethod
    def forget(self, _: object = None) -> None:
        """Drop the references: the call has ended, whether it was sent or not."""


class ValueCodec(ABC):
    """Packs and unpacks values to and from each rank; the agent's is its `RRefManager`."""

    def __init__(self, reference_codecs: Mapping[int, LeafCodec], *, allow_pickle: bool) -> None:
        arrays = ARRAY_CODEC
        last: tuple[LeafCodec, ...] = ()
        if allow_pickle:  # which takes the arrays that can't be sent as tensors
            arrays = dataclasses.replace(ARRAY_CODEC, encode=_take_array_or_leave)
            last = (_PICKLE_CODEC,)
        # By peer, the codecs of values beside nested ones.
        self.leaf_codecs = {peer: (arrays, codec, *last) for peer, codec in reference_codecs.items()}
        self.tags = tuple(each.tag for each in (arrays, *list(reference_codecs.values())[:1], *last))

    @abstractmethod
    def pack(
        self, peer: int, write: Callable[[Any, Sequence[LeafCodec]], Content], value: Any
    ) -> tuple[Content, ReferenceTransfer | None]:
        """Pack a value for a peer by `pack_call` or `pack_result`; references in it are to send the content."""


# Frames; see [Note: frames].

FRAME_BYTES = 512
_HEADER = struct.Struct("<BBHIQ")

FRAME_CONTENT_BYTES = FRAME_BYTES - _HEADER.size
"""Bytes of content that fit into a frame."""

FRAME_TAG = 0

MAX_CONTENT_BYTES = (1 << 32) - 1
"""Limit of a message's content without its tensors."""

_KIND_BITS = 3
_HAS_REFERENCES = 1


class Form(enum.IntEnum):
    """The encoding of a message's content."""

    PLAIN = 0
    ENCODED = 1


_FORMS = frozenset(Form)
_KINDS = {int(kind): kind for kind in MessageKind}


class Frame:
    """A received frame; raises ProtocolError for invalid data."""

    __slots__ = ("call_id", "data", "form", "has_references", "index", "is_cancelled", "is_complete", "kind", "size")

    def __init__(self, data: bytes, peer: int) -> None:
        kind, self.form, flags, self.size, self.call_id = _HEADER.unpack_from(data)
        if kind not in _KINDS or self.form not in _FORMS or flags > _HAS_REFERENCES:
            raise ProtocolError(f"rank {peer} sent something that is not a message of an agent", ranks=(peer,))
        self.data = data
        self.kind = _KINDS[kind]
        self.has_references = bool(flags)  # according to the sender
        # Whether the whole message is in the frame.
        self.is_complete = self.size <= FRAME_CONTENT_BYTES and self.form == Form.PLAIN
        self.index = 0  # its position among the peer's frames, from 1; 0 before `ReceiveQueue._next`
        self.is_cancelled = False  # whether the sender waits for no response any more

    def content(self) -> bytes:
        """The content in the frame."""
        return self.data[_HEADER.size : _HEADER.size + self.size]


def pack_frame(kind: MessageKind, form: Form, call_id: int, content: memoryview, *, has_references: bool) -> bytes:
    """Pack a frame, with the content if it fits."""
    size = content.nbytes
    header = _HEADER.pack(kind, form, _HAS_REFERENCES if has_references else 0, size, call_id)
    return (header + content if size <= FRAME_CONTENT_BYTES else header).ljust(FRAME_BYTES, b"\0")


def payload_tag(kind: MessageKind, call_id: int) -> int:
    """The tag under which oversized content and large tensors of a message travel; distinct from `FRAME_TAG`."""
    return ((call_id << _KIND_BITS | kind) + 1) & ((1 << 62) - 1)
