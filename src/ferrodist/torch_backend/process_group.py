"""`FerrodistProcessGroup`: the process group that torch calls, over a group of ferrodist."""

from __future__ import annotations

import threading
from collections import deque
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions, PrefixStore  # type: ignore[attr-defined] # its stub leaves it out

from ferrodist.backends.lifecycle import ExitStage, at_exit, cancel_at_exit
from ferrodist.backends.native.binding import compiled
from ferrodist.backends.process_group import abort_on_unhandled_exception
from ferrodist.backends.subgroup import SubBackend
from ferrodist.collectives.arguments import check_root
from ferrodist.collectives.fast_path import start_torch_call
from ferrodist.errors import UnsupportedOpError
from ferrodist.torch_backend import general_calls
from ferrodist.torch_backend.argument_forms import accept_options, only_member, plain_reduction, reduction
from ferrodist.torch_backend.buffer_pool import BufferPool
from ferrodist.torch_backend.callback_levels import CallbackLevels
from ferrodist.torch_backend.futures import ThreadPool
from ferrodist.torch_backend.messages import MessageWork, PendingSends, drain_pending, receive_message, send_message
from ferrodist.torch_backend.sparse import sparse_allreduce
from ferrodist.torch_backend.work import DoneWork, FerrodistWork, JoinedWork, can_drain, seconds_of
from ferrodist.torch_private.compilers import not_compiled

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch._C._distributed_c10d import Store

    from ferrodist.backends.base import Backend
    from ferrodist.torch_backend.general_calls import CheckedCall

    Tensors = list[torch.Tensor]

# The declared methods have more forms than torch's functions and its C++ use.
# mypy: disable-error-code="override"


_NUM_RETAINED_WORKS = 1024
"""How many of the last works of one element stay alive: `DistributedDataParallel.join` holds only their C++ half, and
waits for it after later works."""

_CPU = torch.device("cpu")

_IS_BLOCKING = False
"""The last argument of compiled functions: they start no call, but return when it is done."""


@not_compiled
class FerrodistProcessGroup(dist.ProcessGroup):
    """A group of ferrodist as a process group of torch, which makes it and closes the group with it.

    The methods are those that torch's functions and torch's C++ call; names differ between releases of torch, so some
    methods have two. Errors are ferrodist's: wrong arguments raise from the call, all others from the wait.
    """

    is_written_in_python = True
    """True: torch's C++ has no backend for the group, so its hooks can't be attached."""

    def __init__(self, group: Backend, store: Store | None = None) -> None:
        super().__init__(group.rank, group.world_size)  # type: ignore[call-arg] # with a store it is for C++ alone
        self.group = group
        self._store = store
        self._torch_name = group.name
        self._description = "undefined"
        self._threads = ThreadPool(f"ferrodist-futures-{group.name}")
        self._done = DoneWork([], self._threads)
        self._levels = CallbackLevels(group, self._threads)
        self._retained: deque[FerrodistWork] = deque(maxlen=_NUM_RETAINED_WORKS)
        self._sends = PendingSends()
        self._pool = BufferPool()
        self._local = threading.local()
        self.num_calls = 0
        at_exit(ExitStage.TORCH_GROUPS, self._leave_at_exit)

    # Names and capabilities.

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """The backend's name in torch."""
        return "ferrodist"

    name = _get_backend_name = getBackendName

    # torch's C++ names the groups that it has made backends for, and calls these methods of others.

    def getGroupName(self) -> str:  # noqa: N802
        """The group's name in torch."""
        return self._torch_name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Set the group's name."""
        self._torch_name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """The user's description of the group."""
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Set the description."""
        self._description = description

    @property
    def _device_types(self) -> list[torch.device]:
        return [_CPU]

    def _set_sequence_number_for_group(self) -> None:
        self.num_calls = 0

    def _get_sequence_number_for_group(self) -> int:
        return self.num_calls

    # torch's functions ask the backend of a group for a device what it supports; here the group is that backend.

    supports_splitting = True
    supports_coalescing = supports_time_estimate = supports_shrinking = False
    supports_reconfigure = supports_window = False

    @property
    def options(self) -> SimpleNamespace:
        """The options that torch reads when it splits a group: the timeout."""
        timeout = timedelta(seconds=self.group.timeout)
        return SimpleNamespace(backend="ferrodist", timeout=timeout, _timeout=timeout)

    def get_group_store(self) -> Store | None:
        """Return torch's store of this group, if torch made the group."""
        return self._store

    def _get_backend(self, device: torch.device) -> FerrodistProcessGroup:
        del device
        return self

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return whether `allocate_tensor` supports a device."""
        return device.type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Make an uninitialized one-dimensional tensor, in reused memory if there is any."""
        if not self.supports_tensor_alloc(device):
            raise UnsupportedOpError(f"groups of ferrodist have no memory on {device}: use torch.empty")
        return self._pool.empty(size, dtype)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later calls. Groups that were made from this one keep theirs."""
        seconds = timeout.total_seconds()
        for group in self._levels.groups:
            group.timeout = seconds

    # Leaving the group.

    def abort(self) -> None:
        """Abort the group on all ranks: calls that wait in it, and all later ones, raise."""
        self.group.abort(f"torch aborted it on rank {self.group.rank}")

    def shutdown(self) -> None:
        """Leave the group, after the operations other than receives that were started, if `can_drain` allows it."""
        cancel_at_exit(ExitStage.TORCH_GROUPS, self._leave_at_exit)
        try:
            if can_drain():
                drain_pending(self._levels.groups, self._sends)
        finally:  # also when the wait is interrupted
            for group in reversed(self._levels.groups):
                group.close()
            self._threads.close()

    def _leave_at_exit(self) -> None:
        abort_on_unhandled_exception(self.group)
        self.shutdown()

    # Collectives. They try a function of native/bindings/fast_torch.cpp first, if they have the default timeout.

    def _blocking_group(self, opts: Any) -> Backend | None:
        """The group of a call that can take the fast path and waits for its end, else None."""
        # torch's unset timeout is -1 ms, whose days are negative.
        return None if opts.asyncOp or opts.timeout.days >= 0 else self._levels.current().group

    def _execute(
        self,
        opts: Any,
        results: list[Any],
        fast: tuple[Any, ...] | None,
        general: Callable[[], CheckedCall | list[CheckedCall]],
    ) -> FerrodistWork:
        """Start a call on the fast path, or make or start it on the general path.

        Args:
            opts: torch's options.
            results: The results of the work of a started call.
            fast: The compiled function and its arguments, or None if the call has none.
            general: Checks the arguments and prepares the call for the general path.
        """
        if fast is not None and opts.asyncOp and opts.timeout.days < 0:
            level = self._levels.current()  # of this thread's depth of callbacks; [Note: callbacks] in `futures.py`
            started = start_torch_call(*fast, group=level.group)
            if started is not None:
                return self._returned(level.work_of(started, results))
        calls = general()
        return self._run_all(calls, opts) if isinstance(calls, list) else self._run(calls, opts)

    @accept_options(dist.AllreduceOptions, 1, "op", in_lists=True)
    def allreduce(self, tensors: Tensors, opts: Any) -> FerrodistWork:
        """Fold a tensor over the ranks, in place."""
        tensor, op = only_member(tensors, "allreduce"), plain_reduction(opts.reduceOp)
        group = None if op is None else self._blocking_group(opts)
        if group is not None and compiled.fast_torch_allreduce(tensor, op, group, _IS_BLOCKING):
            return self._done
        if tensor.layout is not torch.strided:
            return self._run_all(sparse_allreduce(self.group, tensor, reduction(opts.reduceOp)), opts)
        fast = None if op is None else (compiled.fast_torch_allreduce, tensor, op)
        return self._execute(opts, [tensor], fast, lambda: general_calls.allreduce(tensor, reduction(opts.reduceOp)))

    @accept_options(dist.AllreduceCoalescedOptions, 1)
    def allreduce_coalesced(self, tensors: Tensors, opts: Any) -> FerrodistWork:
        """Fold each of several tensors."""
        return self._join([self.allreduce([tensor], opts) for tensor in tensors])

    @accept_options(dist.BroadcastOptions, 1, "root", in_lists=True)
    def broadcast(self, tensors: Tensors, opts: Any) -> FerrodistWork:
        """Copy the root's tensor to every rank."""
        tensor, root = only_member(tensors, "broadcast"), check_root(self.group, opts.rootRank, "root")
        group = self._blocking_group(opts)
        if group is not None and compiled.fast_torch_broadcast(tensor, root, group, _IS_BLOCKING):
            return self._done
        fast = (compiled.fast_torch_broadcast, tensor, root)
        return self._execute(opts, [tensor], fast, lambda: general_calls.broadcast(self.group, tensor, root))

    @accept_options(dist.ReduceOptions, 1, "root", "op", in_lists=True)
    def reduce(self, tensors: Tensors, opts: Any) -> FerrodistWork:
        """Fold a tensor over the ranks into the root's."""
        tensor, root = only_member(tensors, "reduce"), check_root(self.group, opts.rootRank, "root")
        op = plain_reduction(opts.reduceOp)
        group = None if op is None else self._blocking_group(opts)
        if group is not None and compiled.fast_torch_reduce(tensor, root, op, group, _IS_BLOCKING):
            return self._done
        fast = None if op is None else (compiled.fast_torch_reduce, tensor, root, op)
        return self._execute(
            opts, [tensor], fast, lambda: general_calls.reduce(self.group, tensor, root, reduction(opts.reduceOp))
        )

    @accept_options(AllgatherOptions, 2, in_lists=True)
    def allgather(self, output_tensors: list[Tensors], input_tensors: Tensors, opts: Any) -> FerrodistWork:
        """Gather tensors, whose sizes may differ, on every rank."""
        outputs, tensor = only_member(output_tensors, "allgather"), only_member(input_tensors, "allgather")
        group = self._blocking_group(opts)
        if group is not None and compiled.fast_torch_all_gather(outputs, tensor, group, _IS_BLOCKING):
            return self._done
        fast = (compiled.fast_torch_all_gather, outputs, tensor)
        return self._execute(opts, [outputs], fast, lambda: general_calls.all_gather(self.group, outputs, tensor))

    @accept_options(AllgatherOptions, 2)
    def allgather_coalesced(self, output_lists: list[Tensors], input_list: Tensors, opts: Any) -> FerrodistWork:
        """Gather several tensors on every rank."""
        # The outer list is by rank in torch's C++, and by tensor in its Python.
        by_tensor = [[outputs[index] for outputs in output_lists] for index in range(len(input_list))]
        return self._join(
            [self.allgather([outputs], [tensor], opts) for outputs, tensor in zip(by_tensor, input_list, strict=True)]
        )

    @accept_options(AllgatherOptions, 2)
    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> FerrodistWork:
        """Gather tensors into one on every rank."""
        group = self._blocking_group(opts)
        if group is not None and compiled.fast_torch_all_gather(output, tensor, group, _IS_BLOCKING):
            return self._done
        fast = (compiled.fast_torch_all_gather, output, tensor)
        return self._execute(opts, [output], fast, lambda: general_calls.all_gather_single(self.group, output, tensor))

    @accept_options(AllgatherOptions, 2)
    def all_gather_single_coalesced(self, output_lists: Tensors, input_list: Tensors, opts: Any) -> FerrodistWork:
        """`all_gather_single` of several tensors."""
        return self._join([self.all_gather_single(*pair, opts) for pair in zip(output_lists, input_list, strict=True)])

    @accept_options(dist.GatherOptions, 2, "root", in_lists=True)
    def gather(self, output_tensors: list[Tensors], input_tensors: Tensors, opts: Any) -> FerrodistWork:
        """Gather tensors on the root."""
        root = check_root(self.group, opts.rootRank, "root")
        outputs = only_member(output_tensors, "gather") if self.group.rank == root else None
        return self._gather(outputs, only_member(input_tensors, "gather"), root, opts)

    @accept_options(dist.GatherOptions, 2, "root")
    def gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> FerrodistWork:
        """Gather tensors into one on the root; ``output`` is not used on other ranks."""
        root = check_root(self.group, opts.rootRank, "root")
        return self._gather(output if self.group.rank == root else None, tensor, root, opts)

    def _gather(
        self, outputs: Tensors | torch.Tensor | None, tensor: torch.Tensor, root: int, opts: Any
    ) -> FerrodistWork:
        results = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs or [])
        group = self._blocking_group(opts)
        if group is not None and compiled.fast_torch_gather(outputs, tensor, root, group, _IS_BLOCKING):
            return self._done
        fast = (compiled.fast_torch_gather, outputs, tensor, root)
        return self._execute(opts, results, fast, lambda: general_calls.gather(self.group, outputs, tensor, root))

    @accept_options(dist.ScatterOptions, 2, "root")
    def scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> FerrodistWork:
        """Scatter the root's tensor; ``tensor`` is not used on other ranks."""
        root = check_root(self.group, opts.rootRank, "root")
        return self._scatter(output, tensor if self.group.rank == root else None, root, opts)

    def _scatter(
        self, output: torch.Tensor, inputs: Tensors | torch.Tensor | None, root: int, opts: Any
    ) -> FerrodistWork:
        group = self._blocking_group(opts)
        if group is not None and compiled.fast_torch_scatter(output, inputs, root, group, _IS_BLOCKING):
            return self._done
        fast = (compiled.fast_torch_scatter, output, inputs, root)
        return self._execute(opts, [output], fast, lambda: general_calls.scatter(self.group, output, inputs, root))

    @accept_options(dist.ScatterOptions, 2, "root", in_lists=True)
    def scatter(self, output_tensors: Tensors, input_tensors: list[Tensors], opts: Any) -> FerrodistWork:
        """Scatter the root's tensors."""
        root = check_root(self.group, opts.rootRank, "root")
        inputs = only_member(input_tensors, "scatter") if self.group.rank == root else None
        return self._scatter(only_member(output_tensors, "scatter"), inputs, root, opts)

    @accept_options(dist.ReduceScatterOptions, 2, "op", in_lists=True)
    def reduce_scatter(self, output_tensors: Tensors, input_tensors: list[Tensors], opts: Any) -> FerrodistWork:
        """Fold lists of tensors, whose sizes may differ, over the ranks; rank r gets the r-th."""
        output, inputs = only_member(output_tensors, "reduce_scatter"), only_member(input_tensors, "reduce_scatter")
        return self._reduce_scatter(general_calls.reduce_scatter, output, inputs, opts)

    @accept_options(dist.ReduceScatterOptions, 2)
    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> FerrodistWork:
        """Fold a tensor over the ranks; rank r gets the r-th part."""
        return self._reduce_scatter(general_calls.reduce_scatter_single, output, tensor, opts)

    def _reduce_scatter(
        self, general: Callable[..., Any], output: torch.Tensor, inputs: Tensors | torch.Tensor, opts: Any
    ) -> FerrodistWork:
        op = plain_reduction(opts.reduceOp)
        group = None if op is None else self._blocking_group(opts)
        if group is not None and compiled.fast_torch_reduce_scatter(output, inputs, op, group, _IS_BLOCKING):
            return self._done
        fast = None if op is None else (compiled.fast_torch_reduce_scatter, output, inputs, op)
        return self._execute(
            opts, [output], fast, lambda: general(self.group, output, inputs, reduction(opts.reduceOp))
        )

    @accept_options(dist.ReduceScatterOptions, 2)
    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> FerrodistWork:
        """`reduce_scatter_single` of several tensors."""
        return self._join([self.reduce_scatter_single(*pair, opts) for pair in zip(outputs, inputs, strict=True)])

    @accept_options(dist.AllToAllOptions, 4)
    def all_to_all_single(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any,
    ) -> FerrodistWork:
        """Send rows of a tensor to each rank, and receive rows from each."""
        given = output_tensor, input_tensor, output_split_sizes, input_split_sizes
        group = self._blocking_group(opts)
        if group is not None and compiled.fast_torch_all_to_all_single(*given, group, _IS_BLOCKING):
            return self._done
        fast = (compiled.fast_torch_all_to_all_single, *given)
        return self._execute(opts, [output_tensor], fast, lambda: general_calls.all_to_all_single(self.group, *given))

    @accept_options(dist.AllToAllOptions, 2)
    def alltoall(self, output_tensors: Tensors, input_tensors: Tensors, opts: Any) -> FerrodistWork:
        """Send a tensor to each rank, and receive one from each."""
        given = output_tensors, input_tensors
        group = self._blocking_group(opts)
        if group is not None and compiled.fast_torch_all_to_all(*given, group, _IS_BLOCKING):
            return self._done
        fast = (compiled.fast_torch_all_to_all, *given)
        return self._execute(opts, list(output_tensors), fast, lambda: general_calls.all_to_all(self.group, *given))

    @accept_options(dist.BarrierOptions, 0)
    def barrier(self, opts: Any) -> FerrodistWork:
        """Wait for all ranks."""
        group = self._blocking_group(opts)
        if group is not None and compiled.fast_barrier(group):
            return self._done
        return self._run(general_calls.barrier(), opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:  # noqa: FBT001, FBT002
        """Wait for all ranks; every barrier of ferrodist names all stragglers. A timeout of 0 is not the default."""
        del wait_all_ranks
        self._levels.current().group.barrier(0.0 if timeout == timedelta(0) else seconds_of(timeout))

    # Point-to-point.

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> FerrodistWork:
        """Send a tensor."""
        work = send_message(self.group, only_member(tensors, "send"), dst, tag, self._threads)
        if isinstance(work, MessageWork):
            self._sends.add(work)
        return self._returned(work)

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> FerrodistWork:
        """Receive a tensor."""
        return self._returned(
            receive_message("recv", self.group, only_member(tensors, "recv"), src, tag, self._threads)
        )

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> FerrodistWork:
        """Receive a tensor from any rank."""
        tensor = only_member(tensors, "recv")
        return self._returned(receive_message("recv_anysource", self.group, tensor, None, tag, self._threads))

    # Coalescing.

    def _start_coalescing(self, device: torch.device) -> None:
        del device
        self._local.works = []

    def _end_coalescing(self, device: torch.device) -> FerrodistWork:
        del device
        works, self._local.works = self._local.works, None
        return self._join(works)

    # Sub-groups.

    def split_group(  # noqa: PLR0917 - torch's arguments
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> FerrodistProcessGroup | None:
        """Make a group of some of this group's ranks; called on all of this group's. Returns None outside of it."""
        del opts, device_types
        if self.group.rank not in ranks:
            return None
        name = group_name or f"{self.group_name}{list(ranks)}"
        seconds = seconds_of(timeout)
        made = FerrodistProcessGroup(
            SubBackend(self.group, list(ranks), timeout=seconds, name=f"torch group {name}", label=f"torch {name}"),
            None if self._store is None else PrefixStore(f"split {name}", self._store),
        )
        made.setGroupName(name)
        made.setGroupDesc(group_desc or "undefined")
        return made

    splitGroup = split_group  # noqa: N815 - torch's name

    # Where a device is bound to the default group, torch connects each new group at once, and makes ranks outside of
    # the new group take part. Groups of ferrodist need neither.

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Do nothing: a group is connected when it is made."""

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Do nothing: only its members take part in making a group."""

    # Running calls, and returning their work to torch.

    def _run(self, call: CheckedCall, opts: Any) -> FerrodistWork:
        return self._returned(self._levels.current().run(call, opts))

    def _run_all(self, calls: list[CheckedCall], opts: Any) -> FerrodistWork:
        return self._returned(self._levels.current().run_all(calls, opts))

    def _join(self, works: list[FerrodistWork]) -> FerrodistWork:
        started = [work for work in works if work is not self._done]
        if not started:
            return self._done
        return started[0] if len(works) == 1 else JoinedWork(works, self._threads)

    def _returned(self, work: FerrodistWork | None) -> FerrodistWork:
        """Retain the work that is returned to torch; None is for a call that has ended."""
        if work is None:
            return self._done
        works = getattr(self._local, "works", None)
        if works is not None:
            works.append(work)
        if len(work.results) == 1 and isinstance(work.results[0], torch.Tensor) and work.results[0].numel() == 1:
            self._retained.append(work)
        return work


LEGACY_NAMES = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
    "gather_single": "gather_into_tensor",
}
"""Former names of torch's methods. torch's C++ knows some methods by both names, and finds ours by the current one."""

_CALLED_BY_PYTHON = {"_allgather_base", "_reduce_scatter_base", "gather_into_tensor"}

for _name, _legacy_name in LEGACY_NAMES.items():
    if _legacy_name in _CALLED_BY_PYTHON or not hasattr(dist.ProcessGroup, _name):
        setattr(FerrodistProcessGroup, _legacy_name, getattr(FerrodistProcessGroup, _name))
