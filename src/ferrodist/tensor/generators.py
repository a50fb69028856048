"""Random numbers that all ranks draw alike: those that one process would draw for the whole tensor.

Every rank draws all of a tensor from its generator and keeps its part. That takes the time and the memory of the whole
tensor on each rank, and gives the same bits on any mesh. The generators must be in the same state on all ranks of the
mesh; each call compares them, which is one small exchange.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

from ferrodist.collectives.host_engine import collectives_of
from ferrodist.errors import CollectiveMismatchError
from ferrodist.tensor.redistribution import redistribute_local

if TYPE_CHECKING:
    from ferrodist.mesh import DeviceMesh
    from ferrodist.tensor.layout import Layout

__all__ = ["check_generators", "part_of_whole"]


def check_generators(mesh: DeviceMesh, generator: torch.Generator | None, name: str) -> None:
    """Return if the generators of all ranks of the mesh are in one state; all of them call this.

    Args:
        mesh: The mesh.
        generator: This rank's, or None for torch's default one. Ranks that are threads share that, so they would
            draw from it in any order: they need generators of their own.
        name: What is going to draw, for the error.

    Raises:
        CollectiveMismatchError: On all ranks: they are not.
    """
    group = mesh.group
    if group.world_size == 1:
        return
    state = (torch.default_generator if generator is None else generator).get_state()
    digest = hashlib.blake2b(state.numpy().tobytes(), digest_size=16).digest()
    engine = collectives_of(group)
    said = engine.share("random", digest, timeout=group.timeout, sequence=engine.reserve())
    others = [rank for rank, other in zip(mesh.ranks, said, strict=True) if other != said[0]]
    if others:
        raise CollectiveMismatchError(
            f"{name} draws the same numbers on all ranks, but the generators of ranks {', '.join(map(str, others))} are"
            f" in another state than that of rank {mesh.ranks[0]}: call torch.manual_seed(seed) with the same seed on"
            " all ranks, and draw from the generator only where all do (ranks that are threads pass a generator each)",
            ranks=tuple(others),
        )


def part_of_whole(whole: torch.Tensor, layout: Layout) -> torch.Tensor:
    """This rank's part of a tensor that every rank has all of; it may share memory with that."""
    return redistribute_local(whole, layout.whole, layout)
