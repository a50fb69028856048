"""Which model's bucket a message belongs to, so that ranks that are out of step don't average what doesn't belong.

[Note: marks]
Buckets of two models may have one size and dtype, and then a collective can't tell them apart. A bucket therefore
carries two elements more for each rank, its *mark*: the number of the model within the group and that of the bucket
within the model. Each rank fills in its own mark and leaves the others 0, so that the mean over the ranks has all of
them, divided by the number of ranks. Every rank compares them before it looks at a gradient, and all come to the same
verdict; no message is added. Numbers go from 1 to 127 and then start again, for bfloat16 has 8 bits to tell their
quotients apart.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from ferrodist.errors import CollectiveMismatchError, ranks_text

if TYPE_CHECKING:
    from ferrodist.backends.base import Backend

__all__ = ["MARK_SIZE", "check_marks", "model_title", "number_model", "write_marks"]

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


def write_marks(marks: torch.Tensor, group: Backend, model: int, bucket: int) -> None:
    """Fill in this rank's mark.

    Args:
        marks: Shape (world_size, MARK_SIZE).
        group: The group.
        model: Its number.
        bucket: Its number.
    """
    marks.zero_()
    marks[group.rank, 0] = model % _HIGHEST + 1
    marks[group.rank, 1] = bucket % _HIGHEST + 1


def check_marks(marks: torch.Tensor, group: Backend) -> None:
    """Compare the marks of all ranks after the mean.

    Raises:
        CollectiveMismatchError: On every rank, when two differ, naming both. The group has failed.
    """
    if torch.equal(marks, marks[:1].expand_as(marks)):
        return
    senders: dict[str, list[int]] = {}
    for rank, mark in enumerate((marks.real.double() * group.world_size).tolist()):
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
