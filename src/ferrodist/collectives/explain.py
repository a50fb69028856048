"""Errors of collectives that a component calls say which one called them, and why: the user's program doesn't."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from ferrodist.errors import CollectiveMismatchError, DistributedError, DistributedTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["explain_errors"]


@contextlib.contextmanager
def explain_errors(what: Callable[[], str], advice: str) -> Iterator[None]:
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
