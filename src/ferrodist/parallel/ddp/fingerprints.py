"""The models of a group, and fingerprints in their buckets, which tell them apart without a message of their own.

[Note: fingerprints]
Buckets of two models may have one size and dtype, so that a collective can't tell them apart. A bucket therefore
carries two more elements for each rank, the rank's *fingerprint*: the id of the model within the group and the index of
the bucket within the model. Each rank writes its own fingerprint and leaves the others 0, so that the mean over the
ranks holds all of them, divided by the number of ranks. Every rank compares them before it uses a gradient, and all
reach the same verdict without another message. In a fingerprint ids go from 1 to 127 and then start again, since
bfloat16 has 8 bits to tell the quotients apart: two models whose ids differ by 127 look alike.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ferrodist.errors import CollectiveMismatchError, ranks_text

if TYPE_CHECKING:
    from ferrodist.backends.base import Backend

FINGERPRINT_SIZE = 2  # elements of one rank's fingerprint

_ATTACHMENT = "parallel.ddp.models"  # the group attachment with the titles of its models, by id
_ID_MODULUS = 127


def register_model(group: Backend, name: str, *, wrapper: str = "DDP") -> int:
    """Return a model's id within its group, from 0; ranks register their models in the same order."""
    titles: list[str] = group.attachments.setdefault(_ATTACHMENT, [])
    titles.append(f"{wrapper} model {len(titles)} ({name})")
    return len(titles) - 1


def model_title(group: Backend, model_id: int) -> str:
    """The model's name in error messages, such as "DDP model 0 (Linear)"."""
    title: str = group.attachments[_ATTACHMENT][model_id]
    return title


def bucket_fingerprint(model_id: int, bucket_index: int) -> tuple[float, float]:
    """The fingerprint of a bucket; see [Note: fingerprints]."""
    return float(model_id % _ID_MODULUS + 1), float(bucket_index % _ID_MODULUS + 1)


def verify_fingerprints(fingerprints: list[complex], group: Backend) -> None:
    """Compare the fingerprints of all ranks after the mean."""
    if fingerprints == fingerprints[:FINGERPRINT_SIZE] * group.world_size:
        return
    senders: dict[str, list[int]] = {}
    for rank in range(group.world_size):
        own = fingerprints[rank * FINGERPRINT_SIZE : (rank + 1) * FINGERPRINT_SIZE]
        described = _describe(group, [element.real * group.world_size for element in own])
        senders.setdefault(described, []).append(rank)
    odd = min(senders.values(), key=len)
    if "" in senders:  # another rank's data covers all fingerprints, so they don't tell whose it was
        what_happened = "some rank called an allreduce of its own where the others averaged gradients"
    else:
        what_happened = "; ".join(f"{ranks_text(ranks)} averaged {what}" for what, ranks in senders.items())
    error = CollectiveMismatchError(
        f"the ranks of group {group.name!r} are out of step: {what_happened}. Every rank must average its models in"
        " the same order, and each as often as the others: backward passes of DDP, step() of LocalSGD and DiLoCo.",
        ranks=tuple(odd) if len(senders) == 2 and 2 * len(odd) < group.world_size else (),
    )
    group.abort(error)
    raise error


def _describe(group: Backend, fingerprint: list[float]) -> str:
    """Name the bucket of a fingerprint; empty for other numbers."""
    if not all(math.isfinite(element) for element in fingerprint):
        return ""
    model_id, bucket_index = (round(element) - 1 for element in fingerprint)
    if not (0 <= model_id < _ID_MODULUS and 0 <= bucket_index < _ID_MODULUS):
        return ""
    candidates = range(model_id, len(group.attachments[_ATTACHMENT]), _ID_MODULUS)
    return " or ".join(f"bucket {bucket_index} of {model_title(group, candidate)}" for candidate in candidates)
