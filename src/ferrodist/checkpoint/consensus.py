"""All ranks go on, or all raise: what one rank can't do fails on every rank, with the same words."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, TypeVar

from ferrodist.collectives.objects import all_gather_object, broadcast_object
from ferrodist.errors import DistCheckpointError, DistributedError, add_error_context, describe_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ferrodist.backends.base import Backend
    from ferrodist.deadline import Deadline

_Result = TypeVar("_Result")


@contextlib.contextmanager
def all_or_none(
    what: str, where: str, group: Backend, deadline: Deadline, *, about_arguments: bool = True
) -> Iterator[None]:
    """At the end of the block all ranks learn whether it ended well everywhere; every rank of the group enters it.

    Args:
        what: What the block does: "to write a checkpoint", without the "to".
        where: The checkpoint; the same on all ranks.
        group: The ranks.
        deadline: When the others must have come.
        about_arguments: Whether `TypeError` and `ValueError` are about what this rank has passed.

    Raises:
        DistCheckpointError: On all ranks, when it failed on some, or was done at several places. Errors about
            arguments stay with their rank.
    """
    own: Exception | None = None
    try:
        yield
    except DistCheckpointError as error:
        own = error
    except DistributedError as error:
        if group.failure is not None:
            raise  # of the group: other ranks have it too
        own = error
    except Exception as error:  # noqa: BLE001 - told to all ranks, and raised below
        own = error
    with add_error_context(lambda: f"Rank {group.rank} was to {what} at {where}.", "Every rank must call it."):
        answers = all_gather_object(
            (_plain(where), None if own is None else _text(own)), group=group, timeout=deadline.remaining()
        )
    if own is not None:
        raise _typed(own, what, where, group.rank, about_arguments=about_arguments)
    for rank, (_, answer) in enumerate(answers):
        if answer is not None:
            raise _error(answer, what, where, rank)
    for rank, (other, _) in enumerate(answers):
        if other != answers[0][0]:
            raise DistCheckpointError(
                f"ranks were to {what} at one path, and rank 0 has {answers[0][0]}, rank {rank} {other}: choose it on"
                " one rank, and broadcast it",
                ranks=(0, rank),
            )


def call_on_all(function: Callable[[], _Result], what: str, where: str, group: Backend, deadline: Deadline) -> _Result:
    """What a function gives, when it has ended well on all ranks; see `all_or_none`."""
    results = []
    with all_or_none(what, where, group, deadline):
        results.append(function())
    return results[0]


def run_on_rank0(
    function: Callable[[], _Result], what: str, where: str, group: Backend, deadline: Deadline
) -> _Result | None:
    """Have rank 0 do something for all; every rank calls this, and it returns when rank 0 is done.

    Returns:
        On rank 0 what the function returns, elsewhere None.

    Raises:
        DistCheckpointError: On all ranks, when it failed.
    """
    result: _Result | None = None
    own: Exception | None = None
    if group.rank == 0:
        try:
            result = function()
        except Exception as error:  # noqa: BLE001 - told to all ranks, and raised below
            own = error
    with add_error_context(lambda: f"Rank {group.rank} was to {what} at {where}.", "Every rank must call it."):
        answer = broadcast_object(None if own is None else _text(own), group=group, timeout=deadline.remaining())
    if own is not None:
        raise _typed(own, what, where, 0)
    if answer is not None:
        raise _error(answer, what, where, 0)
    return result


def _text(error: Exception) -> list[object]:
    """What other ranks are told: whether it is a sentence of its own, the sentence, and which ranks it is about."""
    if isinstance(error, DistCheckpointError):
        return [True, _plain(error.message), list(error.ranks)]
    return [False, _plain(describe_error(error)), []]


def _plain(text: str) -> str:
    """Text that can be sent: a path may have bytes that are not UTF-8, which Python keeps as half surrogate pairs."""
    return text.encode("utf-8", "backslashreplace").decode()


def _error(answer: list[object], what: str, where: str, rank: int) -> DistCheckpointError:
    is_whole, text, ranks = answer
    if is_whole:
        return DistCheckpointError(str(text), ranks=tuple(ranks))  # type: ignore[arg-type] # as `_text` made it
    return DistCheckpointError(f"rank {rank} could not {what} at {where}: {text}", ranks=(rank,))


def _typed(error: Exception, what: str, where: str, rank: int, *, about_arguments: bool = True) -> Exception:
    """The error of this rank as it is raised here."""
    if isinstance(error, DistCheckpointError) or (about_arguments and isinstance(error, (TypeError, ValueError))):
        return error
    made = _error(_text(error), what, where, rank)
    made.__cause__ = error
    return made
