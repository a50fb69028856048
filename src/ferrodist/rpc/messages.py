"""What agents say to each other: calls, results and failures, and how they are written down.

[Note: forms]
What is plain, that is without tensors and without values in values, is written by msgspec at once, which is what most
calls are; everything else as a letter (`collectives/serialization.py`) of nested values.
"""

from __future__ import annotations

import dataclasses
import enum
import pickle
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
    from collections.abc import Iterable, Sequence

Content = bytes | PackedValue
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


_ARRAYS = frozenset({np.ndarray, np.memmap})
"""A masked array, a matrix, or a user's own kind is more than its elements."""


def _take_array(value: Any) -> torch.Tensor | None:
    if not isinstance(value, np.ndarray):
        return None
    if type(value) not in _ARRAYS:
        raise TypeError(
            f"is of type {type(value).__name__}, of which only the elements would arrive: pass numpy.asarray(...) of"
            " it, and what else belongs to it beside that"
        )
    try:
        tensor = torch.from_numpy(np.ascontiguousarray(value).reshape(value.shape))
        check_dtype(tensor.dtype)
    except (TypeError, ValueError):  # of a type, or an order of bytes, that tensors don't have
        raise TypeError(f"is a numpy array of {value.dtype}, which does not go from rank to rank: convert it") from None
    return tensor


def _take_array_that_fits(value: Any) -> torch.Tensor | None:
    try:
        return _take_array(value)
    except TypeError:
        return None


def _put_array(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.numpy()
    raise ValueError("an array that is no tensor")


ARRAYS = LeafCodec(tag="array", encode=_take_array, decode=_put_array)
"""Numpy arrays as tensors."""

EXTENSIONS = (ARRAYS,)
"""What goes from rank to rank beside nested values."""

EXTENSIONS_BESIDE_PICKLES = (dataclasses.replace(ARRAYS, encode=_take_array_that_fits),)
"""The same where `PICKLED` takes what they can't."""

REFERENCE_MARK = "rref"
"""Of references, whose extension each agent has its own of for each rank."""


def _take_object(value: Any) -> bytes | None:
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return None
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise TypeError(f"can't be pickled: {error}") from error


PICKLED = LeafCodec(tag="pickle", encode=_take_object, decode=pickle.loads)
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


def _check_tensor(tensor: torch.Tensor) -> None:
    if tensor.is_nested:
        raise TypeError("is a nested tensor: pass tensor.unbind()")
    try:
        check_tensor(tensor, "it")
    except (TypeError, NotImplementedError) as error:
        raise TypeError(f"is a tensor that does not go from rank to rank: {error}") from None


def _place_in(call: Call, text: str) -> str:
    """What an error says, with the place as who made the call knows it."""
    prefixes = {"[1]": "argument ", "[2]": "keyword "}
    if call.name.startswith(OWN_NAMES):  # the last two arguments are what a function is to have
        last = len(call.arguments) - 1
        prefixes = {f"[1][{last - 1}]": "argument ", f"[1][{last}]": "keyword "}
    for prefix, kind in prefixes.items():
        if text.startswith(f"{prefix}["):
            return kind + text.removeprefix(prefix)
    return text.lstrip()


def pack_call(call: Call, extensions: Sequence[LeafCodec]) -> Content:
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
        return PackedValue.of(value, "", extensions, _check_tensor)
    except TypeError as error:
        title = call.name.removeprefix(OWN_NAMES)
        raise TypeError(f"the call of {title!r}: {_place_in(call, str(error))}") from None


def unpack_call(content: Content, src: int, extensions: Sequence[LeafCodec]) -> Call:
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


def pack_result(value: Any, extensions: Sequence[LeafCodec]) -> Content:
    """Write down what a function has returned.

    Raises:
        TypeError: Something in it can't travel; it is named.
    """
    if type(value) in _PLAIN:
        try:
            return _ENCODE(value)
        except (OverflowError, UnicodeEncodeError):
            pass  # as above
    return PackedValue.of(value, "the result", extensions, _check_tensor)


def unpack_result(content: Content, src: int, extensions: Sequence[LeafCodec]) -> Any:
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
