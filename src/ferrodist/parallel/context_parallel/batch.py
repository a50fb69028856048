"""`context_shard_batch`: a language model's batch, sharded along its tokens."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from ferrodist.arguments import check_int, check_type
from ferrodist.backends.process_group import resolve_group
from ferrodist.parallel.context_parallel.arguments import check_bounds
from ferrodist.parallel.context_parallel.layout import context_shard

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrodist.backends.base import Backend

_TAKEN = ("input_ids", "labels", "position_ids", "attention_mask")


def context_shard_batch(
    batch: Mapping[str, torch.Tensor],
    group: Backend | None = None,
    *,
    cu_seqlens: torch.Tensor | Sequence[int] | None = None,
    ignore_index: int = -100,
) -> dict[str, torch.Tensor]:
    """Shard a batch that every rank has whole into what a causal language model takes; nothing is sent.

    Labels are shifted before they are sharded, so that the last token of a rank's part predicts the first one of
    another's. The mean of the ranks' losses is the mean over all tokens of the whole batch, whichever rank has how many
    labels; so `DDP` or `FSDP` over the same ranks, which average gradients, give those of one process.

    Args:
        batch: ``input_ids`` of shape (B, T), and any of: ``labels`` (B, T), not shifted, as Hugging Face's models take
            them; ``position_ids`` (B, T) or (1, T); an ``attention_mask`` of ones.
        group: The group; None is the default group.
        cu_seqlens: Bounds of packed documents, as of `ring_attention`: positions begin anew in each, and its first
            token is predicted by none. Pass them to `context_parallel`, too.
        ignore_index: The label of tokens that don't count.

    Returns:
        A dict to call a model of Hugging Face with: ``input_ids`` and ``position_ids``; an ``attention_mask`` that
        stands for attention over the whole sequence, for `context_parallel` to find; with labels ``labels`` and
        ``shift_labels``, both shifted, and ``num_items_in_batch``, the number of labels of the whole batch divided by
        the number of ranks. A loss of one's own is a sum of cross entropies divided by that number.

    Raises:
        TypeError: ``batch`` is not a mapping of tensors.
        ValueError: ``input_ids`` is missing, shapes differ, an entry is unknown, the mask has padding, or no label
            counts.
    """
    chosen = resolve_group(group)
    ids = _check_batch(batch)
    length = ids.shape[1]
    bounds = (0, length) if cu_seqlens is None else check_bounds(cu_seqlens)
    if bounds[-1] != length:
        raise ValueError(f"cu_seqlens ends at {bounds[-1]}, and input_ids has {length} tokens")
    positions = batch.get("position_ids")
    if positions is None:
        starts = [start for start, stop in itertools.pairwise(bounds) for _ in range(start, stop)]
        positions = (torch.arange(length) - torch.tensor(starts, dtype=torch.int64))[None].to(ids.device)
    result = {
        "input_ids": context_shard(ids, 1, chosen),
        "position_ids": context_shard(positions.expand(ids.shape[0], -1), 1, chosen),
    }
    part = result["input_ids"].shape[1]
    result["attention_mask"] = torch.ones((), dtype=torch.bool, device=ids.device).expand(ids.shape[0], 1, part, part)
    labels = batch.get("labels")
    if labels is not None:
        shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=ignore_index)
        last = [stop - 1 for stop in bounds[1:] if stop]
        shifted[:, last] = ignore_index
        total = int((shifted != check_int("ignore_index", ignore_index)).sum())
        if not total:
            raise ValueError("labels has no label that counts, so that their mean is undefined: leave out this batch")
        result["labels"] = result["shift_labels"] = context_shard(shifted, 1, chosen)
        result["num_items_in_batch"] = torch.tensor(total / chosen.world_size, dtype=torch.float64, device=ids.device)
    return result


def _check_batch(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the ids; raises unless all entries are known and fit them."""
    check_type(batch, Mapping, "batch must be a mapping, as {'input_ids': ids, 'labels': ids}")
    if "input_ids" not in batch:
        raise ValueError("batch has no 'input_ids'")
    for name, each in batch.items():
        if name not in _TAKEN:
            raise ValueError(
                f"batch has {name!r}, of which it is not known whether it has tokens: shard it by context_shard, and"
                f" pass only {', '.join(_TAKEN)}"
            )
        check_type(each, torch.Tensor, f"batch[{name!r}] must be a torch.Tensor")
    ids = batch["input_ids"]
    if ids.dim() != 2 or ids.shape[1] == 0:
        raise ValueError(f"input_ids must be of shape (batch, tokens), with tokens, not {tuple(ids.shape)}")
    for name, each in batch.items():
        if each.shape != ids.shape and not (name == "position_ids" and each.shape == (1, ids.shape[1])):
            raise ValueError(f"{name} must be of the shape of input_ids, {tuple(ids.shape)}, not {tuple(each.shape)}")
    mask = batch.get("attention_mask")
    if mask is not None and not bool(mask.all()):
        raise ValueError(
            "attention_mask has padding, which context parallelism has no mask for: pack the sequences into one row,"
            " and pass their bounds as cu_seqlens"
        )
    return ids
