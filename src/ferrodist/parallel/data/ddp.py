"""Distributed data parallelism: the same model on every rank, each with its own part of the batch.

After S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020
(https://arxiv.org/abs/2006.15704). A step costs one allreduce a bucket, which starts while backward still computes the
gradients of earlier layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch

from ferrodist.backends.process_group import resolve_group
from ferrodist.collectives.explain import explain_errors
from ferrodist.collectives.prepare import check_root
from ferrodist.deadline import Deadline, check_timeout
from ferrodist.errors import DistributedError
from ferrodist.parallel.data.marks import model_title, number_model
from ferrodist.parallel.data.reducer import Reducer
from ferrodist.parallel.data.replication import broadcast_tensors, check_same_form, check_supported

if TYPE_CHECKING:
    from ferrodist.backends.base import Backend

__all__ = ["DDP"]

_MEGABYTE = 1 << 20


class DDP(torch.nn.Module):
    """Train one module on several ranks: after ``backward()`` every rank has the mean of all ranks' gradients.

    Making it is a collective: every rank of the group gives the same module, whose parameters and buffers then
    take rank 0's values in place. From there the ranks stay equal bit for bit, as long as their optimizers do the
    same. When each rank's loss is the mean over a batch of equal size, a step is that of one process with all
    ranks' batches joined.

    Gradients are averaged by the time ``backward()`` returns, and what goes wrong between the ranks is raised by
    it. A parameter that has no gradient on this rank counts as zeros and gets the average, so ranks may use
    different parts of the module (each must reach at least one parameter); one that has no gradient on any rank
    keeps None. Several backwards between two optimizer steps accumulate as without DDP, to rounding. Parameters that
    don't require grad are left out; which do may change between two steps, on all ranks alike.

    Step the optimizer when ``backward()`` has returned: one that steps earlier, in a hook on the parameters, would take
    this rank's own gradients. That is an error on every rank, except where the step neither counts as a change (fused
    optimizers, ``parameter.data``) nor drops the gradient: then the ranks' models drift apart.

    A group may have several models. Every rank makes them in the same order, and runs their backwards in the same
    order, as often as the others: else backward raises on every rank, and says which rank was in which model.

    Args:
        module: Whatever its parameters' dtypes; shared parameters are reduced once. It is kept, not copied.
        group: The group, on all of whose ranks this is called; None is the default group.
        bucket_size_mb: Gradients are reduced in messages of about this many megabytes (2**20 bytes).
        broadcast_buffers: Give every rank the buffers of rank 0 before each forward in training mode, so that
            running statistics are the same everywhere. In evaluation mode a rank may call forward by itself.

    Raises:
        CollectiveMismatchError: On every rank, when the ranks' modules differ, naming the first parameter or buffer.
        DistributedTimeoutError: Some rank did not come.
        UnsupportedOpError: A parameter or buffer is of a kind that collectives can't carry, or can't be written to
            (expanded, made under ``inference_mode``); it is named.
        TypeError, ValueError: An argument is wrong.
    """

    module: torch.nn.Module

    def __init__(
        self,
        module: torch.nn.Module,
        group: Backend | None = None,
        *,
        bucket_size_mb: float = 25,
        broadcast_buffers: bool = True,
    ) -> None:
        super().__init__()
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"DDP wraps a torch.nn.Module, not {type(module).__name__}")
        if isinstance(bucket_size_mb, bool) or not isinstance(bucket_size_mb, (int, float)):
            raise TypeError(f"bucket_size_mb must be a number, not {type(bucket_size_mb).__name__}")
        if not bucket_size_mb > 0:
            raise ValueError(f"bucket_size_mb must be above 0, not {bucket_size_mb}")
        if not isinstance(broadcast_buffers, bool):
            raise TypeError(f"broadcast_buffers must be True or False, not {type(broadcast_buffers).__name__}")
        self.module = module
        self.broadcast_buffers = broadcast_buffers
        self._group = resolve_group(group)
        self._max_bytes = bucket_size_mb * _MEGABYTE
        deadline = Deadline(self._group.timeout)
        check_same_form(module, self._group, deadline)
        self.broadcast_parameters(timeout=deadline.remaining())
        self._number = number_model(self._group, type(module).__name__)
        self._reducer = self._make_reducer()
        self.register_load_state_dict_pre_hook(_insert_module_prefix)  # type: ignore[no-untyped-call]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; in training mode every rank must."""
        if self.training and self.broadcast_buffers:
            # `.data` leaves autograd's version counters alone, so that several forwards may come before one
            # backward: a broadcast changes a buffer only where a forward has changed it, and that was counted.
            with explain_errors(
                lambda: f"Before forward {self._title()} gives all ranks the buffers of rank 0.",
                "In training mode every rank must call forward as often as the others.",
            ):
                self._broadcast([buffer.data for buffer in self.module.buffers()], 0, Deadline(self._group.timeout))
        if torch.is_grad_enabled():
            self._follow_changes()
        return self.module(*args, **kwargs)

    def sync_gradients(self, *, timeout: float | None = None) -> None:
        """Average the gradients as they are now; every rank must call.

        Needed only for gradients that were not made by ``backward()``, which averages by itself. Averaging again
        what is equal on all ranks gives the same values, to rounding, and costs the messages.

        Args:
            timeout: Seconds for each bucket; None takes the group's.

        Raises:
            DistributedError: What failed between the ranks. The group has failed.
        """
        self._follow_changes()
        self._reducer.reduce(None if timeout is None else check_timeout(timeout))

    def broadcast_parameters(self, root: int = 0, *, timeout: float | None = None) -> None:
        """Overwrite every rank's parameters and buffers, in place, with those of rank ``root``; every rank must call.

        Args:
            root: The rank whose values everyone gets.
            timeout: Seconds; None takes the group's.
        """
        check_root(self._group, root, "root")
        deadline = Deadline(self._group.timeout if timeout is None else timeout)
        self._broadcast([*self.module.parameters(), *self.module.buffers()], root, deadline)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own state dict: files written with and without DDP are the same."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the module's own state dict. Every rank loads the same, or `broadcast_parameters` must follow."""
        return self.module.load_state_dict(*args, **kwargs)

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "a DDP belongs to its group and can't be copied or pickled: copy or save its .module, or its state_dict()"
        )

    def _broadcast(self, tensors: list[torch.Tensor], root: int, deadline: Deadline) -> None:
        try:
            broadcast_tensors(tensors, root, self._group, max_bytes=self._max_bytes, deadline=deadline)
        except DistributedError:
            raise
        except (TypeError, ValueError, RuntimeError):
            check_supported(self.module, self._group)  # one may have been replaced: say which
            raise

    def _title(self) -> str:
        return model_title(self._group, self._number)

    def _make_reducer(self) -> Reducer:
        trainable = {name: parameter for name, parameter in self.module.named_parameters() if parameter.requires_grad}
        return Reducer(trainable, self._group, max_bytes=self._max_bytes, model=self._number)

    def _follow_changes(self) -> None:
        """Plan anew when parameters were frozen, unfrozen or replaced: a new one would silently not be averaged."""
        self._reducer.forget_failed_backward()
        trainable = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        known = self._reducer.parameters
        same = len(trainable) == len(known) and all(a is b for a, b in zip(trainable, known, strict=True))
        if not (same and self._reducer.fits()):
            self._reducer = self._make_reducer()


def _insert_module_prefix(_module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, *_rest: object) -> None:
    """Let a module that has a DDP inside load what its ``state_dict()`` gave: names without ``module.``."""
    for name in [name for name in state_dict if name.startswith(prefix)]:
        state_dict[f"{prefix}module.{name.removeprefix(prefix)}"] = state_dict.pop(name)
