"""Loading a checkpoint into what is there, however it lies, on however many ranks.

manifest --rank 0 reads, all get it--> match with `into` --agree--> each rank reads what it needs --agree--> done
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ferrodist.checkpoint.distributing import read_for_all
from ferrodist.checkpoint.folder import read_manifest
from ferrodist.checkpoint.manifest import MANIFEST_NAME, Manifest, decode_manifest, encode_manifest
from ferrodist.checkpoint.matching import Matching
from ferrodist.checkpoint.outcome import agree_on, run_on_first
from ferrodist.checkpoint.reader import CheckpointReader
from ferrodist.checkpoint.shard_metadata import ShardMetadata
from ferrodist.checkpoint.state import tell_autograd
from ferrodist.collectives.objects import all_gather_object, broadcast_object
from ferrodist.errors import DistCheckpointError
from ferrodist.tensor.dtensor import DTensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.checkpoint.storage.base import Storage
    from ferrodist.tensor.regions import LocalPart

    _Target = tuple[str, torch.Tensor, LocalPart]
    from ferrodist.deadline import Deadline

__all__ = ["load"]


@torch.no_grad()
def load(
    storage: Storage,
    into: Any,
    group: Backend,
    *,
    strict: bool,
    verify: bool,
    one_reads: bool,
    shards: ShardMetadata | None,
    deadline: Deadline,
) -> Any:
    """See `load_distributed`."""
    manifest = _share_manifest(storage, group, deadline)
    with agree_on("load a checkpoint", storage.url, group, deadline):
        shards = shards or ShardMetadata(num_ranks=group.world_size)
        shards.check(group.world_size)
        matching = Matching(manifest, group.rank, group.world_size, shards)
        build = matching.match(manifest.tree, into)
    _check_complete(matching if strict else None, storage.url, group, deadline)
    with agree_on("load a checkpoint", storage.url, group, deadline, about_arguments=False):
        reader = CheckpointReader(storage, manifest, verify=verify)
        try:
            targets = sorted(matching.targets, key=lambda target: manifest.place(target[0]))
            boxes = [(key, box, view) for key, _, part in targets for box, view in part.pieces]
            if one_reads:
                read_for_all(reader, manifest, boxes, where=storage.url, group=group, deadline=deadline)
            else:
                for key, box, view in boxes:
                    reader.read_box(key, box, view)
            for _, tensor, _ in targets:
                # to_local() would keep a history
                tell_autograd(tensor._local if isinstance(tensor, DTensor) else tensor)
        finally:
            storage.close()
    taken = []
    with agree_on("take what a checkpoint has", storage.url, group, deadline, about_arguments=False):
        taken.append(build())
    return taken[0]


def _share_manifest(storage: Storage, group: Backend, deadline: Deadline) -> Manifest:
    """Rank 0's, on all ranks: the folder may change while they read it."""
    own = run_on_first(lambda: read_manifest(storage), "read a checkpoint", storage.url, group, deadline)
    data = broadcast_object(None if own is None else encode_manifest(own), group=group, timeout=deadline.remaining())
    return own if own is not None else decode_manifest(data, f"{storage.url}/{MANIFEST_NAME}")


def _check_complete(matching: Matching | None, where: str, group: Backend, deadline: Deadline) -> None:
    """Raise, on all ranks, if a rank wants what is not there, or if a module has no place for what is there.

    Args:
        matching: Of this rank; None if it doesn't mind.
        where: The checkpoint.
        group: The ranks.
        deadline: When the others must have come.
    """
    own = ([], 0, {}) if matching is None else (matching.missing[:10], len(matching.missing), matching.unexpected)
    answers = all_gather_object(own, group=group, timeout=deadline.remaining())
    for rank, (names, number, _) in enumerate(answers):
        if names:
            raise DistCheckpointError(
                f"{where} lacks {_listed(names, number)}, which rank {rank} wants: load with strict=False to leave what"
                " is missing as it is",
                ranks=(rank,),
            )
    unexpected = {key: place for _, _, found in answers for key, place in found.items()}
    if not unexpected:
        return
    here = [] if matching is None else sorted(matching.used & set(unexpected))
    for used in all_gather_object(here, group=group, timeout=deadline.remaining()):
        for key in used:
            unexpected.pop(key, None)
    if unexpected:
        raise DistCheckpointError(
            f"{where} has {_listed(list(unexpected.values()), len(unexpected))}, for which no rank has a place: load"
            " with strict=False to leave it out"
        )


def _listed(names: Sequence[str], number: int) -> str:
    shown = ", ".join(names[:3])
    return shown if number <= 3 else f"{shown} and {number - 3} more"
