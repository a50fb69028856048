"""Measurement of the time that each child of a Sequential takes, or each unit of another model."""

from __future__ import annotations

import contextlib
import copy
import random
import statistics
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ferrodist.parallel.module_init import has_meta_tensors
from ferrodist.parallel.pipeline.model_mappings import Mappings, Outcome, leaves_in, map_tensors
from ferrodist.torch_private.pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

_NUM_WARM_UPS = 2
_NUM_RUNS = 5


def measure_times(
    children: Sequence[tuple[str, torch.nn.Module]], sample: Any, *, clock: Callable[[], float]
) -> list[float]:
    """Measure the seconds of each child's forward and backward: the median of 5 runs, after 2 for warm-up.

    Each child gets the result of the previous one. Copies run, so that the children stay unchanged; the states of
    random generators are restored. Gradients add up from run to run, as they do over microbatches. Raises ValueError,
    naming a child that can't be copied, fails on its inputs or is on the meta device.
    """
    times = []
    inputs = sample
    with preserve_random_states(), torch.inference_mode(False), torch.enable_grad():
        for name, child in children:
            title = f"child {name!r} ({type(child).__name__})"
            if any(has_meta_tensors(module) for module in child.modules()):
                raise ValueError(
                    f"{title} is on the meta device and can't be measured: balance parameters, or pass costs="
                )
            try:
                copied = copy.deepcopy(child)
            except Exception as error:
                raise ValueError(f"{title} can't be copied to be measured: pass costs= ({error})") from error
            try:
                seconds, inputs = _measure(copied, inputs, clock)
            except Exception as error:
                raise ValueError(
                    f"{title} fails on its inputs for the sample ({_describe(inputs)}): {error}"
                ) from error
            times.append(seconds)
    return times


class _Call(torch.nn.Module):
    """A module that is called with one argument, another's arguments, and also returns what that writes to mappings."""

    def __init__(self, module: torch.nn.Module, path: str) -> None:
        super().__init__()
        self.module, self._path = module, path
        self.outcome: Outcome | None = None  # of the last call

    def forward(self, arguments: Any) -> Any:
        args, kwargs = arguments
        mappings = Mappings(self._path, args, kwargs)
        self.outcome = mappings.outcome(self.module(*args, **kwargs))
        return self.outcome.returned, self.outcome.written


def measure_units(
    units: Mapping[str, torch.nn.Module], run: Callable[[Any], object], *, clock: Callable[[], float]
) -> dict[str, float]:
    """Measure the seconds of each unit's forwards and backwards in a run of its model, as `measure_times` does.

    ``run`` runs the model's code, with the function that it is given for each call of a unit: (path, args, kwargs) to
    the result.
    """
    times: dict[str, float] = {}

    def call(path: str, args: Any, kwargs: Any) -> Any:
        unit = units[path]
        if any(has_meta_tensors(module) for module in unit.modules()):
            raise ValueError(f"module {path!r} is on the meta device and can't be measured: balance parameters")
        mappings = Mappings(path, args, kwargs)
        child = _Call(copy.deepcopy(unit), path)
        seconds, (returned, written) = _measure(child, (args, kwargs), clock)
        times[path] = times.get(path, 0) + seconds
        assert child.outcome is not None
        return mappings.apply(replace(child.outcome, returned=returned, written=written))

    with preserve_random_states(), torch.inference_mode(False), torch.enable_grad():
        run(call)
    return times


def _measure(child: torch.nn.Module, inputs: Any, clock: Callable[[], float]) -> tuple[float, Any]:
    """A child's seconds, and its detached result for the inputs."""
    devices = _devices_of([*child.parameters(), *child.buffers(), *leaves_in(inputs)])
    times = []
    for _ in range(_NUM_WARM_UPS + _NUM_RUNS):
        stage_inputs = map_tensors(_as_input, inputs)
        _synchronise(devices)
        begin = clock()
        outputs = child(stage_inputs)
        _synchronise(devices)
        seconds = clock() - begin
        outputs_with_grad = [
            each for each in tree_leaves(outputs) if isinstance(each, torch.Tensor) and each.requires_grad
        ]
        if outputs_with_grad:
            gradients = [torch.ones_like(each) for each in outputs_with_grad]
            _synchronise(devices)
            begin = clock()
            torch.autograd.backward(outputs_with_grad, gradients)
            _synchronise(devices)
            seconds += clock() - begin
        times.append(seconds)
    return statistics.median(times[_NUM_WARM_UPS:]), map_tensors(_as_input, outputs)


def _as_input(value: torch.Tensor) -> torch.Tensor:
    """The value as the previous child returns it, for one run: not a leaf, so that the child may change it in place."""
    return value.detach().requires_grad_().clone() if value.requires_grad else value.detach().clone()


def _devices_of(values: Sequence[Any]) -> set[torch.device]:
    """The asynchronous devices of tensors."""
    return {each.device for each in values if isinstance(each, torch.Tensor) and each.device.type != "cpu"}


def _synchronise(devices: set[torch.device]) -> None:
    for device in devices:
        torch.accelerator.synchronize(device)


def _describe(inputs: Any) -> str:
    return ", ".join(
        f"{each.dtype} of shape {tuple(each.shape)}" if isinstance(each, torch.Tensor) else type(each).__name__
        for each in tree_leaves(inputs)
    )


@contextlib.contextmanager
def preserve_random_states() -> Iterator[None]:
    """Restore, at the end, the default generators of Python, NumPy and torch, also those of GPUs in use."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    has_gpus = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if has_gpus else ()):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
