"""Ranks that train by themselves for many steps, and agree now and then: far fewer messages than a mean each step.

The mean of parameters over the ranks, in memory that is made once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch

from ferrodist.backends.process_group import resolve_group
from ferrodist.collectives.objects import all_gather_object
from ferrodist.collectives.reduce import allreduce
from ferrodist.collectives.reduce_op import ReduceOp
from ferrodist.collectives.symmetric_memory import empty_symmetric
from ferrodist.deadline import Deadline
from ferrodist.errors import BackendUnavailable, CollectiveMismatchError, UnsupportedOpError, add_error_context
from ferrodist.parallel.ddp.bucket import (
    FINGERPRINT_SIZE,
    bucket_fingerprint,
    number_model,
    plan_buckets,
    verify_fingerprints,
)
from ferrodist.parallel.ddp.model_sync import broadcast_tensors, check_same_form
from ferrodist.parallel.module_guard import Members
from ferrodist.wording import with_article

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ferrodist.backends.base import Backend

MAX_BYTES = 25 << 20
"""Of a message."""


class FlatAverager:
    """Flat memory for the mean of some parameters over the ranks, made once; see [Note: marks] in `ddp/bucket.py`."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], group: Backend, number: int) -> None:
        self.parameters = parameters
        self._group = group
        self._number = number
        self._flats: list[torch.Tensor] = []
        names, owners = list(parameters), list(parameters.values())
        places: dict[int, torch.Tensor] = {}
        for bucket in plan_buckets(owners, MAX_BYTES):
            sizes = [owners[place].numel() for place in bucket.members]
            flat = _make(sum(sizes) + group.world_size * FINGERPRINT_SIZE, bucket.dtype, bucket.device, group)
            self._flats.append(flat)
            parts = torch.split(flat[: sum(sizes)], sizes)
            places.update(zip(bucket.members, parts, strict=True))
        self.tensors = {name: places[place].view(owners[place].shape) for place, name in enumerate(names)}
        """The means, by name, after `take`."""

    @torch.no_grad()
    def take(self) -> None:
        """Set `tensors` to the means of the parameters as they are now."""
        for name, parameter in self.parameters.items():
            self.tensors[name].copy_(parameter)
        for index, flat in enumerate(self._flats):
            marks = flat[-self._group.world_size * FINGERPRINT_SIZE :]
            own = marks.zero_()[self._group.rank * FINGERPRINT_SIZE :][:FINGERPRINT_SIZE]
            own.copy_(torch.tensor(bucket_fingerprint(self._number, index), device=flat.device))
            allreduce(flat, ReduceOp.MEAN, group=self._group, out=flat)
            verify_fingerprints(marks.tolist(), self._group)


def _make(count: int, dtype: torch.dtype, device: torch.device, group: Backend) -> torch.Tensor:
    if device.type == "cpu":
        try:
            return empty_symmetric((count,), dtype, group=group)
        except BackendUnavailable:  # on all ranks
            pass
    return torch.empty(count, dtype=dtype, device=device)


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
    rank 0's values. Parameters that don't require grad, and buffers, stay each rank's own afterwards. Which parameters
    require grad may change between two steps, on all ranks alike; one that was frozen since the last average takes part
    in the next, so that it is equal on all ranks from there. Parameters can't be added or replaced, nor change their
    dtype.

    A group may have several; every rank makes them, and calls their `step`, in the same order. To go on from a file,
    save the module and `state_dict` when `step` has averaged; load the module, make this, and then load its state.

    Args:
        module: The module; of one form on all ranks, which is compared.
        group: The group, on all of whose ranks this is called; None is the default group.
        period: Steps between two averages, equal on all ranks.
        start_step: Steps before the first local one, in which gradients are averaged by other means; equal on all
            ranks.

    Raises:
        CollectiveMismatchError: On every rank, when the modules, periods or start steps differ.
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
        self._module = module
        self._group = resolve_group(group)
        self._compare_settings()
        self._number = number_model(self._group, f"{type(self).__name__} of {type(module).__name__}")
        self._members = Members(module)
        self._parameters = dict(module.named_parameters())
        self._means: FlatAverager | None = None
        self.reset()

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} can't be copied or pickled, for it belongs to a group and a module: save its"
            " state_dict(), or make another one of a copy of the module"
        )

    @property
    def is_local(self) -> bool:
        """Whether the step that comes is one in which ranks train by themselves."""
        return self.num_steps >= self.start_step

    def step(self) -> bool:
        """Count a step, and average when a period is over; every rank calls it after each step of its optimizer.

        Returns:
            Whether it averaged.

        Raises:
            UnsupportedOpError: A parameter was added, replaced or removed, or has another dtype or shape.
            CollectiveMismatchError: On every rank, when ranks average different models, or have frozen different
                parameters.
        """
        self.num_steps += 1
        num_local = self.num_steps - self.start_step
        if num_local <= 0 or num_local % self.period:
            return False
        self._check_parameters()
        with add_error_context(
            lambda: f"In step {self.num_steps} {type(self).__name__} averages parameters.",
            "Every rank must call step() as often as the others, and those of several models in the same order.",
        ):
            self._agree()
        return True

    def reset(self) -> None:
        """Go on, on all ranks, from rank 0's parameters and buffers as they are now; every rank calls it.

        For values that were changed otherwise than by training, as by loading them. ``num_steps`` stays.
        """
        self._check_parameters()
        deadline = Deadline(self._group.timeout)
        check_same_form(self._module, None, self._group, deadline, maker=type(self).__name__)
        tensors = [*self._module.parameters(), *self._module.buffers()]
        broadcast_tensors(tensors, 0, self._group, max_bytes=MAX_BYTES, deadline=deadline)
        self._trained = self._find_trained()

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` takes; the module's parameters and buffers are not in it."""
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another one was; every rank calls it, with the same state.

        Raises:
            CollectiveMismatchError: On every rank, when the ranks' numbers of steps differ.
            KeyError, ValueError: It is no such state, or of another module.
        """
        self.num_steps = int(state["num_steps"])
        self._compare_settings()

    def _compare_settings(self) -> None:
        mine = f"{type(self).__name__}(period={self.period}, start_step={self.start_step}) in step {self.num_steps}"
        with add_error_context(
            lambda: f"Rank {self._group.rank} was making or loading {with_article(type(self).__name__)}.",
            "Every rank of the group must do so, at the same place of its program.",
        ):
            everyone = all_gather_object(mine, group=self._group)
        differing = [rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]]
        if differing:
            raise CollectiveMismatchError(
                f"the ranks of group {self._group.name!r} would average at different times: rank {differing[0]} has"
                f" {everyone[differing[0]]} where rank 0 has {everyone[0]}. Give all ranks the same.",
                ranks=tuple(differing),
            )

    def _check_parameters(self) -> None:
        self._members.check_same(type(self._module).__name__, maker=type(self).__name__)
        for name, was in self._means.tensors.items() if self._means else ():
            parameter = self._parameters[name]
            if parameter.dtype is not was.dtype or parameter.shape != was.shape:
                raise UnsupportedOpError(
                    f"parameter {name!r} is {parameter.dtype} of shape {tuple(parameter.shape)} and was {was.dtype} of"
                    f" shape {tuple(was.shape)} before: make a new {type(self).__name__}, on all ranks"
                )

    def _find_trained(self) -> tuple[str, ...]:
        return tuple(name for name, parameter in self._parameters.items() if parameter.requires_grad)

    def _take_means(self) -> tuple[dict[str, torch.Tensor], frozenset[str]]:
        """Average the parameters that are trained now or were when the ranks last agreed.

        Returns:
            The means, and the names of those that are trained now and were then.
        """
        before, self._trained = self._trained, self._find_trained()
        if self._trained != before:
            deadline = Deadline(self._group.timeout)
            check_same_form(self._module, None, self._group, deadline, maker=type(self).__name__)
        both = {*before, *self._trained}
        if self._means is None or self._means.parameters.keys() != both:
            chosen = {name: parameter for name, parameter in self._parameters.items() if name in both}
            self._means = FlatAverager(chosen, self._group, self._number)
        self._means.take()
        return self._means.tensors, frozenset(before).intersection(self._trained)

    @torch.no_grad()
    def _agree(self) -> None:
        for name, mean in self._take_means()[0].items():
            self._parameters[name].copy_(mean)


class DiLoCo(LocalSGD):
    """Treats what the ranks' own steps changed as a gradient, which an outer optimizer applies every ``period`` steps.

    After A. Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023
    (https://arxiv.org/abs/2311.08105), algorithm 1: from where all ranks were equal, the outer gradient is that place
    less the mean of where they are now; SGD with Nesterov momentum takes the step, and all ranks go on from there. The
    ranks' own optimizers keep their state.

    Where the ranks were equal is remembered. So call `reset` after loading other values into the module: nothing tells
    them from training. A parameter that was frozen or unfrozen since takes the plain mean once.

    Args:
        module: As for `LocalSGD`.
        group: As for `LocalSGD`.
        period: As for `LocalSGD`; the paper's is 500.
        outer_optimizer: Makes the outer optimizer of the parameters that it is given, equal on all ranks; None is SGD
            with learning rate 0.7 and Nesterov momentum 0.9, the paper's. Frozen parameters are among them; they have
            no gradient.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        group: Backend | None = None,
        *,
        period: int = 500,
        outer_optimizer: Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer] | None = None,
    ) -> None:
        make = outer_optimizer or (lambda outer: torch.optim.SGD(outer, lr=0.7, momentum=0.9, nesterov=True))
        if not callable(make):
            raise TypeError(
                "outer_optimizer must be a function that makes an optimizer of the parameters that it is given, not"
                f" {type(make).__name__}"
            )
        self._outer: dict[str, torch.nn.Parameter] = {}
        super().__init__(module, group, period=period)
        self.outer_optimizer = make(list(self._outer.values()))
        """The outer optimizer."""
        if not isinstance(self.outer_optimizer, torch.optim.Optimizer):
            raise TypeError(
                "outer_optimizer must be a function that returns a torch.optim.Optimizer, not"
                f" {type(self.outer_optimizer).__name__}"
            )

    def reset(self) -> None:
        """Go on, on all ranks, from rank 0's parameters and buffers as they are now; every rank calls it.

        For values that were changed otherwise than by training, as by loading them. ``num_steps`` and the outer
        optimizer's state stay.
        """
        super().reset()
        for name, parameter in self._parameters.items():
            if parameter.is_floating_point() or parameter.is_complex():
                # A frozen one is not copied: it has no outer steps before it is trained, and then takes other memory.
                place = parameter.detach().clone() if parameter.requires_grad else parameter.detach()
                self._outer.setdefault(name, torch.nn.Parameter(place)).data = place

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` takes: where all ranks were equal, too, and the outer optimizer's state.

        Its tensors are this one's own, and change in later steps.
        """
        outer = {name: self._outer[name].detach() for name in self._trained}
        return {**super().state_dict(), "outer": outer, "outer_optimizer": self.outer_optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `LocalSGD.load_state_dict`."""
        places: Mapping[str, torch.Tensor] = state["outer"]
        for name, place in places.items():
            if name not in self._outer or self._outer[name].shape != place.shape:
                raise ValueError(
                    f"the state has parameter {name!r} of shape {tuple(place.shape)}, which"
                    f" {type(self._module).__name__} has not: load it into a DiLoCo of the same module"
                )
        super().load_state_dict(state)
        self.outer_optimizer.load_state_dict(state["outer_optimizer"])
        for name, place in places.items():
            self._outer[name].data = place.to(self._outer[name].dtype, copy=True)
        self._trained = tuple(name for name in self._parameters if name in places)

    @torch.no_grad()
    def _agree(self) -> None:
        means, kept = self._take_means()
        for name, mean in means.items():
            outer = self._outer[name]
            if name in kept:
                outer.grad = torch.sub(outer, mean, out=mean)
            else:
                outer.data = mean.clone()
        self.outer_optimizer.step()
        for name in means:
            self._outer[name].grad = None
            self._parameters[name].copy_(self._outer[name])
