"""What agents say to each other: calls, results and failures, and how they are written down.

[Note: forms]
What is plain, that is without tensors and without values in values, is written by msgspec at once, which is what most
calls are; everything else as a letter (`collectives/letters.py`) of nested values.
"""

from __future__ import annotations

import enum
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from ferrodist.collectives.letters import Parcel
from ferrodist.collectives.nested_values import Extension
from ferrodist.errors import DistributedTimeoutError, PeerLostError, ProtocolError, RpcError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = [
    "EXTENSIONS",
    "HELLO",
    "MET",
    "NO_NUMBER",
    "OWN_NAMES",
    "PICKLED",
    "REFERENCE_MARK",
    "Call",
    "Content",
    "Failure",
    "FailureKind",
    "MessageKind",
    "error_of",
    "pack_call",
    "pack_failure",
    "pack_result",
    "unpack_call",
    "unpack_failure",
    "unpack_result",
]

Content = bytes | Parcel
"""What a message holds beside its kind and number: see [Note: forms]."""


class MessageKind(enum.IntEnum):
    """What a message is."""

    CALL = 0
    RESULT = 1
    FAILURE = 2

    WITHDRAWAL = 3
    """Whoever made a call waits no more."""

    INTERNAL_CALL = 4
    """A call of an agent to another one, which is served at once."""

    NOTICE = 5
    """The same without an answer, and after all that was sent before."""


OWN_NAMES = "ferrodist."
"""What names of functions that users can't register begin with: agents call these of each other."""

HELLO = "ferrodist.hello"
"""(name): what the rank is called that calls this. It has no answer."""

MET = "ferrodist.met"
"""(): whoever calls this knows of the connection, and so of whatever is sent to it from now on. It has no answer."""

NO_NUMBER = 0
"""Of a `NOTICE`."""


class FailureKind(enum.IntEnum):
    """Why a call has no result."""

    RAISED = 0
    """The function did."""

    UNKNOWN = 1
    """There is no function of that name."""

    UNDECODABLE = 2
    """What came is no call."""

    UNENCODABLE = 3
    """What the function returned can't travel."""

    EXPIRED = 4
    """Its time was over before its turn, or before its end."""

    OVERLOADED = 5
    """There are too many calls without a result."""


@dataclass(frozen=True, slots=True)
class Call:
    """A function to be called.

    Args:
        name: Of the function.
        arguments: By their places.
        keywords: By their names.
    """

    name: str
    arguments: Sequence[Any]
    keywords: dict[str, Any]


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """Why there is no result.

    Args:
        kind: What went wrong.
        type_name: Of the exception.
        text: What it says.
        traceback: Where it was raised.
    """

    kind: FailureKind
    type_name: str
    text: str
    traceback: str


def _take_array(value: Any) -> torch.Tensor | None:
    if not isinstance(value, np.ndarray):
        return None
    try:
        return torch.from_numpy(np.ascontiguousarray(value).reshape(value.shape))
    except (TypeError, ValueError):  # of a type, or an order of bytes, that tensors don't have
        raise TypeError(f"numpy arrays of {value.dtype} don't go from rank to rank: convert it") from None


def _put_array(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.numpy()
    raise ValueError("an array that is no tensor")


ARRAYS = Extension(mark="array", take_apart=_take_array, put_together=_put_array)
"""Numpy arrays as tensors."""

EXTENSIONS = (ARRAYS,)
"""What goes from rank to rank beside nested values."""

REFERENCE_MARK = "rref"
"""Of references, whose extension each agent has its own of for each rank."""


def _take_object(value: Any) -> bytes | None:
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return None
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise TypeError(f"can't be pickled: {error}") from error


PICKLED = Extension(mark="pickle", take_apart=_take_object, put_together=pickle.loads)
"""Whatever else Python knows; the last to be asked, and only where whoever calls is trusted with everything."""

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


def pack_call(call: Call, extensions: Sequence[Extension]) -> Content:
    """Write a call down.

    Raises:
        TypeError: Something in it can't travel; it is named.
    """
    if _are_plain(call.arguments) and _are_plain(call.keywords.values()):
        try:
            return _ENCODE((call.name, call.arguments, call.keywords))
        except (OverflowError, UnicodeEncodeError):
            pass  # an integer of more than 64 bits, or half of a surrogate pair, which is named below
    value = [call.name, tuple(call.arguments), call.keywords]
    try:
        return Parcel.of(value, "", extensions)
    except TypeError as error:
        place = str(error).replace("[1]", "argument ", 1).replace("[2]", "keyword ", 1)
        raise TypeError(f"the call of {call.name!r}: {place}") from None


def unpack_call(content: Content, src: int, extensions: Sequence[Extension]) -> Call:
    """Read a call.

    Raises:
        ProtocolError: It is none.
        PeerLostError: A reference in it is not taken; see `Tables.arrived`.
    """
    try:
        if isinstance(content, bytes):
            call = Call(*_DECODE_CALL(content))
            if _are_plain(call.arguments) and _are_plain(call.keywords.values()):
                return call
        else:
            match content.open(extensions):
                case [str(name), tuple(arguments), dict(keywords)]:
                    return Call(name, arguments, keywords)
    except PeerLostError:  # of a reference that is not taken
        raise
    except Exception as error:
        raise _no(f"call: {error}", src) from error
    raise _no("call", src)


def pack_result(value: Any, extensions: Sequence[Extension]) -> Content:
    """Write down what a function has returned.

    Raises:
        TypeError: Something in it can't travel; it is named.
    """
    if type(value) in _PLAIN:
        try:
            return _ENCODE(value)
        except (OverflowError, UnicodeEncodeError):
            pass  # as above
    return Parcel.of(value, "the result", extensions)


def unpack_result(content: Content, src: int, extensions: Sequence[Extension]) -> Any:
    """Read a result.

    Raises:
        ProtocolError: It is none.
        PeerLostError: As for `unpack_call`.
    """
    try:
        if not isinstance(content, bytes):
            return content.open(extensions)
        value = _DECODE_RESULT(content)
        if type(value) in _PLAIN:
            return value
    except PeerLostError:
        raise
    except Exception as error:
        raise _no(f"result: {error}", src) from error
    raise _no("result", src)


def pack_failure(failure: Failure) -> bytes:
    """Write a failure down."""
    return _ENCODE(failure)


def unpack_failure(content: Content, src: int) -> Failure:
    """Read a failure.

    Raises:
        ProtocolError: It is none.
    """
    try:
        if isinstance(content, bytes):
            return _DECODE_FAILURE(content)
    except Exception as error:
        raise _no(f"failure: {error}", src) from error
    raise _no("failure", src)


def error_of(name: str, peer: int, failure: Failure) -> Exception:
    """What a call raises that has failed."""
    if failure.kind is FailureKind.EXPIRED:
        return DistributedTimeoutError(f"rank {peer}: {failure.text}", ranks=(peer,))
    how = "{} failed on rank {}" if failure.kind is FailureKind.RAISED else "the call of {} on rank {}"
    return RpcError(
        f"{how.format(repr(name.removeprefix(OWN_NAMES)), peer)}: {failure.text}",
        ranks=(peer,),
        type_name=failure.type_name,
        traceback=failure.traceback,
    )


def _no(what: str, src: int) -> ProtocolError:
    return ProtocolError(f"rank {src} sent what is no {what}", ranks=(src,))
