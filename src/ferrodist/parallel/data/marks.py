"""What a bucket carries behind its gradients: whose they are, and which of them are there.

[Note: presence]
A bucket carries two elements more for each parameter: 1 and 0 from a rank that has a gradient for it, 0 and 1 from one
that has none, 0 and 0 from one that has run out of batches (`DDP.join`). Their mean tells a gradient that all ranks
have from one that some have and from one that no rank has. Two, since the share of the ranks in one element would round
to 1 where there are many ranks and the dtype has few bits; above 0 is above 0 in any dtype.

[Note: marks]
Buckets of two models may have one size and dtype, and then a collective can't tell them apart. A bucket therefore
carries two elements more for each rank, its *mark*: the number of the model within the group and that of the bucket
within the model. Each rank fills in its own mark and leaves the others 0, so that the mean over the ranks has all of
them, divided by the number of ranks. Every rank compares them before it looks at a gradient, and all come to the same
verdict; no message is added. Numbers go from 1 to 127 and then start again, for bfloat16 has 8 bits to tell their
quotients apart: models 127 apart are not told apart.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ferrodist.errors import CollectiveMismatchError, ranks_text

if TYPE_CHECKING:
    from ferrodist.backends.base import Backend

__all__ = ["MARK_SIZE", "check_marks", "make_mark", "model_title", "number_model"]

MARK_SIZE = 2
"""Elements of one rank's mark."""

_KEY = "parallel.data.models"
_HIGHEST = 127


def number_model(group: Backend, name: str) -> int:
    """Give a model the next number of its group, from 0; ranks number their models in the same order."""
    names: list[str] = group.attachments.setdefault(_KEY, [])
    names.append(name)
    return len(names) - 1


def model_title(group: Backend, number: int) -> str:
    """How error messages call a model that `number_model` has numbered, as "DDP model 0 (Linear)"."""
    return f"DDP model {number} ({group.attachments[_KEY][number]})"


def make_mark(model: int, bucket: int) -> tuple[float, float]:
    """The mark of a bucket of a model, by their numbers."""
    return float(model % _HIGHEST + 1), float(bucket % _HIGHEST + 1)


def check_marks(marks: list[complex], group: Backend) -> None:
    """Compare the marks of all ranks after the mean.

    Args:
        marks: One after the other, ``world_size * MARK_SIZE`` numbers.
        group: The group.

    Raises:
        CollectiveMismatchError: On every rank, when two differ, naming both. The group has failed.
    """
    if marks == marks[:MARK_SIZE] * group.world_size:
        return
    senders: dict[str, list[int]] = {}
    for rank in range(group.world_size):
        mark = [part.real * group.world_size for part in marks[rank * MARK_SIZE : (rank + 1) * MARK_SIZE]]
        senders.setdefault(_describe(group, mark), []).append(rank)
    odd = min(senders.values(), key=len)
    if "" in senders:  # what another rank sent lies over all marks, so they don't tell who it was
        said = "some rank called an allreduce of its own where the others averaged gradients"
    else:
        said = "; ".join(f"{ranks_text(ranks)} averaged {what}" for what, ranks in senders.items())
    error = CollectiveMismatchError(
        f"the backwards of the ranks of group {group.name!r} are out of step: {said}. Every rank must run the backwards"
        " of its DDP models in the same order, and as many of each.",
        ranks=tuple(odd) if len(senders) == 2 and 2 * len(odd) < group.world_size else (),
    )
    group.abort(error)
    raise error


def _describe(group: Backend, mark: list[float]) -> str:
    """Say which bucket a mark stands for; nothing if it is none."""
    if not all(math.isfinite(part) for part in mark):
        return ""
    model, bucket = (round(part) - 1 for part in mark)
    if not (0 <= model < _HIGHEST and 0 <= bucket < _HIGHEST):
        return ""
    models = range(model, len(group.attachments[_KEY]), _HIGHEST)
    return " or ".join(f"bucket {bucket} of {model_title(group, number)}" for number in models)
