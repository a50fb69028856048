"""Tensors in files of other formats as a source of a checkpoint.

Those that are row-major in their files are read by the checkpoint reader, through a temporary manifest; others are
loaded whole.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ferrodist.checkpoint.format.manifest import MAX_DIMS, FileEntry, Manifest, ShardEntry, TensorEntry, covers_once
from ferrodist.checkpoint.format.safetensors import dtype_from_name, dtype_name
from ferrodist.checkpoint.reader import CheckpointReader
from ferrodist.checkpoint.state import Encoder
from ferrodist.checkpoint.tools.rewrite import (
    RewriteOptions,
    RewriteSource,
    rewrite,
)
from ferrodist.checkpoint.writer import BLOCK_BYTES
from ferrodist.errors import DistCheckpointError
from ferrodist.tensor.box import Box
from ferrodist.wording import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ferrodist.checkpoint.storage.base import Storage


class FileShard(NamedTuple):
    """A box of a tensor, row-major in a file from byte ``start`` on."""

    box: Box
    file: str
    start: int


class LazyShard(NamedTuple):
    """A box of a tensor that is loaded whole when it is needed."""

    box: Box
    load: Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalTensor:
    """A tensor in files of another format; stands for it in a state."""

    shape: tuple[int, ...]
    dtype: str
    parts: Sequence[FileShard] | Sequence[LazyShard]

    @property
    def size_bytes(self) -> int:
        """The size of its elements."""
        return prod(self.shape) * dtype_from_name(self.dtype).itemsize


@contextlib.contextmanager
def conversion_errors(where: str) -> Iterator[None]:
    """Convert errors of the block to DistCheckpointError, with the name of the external file."""
    try:
        yield
    except DistCheckpointError:
        raise
    except (OSError, EOFError) as error:
        raise DistCheckpointError(f"{where} can't be read: {error}") from error
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0] or type(error).__name__
        raise DistCheckpointError(f"{where} can't be made a checkpoint: {first_line}") from error


def import_folder(
    storage: Storage, new_storage: Storage, read_state: Callable[[Storage], Any], options: RewriteOptions | None
) -> None:
    """Write the state of a folder in another format as a checkpoint."""
    with contextlib.closing(storage):
        with conversion_errors(storage.url):
            source = make_rewrite_source(read_state(storage), storage)
        rewrite(source, new_storage, options or RewriteOptions())


def make_rewrite_source(state: Any, storage: Storage) -> RewriteSource:
    """Return a state that may have `ExternalTensor` leaves as a source for `rewrite`."""
    external: dict[int, ExternalTensor] = {}
    encoder = Encoder(0)
    tree = encoder.encode(_with_placeholders(state, external))
    for key, tensor in encoder.tensors.items():
        if tensor.dim() > MAX_DIMS:
            raise ValueError(f"tensor {key!r} has {tensor.dim()} dims, and {MAX_DIMS} are the most")
    known = {key: external[id(tensor)] for key, tensor in encoder.tensors.items() if id(tensor) in external}
    for key, each in known.items():
        _check_whole(key, each, storage.url)
    in_memory = {key: tensor for key, tensor in encoder.tensors.items() if key not in known}
    shapes = {key: (tuple(tensor.shape), dtype_name(tensor.dtype)) for key, tensor in encoder.tensors.items()}
    return RewriteSource(tree=tree, tensors=shapes, source=_ExternalSource(storage, known, in_memory))


def _with_placeholders(node: Any, external: dict[int, ExternalTensor]) -> Any:
    """Replace external tensors by tensors of the same shape that have one element in memory."""
    if isinstance(node, ExternalTensor):
        dtype = dtype_from_name(node.dtype)
        first = torch.empty((1,) * len(node.shape), dtype=dtype, device="cpu")
        placeholder = first.expand(node.shape)
        external[id(placeholder)] = node
        return placeholder
    if isinstance(node, dict):
        return {key: _with_placeholders(each, external) for key, each in node.items()}
    if type(node) in (list, tuple):
        return type(node)(_with_placeholders(each, external) for each in node)
    return node


def _check_whole(key: str, tensor: ExternalTensor, where: str) -> None:
    boxes = [part.box for part in tensor.parts if part.box.numel]
    whole = Box((0,) * len(tensor.shape), tensor.shape)
    ranks = {len(box.shape) for box in boxes} | {len(box.offsets) for box in boxes}
    if ranks - {len(tensor.shape)} or any(whole.intersect(box) != box for box in boxes):
        raise DistCheckpointError(f"{where}: a part of tensor {key!r} is outside of its shape {tensor.shape}")
    found, wanted = sum(box.numel for box in boxes), whole.numel
    if found != wanted:
        raise DistCheckpointError(
            f"{where}: the parts of tensor {key!r} have {counted(found, 'element')} together, and its shape"
            f" {tensor.shape} {wanted}"
        )
    if not covers_once(((box.offsets, box.shape) for box in boxes), tensor.shape):
        raise DistCheckpointError(f"{where}: the parts of tensor {key!r} overlap, or are not all of it")


class _ExternalSource:
    """A `BoxSource` of external tensors, and of some in memory."""

    def __init__(
        self, storage: Storage, external: Mapping[str, ExternalTensor], in_memory: Mapping[str, torch.Tensor]
    ) -> None:
        raw = {key: each for key, each in external.items() if all(isinstance(part, FileShard) for part in each.parts)}
        self._raw = raw.keys()
        self._loaded = {key: each for key, each in external.items() if key not in raw}
        self._in_memory = in_memory
        self._url = storage.url
        self._reader = CheckpointReader(storage, manifest_of(storage, raw), verify=False)
        self._cached_shard: tuple[object, torch.Tensor] | None = None

    def read_box(self, key: str, box: Box, target: torch.Tensor) -> None:
        """Fill a tensor with a box of a tensor."""
        if key in self._raw:
            self._reader.read_box(key, box, target)
        elif key in self._in_memory:
            target.copy_(box.take(self._in_memory[key].detach()))
        else:
            for part in self._loaded[key].parts:
                common = part.box.intersect(box)
                if common is not None:
                    common.within(box).take(target).copy_(common.within(part.box).take(self._load(key, part)))

    def _load(self, key: str, part: Any) -> torch.Tensor:
        """Load a shard; the last one is cached, since consecutive row blocks are in the same one."""
        if self._cached_shard is None or self._cached_shard[0] is not part:
            self._cached_shard = None
            with conversion_errors(f"{self._url}: {key!r}"):
                self._cached_shard = part, part.load()
        return self._cached_shard[1]


def manifest_of(storage: Storage, tensors: Mapping[str, ExternalTensor]) -> Manifest:
    """Return a manifest of file shards, without hashes."""
    indices: dict[str, int] = {}
    files: list[FileEntry] = []
    found = {}
    for key, each in tensors.items():
        itemsize = dtype_from_name(each.dtype).itemsize
        shards = []
        for box, name, start in each.parts:  # type: ignore[misc] # all are file shards
            if name not in indices:
                try:
                    size = storage.size_bytes(name)
                except FileNotFoundError:
                    raise DistCheckpointError(f"{storage.url}/{name} is missing") from None
                indices[name] = len(files)
                files.append(FileEntry(name=name, size_bytes=size, header_bytes=0, header_hash=""))
            file, stop = indices[name], start + box.numel * itemsize
            shards.append(
                ShardEntry(offsets=box.offsets, shape=box.shape, file=file, start=start, stop=stop, hashes=[])
            )
        found[key] = TensorEntry(shape=each.shape, dtype=each.dtype, placement="", shards=shards)
    return Manifest(
        save_id="",
        created_ns=0,
        producer="",
        world_size=1,
        block_bytes=BLOCK_BYTES,
        files=files,
        tensors=found,
        tree=None,
    )
