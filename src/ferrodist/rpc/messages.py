"""What agents say to each other: calls, results and failures, as nested values."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from ferrodist.collectives.letters import Parcel
from ferrodist.collectives.nested_values import Extension
from ferrodist.errors import ProtocolError

__all__ = ["EXTENSIONS", "MARKS", "Call", "Failure", "FailureKind", "Message", "Result", "pack", "unpack"]


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
    """Its time was over before its turn."""


@dataclass(frozen=True, slots=True)
class Call:
    """A function to be called.

    Args:
        number: Of the call, among its caller's.
        seconds: Until its caller waits no more.
        name: Of the function.
        arguments: By their places.
        keywords: By their names.
    """

    number: int
    seconds: float
    name: str
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Result:
    """What a function returned.

    Args:
        number: Of the call.
        value: It.
    """

    number: int
    value: Any


@dataclass(frozen=True, slots=True)
class Failure:
    """Why there is no result.

    Args:
        number: Of the call; -1 where it could not be read.
        kind: What went wrong.
        type_name: Of the exception.
        text: What it says.
        traceback: Where it was raised.
    """

    number: int
    kind: FailureKind
    type_name: str
    text: str
    traceback: str


Message: TypeAlias = Call | Result | Failure


def _take_array(value: Any) -> torch.Tensor | None:
    if not isinstance(value, np.ndarray):
        return None
    try:
        return torch.from_numpy(np.ascontiguousarray(value).reshape(value.shape))
    except TypeError:
        raise TypeError(f"numpy arrays of {value.dtype} don't go from rank to rank: convert it") from None


def _put_array(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.numpy()
    raise ValueError("an array that is no tensor")


EXTENSIONS = (Extension(mark="array", take_apart=_take_array, put_together=_put_array),)
"""What goes from rank to rank beside nested values."""

MARKS = tuple(extension.mark for extension in EXTENSIONS)


def pack(message: Message) -> Parcel:
    """Take a message apart.

    Raises:
        TypeError: Something in it can't travel; it is named.
    """
    value: dict[str, Any]
    match message:
        case Call(number, seconds, name, arguments, keywords):
            value = {"call": number, "seconds": seconds, "name": name, "arguments": arguments, "keywords": keywords}
            what = f"the call of {name!r}: "
        case Result(number, result):
            value, what = {"result": number, "value": result}, "the result: "
        case Failure(number, kind, type_name, text, traceback):
            value = {"failure": number, "kind": int(kind), "type": type_name, "text": text, "traceback": traceback}
            what = "the failure: "
    return Parcel.of(value, what, EXTENSIONS)


def unpack(parcel: Parcel, src: int) -> Message:
    """Put a message together again.

    Raises:
        ProtocolError: It is none.
    """
    try:
        match parcel.open(EXTENSIONS):
            case {
                "call": int(number),
                "seconds": float(seconds),
                "name": str(name),
                "arguments": tuple(arguments),
                "keywords": dict(keywords),
            }:
                return Call(number, seconds, name, arguments, keywords)
            case {"result": int(number), "value": value}:
                return Result(number, value)
            case {
                "failure": int(number),
                "kind": int(kind),
                "type": str(type_name),
                "text": str(text),
                "traceback": str(traceback),
            }:
                return Failure(number, FailureKind(kind), type_name, text, traceback)
    except (ValueError, TypeError) as error:
        raise ProtocolError(f"rank {src} sent what is no message of an agent: {error}", ranks=(src,)) from None
    raise ProtocolError(f"rank {src} sent what is no message of an agent", ranks=(src,))
