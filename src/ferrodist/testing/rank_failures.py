"""From what went wrong on each rank to one error that a person can read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ferrodist.errors import RankFailedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrodist.testing.rank_program import Outcome

__all__ = ["rank_failed_error"]

_RULE = "-" * 8


def rank_failed_error(outcomes: Sequence[Outcome], world_size: int, notes: Sequence[str] = ()) -> RankFailedError:
    """Build the error for a run in which at least one of ``outcomes`` is a failure.

    The failures that started it come first in time order, each with its whole report (once, where ranks raised the
    same); what other ranks raised because of them follows in one line each.

    Args:
        outcomes: Of all ranks that have one, in any order.
        world_size: Number of ranks.
        notes: Sentences about the circumstances, put last.
    """
    failures = sorted((outcome for outcome in outcomes if outcome.failed), key=lambda outcome: outcome.time)
    first = [outcome for outcome in failures if not outcome.secondary] or failures[:1]
    others = [outcome for outcome in failures if outcome not in first]
    ranks = tuple(dict.fromkeys(outcome.rank for outcome in first))
    parts = [f"{_named(ranks)} of {world_size} failed: {first[0].summary}"]
    said: dict[tuple[str, str], Outcome] = {}
    for outcome in first:
        # One exception on every rank is one piece of news, though each rank came to it by its own path; two stuck ranks
        # are alike only if they are in the same place.
        where = "" if outcome.error is not None else outcome.report
        twin = said.setdefault((outcome.summary, where), outcome)
        if twin is outcome:
            parts.append(f"\n{_RULE} rank {outcome.rank} {_RULE}\n{outcome.report or outcome.summary}")
        else:
            parts.append(f"\n{_RULE} rank {outcome.rank}: the same as rank {twin.rank} {_RULE}")
    if others:
        parts.append("\nas a consequence:")
        parts.extend(f"  rank {outcome.rank}: {outcome.summary}" for outcome in others)
    parts.extend(f"\nnote: {note}" for note in notes)
    error = RankFailedError("\n".join(parts), ranks=ranks)
    error.__cause__ = next((outcome.error for outcome in first if outcome.error is not None), None)
    return error


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
