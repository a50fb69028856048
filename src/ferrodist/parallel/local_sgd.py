"""Local SGD and DiLoCo: ranks train on their own for many steps and average parameters now and then."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from typing_extensions import override

from ferrodist.arguments import check_int, check_type
from ferrodist.backends.process_group import resolve_group
from ferrodist.collectives.objects import all_gather_object
from ferrodist.collectives.reduce import allreduce
from ferrodist.collectives.reduce_op import ReduceOp
from ferrodist.deadline import Deadline
from ferrodist.errors import CollectiveMismatchError, UnsupportedOpError, add_error_context
from ferrodist.parallel.ddp.bucket import allocate_flat, compute_bucket_assignment
from ferrodist.parallel.ddp.fingerprints import (
    FINGERPRINT_SIZE,
    bucket_fingerprint,
    register_model,
    verify_fingerprints,
)
from ferrodist.parallel.ddp.model_sync import broadcast_tensors, verify_module
from ferrodist.parallel.module_guard import ModuleGuard
from ferrodist.wording import with_article

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ferrodist.backends.base import Backend

MAX_BYTES = 25 << 20  # size limit of a message


class FlatAverager:
    """The mean of parameters over the ranks, in flat memory that is allocated once.

    Each message carries fingerprints; see [Note: fingerprints] in `ddp/fingerprints.py`.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], group: Backend, model_id: int) -> None:
        self.parameters = parameters
        self.tensors: dict[str, torch.Tensor] = {}  # the means by name, after `average`
        self._group, self._model_id = group, model_id
        self._flats: list[torch.Tensor] = []
        names, values = list(parameters), list(parameters.values())
        for spec in compute_bucket_assignment(values, MAX_BYTES):
            sizes = [values[position].numel() for position in spec.members]
            flat = allocate_flat(sum(sizes) + group.world_size * FINGERPRINT_SIZE, spec.dtype, spec.device, group)
            self._flats.append(flat)
            for position, mean in zip(spec.members, torch.split(flat[: sum(sizes)], sizes), strict=True):
                self.tensors[names[position]] = mean.view(values[position].shape)

    @torch.no_grad()
    def average(self) -> None:
        """Set `tensors` to the means of the parameters' present values; every rank calls this."""
        for name, parameter in self.parameters.items():
            self.tensors[name].copy_(parameter)
        for index, flat in enumerate(self._flats):
            fingerprints = flat[-self._group.world_size * FINGERPRINT_SIZE :]
            own_fingerprint = fingerprints.zero_()[self._group.rank * FINGERPRINT_SIZE :][:FINGERPRINT_SIZE]
            own_fingerprint.copy_(torch.tensor(bucket_fingerprint(self._model_id, index), device=flat.device))
            allreduce(flat, ReduceOp.MEAN, group=self._group, out=flat)
            verify_fingerprints(fingerprints.tolist(), self._group)


class LocalSGD:
    """Average a module's parameters over the ranks every ``period`` steps, where DDP averages gradients in each.

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

    Without a start step the bare module will do. Construction is a collective: every rank's parameters and buffers take
    rank 0's values. Parameters that don't require grad, and buffers, stay each rank's own afterwards. The set of
    parameters that require grad may change between two steps, on all ranks alike; a parameter that was frozen since the
    last average takes part in the next one, so that it is equal on all ranks from there. Parameters can't be added or
    replaced, nor change their dtype.

    A group may have several; every rank makes them, and calls their `step`, in the same order. To resume from a file,
    save the module and `state_dict` when `step` has averaged; load the module, make the LocalSGD, and load its state.

    Args:
        module: The module; it must be the same on all ranks, which is checked.
        group: The group, on all of whose ranks this is called; None is the default group.
        period: Number of steps between two averages, equal on all ranks.
        start_step: Number of steps before the first local one, in which gradients are averaged by other means; equal on
            all ranks.

    Raises:
        CollectiveMismatchError: On every rank, when the modules, periods or start steps differ.
        TypeError, ValueError: An argument is wrong.
    """

    def __init__(
        self, module: torch.nn.Module, group: Backend | None = None, *, period: int, start_step: int = 0
    ) -> None:
        check_type(module, torch.nn.Module, f"{type(self).__name__} averages a torch.nn.Module")
        self.period = check_int("period", period, min=1)
        self.start_step = check_int("start_step", start_step, min=0)
        self.num_steps = 0
        """Number of calls of `step`."""
        self._module = module
        self._group = resolve_group(group)
        self._compare_settings()
        self._model_id = register_model(self._group, type(module).__name__, wrapper=type(self).__name__)
        self._guard = ModuleGuard(module, type(self).__name__)
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
        """True if the next step is one in which ranks train on their own."""
        return self.num_steps >= self.start_step

    @torch.inference_mode(mode=False)
    def step(self) -> bool:
        """Count a step, and average at the end of a period; every rank calls it after each step of its optimizer.

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
            self._average_parameters()
        return True

    def reset(self) -> None:
        """Continue on all ranks from rank 0's present parameters and buffers; every rank calls it.

        Call it after values changed in another way than by training, such as loading. ``num_steps`` stays.
        """
        self._check_parameters()
        deadline = Deadline(self._group.timeout)
        verify_module(self._module, None, self._group, deadline, maker=type(self).__name__)
        tensors = [*self._module.parameters(), *self._module.buffers()]
        broadcast_tensors(tensors, 0, self._group, max_bytes=MAX_BYTES, deadline=deadline)
        self._trained = self._find_trained()

    def state_dict(self) -> dict[str, Any]:
        """The state for `load_state_dict`, without the module's parameters and buffers."""
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; every rank calls it, with the same state.

        Raises:
            CollectiveMismatchError: On every rank, when the ranks' numbers of steps differ.
            KeyError, ValueError: The state has another form, or belongs to another module.
        """
        before, self.num_steps = self.num_steps, int(state["num_steps"])
        try:
            self._compare_settings()
        except BaseException:
            self.num_steps = before
            raise

    def _compare_settings(self) -> None:
        own_settings = (
            f"{type(self).__name__}(period={self.period}, start_step={self.start_step}) in step {self.num_steps}"
        )
        with add_error_context(
            lambda: f"Rank {self._group.rank} was making or loading {with_article(type(self).__name__)}.",
            "Every rank of the group must do so, at the same point of its program.",
        ):
            settings = all_gather_object(own_settings, group=self._group)
        differing = tuple(rank for rank, theirs in enumerate(settings) if theirs != settings[0])
        if differing:
            raise CollectiveMismatchError(
                f"the ranks of group {self._group.name!r} would average at different steps: rank {differing[0]} has"
                f" {settings[differing[0]]} where rank 0 has {settings[0]}. Give all ranks the same.",
                ranks=differing,
            )

    def _check_parameters(self) -> None:
        self._guard.check_unchanged(type(self._module).__name__)
        for name, mean in self._means.tensors.items() if self._means else ():
            parameter = self._parameters[name]
            if parameter.dtype is not mean.dtype or parameter.shape != mean.shape:
                raise UnsupportedOpError(
                    f"parameter {name!r} is {parameter.dtype} of shape {tuple(parameter.shape)} and was {mean.dtype} of"
                    f" shape {tuple(mean.shape)} before: make a new {type(self).__name__}, on all ranks"
                )

    def _find_trained(self) -> tuple[str, ...]:
        return tuple(name for name, parameter in self._parameters.items() if parameter.requires_grad)

    def _compute_means(self) -> tuple[dict[str, torch.Tensor], frozenset[str]]:
        """Average the parameters trained now or at the last average; also return the names of those in both sets."""
        before, now = self._trained, self._find_trained()
        if now != before:
            deadline = Deadline(self._group.timeout)
            verify_module(self._module, None, self._group, deadline, maker=type(self).__name__)
        self._trained = now  # not before: ranks that differ compare again in their next step
        both = {*before, *now}
        if self._means is None or self._means.parameters.keys() != both:
            chosen = {name: parameter for name, parameter in self._parameters.items() if name in both}
            self._means = FlatAverager(chosen, self._group, self._model_id)
        self._means.average()
        return self._means.tensors, frozenset(before).intersection(self._trained)

    @torch.no_grad()
    def _average_parameters(self) -> None:
        for name, mean in self._compute_means()[0].items():
            self._parameters[name].copy_(mean)


class DiLoCo(LocalSGD):
    """Treat the change made by the ranks' own steps as a gradient, which an outer optimizer applies every ``period``
    steps.

    After A. Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023
    (https://arxiv.org/abs/2311.08105), algorithm 1: the outer gradient is the last common parameters less the mean of
    the ranks' present ones; SGD with Nesterov momentum takes the step, and all ranks continue from there. The ranks'
    own optimizers keep their state.

    The last common parameters are stored. So call `reset` after loading other values into the module: loading can't be
    told from training; the outer optimizer's state stays. A parameter that was frozen or unfrozen since then takes the
    plain mean once.

    Args:
        module, group, period: As for `LocalSGD`; the paper's period is 500.
        outer_optimizer: Function that makes the outer optimizer of the parameters that it is given, equal on all ranks;
            None is SGD with learning rate 0.7 and Nesterov momentum 0.9, the paper's. Frozen parameters are among them;
            they have no gradient.
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
        expected = "outer_optimizer must be a function that returns a torch.optim.Optimizer"
        check_type(self.outer_optimizer, torch.optim.Optimizer, expected)

    @override
    @torch.inference_mode(mode=False)
    def reset(self) -> None:
        super().reset()
        for name, parameter in self._parameters.items():
            if parameter.is_floating_point() or parameter.is_complex():
                # A frozen one is not copied: it takes no outer steps until it is trained, and then gets new memory.
                anchor = parameter.detach().clone() if parameter.requires_grad else parameter.detach()
                self._outer.setdefault(name, torch.nn.Parameter(anchor)).data = anchor

    def state_dict(self) -> dict[str, Any]:
        """The state for `load_state_dict`, with the last common parameters and the outer optimizer's state.

        Its tensors are shared with this object and change in later steps.
        """
        outer = {name: self._outer[name].detach() for name in self._trained}
        return {**super().state_dict(), "outer": outer, "outer_optimizer": self.outer_optimizer.state_dict()}

    @override
    @torch.inference_mode(mode=False)
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        anchors: Mapping[str, torch.Tensor] = state["outer"]
        for name, anchor in anchors.items():
            if name not in self._outer or self._outer[name].shape != anchor.shape:
                raise ValueError(
                    f"the state has parameter {name!r} of shape {tuple(anchor.shape)}, which"
                    f" {type(self._module).__name__} does not have: load it into a DiLoCo of the same module"
                )
        before = self.num_steps
        super().load_state_dict(state)
        try:
            self.outer_optimizer.load_state_dict(state["outer_optimizer"])
        except BaseException:
            self.num_steps = before
            raise
        for name, anchor in anchors.items():
            self._outer[name].data = anchor.to(self._outer[name].dtype, copy=True)
        self._trained = tuple(name for name in self._parameters if name in anchors)

    @torch.no_grad()
    def _average_parameters(self) -> None:
        means, trained_before = self._compute_means()
        for name, mean in means.items():
            outer = self._outer[name]
            if name in trained_before:
                outer.grad = torch.sub(outer, mean, out=mean)
            else:
                outer.data = mean.clone()
        self.outer_optimizer.step()
        for name in means:
            self._outer[name].grad = None
            self._parameters[name].copy_(self._outer[name])
