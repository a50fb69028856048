"""The errors that ferrodist raises.

::

    DistributedError(RuntimeError)
    |-- InvalidRankError       (ValueError)   a wrong argument: fix the call
    |-- InvalidWorldSizeError  (ValueError)   a wrong argument: fix the call
    |-- SelfSendError          (ValueError)   a wrong argument: fix the call
    |-- SizeMismatchError      (ValueError)   a message does not fit its receive buffer
    |-- UnsupportedOpError     (TypeError)    no backend or dtype here supports this
    |-- CollectiveMismatchError               ranks made different collective calls
    |-- GroupClosedError                      this rank closed the group
    |-- GroupAbortedError                     some rank called abort()
    |-- PeerLostError                         a rank died or left
    |-- DistributedTimeoutError (TimeoutError) a rank is late
    |-- NoConnectionError                     there never was a path to that rank
    |-- ProtocolError                         bytes that no ferrodist peer would send
    |-- AuthenticationError                   a peer does not know the job secret
    |-- RendezvousError                       the ranks could not all meet
    |-- BackendUnavailable                    the engine is not installed here
    |-- DistCheckpointError                   a checkpoint can't be written, or is missing or damaged
    |-- PipelineError                         a stage of a pipeline failed, on some rank
    |-- RpcError                              a function called on another rank failed, or does not exist
    `-- RankFailedError                       a rank's program failed (launcher, test kit)

Python's own ``ValueError`` and ``TypeError`` are raised for arguments that are plainly wrong. The first rank that
detects a failure reports it; every other rank raises the same class with the same facts, so every error can be pickled
and sent. Errors of collectives that a component of ferrodist calls name the component and its purpose
(`add_error_context`).
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
    "add_error_context",
    "describe_error",
    "describe_failed_program",
    "error_from_wire",
    "error_to_wire",
    "ranks_text",
]


class DistributedError(RuntimeError):
    """Base of all ferrodist errors.

    Args:
        message: A full sentence: what happened, where, and what to do.
        ranks: The ranks that the error is about (lost peers, stragglers), as numbered in the group it names.
    """

    def __init__(self, message: str, *, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.ranks = tuple(ranks)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__.copy())

    def fresh(self) -> DistributedError:
        """Return a copy to raise. Raising a stored error repeatedly would keep the frames of each time alive."""
        copy = _rebuild(type(self), self.args, self.__dict__.copy())
        copy.__cause__ = self.__cause__
        return copy

    @property
    def rank(self) -> int | None:
        """The rank that the error is about; None if it is about none or several."""
        return self.ranks[0] if len(self.ranks) == 1 else None


def _rebuild(kind: type[DistributedError], args: tuple[Any, ...], state: dict[str, Any]) -> DistributedError:
    """Create an error without calling ``__init__``, whose signature a subclass may have changed."""
    new = OSError.__new__ if issubclass(kind, OSError) else RuntimeError.__new__  # a TimeoutError is an OSError
    error = new(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class InvalidRankError(DistributedError, ValueError):
    """A rank outside 0..world_size-1, or one that is not a member of the group."""


class InvalidWorldSizeError(DistributedError, ValueError):
    """A world size below 1, or one that differs between ranks."""


class SelfSendError(DistributedError, ValueError):
    """A rank tried to send to, or receive from, itself."""


class SizeMismatchError(DistributedError, ValueError):
    """A message has another size than its receive buffer."""


class UnsupportedOpError(DistributedError, TypeError):
    """An operation that this backend, dtype or device does not support."""


class CollectiveMismatchError(DistributedError):
    """Ranks of one group made different collective calls at the same position of their programs."""


class GroupClosedError(DistributedError):
    """The group was closed on this rank before the call."""


class GroupAbortedError(DistributedError):
    """A rank deliberately ended the group with ``abort()``."""


class PeerLostError(DistributedError):
    """A rank of the group died, or left while others still needed it."""


class DistributedTimeoutError(DistributedError, TimeoutError):
    """A deadline passed; ``ranks`` are the stragglers, if known.

    Attributes:
        detail: Further facts about the cause: a clause that begins with a space, or empty. The message contains it.
    """

    detail = ""


class NoConnectionError(DistributedError):
    """There is no path to a rank.

    Attributes:
        relay: The lost rank that relayed messages to it, as numbered in the outermost group; None for another reason.
    """

    relay: int | None = None


class ProtocolError(DistributedError):
    """A peer sent bytes that do not follow the wire format."""


class AuthenticationError(DistributedError):
    """A peer could not prove that it knows the job secret."""


class RendezvousError(DistributedError):
    """The ranks of a job could not all meet."""


class BackendUnavailable(DistributedError):  # noqa: N818 - a public name
    """An engine that is not installed, or cannot run on this machine."""


class DistCheckpointError(DistributedError):
    """A checkpoint can't be written, is missing, or is damaged; the message names file and tensor."""


class PipelineError(DistributedError):
    """A stage of a pipeline failed; ``ranks`` has its rank."""


class _RemoteTraceback(Exception):  # noqa: N818 - never raised
    """A traceback from another rank, as the cause of an error here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class RpcError(DistributedError):
    """A function called on another rank raised, or does not exist.

    Args:
        message: A full sentence, as for all errors.
        ranks: The rank that was called.
        type_name: The class name of the error raised there, or empty.
        traceback: The traceback there, or empty; it is shown above this error's own.

    Attributes:
        type_name: The class name of the error raised there, or empty.
        remote_traceback: The traceback there, or empty.
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
    """Reduce an error to (class name, message, ranks), which any codec can encode.

    A class from elsewhere becomes the nearest one of this module. Text that UTF-8 can't encode, as in some file names,
    is escaped.
    """
    if not isinstance(error, DistributedError):
        return DistributedError.__name__, to_utf8(f"{type(error).__name__}: {error}"), ()
    nearest = next(kind for kind in type(error).__mro__ if _BY_NAME.get(kind.__name__) is kind)
    return nearest.__name__, to_utf8(error.message), error.ranks


def to_utf8(text: str) -> str:
    """Escape half surrogate pairs, as which Python keeps bytes of a path that are not UTF-8: msgpack refuses them."""
    return text.encode("utf-8", "backslashreplace").decode()


def error_from_wire(name: str, message: str, ranks: tuple[int, ...]) -> DistributedError:
    """Rebuild an error from `error_to_wire`'s triple; an unknown class becomes `DistributedError`.

    Names are looked up among this module's classes only, so that a peer can't make this process import or call
    anything.
    """
    return _BY_NAME.get(name, DistributedError)(message, ranks=tuple(ranks))


def describe_error(error: BaseException) -> str:
    """Describe any error in one line."""
    try:
        first_line = str(error).strip().partition("\n")[0]
    except Exception:  # noqa: BLE001 - an error must be reported even if its text can't be
        first_line = "it can't be put into words"
    return f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__


def describe_failed_program(error: BaseException) -> str:
    """Return the reason with which a rank aborts its group after ``error`` has ended its program."""
    return f"its program failed with {describe_error(error)}"


def ranks_text(ranks: Collection[int]) -> str:
    """Name one or more ranks in a message: "rank 3", or "ranks 1, 3"."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"


@contextlib.contextmanager
def add_error_context(what: Callable[[], str], advice: str) -> Iterator[None]:
    """Append a sentence about the current operation to the messages of errors between ranks.

    ``advice`` is for a straggler or a mismatched call. Class and ranks of the errors stay.
    """
    try:
        yield
    except DistributedError as error:
        extended = error.fresh()
        extended.message = f"{error.message.rstrip('.')}. {what()}"
        if isinstance(error, (CollectiveMismatchError, DistributedTimeoutError)):
            extended.message += f" {advice}"
        extended.args = (extended.message,)
        raise extended from error.__cause__
