"""The contract of a backend: what a group is to everything above it.

A group is a `Backend`: one rank's handle on a fixed set of ranks that can send each other bytes. Authors of backends
implement ``send``, ``recv``, ``abort`` and ``close``, and may override ``rank``, ``world_size`` and ``barrier``. These
seven are the contract; everything else in ferrodist works on top of them. A backend that knows why a group has failed
returns the reason from ``failure``. A backend that can start a transfer without waiting for it overrides ``isend`` and
``irecv``, which otherwise run the blocking calls in threads. `ferrodist.testing.check_backend` tests this contract.
"""

from __future__ import annotations

import inspect
import math
import operator
import threading
from abc import ABC, abstractmethod
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload
from weakref import WeakSet

from typing_extensions import Buffer, Self, override

from ferrodist.backends.collective_op import CollectiveKind, CollectiveOp
from ferrodist.backends.persistent_recv import (
    LockWaitEvent,
    OnEnd,
    OnMessages,
    PersistentRecv,
    PostedPersistentRecv,
    WaitEvent,
)
from ferrodist.backends.request import Request, SizedRequest, ThreadedRequest, answer_seconds
from ferrodist.backends.stragglers import Stragglers
from ferrodist.backends.tags import ANY_SOURCE
from ferrodist.backends.verification import CollectiveVerifier
from ferrodist.backends.weak import name_weakly, snapshot_weak
from ferrodist.deadline import Deadline, check_timeout, default_timeout, resolve_timeout
from ferrodist.errors import (
    DistributedError,
    DistributedTimeoutError,
    GroupAbortedError,
    InvalidRankError,
    InvalidWorldSizeError,
    SelfSendError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.backends.interfaces import CollectiveEngine, DataPlane, DeviceP2P, HostEngine


class FastPath(NamedTuple):
    """The compiled objects that take a group's plain calls without the Python layers between.

    native/bindings/fast_call.cpp, fast_p2p.cpp and `ferrodist.collectives.fast_path` read it.
    """

    communicator: Any  # None until it is open, in a sub-group by the first collective: backends/native/engine.py
    timeout: float  # the group's, in seconds
    engine: Any  # makes errors of the communicator's failures
    p2p: Any


class Backend(ABC):
    """One rank's handle on a group of ranks.

    Threads may share a handle. Every blocking call takes ``timeout`` in seconds; None means the group's own.

    Args:
        rank: This rank, 0-based.
        world_size: Number of ranks in the group.
        timeout: Default of blocking calls' ``timeout``, in seconds; None takes FERRODIST_TIMEOUT's, or
            `DEFAULT_COLLECTIVE_TIMEOUT`.
        name: The group's name in error messages.
    """

    is_member: Literal[True] = True
    """True: this rank is in the group. False for the `NonMemberGroup` that `new_group` returns on the ranks outside."""

    subgroups: WeakSet[Backend]
    """All sub-groups made from this group, directly or from sub-groups. The outermost group closes them with itself."""

    attachments: dict[str, Any]  # objects that layers above attach to the group, by name
    verifier: CollectiveVerifier
    graph_name: str  # in graphs of torch.compile

    _close_callbacks: list[Callable[[], None]]
    _synchronizers: list[Callable[[float], None]]
    _threaded: dict[tuple[str, int], list[tuple[int, ThreadedRequest]]]
    _threaded_lock: threading.Lock
    _engine_by_device: dict[str, CollectiveEngine | None]
    _p2p_by_device: dict[str, DeviceP2P | None]

    group_id: int = 0
    """Upper half of the tags of this group's messages: 0, or for a sub-group a hash of its members."""

    verification_key: bytes = b""  # authenticates calls in verification where messages are not authenticated, or empty
    data_plane: DataPlane | None = None  # moves bytes between all ranks at once; None where the group has none
    fast_path: FastPath | None = None  # the compiled path of plain calls; None where the group has none

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in ("rank", "world_size", "timeout", "name", "failure"):
            if inspect.isfunction(vars(cls).get(name)):
                raise TypeError(f"{cls.__name__}.{name} is a property of every Backend: put @property before it")

    def __new__(cls, *_arguments: Any, **_options: Any) -> Self:
        """Set the state of every group: a class with its own `rank` and `world_size` need not call `__init__`."""
        self = super().__new__(cls)
        self._timeout = default_timeout()
        self._name = "world"
        self._close_callbacks, self._synchronizers = [], []
        self._threaded = {}
        self._engine_by_device, self._p2p_by_device = {}, {}
        self.graph_name = name_weakly(self)
        self._threaded_lock = threading.Lock()
        self.subgroups = WeakSet()
        self.attachments = {}
        self.verifier = CollectiveVerifier(self)
        return self

    def __init__(self, rank: int, world_size: int, *, timeout: float | None = None, name: str = "world") -> None:
        if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
            raise InvalidWorldSizeError(f"a group needs a world size of at least 1, not {world_size!r}")
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < world_size:
            raise InvalidRankError(f"rank {rank!r} is not in 0..{world_size - 1} (world size {world_size})")
        self._rank, self._world_size = rank, world_size
        self._timeout = resolve_timeout(timeout)
        self._name = name

    @property
    def rank(self) -> int:
        """This rank's index in the group."""
        return self._rank

    @property
    def world_size(self) -> int:
        """Number of ranks in the group."""
        return self._world_size

    @property
    def timeout(self) -> float:
        """Seconds a blocking call may take when it names no timeout itself."""
        return self._timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._timeout = check_timeout(seconds)
        if self.fast_path is not None:
            self.fast_path = self.fast_path._replace(timeout=self._timeout)

    @property
    def name(self) -> str:
        """The group's name in error messages."""
        return self._name

    @property
    def failure(self) -> DistributedError | None:
        """The reason why the group can't be used any more, or None while it can. A failed group stays failed.

        The default implementation returns None: then calls in a failed group raise the errors of `send` and `recv`.
        """
        return None

    @overload
    def engine(self, device_type: Literal["cpu"]) -> HostEngine | None: ...
    @overload
    def engine(self, device_type: str) -> CollectiveEngine | None: ...
    def engine(self, device_type: str) -> CollectiveEngine | None:
        """The backend's own engine of collectives of tensors on "cpu" or "cuda"; None if it has none."""
        return self._engine_by_device.get(device_type)

    def p2p(self, device_type: str) -> DeviceP2P | None:
        """The backend's own point-to-point transfer of tensors on "cpu" or "cuda"; None if it has none."""
        return self._p2p_by_device.get(device_type)

    def use_engine(self, device_type: str, engine: CollectiveEngine | None, p2p: DeviceP2P | None = None) -> None:
        """Set the results of `engine` and `p2p` for a type of device."""
        self._engine_by_device[device_type] = engine
        self._p2p_by_device[device_type] = p2p

    def equip_subgroup(self, subgroup: Backend) -> None:  # noqa: B027 - may stay as it is
        """Give a new sub-group of this group its engines and its fast path; every member calls it.

        The default implementation gives it none, so that its tensors travel as messages.
        """

    def __repr__(self) -> str:
        state = f", failed: {type(self.failure).__name__}" if self.failure else ""
        return f"{type(self).__name__}(rank={self.rank}, world_size={self.world_size}, name={self.name!r}{state})"

    @abstractmethod
    def send(self, data: Buffer, dst: int, *, tag: int = 0, timeout: float | None = None) -> None:
        """Send bytes to one rank; ``data`` may be changed when the call returns.

        Returns when the backend has taken the message over. A message of more than 1 KiB may be taken over only when
        ``dst`` receives it.

        Args:
            data: Any C-contiguous buffer. It may be empty.
            dst: The receiving rank.
            tag: See [Note: tags] in `tags.py`; users choose from 0 to 2**56-1.
            timeout: Seconds, or None for the group's.

        Raises:
            InvalidRankError: ``dst`` is not in the group.
            SelfSendError: ``dst`` is this rank.
            DistributedTimeoutError: The message could not be handed over in time. It was not, and will not be,
                received.
            PeerLostError: ``dst`` died or left.
            GroupClosedError: This rank closed the group.
        """

    @abstractmethod
    def recv(self, buffer: Buffer, src: int, *, tag: int = 0, timeout: float | None = None) -> int:
        """Receive the next message from ``src`` into ``buffer``, which it must fill exactly.

        Args:
            buffer: A writable C-contiguous buffer of the message's size.
            src: The sending rank, or `ANY_SOURCE`.
            tag: The tag that the message was sent with.
            timeout: Seconds, or None for the group's.

        Returns:
            The sending rank.

        Raises:
            SizeMismatchError: The message has another size. It stays queued.
            DistributedTimeoutError: No message came in time. The group is still good and the call may be made again.
            InvalidRankError, SelfSendError, PeerLostError, GroupClosedError: As for `send`.
        """

    @abstractmethod
    def abort(self, reason: str | DistributedError) -> None:
        """End the group on all ranks: calls that wait in it, and all later calls, raise.

        Sub-groups made from it are groups of their own and go on, if the backend can tell their messages apart.

        Args:
            reason: A sentence, raised as `GroupAbortedError`, or the error itself. Only the first abort counts; after
                `close` it does nothing.
        """

    @abstractmethod
    def close(self, timeout: float | None = None) -> None:
        """Leave the group and release its resources. Closing twice is allowed.

        Messages that this rank has sent stay receivable. Ranks that still wait for it get `PeerLostError`. Later calls
        on this rank raise `GroupClosedError`, whatever the group's state was. Implementations call
        `_run_close_callbacks` last.

        Args:
            timeout: Seconds to wait until the other ranks have this rank's messages; None lets the backend choose.
        """

    def barrier(self, timeout: float | None = None) -> None:
        """Return when every rank of the group has called it. When it raises, the group has failed.

        Raises:
            CollectiveMismatchError: Some rank called another collective instead.
            DistributedTimeoutError: Some rank did not call in time; it is named.
        """
        limit = self.timeout if timeout is None else check_timeout(timeout)
        engine = self.engine("cpu")
        op = CollectiveOp(kind=CollectiveKind.BARRIER, timeout=limit)
        if engine is None:
            self.verifier.verify(op.signature(), limit)
        else:
            engine.run(op, engine.reserve())

    def synchronize(self, timeout: float | None = None) -> None:
        """Return when the work that this rank has started on GPUs in this group is done there; the host waits.

        Raises:
            DistributedTimeoutError: The work is not done in time.
            DistributedError: The group has failed; its failure.
        """
        deadline = Deadline(self.timeout if timeout is None else check_timeout(timeout))
        for wait in self._synchronizers:
            wait(deadline.remaining())
        if self.failure is not None:
            raise self.failure.fresh()

    def on_synchronize(self, wait: Callable[[float], None]) -> None:
        """Have `synchronize` call ``wait(seconds)``. For code that starts work on GPUs for this group."""
        self._synchronizers.append(wait)

    def isend(self, data: Buffer, dst: int, *, tag: int = 0) -> Request:
        """Start `send` and return at once. The default implementation repeats the blocking call in a thread.

        Messages started in one thread with the same tag and ``dst`` are received in that order.
        """
        dst = check_peer(self, dst)

        def attempt(timeout: float) -> int:
            self.send(data, dst, tag=tag, timeout=timeout)
            return dst

        return self._in_thread(("send", tag), dst, attempt, memoryview(data).nbytes)

    def irecv(self, buffer: Buffer, src: int, *, tag: int = 0) -> Request:
        """Start `recv` and return at once. The default implementation repeats the blocking call in a thread."""
        src = check_peer(self, src, any_source=True)

        def attempt(timeout: float) -> int:
            return self.recv(buffer, src, tag=tag, timeout=timeout)

        return self._in_thread(("recv", tag), src, attempt, memoryview(buffer).nbytes)

    @property
    def inline_limit(self) -> int:
        """Bytes of a tensor's elements up to which they are sent in one message with its header.

        The default is 0, for backends without `irecv_up_to`.
        """
        return 0

    def irecv_up_to(self, buffer: Buffer, src: int, *, tag: int = 0) -> SizedRequest:
        """Start to receive a message that may be shorter than ``buffer``. Only where `inline_limit` is above 0."""
        raise NotImplementedError(f"{type(self).__name__} has an inline_limit, and no irecv_up_to: implement it")

    def _in_thread(self, kind: tuple[str, int], peer: int, attempt: Callable[[float], int], size_bytes: int) -> Request:
        """Start a transfer that runs after the earlier ones that could take its message, and waits for no others."""
        with self._threaded_lock:
            started = [(other, request) for other, request in self._threaded.get(kind, []) if not request.done()]
            earlier = [request for other, request in started if other == peer or ANY_SOURCE in (other, peer)]
            request = ThreadedRequest(attempt, peer, lambda: self.failure, after=earlier, size_bytes=size_bytes)
            self._threaded[kind] = [*started, (peer, request)]
        request.add_done_callback(lambda: self._forget_threaded(kind))
        return request

    def _forget_threaded(self, kind: tuple[str, int]) -> None:
        with self._threaded_lock:
            if all(request.done() for _, request in self._threaded.get(kind, [])):
                self._threaded.pop(kind, None)

    def _wait_or_give_up(self, request: Request, what: str, timeout: float) -> int:
        """Wait for a request of this group; after ``timeout`` seconds cancel it and say ``what`` did not happen."""
        try:
            return request.wait(timeout)
        except DistributedTimeoutError as error:
            if self.failure is not None:
                raise
            late = self.find_stragglers(error.ranks, answer_seconds(timeout))
            if not request.cancel():
                return request.wait(math.inf)  # it has ended meanwhile, or does so at once: see Request.cancel
            raise given_up_error(self, what, late, timeout) from None
        except BaseException:
            request.cancel()
            raise

    def find_stragglers(self, peers: tuple[int, ...], within: float) -> Stragglers:
        """Find the ranks that are responsible for a wait for ``peers`` that timed out.

        The default implementation returns the peers. A backend whose messages pass through other ranks knows more.

        Args:
            peers: The ranks that were waited for; empty for any rank.
            within: Seconds this may take.
        """
        del within
        return Stragglers(ranks=peers)

    def abort_subgroup(self, group_id: int, members: tuple[int, ...], error: DistributedError) -> None:
        """End one sub-group on all its members (ranks of this group).

        The default implementation ends this whole group, which is right if the backend can't tell its messages apart.
        """
        del group_id, members
        self.abort(error)

    def subgroup_failure(self, group_id: int, members: tuple[int, ...]) -> DistributedError | None:
        """The reason why a sub-group of this group can't be used any more, or None."""
        del group_id, members
        return self.failure

    def fail_with(self, group_id: int, leader_id: int) -> None:  # noqa: B027 - may stay as it is
        """Make a sub-group fail when another group of this backend with the same ranks does.

        The default implementation does nothing, which is right if the backend can't tell the messages of groups apart.
        """

    def open_subgroup(self, group_id: int, members: tuple[int, ...], name: str) -> bool:  # noqa: ARG002 - overridden
        """Note that this rank has made a sub-group of ``members`` (ranks of this group, in the sub-group's order).

        Returns whether the sub-group's errors have its ranks and name; if not, `SubBackend` translates them.
        """
        return False

    def close_subgroup(self, group_id: int, members: tuple[int, ...]) -> None:  # noqa: B027 - may stay as it is
        """Note that this rank has left a sub-group. The default implementation does nothing."""

    def try_send(self, data: bytes, dst: int, *, tag: int = 0) -> bool:
        """Send a small message if that is possible at once; the arguments are not checked.

        False means that nothing was done: `isend` then sends it, or raises. A message to a rank that has left, or in a
        group that has failed, may be lost.
        """
        del data, dst, tag
        return False

    def post_persistent_recv(
        self, src: int, size_bytes: int, heard: OnMessages, ended: OnEnd, *, tag: int = 0
    ) -> PersistentRecv:
        """Post a persistent receive: of every message from a rank with a tag, for as long as the group lasts.

        Args:
            src: The sending rank.
            size_bytes: The size of every message.
            heard: Called with messages in the order of sending, in any thread, but never in two at a time; must not
                block or raise. If a signal handler raises in it, it is called again with what is left, and then the
                thread raises.
            ended: Called with the reason why no more messages come.
            tag: As in `recv`.
        """
        return PostedPersistentRecv(lambda buffer: self.irecv(buffer, src, tag=tag), size_bytes, heard, ended)

    def make_wait_event(self) -> WaitEvent:
        """Make an event for one thread to wait for; where waiting threads drive progress, its `wait` does, too."""
        return LockWaitEvent()

    def on_close(self, callback: Callable[[], None]) -> None:
        """Have ``callback()`` run once this rank has closed the group and nothing waits in it; last in, first out."""
        self._close_callbacks.append(callback)

    def _run_close_callbacks(self) -> None:
        with ExitStack() as stack:  # goes on when one raises
            for callback in (*self._close_callbacks, *(sub.close for sub in snapshot_weak(lambda: self.subgroups))):
                stack.callback(callback)
            self._close_callbacks.clear()


class NonBlockingBackend(Backend):
    """A backend whose `isend` and `irecv` need no threads: its `send` and `recv` start one of them and wait."""

    @abstractmethod
    def isend(self, data: Buffer, dst: int, *, tag: int = 0) -> Request:
        """Start `send` and return immediately."""

    @abstractmethod
    def irecv(self, buffer: Buffer, src: int, *, tag: int = 0) -> Request:
        """Start `recv` and return immediately."""

    @override
    def send(self, data: Buffer, dst: int, *, tag: int = 0, timeout: float | None = None) -> None:
        limit = self.timeout if timeout is None else check_timeout(timeout)
        request = self.isend(data, dst, tag=tag)
        self._wait_or_give_up(request, f"send to rank {dst}: it did not receive the message", limit)

    @override
    def recv(self, buffer: Buffer, src: int, *, tag: int = 0, timeout: float | None = None) -> int:
        limit = self.timeout if timeout is None else check_timeout(timeout)
        source = "any rank" if src == ANY_SOURCE else f"rank {src}"
        return self._wait_or_give_up(self.irecv(buffer, src, tag=tag), f"recv from {source}: nothing came", limit)


def check_rank(group: Backend, rank: int, what: str) -> int:
    """Return ``rank`` as an int; raises InvalidRankError, about ``what``, unless it is a rank of ``group``."""
    try:
        index = -1 if isinstance(rank, bool) else operator.index(rank)
    except TypeError:
        index = -1
    if not 0 <= index < group.world_size:
        raise InvalidRankError(f"{what} is not in 0..{group.world_size - 1} of group {group.name!r}")
    return index


def check_peer(group: Backend, peer: int, *, any_source: bool = False) -> int:
    """Return ``peer`` as an int; raises unless it is another rank of ``group``, or `ANY_SOURCE` if that is allowed."""
    try:
        rank = operator.index(peer)
    except TypeError:
        rank = -2
    if any_source and rank == ANY_SOURCE:
        return rank
    if isinstance(peer, bool) or not 0 <= rank < group.world_size:
        raise InvalidRankError(
            f"rank {peer!r} is not in 0..{group.world_size - 1} of group {group.name!r} (called on rank {group.rank})"
        )
    if rank == group.rank:
        raise SelfSendError(
            f"rank {rank} of group {group.name!r} cannot exchange messages with itself: copy the data instead",
            ranks=(rank,),
        )
    return rank


def given_up_error(group: Backend, what: str, late: Stragglers, timeout: float) -> DistributedTimeoutError:
    """The error of a blocking call that was taken back at its deadline; ``what`` did not happen."""
    return DistributedTimeoutError(
        f"{what} within {timeout:g} s (group {group.name!r}, rank {group.rank}){late.detail}. The group is still"
        " good: the call may be made again.",
        ranks=late.ranks,
    )


def as_abort_error(group: Backend, reason: str | DistributedError) -> DistributedError:
    """The error that `Backend.abort` with ``reason`` raises on every rank."""
    if isinstance(reason, DistributedError):
        return reason
    return GroupAbortedError(f"rank {group.rank} aborted group {group.name!r}: {reason}", ranks=(group.rank,))
