"""Distributed data parallelism: the same model on every rank, each with its own share of the batch.

After S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020
(https://arxiv.org/abs/2006.15704). A step costs one allreduce for each bucket, which starts while backward still
computes the gradients of earlier layers.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NoReturn

import torch

from ferrodist.arguments import check_bool, check_type
from ferrodist.backends.process_group import resolve_group
from ferrodist.backends.weak import weak_method
from ferrodist.collectives.arguments import check_root
from ferrodist.deadline import Deadline, check_timeout
from ferrodist.errors import DistributedError, add_error_context
from ferrodist.parallel.backward_hooks import current_backward_id, find_outputs
from ferrodist.parallel.ddp.autograd_hooks import find_unused_parameters
from ferrodist.parallel.ddp.config import Options
from ferrodist.parallel.ddp.fingerprints import model_title, register_model
from ferrodist.parallel.ddp.join import Event, Join
from ferrodist.parallel.ddp.model_sync import broadcast_tensors, check_supported, verify_module
from ferrodist.parallel.ddp.reducer import Reducer
from ferrodist.parallel.module_guard import ModuleGuard
from ferrodist.parallel.transparent_wrapper import TransparentWrapper, WrappedModule, strip_module_prefix
from ferrodist.torch_private.autograd import version_of
from ferrodist.torch_private.compilers import outside_of_compiler

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from typing_extensions import Self

    from ferrodist.backends.base import Backend
    from ferrodist.parallel.ddp.bucket import CommHook


class DDP(TransparentWrapper, Generic[WrappedModule]):
    """Train one module on several ranks: after ``backward()`` every rank has the mean of all ranks' gradients.

    Construction is a collective: every rank of the group passes the same module, whose parameters and buffers then take
    rank 0's values in place. From there the ranks stay equal bit for bit, as long as their optimizers do the same. When
    each rank's loss is the mean over a batch of equal size, a step is that of one process with all batches joined.

    Gradients are averaged by the time ``backward()`` returns, and errors between the ranks are raised by it. A
    parameter that has no gradient on any rank keeps None; one that has a gradient on some ranks only is an error on
    all, unless ``find_unused_parameters``. Several backward passes between two optimizer steps accumulate as without
    DDP, to rounding; `no_sync` saves the messages of all but the last. Parameters that don't require grad are left out;
    requires_grad may change between two steps, on all ranks alike. Parameters can't be added or replaced.

    After an optimizer's ``zero_grad()`` the former gradient tensors are still DDP's memory, which the next backward
    overwrites: clone any that you keep. After an error of backward, gradients are undefined.

    Step the optimizer when ``backward()`` has returned: an optimizer that steps earlier, in a hook on the parameters,
    would use this rank's own gradients. That is an error on every rank, except where the step neither moves version
    counters (fused optimizers, ``parameter.data``) nor drops the gradient: then the ranks' models drift apart.

    A group may have several models. Every rank makes them in the same order, and runs their backward passes in the same
    order, as often as the others: otherwise backward raises on every rank, and names the rank that was in another
    model. Models have no parameters in common: the DDP that was made last owns them, and an older one refuses to train.

    Copies and unpickled DDPs belong to no group until their first forward in training mode, which every rank calls: a
    copy then joins the group of the original, and an unpickled DDP the default group.

    Args:
        module: The module, with parameters of any dtypes; shared ones are reduced once. It is wrapped, not copied.
        group: The group, on all of whose ranks this is called; None is the default group.
        bucket_size_mb: Gradients are reduced in messages of about this many megabytes (2**20 bytes); the first has one.
        overlap_comm: Average during backward. If False, backward leaves this rank's own gradients, and `sync_gradients`
            or `overlapped_sync_gradients` averages them before the optimizer steps.
        broadcast_buffers: Broadcast the buffers of rank 0 before each forward in training mode, and again when its
            gradients are averaged (or, where none can come, as under ``torch.no_grad()``, after the forward): so
            running statistics are the same everywhere between two steps and after the last one. In evaluation mode
            nothing is sent, and a rank may call forward alone; it warns when its buffers may differ, because the
            gradients of the last forward in training mode were not averaged.
        find_unused_parameters: Ranks may use different parts of the module (each at least one parameter): a rank
            without a gradient contributes zeros, and gets the average. Each forward then searches the graph, so that
            buckets need not wait for gradients that will not come.
        static_graph: Every step uses the same parameters, each as often, which the first step learns. Needed for
            communication to overlap re-entrant checkpointing.
        gradient_as_bucket_view: Gradients are views of the memory that is reduced, and not copied from and to it.
        comm_hook: ``comm_hook(bucket)`` starts the reduction of a `GradientBucket` and returns a `PendingCollective`,
            whose result is the average of each element; see `comm_hooks`. None is an allreduce.

    Raises:
        CollectiveMismatchError: On every rank, when the ranks' modules or options differ, naming the first parameter,
            buffer or option.
        DistributedTimeoutError: A rank did not call in time.
        UnsupportedOpError: A parameter or buffer can't be sent by collectives, can't be written to (expanded, made
            under ``inference_mode``), or is a DTensor, for which there is `FSDP` with NO_SHARD; it is named.
        TypeError, ValueError: An argument is wrong.
    """

    module: WrappedModule

    def __init__(
        self,
        module: WrappedModule,
        group: Backend | None = None,
        *,
        bucket_size_mb: float = 25,
        overlap_comm: bool = True,
        broadcast_buffers: bool = True,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = True,
        comm_hook: CommHook | None = None,
    ) -> None:
        super().__init__()
        check_type(module, torch.nn.Module, "DDP wraps a torch.nn.Module")
        self.module = module
        self._options = Options(
            bucket_size_mb=bucket_size_mb,
            overlap_comm=overlap_comm,
            broadcast_buffers=broadcast_buffers,
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            gradient_as_bucket_view=gradient_as_bucket_view,
            comm_hook=comm_hook,
        )
        self._pending_group: Backend | None = None
        self._buffers_may_differ = False  # after a forward in training mode, until buffers are broadcast
        self._join_group(resolve_group(group))
        self.register_load_state_dict_pre_hook(_insert_module_prefix)  # type: ignore[no-untyped-call]

    @torch.inference_mode(mode=False)
    def _join_group(self, group: Backend) -> None:
        """Become one of the group's models; every rank calls this."""
        deadline = Deadline(group.timeout)
        verify_module(self.module, self._options, group, deadline)
        tensors = [*self.module.parameters(), *self.module.buffers()]
        broadcast_tensors(tensors, 0, group, max_bytes=self._options.max_bytes, deadline=deadline)
        self._guard = ModuleGuard(self.module, "DDP")
        self._in_no_sync = False
        self._join: Join | None = None
        self._model_id = register_model(group, type(self.module).__name__)
        self._group = group
        self._reducer: Reducer | None = self._make_reducer()
        self._mark_buffers_equal()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; in training mode every rank must."""
        if not self.training:
            if self._buffers_may_differ:
                self._check_buffers()
            if self._reducer is None or not torch.is_grad_enabled():
                return self.module(*args, **kwargs)
        reducer = self._prepare_forward()
        result = self.module(*args, **kwargs)
        if torch.is_grad_enabled():
            self._watch_outputs(result, reducer)
        if self.training and not (torch.is_grad_enabled() and reducer.parameters):
            self._end_forward()
        return result

    @outside_of_compiler
    def _watch_outputs(self, result: object, reducer: Reducer) -> None:
        """Hook the outputs, to notice when their gradients begin to flow."""
        outputs = find_outputs(result)
        is_searching = self._options.find_unused_parameters and not self._in_no_sync and self._group.world_size > 1
        reducer.watch_outputs(
            outputs, find_unused_parameters(outputs, reducer.parameters) if is_searching else frozenset()
        )

    @outside_of_compiler
    def _prepare_forward(self) -> Reducer:
        reducer = self._refresh_reducer() if torch.is_grad_enabled() else self._get_reducer()
        in_backward = current_backward_id() != -1  # a checkpoint's second forward must see the first one's buffers
        if self.training and self._options.broadcast_buffers and not in_backward:
            if not self._in_no_sync:
                root = 0 if self._join is None else self._join.announce(Event.FORWARD)
                self._broadcast_buffers("Before forward", root)
            self._buffers_may_differ = True
        return reducer

    def _broadcast_buffers(self, when: str, root: int) -> None:
        # `.data` leaves autograd's version counters alone, so that several forwards may precede one backward: autograd
        # saves batch norm's running statistics without using them. So a buffer that backward does use, and that differs
        # from rank 0's when a second forward begins, goes unnoticed, too.
        with add_error_context(
            lambda: f"{when} {self._title()} broadcasts the buffers of rank {root}.",
            "In training mode every rank must call forward and backward as often as the others (see join()).",
        ):
            self._broadcast([buffer.data for buffer in self.module.buffers()], root, Deadline(self._group.timeout))
        self._mark_buffers_equal()

    @outside_of_compiler
    def _end_forward(self) -> None:
        """Broadcast the buffers of rank 0 after a forward that has no backward."""
        if self._options.broadcast_buffers and not self._in_no_sync and current_backward_id() == -1:
            root = 0 if self._join is None else self._join.announce(Event.FORWARD)
            self._broadcast_buffers("After forward", root)

    def _mark_buffers_equal(self) -> None:
        self._buffers_may_differ = False
        self._synced_versions = self._read_buffer_versions()

    def _read_buffer_versions(self) -> tuple[int, ...]:
        return tuple(version_of(buffer) for buffer in self.module.buffers() if not buffer.is_inference())

    @outside_of_compiler
    def _check_buffers(self) -> None:
        """Warn, in evaluation, if the last forward has changed buffers that were not broadcast."""
        self._buffers_may_differ = False
        if (
            self._reducer is not None
            and self._group.world_size > 1
            and self._synced_versions != self._read_buffer_versions()
        ):
            warnings.warn(
                f"rank {self._group.rank} evaluates {self._title()} with buffers of its own, such as batch norm's"
                " running statistics: they become equal when gradients are averaged, and those of the last forward in"
                " training mode were not (no_sync(), or no backward). Call broadcast_parameters() on all ranks first.",
                stacklevel=3,
            )

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate this rank's own gradients inside the block, and send nothing, neither in backward nor in forward.

        The first backward after the block averages all that was accumulated.
        """
        is_syncing = self._refresh_reducer().is_syncing  # first: a copy joins its group
        before = self._in_no_sync, is_syncing
        self._in_no_sync, self._get_reducer().is_syncing = True, False
        try:
            yield
        finally:
            self._in_no_sync, self._get_reducer().is_syncing = before

    @contextlib.contextmanager
    def join(
        self, *, divide_by_initial_world_size: bool = False, throw_on_early_termination: bool = False
    ) -> Iterator[None]:
        """Enter a block for a training loop in which ranks may have different numbers of batches; all ranks enter it.

        ::

            with ddp.join():
                for inputs, labels in batches:
                    optimizer.zero_grad()
                    loss_fn(ddp(inputs), labels).backward()
                    optimizer.step()

        A rank whose loop has ended stays at the end of the block and helps the others. Averages are over the ranks that
        have a batch, as in one process with the batches that are left. Buffers come from the lowest of them. When the
        block ends, all ranks have the parameters and buffers of the ranks that finished last; a rank's optimizer has
        made as many steps as the rank had batches.

        Gradients of a rank that is done are undefined. The module must not call collectives itself (`SyncBatchNorm2d`),
        and other models of the group must not train inside the block. An exception inside the block aborts the group,
        because the others may wait for this rank.

        Args:
            divide_by_initial_world_size: Divide by the number of all ranks, also of those without a batch, so that
                every sample has the same weight from the first to the last step.
            throw_on_early_termination: Raise on every rank as soon as one has no batch left, instead of helping.

        Raises:
            RuntimeError: Some rank has no batch left, and ``throw_on_early_termination``. The group stays usable.
            CollectiveMismatchError: On every rank, when the ranks' steps differ.
        """
        check_bool("divide_by_initial_world_size", divide_by_initial_world_size)
        check_bool("throw_on_early_termination", throw_on_early_termination)
        self._refresh_reducer()
        if self._join is not None:
            raise RuntimeError("join() blocks of one DDP can't be nested: one around the training loop is enough")
        self._join = Join(
            group=self._group,
            title=self._title(),
            broadcast_buffers=partial(self._broadcast_buffers, "Before forward"),
            reduce_without_batch=lambda: self._refresh_reducer().finish_round(is_joined=True),
            broadcast_model=self.broadcast_parameters,
            divides_by_all=divide_by_initial_world_size,
            raises_early=throw_on_early_termination,
        )
        self._get_reducer().before_round = self._join.begin_round
        try:
            with self._join:
                yield
        finally:
            self._join = None
            self._get_reducer().before_round = None

    @torch.inference_mode(mode=False)
    def sync_gradients(self, *, timeout: float | None = None) -> None:
        """Average the present gradients, bucket after bucket; every rank must call this.

        Needed with ``overlap_comm=False``, and for gradients that were not made by ``backward()``. Averaging gradients
        again that are equal on all ranks gives the same values, to rounding, and costs the messages.

        Args:
            timeout: Seconds for each bucket; None uses the group's.

        Raises:
            CollectiveMismatchError: As in backward, for a gradient that only some ranks have.
            DistributedError: Communication between the ranks failed. The group has failed.
        """
        limit = None if timeout is None else check_timeout(timeout)
        self._refresh_reducer().finish_round(limit, one_by_one=True)

    @torch.inference_mode(mode=False)
    def overlapped_sync_gradients(self, *, timeout: float | None = None) -> None:
        """`sync_gradients` with all buckets under way at once: one is copied while others travel."""
        limit = None if timeout is None else check_timeout(timeout)
        self._refresh_reducer().finish_round(limit)

    def broadcast_parameters(self, root: int = 0, *, timeout: float | None = None) -> None:
        """Overwrite every rank's parameters and buffers, in place, with those of rank ``root``.

        Every rank must call this.

        Args:
            root: The source rank.
            timeout: Seconds; None uses the group's.
        """
        self._get_reducer()
        check_root(self._group, root, "root")
        deadline = Deadline(self._group.timeout if timeout is None else timeout)
        self._broadcast([*self.module.parameters(), *self.module.buffers()], root, deadline)
        self._mark_buffers_equal()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own state dict: files written with and without DDP are the same."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load the module's own state dict, or one of torch's DDP, whose names begin with ``module.``.

        Every rank loads the same, or `broadcast_parameters` must follow.
        """
        return self.module.load_state_dict(strip_module_prefix(state_dict, self.module), *args, **kwargs)

    def checkpoint_module(self) -> torch.nn.Module:
        """The module that `save_distributed` saves for this wrapper."""
        return self.module

    @property
    def saves_buffers(self) -> bool:
        """True if this rank's buffers are saved: those that forward broadcasts, or a copy's own."""
        return self._reducer is None or self._group.rank == 0

    def __getstate__(self) -> dict[str, Any]:
        """The picklable state, without attributes of the group."""
        of_group = {"_group", "_guard", "_join", "_in_no_sync", "_model_id"}
        state = {name: value for name, value in self.__dict__.items() if name not in of_group}
        return {**state, "_reducer": None, "_pending_group": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        copied._pending_group = self._pending_group if self._reducer is None else self._group  # noqa: SLF001
        return copied

    def __copy__(self) -> NoReturn:
        raise TypeError("two DDPs of one module would average its gradients twice: use copy.deepcopy")

    def _broadcast(self, tensors: list[torch.Tensor], root: int, deadline: Deadline) -> None:
        try:
            broadcast_tensors(tensors, root, self._group, max_bytes=self._options.max_bytes, deadline=deadline)
        except DistributedError:
            raise
        except (TypeError, ValueError, RuntimeError):
            check_supported(self.module, self._group)  # names a tensor that was replaced
            raise

    def _title(self) -> str:
        return model_title(self._group, self._model_id)

    @torch.inference_mode(mode=False)
    def _make_reducer(self) -> Reducer:
        trainable = {name: parameter for name, parameter in self.module.named_parameters() if parameter.requires_grad}
        reducer = Reducer(trainable, self._group, self._options, model_id=self._model_id)
        if self._options.broadcast_buffers:
            reducer.after_round = weak_method(self._broadcast_buffers, "After backward")
        return reducer

    def _get_reducer(self) -> Reducer:
        """The reducer; a copy joins its group first."""
        if self._reducer is None:
            self._join_group(resolve_group(self._pending_group))
            assert self._reducer is not None
        return self._reducer

    def _refresh_reducer(self) -> Reducer:
        """Rebuild the reducer if parameters were frozen, unfrozen or changed their dtype, and refuse new parameters."""
        reducer = self._get_reducer()
        reducer.discard_failed_round()
        self._guard.check_unchanged(self._title())
        if not self._options.overlap_comm:
            self._check_gradients_averaged(reducer)
        reducer.hooks.check_owner()
        matches = all(bucket.matches_parameters() for bucket in reducer.buckets)
        # First: it must be called in every step, since it compares with its last call.
        if self._guard.take_requires_grad_change() or not matches:
            previous, reducer = reducer, self._make_reducer()
            reducer.inherit_state(previous)
            self._reducer = reducer
        return reducer

    def _check_gradients_averaged(self, reducer: Reducer) -> None:
        """Raise if an optimizer has stepped with gradients that were not averaged."""
        # First: it must be called in every step, since it compares with its last call.
        if self._guard.take_value_change() and reducer.has_unreduced_gradients and not self._in_no_sync:
            reducer.has_unreduced_gradients = False
            raise RuntimeError(
                f"the parameters of {self._title()} have changed since backward, but their gradients were not averaged:"
                " with overlap_comm=False call sync_gradients() before optimizer.step(), otherwise the ranks' models"
                " drift apart"
            )


def _insert_module_prefix(ddp: DDP, state_dict: dict[str, Any], prefix: str, *_rest: object) -> None:
    """Add the ``module.`` that ``state_dict()`` leaves out, when a DDP inside another module is loaded."""
    prefixed = {name: state_dict.pop(name) for name in [name for name in state_dict if name.startswith(prefix)]}
    stripped = strip_module_prefix({name.removeprefix(prefix): value for name, value in prefixed.items()}, ddp.module)
    state_dict.update({f"{prefix}module.{name}": value for name, value in stripped.items()})
