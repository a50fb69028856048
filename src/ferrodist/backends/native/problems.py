"""Problems of single ranks as an engine is set up, which all ranks report as one error."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ferrodist.backends.signature import CollectiveSignature
from ferrodist.errors import BackendUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ferrodist.backends.base import Backend
    from ferrodist.deadline import Deadline

MAX_TEXT_BYTES = 100  # bytes of an error, or of an address, that travel with a collective call


def raise_if_any_failed(group: Backend, problem: str, what: str, deadline: Deadline) -> None:
    """Share every rank's problem, "" for none, and raise BackendUnavailable on all ranks if any has one.

    A collective call, named ``what``: the ability that the engine needs, such as "share memory".
    """
    answers = group.verifier.verify(
        CollectiveSignature(operation=what, payload=problem.encode()[:MAX_TEXT_BYTES]), deadline.remaining()
    )
    check_problems(group, answers, what)


def check_problems(group: Backend, answers: Iterable[bytes], what: str) -> None:
    """Raise BackendUnavailable if any text is not empty; the texts are those of all ranks, or this rank's own."""
    problems = dict.fromkeys(text.decode(errors="replace") for text in answers if text)
    if problems:
        raise BackendUnavailable(
            f"the ranks of group {group.name!r} can't {what}: {'; '.join(problems)}. Use the tcp backend, or"
            " fix the cause."
        )
