"""Writing a checkpoint of any source and for any number of ranks, by one process in bounded memory.

All ranks' files grow side by side: a block of rows of a tensor is read once, and each file gets its part of it. This
works because all files have tensors in one order, and because row blocks follow each other in row-major order, so that
each file's bytes come in the file's order. `reshard` rewrites a checkpoint, and `ferrodist.checkpoint.convert` sources
in other formats.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ferrodist.arguments import check_int, check_type
from ferrodist.checkpoint.commit import commit, make_manifest
from ferrodist.checkpoint.format.safetensors import dtype_from_name
from ferrodist.checkpoint.format.tree import child_nodes, split_node
from ferrodist.checkpoint.save_distributed import check_owned
from ferrodist.checkpoint.save_plan import (
    DEFAULT_FILE_BYTES,
    BoxReport,
    SavePlan,
    Span,
    StateReport,
    TensorReport,
    plan_save,
    write_order,
)
from ferrodist.checkpoint.writer import SafetensorsWriter, row_major_bytes
from ferrodist.collectives.arguments import compute_shard_sizes, offsets_of
from ferrodist.deadline import Deadline, default_timeout
from ferrodist.errors import DistCheckpointError
from ferrodist.tensor.box import Box
from ferrodist.wording import counted

if TYPE_CHECKING:
    from ferrodist.checkpoint.storage.base import Storage

ProgressCallback = Callable[[int, int], None]
"""Called with the bytes done, and their total."""
ChooseDim = Callable[[str, tuple[int, ...]], int | None]
"""Returns the sharded dim for a tensor's key and shape; None leaves it whole."""

DEFAULT_MEMORY_BYTES = 256 << 20
_MIN_MEMORY_BYTES = 16 << 20
_MAX_OPEN_FILES = 128
_UPLOAD_BYTES = 32 << 20
"""The memory that an open file in an object store may take."""

ROW_BLOCK_BYTES = 16 << 20
"""The size of a block of rows; large enough to hide the latency of reads."""


class BoxSource(Protocol):
    """A source of boxes of tensors."""

    def read_box(self, key: str, box: Box, target: torch.Tensor) -> None:
        """Fill a tensor of the box's shape with a box of the tensor."""


def row_blocks(shape: tuple[int, ...], max_elements: int) -> Iterator[Box]:
    """Split a tensor into boxes of at most ``max_elements`` in row-major order, which is also that of any box of it."""
    if prod(shape) <= max_elements:
        yield Box((0,) * len(shape), shape)
        return
    size, *rest = shape
    num_rows = max_elements // prod(rest)
    if num_rows:
        for row in range(0, size, num_rows):
            yield Box((row, *[0] * len(rest)), (min(num_rows, size - row), *rest))
        return
    for row in range(size):
        for rows in row_blocks(tuple(rest), max_elements):
            yield Box((row, *rows.offsets), (1, *rows.shape))


class ProgressCounter:
    """Counts bytes and reports them; ``report`` is called at the beginning and after each `add`."""

    def __init__(self, total: int, report: ProgressCallback | None) -> None:
        self._total = total
        self._done = 0
        self._report = report
        self.add(0)

    def add(self, count: int) -> None:
        """Count more bytes."""
        self._done += count
        if self._report is not None:
            self._report(self._done, self._total)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewriteSource:
    """The contents of a new checkpoint."""

    tree: Any
    tensors: Mapping[str, tuple[tuple[int, ...], str]]
    source: BoxSource
    world_size: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RewriteOptions:
    """Options for writing a checkpoint.

    Args:
        num_ranks: The number of ranks to write for.
        dim: The dim along which tensors are sharded, if they have it; or a function that returns it for each. None is
            the first dim that divides evenly over the ranks, or else the longest.
        max_file_bytes: The size from which files are split, between tensors.
        max_memory_bytes: The limit of memory for tensors.
        progress: Called with the bytes written, and their total.

    Raises:
        TypeError, ValueError: An option is wrong.
    """

    num_ranks: int = 1
    dim: int | ChooseDim | None = None
    max_file_bytes: int = DEFAULT_FILE_BYTES
    max_memory_bytes: int = DEFAULT_MEMORY_BYTES
    progress: ProgressCallback | None = None

    def __post_init__(self) -> None:
        check_int("num_ranks", self.num_ranks, min=1)
        check_int("max_file_bytes", self.max_file_bytes, min=1)
        check_int("max_memory_bytes", self.max_memory_bytes, min=_MIN_MEMORY_BYTES)
        if not (self.dim is None or type(self.dim) is int or callable(self.dim)):
            raise TypeError(f"dim must be an int, a function of key and shape, or None, not {type(self.dim).__name__}")

    def choose(self, key: str, shape: tuple[int, ...]) -> int | None:
        """Return the dim along which a tensor is sharded, at least 0; None if it stays whole."""
        if self.num_ranks == 1 or not prod(shape):
            return None
        if callable(self.dim):
            dim = self.dim(key, shape)
            dim = None if dim is None else check_int(f"dim of tensor {key!r}", dim)
            if dim is not None and not -len(shape) <= dim < len(shape):
                raise ValueError(f"dim gives {dim} for tensor {key!r} of shape {shape}: give one of its dims, or None")
        elif self.dim is not None:
            dim = self.dim if -len(shape) <= self.dim < len(shape) else None
        else:
            even = [dim for dim, size in enumerate(shape) if size % self.num_ranks == 0]
            longest = max(range(len(shape)), key=lambda dim: shape[dim], default=None)
            dim = even[0] if even else longest if prod(shape) > 1 else None
        return None if dim is None else dim % len(shape)


def rewrite(
    source_state: RewriteSource, storage: Storage, options: RewriteOptions, *, single_name: str | None = None
) -> None:
    """Write a checkpoint; one in the folder is replaced atomically at the end, as by `save_distributed`.

    ``single_name`` is the name of the file of tensors if it is the only one. DistCheckpointError: the source is
    damaged, or the storage refuses; nothing was committed.
    """
    check_type(options, RewriteOptions, "options must be RewriteOptions or None")
    timeout = default_timeout()  # a wrong FERRODIST_TIMEOUT is found before hours of writing
    reports = _make_reports(source_state, options)
    save_id = uuid.uuid4().hex[:12]
    try:
        check_owned(storage)
        plan = plan_save(reports, prefix=f"model-{save_id}", max_file_bytes=options.max_file_bytes)
        del reports
        storage.begin(save_id)
        files = [
            [SafetensorsWriter(storage, save_id, file, plan.tensors) for file in files_of_rank]
            for files_of_rank in plan.files
        ]
        # Files in an object store take memory while they are open.
        max_open = _MAX_OPEN_FILES if storage.is_staged else max(1, options.max_memory_bytes // 2 // _UPLOAD_BYTES)
        _write(source_state, plan, files, min(max_open, _MAX_OPEN_FILES), options)
        manifest = make_manifest(
            plan,
            [[stream.report() for stream in streams] for streams in files],
            save_id=save_id,
            world_size=source_state.world_size if _has_per_rank(plan.tree) else options.num_ranks,
        )
        commit(storage, manifest, Deadline(timeout), single_name=single_name)
    except BaseException as error:
        with contextlib.suppress(OSError):  # the error that is being raised says more
            storage.discard(save_id)
            storage.remove_leftovers()
        if isinstance(error, OSError):
            raise DistCheckpointError(f"could not write a checkpoint at {storage.url}: {error}") from error
        raise


def _make_reports(source_state: RewriteSource, options: RewriteOptions) -> list[StateReport]:
    """Return the report that each rank would make."""
    reports = [StateReport(source_state.tree, {}) for _ in range(options.num_ranks)]
    owners = _per_rank_keys(source_state.tree)
    for key, (shape, dtype) in source_state.tensors.items():
        ranks: Sequence[int] = range(options.num_ranks)
        if (owner := owners.get(key)) is not None:
            ranks = [owner % options.num_ranks]
        dim = options.choose(key, shape) if owner is None else None
        boxes = [BoxReport((0,) * len(shape), shape)] * len(ranks)
        placement = "whole"
        if dim is not None:
            after = len(shape) - dim - 1
            boxes = [
                BoxReport((*[0] * dim, begin, *[0] * after), (*shape[:dim], end - begin, *shape[dim + 1 :]))
                for begin, end in pairwise(offsets_of(compute_shard_sizes(shape[dim], options.num_ranks)))
            ]
            placement = f"Shard({dim}) over {counted(options.num_ranks, 'rank')}"
        for rank, box in zip(ranks, boxes, strict=True):
            boxes_of_rank = [] if dim is not None and prod(box.shape) == 0 else [box]
            reports[rank].tensors[key] = TensorReport(shape, dtype, placement, boxes_of_rank)
    return reports


def _has_per_rank(node: Any) -> bool:
    """Return whether a tree has `PerRank` values."""
    return split_node(node)[0] == "per_rank" or any(_has_per_rank(each) for _, each in child_nodes(node))


def _per_rank_keys(tree: Any) -> dict[str, int]:
    """Return the keys of tensors within one rank's `PerRank` values, with that rank."""
    found: dict[str, set[int | None]] = {}

    def visit(node: Any, rank: int | None) -> None:
        mark, content = split_node(node)
        if mark in ("tensor", "array"):
            found.setdefault(content, set()).add(rank)
        for key, each in child_nodes(node):
            visit(each, int(key) if mark == "per_rank" and rank is None else rank)

    visit(tree, None)
    return {key: rank for key, ranks in found.items() if len(ranks) == 1 for rank in ranks if rank is not None}


def _write(
    source_state: RewriteSource,
    plan: SavePlan,
    files: list[list[SafetensorsWriter]],
    max_open: int,
    options: RewriteOptions,
) -> None:
    sizes = {key: dtype_from_name(tensor.dtype).itemsize for key, tensor in plan.tensors.items()}
    order = write_order(plan.tensors)
    total = sum(prod(tensor.shape) * sizes[key] for key, tensor in plan.tensors.items())
    progress = ProgressCounter(total, options.progress)
    # A row block, a copy if it isn't contiguous in the source, a copy of a part of it, and the blocks to check.
    block_bytes = min(ROW_BLOCK_BYTES, options.max_memory_bytes // 4)
    for first in range(0, len(files), max_open):
        streams = [stream for each in files[first : first + max_open] for stream in each]
        consumers: dict[str, list[tuple[Span, SafetensorsWriter]]] = {}
        for file in streams:
            for span in file.plan.spans:
                consumers.setdefault(span.key, []).append((span, file))
        try:
            for key in sorted(consumers, key=order.__getitem__):
                for rows in row_blocks(plan.tensors[key].shape, max(1, block_bytes // sizes[key])):
                    progress.add(_write_rows(source_state.source, key, plan.tensors[key].dtype, rows, consumers[key]))
            for file in streams:
                file.close()
        except BaseException:
            for file in streams:
                file.discard()
            raise


def _write_rows(
    source: BoxSource, key: str, dtype: str, rows: Box, consumers: Sequence[tuple[Span, SafetensorsWriter]]
) -> int:
    """Write a block of rows to each file that needs a part of it; return the number of bytes."""
    tensor: torch.Tensor | None = None
    written = 0
    for span, file in consumers:
        part = Box(span.offsets, span.shape).intersect(rows)
        if part is None:
            continue
        if tensor is None:
            tensor = torch.empty(rows.shape, dtype=dtype_from_name(dtype), device="cpu")
            source.read_box(key, rows, tensor)
        data = row_major_bytes(part.within(rows).take(tensor))
        file.add(span, data)
        written += len(data)
    return written
