"""`context_shard_batch`: a language model's batch, sharded along its tokens."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from ferrodist.arguments import check_bool, check_int, check_type
from ferrodist.backends.process_group import resolve_group
from ferrodist.parallel.context_parallel.agreement import Call, compare_calls
from ferrodist.parallel.context_parallel.arguments import check_bounds
from ferrodist.parallel.context_parallel.layout import check_local, context_shard, local_length
from ferrodist.wording import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from ferrodist.backends.base import Backend

_TAKEN = ("input_ids", "labels", "position_ids", "attention_mask")
_NEEDED = ("input_ids", "position_ids", "attention_mask")  # of a model's forward, by name
_PASSED_ON = ("shift_labels", "num_items_in_batch", "ignore_index")  # by the forward to the loss, perhaps unnamed
_OF_LABELS = ("labels", "shift_labels", "num_items_in_batch")
_true: dict[torch.device, torch.Tensor] = {}  # the one element of all masks of a device, by which they are known


def context_shard_batch(
    batch: Mapping[str, torch.Tensor],
    group: Backend | None = None,
    *,
    cu_seqlens: torch.Tensor | Sequence[int] | None = None,
    ignore_index: int = -100,
    model: nn.Module | None = None,
    check: bool = False,
) -> dict[str, Any]:
    """Shard a batch that every rank has whole into what a causal language model takes; only ``check`` sends something.

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
        model: The model that will be called with the result, to be checked; it may be in `DDP` or `FSDP`. Models that
            take any keyword arguments ignore those that they don't know, and are wrong without an error.
        check: Whether the ranks, all of which must call this, compare their batches by digests; different ones are
            wrong without an error. A wrong argument on one rank is an error on all then.

    Returns:
        A dict: ``input_ids`` and ``position_ids``; an ``attention_mask`` that stands for attention over the whole
        sequence, for `context_parallel` to find; with labels ``labels`` and ``shift_labels``, both shifted,
        ``num_items_in_batch``, the number of labels of the whole batch divided by the number of ranks, and
        ``ignore_index``, if it is not -100, which Hugging Face's loss takes. A loss of one's own is a sum of cross
        entropies divided by that number.

        A model can be called with it if its forward takes ``position_ids`` and uses no other positions, hands the mask
        to `torch.nn.functional.scaled_dot_product_attention` as it is, has no sliding window that is shorter than the
        sequence, and computes its loss of ``shift_labels`` and ``num_items_in_batch``, as Hugging Face's Llama and
        models like it do. ``model=`` checks names and windows, but not what a forward does with what it takes.

    Raises:
        TypeError: ``batch`` is not a mapping of tensors, or the forward of ``model`` does not take an entry.
        ValueError: ``input_ids`` is missing, shapes differ, an entry is unknown, the mask has padding, no label
            counts, a rank would have no token, or ``model`` has sliding windows, layers that are not attention, an
            ``attn_implementation`` other than "sdpa", or positions of its own (RoBERTa's) and ``batch`` has none.
        CollectiveMismatchError: On all ranks, with ``check``: the ranks' batches or options differ.
    """
    chosen = resolve_group(group)
    check_bool("check", check)
    if not check:
        return _shard_batch(batch, chosen, cu_seqlens, ignore_index, model)
    result: dict[str, Any] = {}

    def describe() -> Call:
        bounds = None if cu_seqlens is None else check_bounds(cu_seqlens)
        result.update(_shard_batch(batch, chosen, bounds, ignore_index, model))
        entries = ", ".join(f"{name} {_describe_tensor(batch[name])}" for name in sorted(batch))
        return Call(f"{entries}, cu_seqlens={bounds}, ignore_index={ignore_index}", ())

    compare_calls("context_shard_batch", describe, chosen)
    return result


def _describe_tensor(tensor: torch.Tensor) -> str:
    """The dtype, the shape and a digest of a tensor."""
    elements = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    digest = xxhash.xxh3_64_hexdigest(elements.data)
    return f"{tensor.dtype} of shape {tuple(tensor.shape)} and digest {digest}"


def _shard_batch(
    batch: Mapping[str, torch.Tensor],
    group: Backend,
    cu_seqlens: torch.Tensor | Sequence[int] | None,
    ignore_index: int,
    model: nn.Module | None,
) -> dict[str, Any]:
    """Check the arguments of `context_shard_batch` on this rank, and return its result."""
    ids = _check_batch(batch)
    length = ids.shape[1]
    bounds = (0, length) if cu_seqlens is None else check_bounds(cu_seqlens)
    if bounds[-1] != length:
        raise ValueError(f"cu_seqlens ends at {bounds[-1]}, and input_ids has {length} tokens")
    if not all(local_length(length, group.world_size, rank) for rank in range(group.world_size)):
        raise ValueError(
            f"input_ids has {counted(length, 'token')}, and each of {counted(group.world_size, 'rank')} must have one"
        )
    needed: tuple[str, ...] = _NEEDED
    if "labels" in batch:
        needed += _OF_LABELS if check_int("ignore_index", ignore_index) == -100 else (*_OF_LABELS, "ignore_index")
    if model is not None:
        _check_model(model, length, needed, has_positions="position_ids" in batch)
    positions = batch.get("position_ids")
    if positions is None:
        starts = [start for start, stop in itertools.pairwise(bounds) for _ in range(start, stop)]
        positions = (torch.arange(length) - torch.tensor(starts, dtype=torch.int64))[None].to(ids.device)
    result: dict[str, Any] = {
        "input_ids": context_shard(ids, 1, group),
        "position_ids": context_shard(positions.expand(ids.shape[0], -1), 1, group),
    }
    part = result["input_ids"].shape[1]
    one = _true.setdefault(ids.device, torch.ones((), dtype=torch.bool, device=ids.device))
    result["attention_mask"] = one.expand(ids.shape[0], 1, part, part)
    labels = batch.get("labels")
    if labels is not None:
        shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=ignore_index)
        last = [stop - 1 for stop in bounds[1:] if stop]
        shifted[:, last] = ignore_index
        total = int((shifted != ignore_index).sum())
        if not total:
            raise ValueError("labels has no label that counts, so that their mean is undefined: leave out this batch")
        result["labels"] = result["shift_labels"] = context_shard(shifted, 1, group)
        result["num_items_in_batch"] = torch.tensor(total / group.world_size, dtype=torch.float64, device=ids.device)
        if ignore_index != -100:
            result["ignore_index"] = ignore_index
    return result


def stands_for_all(mask: torch.Tensor) -> bool:
    """True if a mask is that of `context_shard_batch`, or a view of it."""
    one = _true.get(mask.device)
    return one is not None and mask.untyped_storage().data_ptr() == one.untyped_storage().data_ptr()


def _check_model(model: nn.Module, length: int, needed: tuple[str, ...], *, has_positions: bool) -> None:
    """Raise unless a model takes all entries, and has no attention that `context_parallel` can't stand for."""
    check_type(model, torch.nn.Module, "model must be a torch.nn.Module")
    while isinstance(inner := getattr(model, "module", None), torch.nn.Module):  # of DDP or FSDP
        model = inner
    name = type(model).__name__
    takes = inspect.signature(model.forward).parameters
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in takes.values())
    missing = [each for each in needed if each not in takes and not (takes_any and each in _PASSED_ON)]
    loss = getattr(model, "loss_function", None)
    if callable(loss):
        of_loss = inspect.signature(loss).parameters
        missing += [f"{each} (of its loss_function)" for each in needed if each in _PASSED_ON and each not in of_loss]
    if missing:
        raise TypeError(
            f"{name} can't be called with a sharded batch: it does not take {', '.join(missing)} by name, and would be"
            " wrong without an error"
        )
    if not has_positions and any(hasattr(each, "create_position_ids_from_input_ids") for each in model.modules()):
        raise ValueError(
            f"{name} numbers positions in a way of its own (those of Hugging Face's RoBERTa begin after the index of"
            " padding): pass position_ids in the batch, as the model would make them of the whole sequence"
        )
    config = getattr(model, "config", None)
    if config is not None:
        _check_config(name, config, length)


def _check_config(name: str, config: Any, length: int) -> None:
    """Raise unless a model's attention is torch's, of the whole sequence."""
    if callable(getattr(config, "get_text_config", None)):
        config = config.get_text_config()
    implementation = getattr(config, "_attn_implementation", None) or "sdpa"
    if implementation != "sdpa":
        raise ValueError(f'{name} has attn_implementation={implementation!r}: make it with attn_implementation="sdpa"')
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["full_attention" if window is None else "sliding_attention"]
    for kind in kinds:
        if kind == "sliding_attention" and (window is None or window < length):
            raise ValueError(
                f"{name} has layers with a sliding window of {window} tokens, and the sequence has {length}:"
                " context_parallel has no windows. Set the config's sliding_window to None, or to at least the"
                " sequence's length"
            )
    if (kind := find_other_kind(config, length)) is not None:
        raise ValueError(f"{name} has layers of the kind {kind!r}, and context_parallel has only full attention")


def find_other_kind(config: Any, length: int) -> str | None:
    """The kind of a transformers model's layers that mix tokens otherwise than by attention to all or in a window."""
    if getattr(config, "trigram_input", False):  # MobileBERT's embeddings are joined with those of both neighbours
        return "trigram_input"
    for kind in dict.fromkeys(getattr(config, "layer_types", None) or ()):
        chunk = getattr(config, "attention_chunk_size", None) if kind == "chunked_attention" else None
        if kind not in {"sliding_attention", "full_attention"} and (chunk is None or chunk < length):
            return str(kind)
    return None


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
        check_local("context_shard_batch", each, f"batch[{name!r}]", "pass its full_tensor()")
    ids = batch["input_ids"]
    if ids.dim() != 2 or ids.shape[1] == 0:
        raise ValueError(f"input_ids must be of shape (batch, tokens), with tokens, not {tuple(ids.shape)}")
    for name, each in batch.items():
        if each.shape != ids.shape and not (name == "position_ids" and each.shape == (1, ids.shape[1])):
            raise ValueError(f"{name} must be of the shape of input_ids, {tuple(ids.shape)}, not {tuple(each.shape)}")
    for name in ("input_ids", "labels", "position_ids"):
        if name in batch and batch[name].dtype not in (torch.int64, torch.int32):
            raise TypeError(f"batch[{name!r}] must be of int64 or int32, not {batch[name].dtype}")
    mask = batch.get("attention_mask")
    if mask is not None and not bool(mask.all()):
        raise ValueError(
            "attention_mask has padding, which context parallelism has no mask for: pack the sequences into one row,"
            " and pass their bounds as cu_seqlens"
        )
    return ids
