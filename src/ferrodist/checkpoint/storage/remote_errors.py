"""What file systems of fsspec raise, as OSError. Each raises what its own libraries do."""

from __future__ import annotations

import contextlib
import errno
from typing import TYPE_CHECKING

from ferrodist.errors import describe_error

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["as_os_errors", "to_os_error", "was_refused"]

_NUMBERS: dict[type[OSError], int] = {
    FileNotFoundError: errno.ENOENT,
    PermissionError: errno.EACCES,
    FileExistsError: errno.EEXIST,
    IsADirectoryError: errno.EISDIR,
    NotADirectoryError: errno.ENOTDIR,
    TimeoutError: errno.ETIMEDOUT,
}
"""Of those that are raised with a text alone."""

_REFUSALS = (FileNotFoundError, PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError)


@contextlib.contextmanager
def as_os_errors(where: str) -> Iterator[None]:
    """Raise OSError for everything that the block raises.

    Args:
        where: The file, for the message.
    """
    try:
        yield
    except Exception as error:  # libraries of file systems raise classes that share nothing
        raise to_os_error(error, where) from error


def to_os_error(error: BaseException, where: str) -> OSError:
    """The OSError that says what an error does, of the subclass that its number has."""
    if not isinstance(error, OSError):
        return OSError(errno.EIO, describe_error(error), where)
    number = error.errno
    if number is None:
        number = next((number for kind, number in _NUMBERS.items() if isinstance(error, kind)), errno.EIO)
    text = error.strerror or (str(error).strip().partition("\n")[0]) or type(error).__name__
    return OSError(number, text, where)


def was_refused(error: OSError) -> bool:
    """Whether the store has answered, with a no; without an answer, what was asked for may still happen."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(getattr(cause, "response", None), dict):  # botocore's: what the server sent
            return True
        cause = cause.__cause__
    return isinstance(error, _REFUSALS)
