"""Which adapter a peer has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ferrodist.bench.peers import OURS, Peer

if TYPE_CHECKING:
    from ferrodist.bench.adapters.base import Adapter, Place


def open_adapter(peer: Peer, place: Place) -> Adapter:
    """Join the group of a peer; every rank of it calls this."""
    if peer is Peer.OVER_NCCL:
        from ferrodist.bench.adapters.ferrodist_nccl import NcclAdapter  # noqa: PLC0415

        return NcclAdapter(place)
    if peer in OURS:
        from ferrodist.bench.adapters.ferrodist_group import FerrodistAdapter  # noqa: PLC0415

        return FerrodistAdapter(peer, place)
    if peer is Peer.GLOO:
        from ferrodist.bench.adapters.gloo import GlooAdapter  # noqa: PLC0415

        return GlooAdapter(place)
    if peer is Peer.LIMIT:
        from ferrodist.bench.adapters.memory_copy import MemoryCopyAdapter  # noqa: PLC0415

        return MemoryCopyAdapter(place)
    from ferrodist.bench.adapters.mpi import MpiAdapter  # noqa: PLC0415

    return MpiAdapter(peer)
