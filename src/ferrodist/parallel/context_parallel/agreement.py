"""Comparison of the ranks' calls before any of them sends its data: all ranks raise if one must."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, NamedTuple

import torch

from ferrodist.collectives.all_gather import all_gather
from ferrodist.collectives.objects import all_gather_object
from ferrodist.errors import CollectiveMismatchError, DistributedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.backends.base import Backend

_NUM_SIZES = 2  # that a call may have
_OK, _REFUSED = 0, 1


class Call(NamedTuple):
    """A rank's call: what must be equal on all ranks, in words, and sizes, which may differ."""

    text: str
    sizes: tuple[int, ...]


def compare_calls(
    operation: str, describe: Callable[[], Call], group: Backend, timeout: float | None = None
) -> list[tuple[int, ...]]:
    """Check this rank's arguments, and compare them with the other ranks'; returns the sizes of all.

    One all_gather of four integers. If a rank's arguments are wrong or others', a second one carries the words.

    Args:
        operation: The name of the call.
        describe: Checks the arguments and describes them; an error that it raises is raised here, once all know of it.
        group: The group, all of whose ranks call this.
        timeout: Seconds; None takes the group's.

    Raises:
        CollectiveMismatchError: The calls differ, or another rank's ``describe`` raised.
        DistributedTimeoutError, PeerLostError: As for `all_gather`.
    """
    refusal: Exception | None = None
    try:
        call = describe()
    except DistributedError:  # of the group itself
        raise
    except Exception as error:  # noqa: BLE001 - raised below, after the others know
        call, refusal = Call(f"{type(error).__name__}: {error}", ()), error
    digest = hashlib.blake2b(f"{operation}: {call.text}".encode(), digest_size=7).digest()
    status = _OK if refusal is None else _REFUSED
    sizes = [*call.sizes, *[0] * (_NUM_SIZES - len(call.sizes))]
    own = torch.tensor([[status, int.from_bytes(digest, "little"), *sizes]], dtype=torch.int64, device="cpu")
    gathered: list[list[int]] = all_gather(own, group=group, timeout=timeout).tolist()
    if any(each[0] for each in gathered) or len({each[1] for each in gathered}) > 1:
        calls: list[tuple[str, str]] = all_gather_object((operation, call.text), group=group, timeout=timeout)
        refused = [bool(each[0]) for each in gathered]
        is_one = any(refused) or len({name for name, _ in calls}) == 1
        texts = [text if is_one else f"{name} with {text}" for name, text in calls]
        _raise_difference(operation, refusal, refused, texts, group)
    return [tuple(each[2 : 2 + len(call.sizes)]) for each in gathered]


def _raise_difference(
    operation: str, refusal: Exception | None, refused: list[bool], texts: list[str], group: Backend
) -> None:
    """Raise this rank's own error, or else one that names the other rank and its arguments."""
    if refusal is not None:
        raise refusal
    if any(refused):
        rank = refused.index(True)
        raise CollectiveMismatchError(
            f"{operation} on group {group.name!r}: the arguments of rank {rank} are wrong ({texts[rank]}), those of"
            f" rank {group.rank} are right: {texts[group.rank]}. Call it alike on all ranks",
            ranks=tuple(each for each, is_refused in enumerate(refused) if is_refused),
        )
    differing = tuple(rank for rank, text in enumerate(texts) if text != texts[0])
    raise CollectiveMismatchError(
        f"{operation} on group {group.name!r}: the ranks' arguments differ. Rank 0: {texts[0]}. Rank {differing[0]}:"
        f" {texts[differing[0]]}. Call it alike on all ranks",
        ranks=differing,
    )
