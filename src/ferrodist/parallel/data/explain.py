"""Errors of collectives that DDP calls say that DDP called them: the user's program doesn't."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from ferrodist.errors import CollectiveMismatchError, DistributedError, DistributedTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["explain_errors"]


@contextlib.contextmanager
def explain_errors(what: Callable[[], str], advice: str) -> Iterator[None]:
    """Have errors between ranks that are raised inside the block say what DDP was doing; class and ranks stay.

    Args:
        what: Returns a sentence that says what DDP was doing.
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
