"""Sub-groups: some ranks of a group as a group of their own."""

from __future__ import annotations

import hashlib
import math
import threading
import weakref
from collections import Counter
from typing import TYPE_CHECKING

from typing_extensions import Buffer, override

from ferrodist.backends.base import Backend, NonBlockingBackend, as_abort_error, check_peer, check_rank
from ferrodist.backends.stragglers import Stragglers
from ferrodist.backends.tags import ANY_SOURCE, check_tag, group_tag
from ferrodist.backends.verification import CollectiveVerifier
from ferrodist.errors import DistributedError, DistributedTimeoutError, GroupClosedError, InvalidRankError, ranks_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.backends.persistent_recv import OnEnd, OnMessages, PersistentRecv, WaitEvent
    from ferrodist.backends.request import Request, SizedRequest


_TAG_BITS = 64

_HINT = "Or a rank made this sub-group with other ranks, in another order, or another number of times."
"""Part of the errors of ranks that wait for each other: making a sub-group sends nothing that would show it."""

_COUNTS = "backends.subgroups"
"""Key of a group's attachment: how many sub-groups of each label and members this rank has made of it."""

_lock = threading.RLock()  # guards counts, and whether a group is closed; a signal handler may close one


class SubBackend(NonBlockingBackend):
    """A group made of some ranks of another, over the connections of the other.

    Only the members make it, each by itself, without a message: ranks outside don't take part. Members that make
    several sub-groups of the same ranks must make them in the same order, or give each a label. Otherwise they are in
    different groups, and wait for each other there: the first timeout says so. A sub-group of a sub-group is one of the
    outermost group.

    [Note: group ids]
    Messages of groups are told apart by a 64-bit id, a hash of the parent's id, the members' ranks in the outermost
    group, the label, and how often this rank has made such a sub-group of this parent. Members agree on all of these
    without a message. Two ids of one job are equal with probability 2**-64 for each pair.

    Args:
        parent: The group to take ranks from.
        ranks: Ranks of ``parent``, all different, including this one. Position i becomes rank i.
        timeout: Default of blocking calls' ``timeout``, in seconds; None takes the parent's.
        name: The group's name in error messages.
        label: Sub-groups of the same ranks are counted separately for each label; the same on all members.
        ends_with_parent: Whether it fails when ``parent`` does, which has the same ranks.

    Raises:
        InvalidRankError: A rank is not in ``parent``, comes twice, or this rank is missing.
    """

    def __init__(
        self,
        parent: Backend,
        ranks: Sequence[int],
        *,
        timeout: float | None = None,
        name: str | None = None,
        label: str = "",
        ends_with_parent: bool = False,
    ) -> None:
        members = self.check_members(parent, ranks)
        if parent.rank not in members:
            raise InvalidRankError(
                f"rank {parent.rank} of group {parent.name!r} is not among the sub-group's ranks {list(members)}: only"
                " members make a sub-group; new_group() gives other ranks a NonMemberGroup"
            )
        super().__init__(
            members.index(parent.rank),
            len(members),
            timeout=parent.timeout if timeout is None else timeout,
            name=name or f"{parent.name}{list(members)}",
        )
        self.verifier = CollectiveVerifier(self, hint=_HINT)
        self._parent = parent
        self._members = members
        self._root, self._root_ranks = parent, members
        if isinstance(parent, SubBackend):
            self._root = parent._root  # noqa: SLF001 - the same class
            self._root_ranks = tuple(parent.root_ranks[rank] for rank in members)
        self.verification_key = self._root.verification_key
        self._index = {rank: i for i, rank in enumerate(self._root_ranks)}
        self._closed: DistributedError | None = None
        self.group_id = _next_id(parent, self._root_ranks, label)
        self._root_translates_errors = self._root.open_subgroup(self.group_id, self._root_ranks, self.name)
        self._root.subgroups.add(self)
        if ends_with_parent:
            self._root.fail_with(self.group_id, parent.group_id)
        self._root.equip_subgroup(self)

    @staticmethod
    def check_members(parent: Backend, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return the ranks of a sub-group of ``parent`` as a tuple; raises InvalidRankError if they are invalid."""
        members = tuple(check_rank(parent, rank, f"rank {rank!r}") for rank in ranks)
        if not members:
            raise InvalidRankError(f"a sub-group of group {parent.name!r} needs at least one rank")
        if len(set(members)) != len(members):
            raise InvalidRankError(f"a sub-group's ranks must all be different, not {list(members)}")
        return members

    @property
    def members(self) -> tuple[int, ...]:
        """The parent's ranks that form this group, in this group's order."""
        return self._members

    @property
    def root_ranks(self) -> tuple[int, ...]:
        """The outermost group's ranks that form this group, in this group's order."""
        return self._root_ranks

    @property
    def parent(self) -> Backend:
        """The group this one was made from."""
        return self._parent

    @override
    @property
    def failure(self) -> DistributedError | None:
        return self._closed or self._root.subgroup_failure(self.group_id, self._root_ranks)

    def to_global(self, local: int) -> int:
        """The parent's rank of this group's rank ``local``."""
        return self._members[check_rank(self, local, f"rank {local!r}")]

    def to_local(self, rank: int) -> int | None:
        """This group's rank of the parent's ``rank``, or None if it is no member."""
        return self._members.index(rank) if rank in self._members else None

    @override
    def isend(self, data: Buffer, dst: int, *, tag: int = 0) -> Request:
        peer = self._root_ranks[check_peer(self, dst)]
        self._check_open()
        return _SubRequest(self._root.isend(data, peer, tag=self._tag(tag)), self)

    @override
    def irecv(self, buffer: Buffer, src: int, *, tag: int = 0) -> Request:
        return _SubRequest(self._root.irecv(buffer, self._root_source(src), tag=self._tag(tag)), self)

    @override
    @property
    def inline_limit(self) -> int:
        return self._root.inline_limit

    @override
    def irecv_up_to(self, buffer: Buffer, src: int, *, tag: int = 0) -> SizedRequest:
        return _SubSizedRequest(self._root.irecv_up_to(buffer, self._root_source(src), tag=self._tag(tag)), self)

    def _root_source(self, src: int) -> int:
        """The outermost group's rank of the source of a receive, which is checked."""
        source = check_peer(self, src, any_source=True)
        self._check_open()
        return source if source == ANY_SOURCE else self._root_ranks[source]

    @override
    def try_send(self, data: bytes, dst: int, *, tag: int = 0) -> bool:
        if self._closed is not None:
            return False
        return self._root.try_send(data, self._root_ranks[dst], tag=group_tag(self.group_id, tag))

    @override
    def post_persistent_recv(
        self, src: int, size_bytes: int, heard: OnMessages, ended: OnEnd, *, tag: int = 0
    ) -> PersistentRecv:
        peer = self._root_ranks[check_peer(self, src)]
        self._check_open()
        self_ref = weakref.ref(self)  # the outermost group owns the receive, which must not keep a dropped group alive

        def on_end(error: DistributedError) -> None:
            group = self_ref()
            ended(error if group is None else group.translate_error(error))

        return self._root.post_persistent_recv(peer, size_bytes, heard, on_end, tag=self._tag(tag))

    @override
    def make_wait_event(self) -> WaitEvent:
        return self._root.make_wait_event()

    def find_stragglers(self, peers: tuple[int, ...], within: float) -> Stragglers:
        """Ask the outermost group, whose ranks may relay messages; see `Backend.find_stragglers`."""
        late = self._root.find_stragglers(tuple(self._root_ranks[peer] for peer in peers), within)
        members = tuple(self._index[rank] for rank in late.ranks if rank in self._index)
        if not members:  # the rank that does not answer is a relay outside this group
            return Stragglers(ranks=peers, detail=late.detail)
        return Stragglers(ranks=members, detail=late.detail, is_relay=late.is_relay)

    @override
    def abort(self, reason: str | DistributedError) -> None:
        self._root.abort_subgroup(self.group_id, self._root_ranks, as_abort_error(self, reason))

    def close(self, timeout: float | None = None) -> None:
        """Leave the group; the parent goes on. See `Backend.close`."""
        del timeout
        with _lock:
            if self._closed is not None:
                return
            self._closed = GroupClosedError(f"group {self.name!r} was closed on this rank ({self.rank})")
        self._root.close_subgroup(self.group_id, self._root_ranks)
        self._run_close_callbacks()

    def translate_error(self, error: DistributedError) -> DistributedError:
        """Translate the error of a transfer of the outermost group into this group's terms."""
        if self._root_translates_errors or self._root.failure is not None or not error.ranks:
            return error  # a failed root is named with its own ranks
        ranks = tuple(self._index[rank] for rank in error.ranks if rank in self._index)
        translated = error.fresh()
        translated.message = (
            f"{ranks_text(ranks)} of group {self.name!r}: {error.message} (rank numbers of group {self._root.name!r})"
        )
        translated.args, translated.ranks = (translated.message,), ranks
        return translated

    def _check_open(self) -> None:
        if self._closed is not None:
            raise self._closed.fresh()

    def _tag(self, tag: int) -> int:
        return group_tag(self.group_id, check_tag(tag, _TAG_BITS))


class _SubRequest:
    """A request of the outermost group whose peer is a rank of the sub-group."""

    __slots__ = ("_group", "_index", "_request")

    def __init__(self, request: Request, group: SubBackend) -> None:
        self._request = request
        self._group = group
        self._index = group._index  # noqa: SLF001 - the two are one mechanism

    @property
    def peer(self) -> int:
        return self._index.get(self._request.peer, ANY_SOURCE)

    def wait(self, timeout: float) -> int:
        try:
            return self._index[self._request.wait(timeout)]
        except DistributedTimeoutError as error:
            if self._request.done():  # it has ended meanwhile, or the group has failed with a timeout
                return self._index[self._request.wait(math.inf)]
            if not error.ranks:
                raise
            rank = self._index[self._request.peer]
            raise DistributedTimeoutError(f"no transfer with rank {rank} within {timeout:g} s", ranks=(rank,)) from None
        except DistributedError as error:
            raise self._group.translate_error(error) from None

    def find_stragglers(self, peers: tuple[int, ...], within: float) -> Stragglers:
        return self._group.find_stragglers(peers, within)

    def done(self) -> bool:
        return self._request.done()

    def cancel(self) -> bool:
        return self._request.cancel()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        self._request.add_done_callback(callback)


class _SubSizedRequest(_SubRequest):
    """A `_SubRequest` of a message whose size is not known before."""

    __slots__ = ()

    _request: SizedRequest

    @property
    def message_bytes(self) -> int:
        return self._request.message_bytes


def _next_id(parent: Backend, ranks: tuple[int, ...], label: str) -> int:
    with _lock:
        counts: Counter[tuple[str, tuple[int, ...]]] = parent.attachments.setdefault(_COUNTS, Counter())
        counts[label, ranks] += 1
        generation = counts[label, ranks]
    text = f"{parent.group_id}:{generation}:{','.join(map(str, ranks))}:{label}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") or 1
