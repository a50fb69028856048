"""The groups of a program: initialization from the environment, and the default group."""

from __future__ import annotations

import contextlib
import sys
import threading
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, overload

from ferrodist.backends.base import Backend
from ferrodist.backends.lifecycle import ExitStage, at_exit, cancel_at_exit
from ferrodist.backends.mpi import MpiBackend
from ferrodist.backends.native import GlooBackend, NativeBackend
from ferrodist.backends.nccl import NcclBackend
from ferrodist.backends.nccl.backend import HybridBackend, best_backend
from ferrodist.backends.non_member import NonMemberGroup, check_group
from ferrodist.backends.subgroup import SubBackend
from ferrodist.backends.tcp import TcpBackend
from ferrodist.backends.ucc import UccBackend
from ferrodist.deadline import Deadline, resolve_timeout
from ferrodist.errors import GroupClosedError, describe_failed_program
from ferrodist.rendezvous import Membership, rendezvous
from ferrodist.resource_limits import naming_limits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Factory = Callable[[Membership, float, Deadline], Backend]


_local_group: ContextVar[Backend | None] = ContextVar("ferrodist_group", default=None)
_MPI = "mpi"  # the backend whose ranks meet by other means than our rendezvous
_lock = threading.RLock()  # a signal handler may close a group


class _Process:
    """The default group of this process, and the rendezvous that it came from."""

    def __init__(self) -> None:
        self.group: Backend | None = None  # `own`, else `from_torch`; compiled code reads it, too
        self.own: Backend | None = None
        self.membership: Membership | None = None
        self.end_torch_default: Callable[[], None] | None = None
        self.from_torch: Backend | None = None
        self.num_local = 0  # the number of `use_group` blocks that are open, in all threads
        self.has_local = False  # whether there are any, which the compiler reads

    def choose(self) -> None:
        """Update `group`."""
        self.group = self.from_torch if self.own is None else self.own

    def count_local(self, change: int) -> None:
        """Count `use_group` blocks."""
        with _lock:
            self.num_local += change
            self.has_local = self.num_local > 0


_process = _Process()


def init_process_group(
    backend: str | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    init_method: str | None = None,
    timeout: float | None = None,
    secret: str | bytes | None = None,
    torch_default: bool = False,
) -> Backend:
    """Meet the other ranks of the job and make the default group. Every rank calls it, once.

    The group is closed when the interpreter exits, if not before. If an unhandled exception is the reason for the exit,
    it is aborted first, so that the other ranks raise `GroupAbortedError` with that exception.

    Args:
        backend: "native", "gloo", "tcp", "hybrid", "nccl", "mpi", "ucc", or a name given to `register_backend`. None
            takes hybrid where every rank has NCCL and a GPU, else native where it is installed, else tcp. With "mpi"
            the ranks are those that ``mpiexec`` has started, and ``init_method`` and ``secret`` are not needed.
        rank: This rank; None takes RANK from the environment.
        world_size: Number of ranks; None takes WORLD_SIZE.
        init_method: ``env://`` (the default: torchrun's variables MASTER_ADDR and MASTER_PORT), ``tcp://host:port``
            (rank 0 serves there) or ``file://path`` (a file that all ranks can reach).
        timeout: Seconds for all ranks to meet, and the group's default for blocking calls. None takes
            FERRODIST_TIMEOUT's (``ferrodist run --timeout``), or `DEFAULT_COLLECTIVE_TIMEOUT`: 30 minutes. After 30
            seconds a warning names the late ranks.
        secret: The job secret; None takes FERRODIST_SECRET. Needed where the ranks meet on anything but loopback;
            without one they prove that they are processes of one user.
        torch_default: Whether the group becomes torch.distributed's default group, too, for code that asks torch:
            `torch.nn.SyncBatchNorm`, `DistributedSampler`, torchmetrics. On all ranks or on none.
            `destroy_process_group` ends both.

    Returns:
        The group, which calls without ``group=`` then use.

    Raises:
        RendezvousError: The environment lacks a variable; or, on every rank, some ranks did not come: they are named.
        BackendUnavailable: This installation has no such backend, or some rank can't use it.
        ValueError: ``backend`` or ``init_method`` is unknown, or with ``torch_default`` torch has a default group
            already.
        CollectiveMismatchError: On every rank, when some pass ``torch_default`` and some do not: at the first
            collective of those.
    """
    factory = None if backend == _MPI else _factory(backend)
    limit = resolve_timeout(timeout)
    deadline = Deadline(limit)
    if torch_default:
        from ferrodist.backends import torch_default_group as torch_group  # noqa: PLC0415 - loads torch.distributed

        torch_group.check_torch_default()
    with _lock:
        if _process.own is not None:
            raise ValueError("this process has a default group: call destroy_process_group() before making another")
        membership = None
        with naming_limits("the default group can't be made"):
            if factory is None:  # MPI has brought its ranks together
                if init_method is not None:
                    raise ValueError(f"the mpi backend's ranks have met through MPI: leave {init_method=} out")
                group: Backend = MpiBackend.from_job(rank, world_size, limit, deadline)
            else:
                membership = rendezvous(
                    init_method, rank=rank, world_size=world_size, timeout=deadline.remaining(), secret=secret
                )
                try:
                    group = factory(membership, limit, deadline)
                except BaseException:
                    membership.close()
                    raise
        if torch_default:
            store = None if membership is None else membership.store
            try:
                _process.end_torch_default = torch_group.open_torch_default(group, store, deadline)
            except BaseException:
                _close(group, membership)
                raise
        _process.own, _process.membership = group, membership
        _process.choose()
    at_exit(ExitStage.DEFAULT_GROUP, _leave_at_exit)
    return group


def destroy_process_group() -> None:
    """Close the group that `init_process_group` made, and the store it was made through. Does nothing without one.

    If it is torch's default group, too, that is destroyed, with the groups that torch has made from it.
    """
    with _lock:
        group, membership, end_torch_default = _process.own, _process.membership, _process.end_torch_default
        _process.own = _process.membership = _process.end_torch_default = None
        _process.choose()
    cancel_at_exit(ExitStage.DEFAULT_GROUP, _leave_at_exit)
    try:
        if end_torch_default is not None:
            end_torch_default()
    finally:
        _close(group, membership)


def _close(group: Backend | None, membership: Membership | None) -> None:
    try:
        if group is not None:
            group.close()
    finally:
        if membership is not None:
            membership.close()


def use_torch_default(group: Backend) -> None:
    """Have calls without a group use torch's default group, which is of our backend, until it is closed.

    The group of `init_process_group` has precedence.
    """
    with _lock:
        _process.from_torch = group
        _process.choose()
    group.on_close(partial(_forget_torch_default, group))


def _forget_torch_default(group: Backend) -> None:
    with _lock:
        if _process.from_torch is group:
            _process.from_torch = None
            _process.choose()


def _leave_at_exit() -> None:
    """Close the default group; the others first learn of the exception that ended this program, if any."""
    if _process.own is not None:
        abort_on_unhandled_exception(_process.own)
    destroy_process_group()


def abort_on_unhandled_exception(group: Backend) -> None:
    """Abort a group if an unhandled exception is the reason why the interpreter exits."""
    # `last_value` is for Python before 3.12. At a prompt, exceptions end nothing.
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if isinstance(error, BaseException) and not hasattr(sys, "ps1"):
        with contextlib.suppress(Exception):  # a user's backend or exception may raise anything here
            group.abort(describe_failed_program(error))


def is_initialized() -> bool:
    """Return whether calls without a group have one to use here."""
    return _local_group.get() is not None or _process.group is not None


def default_group() -> Backend:
    """The group that calls without ``group=`` use: `use_group`'s in this thread, else the process's.

    The process's is `init_process_group`'s, else torch's default group where that is of backend "ferrodist".

    Raises:
        GroupClosedError: There is none.
    """
    group = _local_group.get() or _process.group
    if group is None:
        raise GroupClosedError(
            "there is no default group: call ferrodist.init_process_group() first, pass group=, or use"
            " ferrodist.use_group()"
        )
    return group


def resolve_group(group: Backend | None) -> Backend:
    """Return ``group``, or the default group if it is None.

    Raises TypeError if it is neither a `Backend` nor None, InvalidRankError if this rank is not in it.
    """
    return default_group() if group is None else check_group(group)


def find_group(group: Backend | None) -> Backend | None:
    """Return the result of `resolve_group`, or None if that raises."""
    if group is None:
        return _local_group.get() or _process.group
    return group if isinstance(group, Backend) else None


def group_in_graphs(group: Backend | None) -> Backend | None:
    """The group of a call that torch.compile traces, which then reads this code and guards what it depends on.

    None inside of `use_group`, in any thread: the compiler can't guard a context variable.
    """
    if group is not None:
        return group
    return None if _process.has_local else _process.group


def default_holders() -> tuple[ContextVar[Backend | None], object]:
    """The holders of the default group, for compiled code: a context variable, and an object with `group`."""
    return _local_group, _process


@contextlib.contextmanager
def use_group(group: Backend) -> Iterator[Backend]:
    """Make ``group`` the default group of this thread (context) inside the block."""
    token = _local_group.set(resolve_group(group))
    _process.count_local(1)
    try:
        yield group
    finally:
        _process.count_local(-1)
        _local_group.reset(token)


@overload
def new_group(ranks: None = None, *, group: Backend | None = None, timeout: float | None = None) -> SubBackend: ...


@overload
def new_group(
    ranks: Sequence[int], *, group: Backend | None = None, timeout: float | None = None
) -> SubBackend | NonMemberGroup: ...


def new_group(
    ranks: Sequence[int] | None = None, *, group: Backend | None = None, timeout: float | None = None
) -> SubBackend | NonMemberGroup:
    """Make a sub-group. Only its members need to call; no rank waits for another.

    Other ranks get a `NonMemberGroup`, which every call refuses with `InvalidRankError`::

        evens = fd.new_group([0, 2])
        if evens.is_member: fd.allreduce(tensor, group=evens)

    Args:
        ranks: Ranks of ``group``, in the order of the sub-group; None takes all.
        group: The group to take them from; None is the default group.
        timeout: Default of blocking calls' ``timeout``, in seconds; None takes the parent's.
    """
    parent = resolve_group(group)
    members = SubBackend.check_members(parent, range(parent.world_size) if ranks is None else ranks)
    if parent.rank not in members:
        return NonMemberGroup(parent, members)
    return SubBackend(parent, members, timeout=timeout)


def register_backend(name: str, factory: Factory) -> None:
    """Make ``init_process_group(name)`` call ``factory(membership, timeout, deadline)`` for this rank's `Backend`.

    ``timeout`` is the group's default for blocking calls, ``deadline`` when all ranks must have met.

    Raises:
        TypeError: ``name`` is no str, or ``factory`` no function.
        ValueError: The name is taken.
    """
    if not isinstance(name, str) or not callable(factory):
        raise TypeError(f"register_backend takes a name and a function that makes a group, not {name!r}, {factory!r}")
    if name in _FACTORIES or name == _MPI:
        raise ValueError(f"there is a backend {name!r} already")
    _FACTORIES[name] = factory


def _factory(name: str | None) -> Factory:
    if name is None:
        return best_backend
    if isinstance(name, str) and name in _FACTORIES:
        return _FACTORIES[name]
    hint = "; make simulated groups with SimulatedBackend.create_group(n)" if name == "simulated" else ""
    raise ValueError(f"unknown backend {name!r}: there are {', '.join(sorted([*_FACTORIES, _MPI]))}{hint}")


_FACTORIES: dict[str, Factory] = {
    "gloo": GlooBackend.from_membership,
    "hybrid": HybridBackend.from_membership,
    "native": NativeBackend.from_membership,
    "nccl": NcclBackend.from_membership,
    "tcp": TcpBackend.from_membership,
    "ucc": UccBackend.from_membership,
}
