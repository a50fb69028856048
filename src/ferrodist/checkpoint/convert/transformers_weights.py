"""Names and layouts of a transformers model's weights in its files, where they are not those of the module.

transformers 5 renames tensors when it loads them, stacks those of experts, and joins or splits projections. Its own
tables and its own matching of names are used here; its operations on tensors become operations on entries of a
manifest, which say where in the files the boxes of a tensor lie. So a rank can read any part of a tensor that
transformers would have to load whole.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field
from importlib import import_module
from math import prod
from typing import TYPE_CHECKING, Any

from ferrodist.checkpoint.format.manifest import Manifest, ShardEntry, TensorEntry
from ferrodist.checkpoint.format.safetensors import dtype_from_name
from ferrodist.errors import DistCheckpointError
from ferrodist.tensor.box import Box

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    Shapes = Mapping[str, tuple[int, ...]]
    """The full shapes of a module's tensors by name."""
    Collected = dict[str, list[TensorEntry]]
    """Tensors by the pattern of a conversion that they match, as transformers' operations take them."""


def convert_entries(files: Manifest, module: torch.nn.Module, shapes: Shapes, where: str) -> dict[str, TensorEntry]:
    """Return the tensors that a transformers model makes of those in files, by the model's names.

    Tensors that the model doesn't have keep their names; those that it ignores are left out.

    Args:
        files: The tensors in the files.
        module: The model.
        shapes: The full shapes of its tensors.
        where: The folder, for errors.

    Raises:
        DistCheckpointError: A tensor is made by an operation that mixes elements, such as a transposition; or two
            tensors of the files get one name.
    """
    try:
        loading = import_module("transformers.core_model_loading")
        transforms = import_module("transformers.conversion_mapping").get_model_conversion_mapping(module)
    except (ImportError, AttributeError):  # transformers 4, whose models have the names of their files
        return dict(files.tensors)
    names = _Names(loading, transforms, module, shapes)
    found: dict[str, TensorEntry] = {}
    unexpected: dict[str, TensorEntry] = {}
    jobs: dict[str, _Conversion] = {}
    for source in sorted(files.tensors, key=loading.dot_natural_key):
        name, pattern = names.match(source)
        if name not in shapes:
            if not (ignores(module, name, "unexpected") or ignores(module, source, "unexpected")):
                unexpected[source] = files.tensors[source]
        elif pattern is None:
            if name in found:
                raise DistCheckpointError(f"{where} has two tensors that are {name!r} in the model, one {source!r}")
            found[name] = files.tensors[source]
        else:
            job = jobs.setdefault(name, _Conversion(names.converter(pattern), where))
            job.collected.setdefault(pattern, []).append(files.tensors[source])
            job.sources.append(source)
    for name, job in jobs.items():
        found.update(job.run(name, shapes, module))
    return {**unexpected, **found}


def ignores(module: torch.nn.Module, name: str, problem: str) -> bool:
    """Return whether a transformers model says that a tensor may be ``"missing"`` or ``"unexpected"``."""
    patterns = list(getattr(module, f"_keys_to_ignore_on_load_{problem}", None) or ())
    if problem == "unexpected":
        patterns += [r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"]  # buffers that were saved by older versions
    return any(re.search(pattern, name) for pattern in patterns)


class _Names:
    """transformers' matching of the names in files with those of a model."""

    def __init__(self, loading: Any, transforms: Sequence[Any], module: Any, shapes: Shapes) -> None:
        self._rename = loading.rename_source_key
        self._renamings = [each for each in transforms if isinstance(each, loading.WeightRenaming)]
        self._converters = [each for each in transforms if isinstance(each, loading.WeightConverter)]
        self._prefix = module.base_model_prefix
        self._shapes = shapes

    def match(self, source: str) -> tuple[str, str | None]:
        """Return a tensor's name in the model, and the pattern of the conversion if there is one."""
        name, pattern = self._rename(source, self._renamings, self._converters, self._prefix, self._shapes)
        if name not in self._shapes and source in self._shapes:  # a file with the model's own names
            name, pattern = self._rename(source, [], [], self._prefix, self._shapes)
        return name, pattern

    def converter(self, pattern: str) -> Any:
        """Return the conversion that has a pattern."""
        return next(each for each in reversed(self._converters) if pattern in each.source_patterns)


@dataclass
class _Conversion:
    """A conversion of some tensors of the files to one or more tensors of the model."""

    converter: Any
    where: str
    collected: Collected = field(default_factory=dict)
    sources: list[str] = field(default_factory=list)

    def run(self, name: str, shapes: Shapes, module: Any) -> dict[str, TensorEntry]:
        """Return the model's tensors; ``name`` is the first one's."""
        made = self.collected
        for operation in self.converter.operations:
            act = _OPERATIONS.get(type(operation).__name__)
            if act is None:
                raise DistCheckpointError(
                    f"{self.where}: transformers makes {name!r} of {self.sources[0]!r} by {operation!r}, which can't be"
                    " done in parts: load the folder with from_pretrained() once, and write it anew with"
                    " save_pretrained(folder, save_original_format=False)"
                )
            try:
                made = act(made, operation, _Context(self.converter, name, shapes, module.config))
            except (ValueError, IndexError, KeyError) as error:
                raise DistCheckpointError(
                    f"{self.where}: {name!r} can't be made of {self.sources[0]!r} and"
                    f" {len(self.sources) - 1} more by {operation!r}: {error}"
                ) from error
        target = next((each for each in made if each in name), None)
        prefix, _, suffix = name.partition(target) if target is not None else ("", "", "")
        return {f"{prefix}{key}{suffix}": entries[0] for key, entries in made.items()}


@dataclass(frozen=True)
class _Context:
    """The conversion to which an operation belongs."""

    converter: Any
    name: str
    shapes: Shapes
    config: Any


def _merge_list(made: Collected, operation: Any, context: _Context) -> Collected:
    targets = context.converter.target_patterns
    return {
        operation.get_target_pattern(len(made), pattern, targets): [stack_entries(entries, operation.dim)]
        for pattern, entries in made.items()
    }


def _concatenate(made: Collected, operation: Any, context: _Context) -> Collected:
    ordered = [entry for pattern in context.converter.source_patterns for entry in made.get(pattern, ())]
    target = operation.get_target_pattern(context.converter.target_patterns)
    return {target: [concatenate_entries(ordered, operation.dim)]}


def _chunk(made: Collected, operation: Any, context: _Context) -> Collected:
    entry = _only(made)
    targets = operation.get_target_patterns(context.converter.target_patterns, config=context.config)
    size, num_chunks = entry.shape[operation.dim], len(targets)
    largest = -(-size // num_chunks)  # as torch.chunk
    sizes = [max(0, min(largest, size - index * largest)) for index in range(num_chunks)]
    return {key: [each] for key, each in zip(targets, split_entry(entry, operation.dim, sizes), strict=True)}


def _split(made: Collected, operation: Any, context: _Context) -> Collected:
    targets = context.converter.target_patterns
    names = [context.name.replace(targets[0], target) for target in targets]
    sizes = [context.shapes[name][operation.dim] for name in names]
    return {key: [each] for key, each in zip(targets, split_entry(_only(made), operation.dim, sizes), strict=True)}


_OPERATIONS: dict[str, Callable[[Collected, Any, _Context], Collected]] = {
    "MergeModulelist": _merge_list,
    "Concatenate": _concatenate,
    "Chunk": _chunk,
    "Split": _split,
}


def _only(made: Collected) -> TensorEntry:
    [entries] = made.values()
    return entries[0]


def stack_entries(entries: Sequence[TensorEntry], dim: int) -> TensorEntry:
    """Return the tensor that `torch.stack` makes; the bytes stay where they are."""
    new_dim = dim % (len(entries[0].shape) + 1)

    def insert(values: tuple[int, ...], value: int) -> tuple[int, ...]:
        return (*values[:new_dim], value, *values[new_dim:])

    lifted = [
        TensorEntry(
            shape=insert(entry.shape, 1),
            dtype=entry.dtype,
            placement=entry.placement,
            shards=[_moved(each, insert(each.offsets, 0), insert(each.shape, 1)) for each in entry.shards],
        )
        for entry in entries
    ]
    return concatenate_entries(lifted, new_dim)


def concatenate_entries(entries: Sequence[TensorEntry], dim: int) -> TensorEntry:
    """Return the tensor that `torch.cat` makes; ValueError for shapes or dtypes that don't fit."""
    first = entries[0]
    at = dim % len(first.shape)
    shards: list[ShardEntry] = []
    end = 0
    for entry in entries:
        others = [(*each.shape[:at], *each.shape[at + 1 :]) for each in (first, entry)]
        if others[0] != others[1] or entry.dtype != first.dtype:
            raise ValueError(f"{entry.dtype}{list(entry.shape)} doesn't fit to {first.dtype}{list(first.shape)}")
        for each in entry.shards:
            offsets = (*each.offsets[:at], each.offsets[at] + end, *each.offsets[at + 1 :])
            shards.append(_moved(each, offsets, each.shape))
        end += entry.shape[at]
    shape = (*first.shape[:at], end, *first.shape[at + 1 :])
    return TensorEntry(shape=shape, dtype=first.dtype, placement=first.placement, shards=shards)


def split_entry(entry: TensorEntry, dim: int, sizes: Sequence[int]) -> list[TensorEntry]:
    """Return the tensors that `torch.split` makes; ValueError if the sizes don't add up."""
    at = dim % len(entry.shape)
    if sum(sizes) != entry.shape[at]:
        raise ValueError(f"{list(entry.shape)} can't be split into {list(sizes)} along dim {dim}")
    found, begin = [], 0
    for size in sizes:
        box = Box(
            (*(0 for _ in entry.shape[:at]), begin, *(0 for _ in entry.shape[at + 1 :])),
            (*entry.shape[:at], size, *entry.shape[at + 1 :]),
        )
        shards = [part for shard in entry.shards for part in _cut(shard, box, entry.dtype)]
        found.append(TensorEntry(shape=box.shape, dtype=entry.dtype, placement=entry.placement, shards=shards))
        begin += size
    return found


def _cut(shard: ShardEntry, box: Box, dtype: str) -> list[ShardEntry]:
    """The part of a shard in a box, as shards with offsets in the box: each a range of the shard's bytes."""
    saved = Box(shard.offsets, shard.shape)
    common = saved.intersect(box)
    if common is None:
        return []
    inner, itemsize = common.within(saved), dtype_from_name(dtype).itemsize
    # The last dim that is cut: elements are contiguous from there on, for each index of the dims before it.
    cut = max((dim for dim, size in enumerate(inner.shape) if size != saved.shape[dim]), default=0)
    strides = [prod(saved.shape[dim + 1 :]) for dim in range(len(saved.shape))]
    parts = []
    for index in itertools.product(*(range(size) for size in inner.shape[:cut])):
        begins = (*map(sum, zip(inner.offsets[:cut], index, strict=True)), *inner.offsets[cut:])
        shape = (*(1 for _ in index), *inner.shape[cut:])
        start = shard.start + itemsize * sum(map(prod, zip(begins, strides, strict=True)))
        offsets = tuple(a + b - c for a, b, c in zip(saved.offsets, begins, box.offsets, strict=True))
        part = _moved(shard, offsets, shape)
        part.start, part.stop = start, start + prod(shape) * itemsize
        parts.append(part)
    return parts


def _moved(shard: ShardEntry, offsets: tuple[int, ...], shape: tuple[int, ...]) -> ShardEntry:
    """The same bytes elsewhere in a tensor."""
    return ShardEntry(offsets=offsets, shape=shape, file=shard.file, start=shard.start, stop=shard.stop, hashes=[])
