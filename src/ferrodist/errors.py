"""Every error ferrodist raises of its own.

::

    DistributedError(RuntimeError)            what            whose turn it is
    |-- InvalidRankError       (ValueError)   wrong argument   fix the call
    |-- InvalidWorldSizeError  (ValueError)   wrong argument   fix the call
    |-- SelfSendError          (ValueError)   wrong argument   fix the call
    |-- SizeMismatchError      (ValueError)   a message does not fit the buffer given for it
    |-- UnsupportedOpError     (TypeError)    no backend or dtype here can do this
    |-- CollectiveMismatchError               ranks called different things
    |-- GroupClosedError                      this rank closed the group
    |-- GroupAbortedError                     some rank called abort()
    |-- PeerLostError                         a rank died or left
    |-- DistributedTimeoutError (TimeoutError) a rank is late
    |-- NoConnectionError                     there never was a path to that rank
    |-- ProtocolError                         bytes that no ferrodist peer would send
    |-- AuthenticationError                   a peer does not know the job secret
    |-- RendezvousError                       the ranks could not all meet
    |-- BackendUnavailable                    the engine is not installed here
    |-- DistCheckpointError                   a checkpoint can't be written, or is not what was written
    |-- PipelineError                         a stage of a pipeline failed, on some rank
    |-- RpcError                              a function that was called on some rank failed, or is not there
    `-- RankFailedError                       a rank's program failed (launcher, test kit)

``ValueError`` and ``TypeError`` of Python itself are raised for arguments that are wrong on their face. The first rank
that detects a failure reports it; every other rank raises the same class with the same facts, so each error pickles and
crosses process boundaries whole.

Errors of collectives that a component calls say which one called them, and why: the user's program doesn't.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

__all__ = [
    "AuthenticationError",
    "BackendUnavailable",
    "CollectiveMismatchError",
    "DistCheckpointError",
    "DistributedError",
    "DistributedTimeoutError",
    "GroupAbortedError",
    "GroupClosedError",
    "InvalidRankError",
    "InvalidWorldSizeError",
    "NoConnectionError",
    "PeerLostError",
    "PipelineError",
    "ProtocolError",
    "RankFailedError",
    "RendezvousError",
    "RpcError",
    "SelfSendError",
    "SizeMismatchError",
    "UnsupportedOpError",
    "describe_error",
    "describe_failed_program",
    "error_from_wire",
    "error_to_wire",
    "ranks_text",
]


class DistributedError(RuntimeError):
    """Base of all ferrodist errors.

    Args:
        message: A whole sentence: what happened, where, and what to do.
        ranks: The ranks the error is about (the lost peers, the late ranks), in the numbering of the group it names.
    """

    def __init__(self, message: str, *, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.ranks = tuple(ranks)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__.copy())

    def fresh(self) -> DistributedError:
        """A copy to raise. What is kept and raised again and again would keep the frames of each time alive."""
        copy = _rebuild(type(self), self.args, self.__dict__.copy())
        copy.__cause__ = self.__cause__
        return copy

    @property
    def rank(self) -> int | None:
        """The rank the error is about, or None when it is about none or several."""
        return self.ranks[0] if len(self.ranks) == 1 else None


def _rebuild(kind: type[DistributedError], args: tuple[Any, ...], state: dict[str, Any]) -> DistributedError:
    """Make an error without its ``__init__``, whose signature a subclass may have changed."""
    new = OSError.__new__ if issubclass(kind, OSError) else RuntimeError.__new__  # a TimeoutError is an OSError
    error = new(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class InvalidRankError(DistributedError, ValueError):
    """A rank outside 0..world_size-1, or one that is not a member of the group."""


class InvalidWorldSizeError(DistributedError, ValueError):
    """A world size below 1, or one that other ranks do not agree with."""


class SelfSendError(DistributedError, ValueError):
    """A rank tried to send to, or receive from, itself."""


class SizeMismatchError(DistributedError, ValueError):
    """A message has another size than the buffer it was to be received into."""


class UnsupportedOpError(DistributedError, TypeError):
    """An operation that this backend, dtype or device cannot do."""


class CollectiveMismatchError(DistributedError):
    """Ranks of one group made different collective calls at the same position of their programs."""


class GroupClosedError(DistributedError):
    """The group was closed on this rank before the call."""


class GroupAbortedError(DistributedError):
    """A rank ended the group on purpose with ``abort()``."""


class PeerLostError(DistributedError):
    """A rank of the group died, or left while others still counted on it."""


class DistributedTimeoutError(DistributedError, TimeoutError):
    """A deadline passed; ``ranks`` are those that were waited for, where known.

    Attributes:
        detail: What else is known of who is to blame: a clause with a space in front, or empty. The message has it.
    """

    detail = ""


class NoConnectionError(DistributedError):
    """There is no path to a rank.

    Attributes:
        relay: The rank that passed on messages on the way to it and is gone, in the numbers of the outermost group;
            None where it is another reason.
    """

    relay: int | None = None


class ProtocolError(DistributedError):
    """A peer sent bytes that do not follow the wire format."""


class AuthenticationError(DistributedError):
    """A peer could not prove that it knows the job secret."""


class RendezvousError(DistributedError):
    """The ranks of a job could not all meet."""


class BackendUnavailable(DistributedError):  # noqa: N818 - the name the crate gave it
    """An engine that is not installed, or cannot run on this machine."""


class DistCheckpointError(DistributedError):
    """A checkpoint can't be written, is not there, or is not what was written; the message names file and tensor."""


class PipelineError(DistributedError):
    """A stage of a pipeline failed; ``ranks`` has its rank."""


class _RemoteTraceback(Exception):  # noqa: N818 - never raised
    """What was printed on another rank, as the cause of an error here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class RpcError(DistributedError):
    """A function that was called on another rank raised, or there is none.

    Args:
        message: As for all.
        ranks: The rank that was called.
        type_name: Of what was raised there, or empty.
        traceback: Of it, or empty; it is shown above this one's own.

    Attributes:
        type_name: As given.
        remote_traceback: The traceback.
    """

    def __init__(self, message: str, *, ranks: tuple[int, ...] = (), type_name: str = "", traceback: str = "") -> None:
        super().__init__(message, ranks=ranks)
        self.type_name = type_name
        self.remote_traceback = traceback
        if traceback:
            self.__cause__ = _RemoteTraceback(traceback)


class RankFailedError(DistributedError):
    """The program of one or more ranks failed; the message carries their tracebacks."""


_BY_NAME: dict[str, type[DistributedError]] = {
    name: kind
    for name, kind in list(globals().items())
    if isinstance(kind, type) and issubclass(kind, DistributedError)
}


def error_to_wire(error: BaseException) -> tuple[str, str, tuple[int, ...]]:
    """Reduce an error to (class name, message, ranks), which any codec can carry.

    A class from elsewhere becomes the nearest one of this module. What UTF-8 can't carry, as in some file names,
    becomes an escape.
    """
    if not isinstance(error, DistributedError):
        return DistributedError.__name__, _sendable(f"{type(error).__name__}: {error}"), ()
    nearest = next(kind for kind in type(error).__mro__ if _BY_NAME.get(kind.__name__) is kind)
    return nearest.__name__, _sendable(error.message), error.ranks


def _sendable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def error_from_wire(name: str, message: str, ranks: tuple[int, ...]) -> DistributedError:
    """Rebuild an error from `error_to_wire`'s triple; an unknown class becomes `DistributedError`.

    Names are looked up among this module's classes only, so a peer cannot make this process import or call anything.
    """
    return _BY_NAME.get(name, DistributedError)(message, ranks=tuple(ranks))


def describe_error(error: BaseException) -> str:
    """Any error in one line."""
    try:
        first_line = str(error).strip().partition("\n")[0]
    except Exception:  # noqa: BLE001 - others are to be told all the same
        first_line = "it can't be put into words"
    return f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__


def describe_failed_program(error: BaseException) -> str:
    """The reason for which a rank aborts its group when ``error`` has ended its program."""
    return f"its program failed with {describe_error(error)}"


def ranks_text(ranks: Collection[int]) -> str:
    """How messages name ranks, of which there is at least one: "rank 3", or "ranks 1, 3"."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"


@contextlib.contextmanager
def add_error_context(what: Callable[[], str], advice: str) -> Iterator[None]:
    """Have errors between ranks that are raised inside the block say what was being done; class and ranks stay.

    Args:
        what: Returns a sentence that says what was being done.
        advice: What to look for when a rank is late or called something else.
    """
    try:
        yield
    except DistributedError as error:
        told = error.fresh()
        told.message = f"{error.message.rstrip('.')}. {what()}"
        if isinstance(error, (CollectiveMismatchError, DistributedTimeoutError)):
            told.message += f" {advice}"
        told.args = (told.message,)
        raise told from error.__cause__
