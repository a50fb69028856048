"""Groups of ferrodist as groups of torch: made for `init_process_group` and `new_group`, and found again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ferrodist.backends.base import Backend
from ferrodist.backends.native.backend import open_host_group
from ferrodist.backends.process_group import use_torch_default
from ferrodist.backends.subgroup import SubBackend
from ferrodist.deadline import Deadline
from ferrodist.errors import InvalidRankError
from ferrodist.rendezvous import PrefixStore, rendezvous_in
from ferrodist.torch_backend.process_group import FerrodistProcessGroup
from ferrodist.torch_backend.torch_store import TorchStore, make_private, server_of

if TYPE_CHECKING:
    from collections.abc import Callable

_FOLDER = "ferrodist"


def make_process_group(options: Any, pg_options: Any) -> FerrodistProcessGroup:
    """Make this rank's process group; torch calls it on all of the group's ranks.

    Within a default group of ferrodist a new group is a sub-group, which takes no message. Other ranks meet in torch's
    store. A default group that is made here is also the default of `ferrodist`'s functions. ``pg_options`` may be a
    group of ferrodist with these ranks, which is used as it is.
    """
    if isinstance(pg_options, Backend):
        return FerrodistProcessGroup(pg_options)
    if pg_options is not None:
        raise TypeError(f"groups of ferrodist have no options: leave pg_options={pg_options!r} out")
    seconds = options.timeout.total_seconds()
    ranks = list(options.global_ranks_in_group)
    default = dist.group.WORLD if ranks else None
    name = f"torch group {options.group_id}"
    if isinstance(default, FerrodistProcessGroup):
        # Labelled by torch's id: the number of earlier sub-groups may differ, for not all groups are ferrodist's.
        group: Backend = SubBackend(default.group, ranks, timeout=seconds, name=name, label=f"torch {options.group_id}")
        return FerrodistProcessGroup(group, options.store)
    group, leave = _rendezvous(options, seconds)
    group.on_close(leave)
    if not ranks:
        use_torch_default(group)
    return FerrodistProcessGroup(group, options.store)


def _rendezvous(options: Any, seconds: float) -> tuple[Backend, Callable[[], None]]:
    deadline = Deadline(seconds)
    store = TorchStore(options.store, timeout=seconds)
    # Each rank counts its rendezvous in the store, so no other one has used this prefix.
    prefixed = PrefixStore(store, f"{_FOLDER}/{store.add(f'{_FOLDER}/meetings of {options.group_rank}', 1)}")
    is_private = make_private(options.store)  # after its file was made, and before a secret may be put into it
    membership = rendezvous_in(
        prefixed,
        "torch's store",
        rank=options.group_rank,
        world_size=options.group_size,
        timeout=seconds,
        secret=None,
        job=f"torch/{options.group_id}",
        server=server_of(options.store),
        is_private=is_private,
    )
    try:
        return open_host_group(membership, seconds, deadline), membership.close
    except BaseException:
        membership.close()
        raise


def group_of(process_group: dist.ProcessGroup | None = None) -> Backend:
    """The group of ferrodist behind a process group of torch, for `ferrodist`'s own functions.

    Args:
        process_group: torch's process group; None is its default group.

    Raises:
        TypeError: The process group is another backend's, or there is no default group.
        InvalidRankError: The process group is what torch returns on ranks that are not members.
    """
    chosen = dist.group.WORLD if process_group is None else process_group
    if chosen is dist.GroupMember.NON_GROUP_MEMBER:  # type: ignore[comparison-overlap] # as torch returns it
        raise InvalidRankError(
            f"rank {dist.get_rank()} is not in this group of torch's: only members make its calls; ask"
            " `group is not torch.distributed.GroupMember.NON_GROUP_MEMBER` first"
        )
    if not isinstance(chosen, FerrodistProcessGroup):
        raise TypeError(f"{chosen!r} is no group of ferrodist's: make it with init_process_group('ferrodist')")
    return chosen.group
