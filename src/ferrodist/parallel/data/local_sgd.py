"""Ranks that train by themselves for many steps, and agree now and then: far fewer messages than a mean each step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ferrodist.backends.process_group import resolve_group
from ferrodist.collectives.explain import explain_errors
from ferrodist.collectives.reduce_op import ReduceOp
from ferrodist.collectives.reductions import allreduce
from ferrodist.collectives.symmetric import empty_symmetric
from ferrodist.deadline import Deadline
from ferrodist.errors import BackendUnavailable
from ferrodist.parallel.data.buckets import plan_buckets
from ferrodist.parallel.data.replication import broadcast_tensors, check_same_form

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.backends.base import Backend

__all__ = ["DiLoCo", "LocalSGD"]

_MAX_BYTES = 25 << 20


class LocalSGD:
    """Averages a module's parameters over the ranks every ``period`` steps, where DDP averages gradients in each.

    After S. U. Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019 (https://arxiv.org/abs/1805.09767);
    ``start_step`` makes it post-local SGD, after T. Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", ICLR
    2020 (https://arxiv.org/abs/1808.07217)::

        averaging = fd.LocalSGD(ddp.module, period=8, start_step=1000)
        for inputs, labels in batches:
            optimizer.zero_grad()
            with ddp.no_sync() if averaging.is_local else contextlib.nullcontext():
                loss_fn(ddp(inputs), labels).backward()
            optimizer.step()
            averaging.step()

    Without a start step the bare module will do. Making it is a collective: every rank's parameters and buffers take
    rank 0's values. Parameters that don't require grad, and buffers, stay each rank's own afterwards.

    Args:
        module: The module; of one form on all ranks, which is compared.
        group: The group, on all of whose ranks this is called; None is the default group.
        period: Steps between two averages.
        start_step: Steps before the first local one, in which gradients are averaged by other means.

    Raises:
        CollectiveMismatchError: On every rank, when the modules differ.
        TypeError, ValueError: An argument is wrong.
    """

    def __init__(
        self, module: torch.nn.Module, group: Backend | None = None, *, period: int, start_step: int = 0
    ) -> None:
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"{type(self).__name__} averages a torch.nn.Module, not {type(module).__name__}")
        for name, value, least in (("period", period, 1), ("start_step", start_step, 0)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an integer, not {type(value).__name__}")
            if value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")
        self.period = period
        self.start_step = start_step
        self.num_steps = 0
        """How often `step` was called."""
        self._group = resolve_group(group)
        deadline = Deadline(self._group.timeout)
        check_same_form(module, None, self._group, deadline)
        tensors = [*module.parameters(), *module.buffers()]
        broadcast_tensors(tensors, 0, self._group, max_bytes=_MAX_BYTES, deadline=deadline)
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._means = _Means(self._parameters, self._group)

    @property
    def is_local(self) -> bool:
        """Whether the step that comes is one in which ranks train by themselves."""
        return self.num_steps >= self.start_step

    def step(self) -> bool:
        """Count a step, and average when a period is over; every rank calls it after each step of its optimizer.

        Returns:
            Whether it averaged.
        """
        self.num_steps += 1
        num_local = self.num_steps - self.start_step
        if num_local <= 0 or num_local % self.period:
            return False
        with explain_errors(
            lambda: f"In step {self.num_steps} {type(self).__name__} averages parameters.",
            "Every rank must call step() as often as the others.",
        ):
            self._agree()
        return True

    def _agree(self) -> None:
        self._means.take(self._parameters)
        with torch.no_grad():
            for parameter, mean in zip(self._parameters, self._means.tensors, strict=True):
                parameter.copy_(mean)


class DiLoCo(LocalSGD):
    """Treats what the ranks' own steps changed as a gradient, which an outer optimizer applies every ``period`` steps.

    After A. Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023
    (https://arxiv.org/abs/2311.08105), algorithm 1: from where all ranks were equal, the outer gradient is that place
    less the mean of where they are now; SGD with Nesterov momentum takes the step, and all ranks go on from there. The
    ranks' own optimizers keep their state.

    Args:
        module: As for `LocalSGD`.
        group: As for `LocalSGD`.
        period: As for `LocalSGD`; the paper's is 500.
        outer_optimizer: Makes the outer optimizer of the parameters that it is given, equal on all ranks; None is SGD
            with learning rate 0.7 and Nesterov momentum 0.9, the paper's.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        group: Backend | None = None,
        *,
        period: int = 500,
        outer_optimizer: Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer] | None = None,
    ) -> None:
        super().__init__(module, group, period=period)
        self._outer = [torch.nn.Parameter(parameter.detach().clone()) for parameter in self._parameters]
        make = outer_optimizer or (lambda outer: torch.optim.SGD(outer, lr=0.7, momentum=0.9, nesterov=True))
        self.outer_optimizer = make(self._outer)
        """The outer optimizer, for its state to be saved."""

    def _agree(self) -> None:
        self._means.take(self._parameters)
        with torch.no_grad():
            for outer, mean in zip(self._outer, self._means.tensors, strict=True):
                outer.grad = torch.sub(outer, mean, out=mean)
        self.outer_optimizer.step()
        with torch.no_grad():
            for parameter, outer in zip(self._parameters, self._outer, strict=True):
                outer.grad = None
                parameter.copy_(outer)


class _Means:
    """Flat memory for the mean of some tensors over the ranks, made once."""

    def __init__(self, tensors: Sequence[torch.Tensor], group: Backend) -> None:
        self._group = group
        self._flats: list[torch.Tensor] = []
        places: dict[int, torch.Tensor] = {}
        for bucket in plan_buckets(tensors, _MAX_BYTES):
            sizes = [tensors[place].numel() for place in bucket.members]
            flat = _make(sum(sizes), bucket.dtype, group)
            self._flats.append(flat)
            parts = torch.split(flat, sizes)
            places.update(zip(bucket.members, parts, strict=True))
        self.tensors = [places[place].view(tensor.shape) for place, tensor in enumerate(tensors)]
        """The means, after `take`."""

    @torch.no_grad()
    def take(self, tensors: Sequence[torch.Tensor]) -> None:
        """Set `tensors` to the means of these."""
        for mean, tensor in zip(self.tensors, tensors, strict=True):
            mean.copy_(tensor)
        for flat in self._flats:
            allreduce(flat, ReduceOp.MEAN, group=self._group, out=flat)


def _make(count: int, dtype: torch.dtype, group: Backend) -> torch.Tensor:
    try:
        return empty_symmetric((count,), dtype, group=group)
    except BackendUnavailable:  # on all ranks
        return torch.empty(count, dtype=dtype)
