"""How long each child of a Sequential computes."""

from __future__ import annotations

import contextlib
import copy
import random
import statistics
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ferrodist.parallel.module_init import has_meta_tensors
from ferrodist.torch_private.pytree import tree_leaves, tree_map

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_NUM_WARM_UPS = 2
_NUM_RUNS = 5


def measure_times(
    children: Sequence[tuple[str, torch.nn.Module]], sample: Any, *, clock: Callable[[], float]
) -> list[float]:
    """Measure what each child takes for a forward and a backward: the median of 5 runs, after 2 that don't count.

    Each child gets what the one before returned; where that has a gradient, the backward goes on to it. What runs is a
    copy of the child, so that the child's parameters, gradients, buffers and other attributes stay what they are; the
    random generators are set back. Gradients add up from run to run, as they do over microbatches.

    Args:
        children: Their names, and them, in order.
        sample: What the first one is called with; it stays as it is.
        clock: Where the time comes from, in seconds.

    Returns:
        Seconds for each child.

    Raises:
        ValueError: A child can't be copied, or fails on its inputs; it is named. Or it is on the meta device.
    """
    times = []
    inputs = sample
    with _random_states_kept(), torch.inference_mode(False), torch.enable_grad():
        for name, child in children:
            kind = f"child {name!r} ({type(child).__name__})"
            if any(has_meta_tensors(module) for module in child.modules()):
                raise ValueError(
                    f"{kind} is on the meta device, where nothing is computed: balance parameters, or pass costs="
                )
            try:
                copied = copy.deepcopy(child)
            except Exception as error:
                raise ValueError(f"{kind} can't be copied to be measured: pass costs= ({error})") from error
            try:
                seconds, inputs = _measure(copied, inputs, clock)
            except Exception as error:
                raise ValueError(
                    f"{kind} fails on what it is given for the sample ({_describe(inputs)}): {error}"
                ) from error
            times.append(seconds)
    return times


def _measure(child: torch.nn.Module, inputs: Any, clock: Callable[[], float]) -> tuple[float, Any]:
    """A child's seconds, and what it returns for the inputs, cut off."""
    devices = _devices_of([*child.parameters(), *child.buffers(), *tree_leaves(inputs)])
    times = []
    for _ in range(_NUM_WARM_UPS + _NUM_RUNS):
        given = tree_map(_as_given, inputs)
        _synchronise(devices)
        begin = clock()
        outputs = child(given)
        _synchronise(devices)
        seconds = clock() - begin
        ends = [each for each in tree_leaves(outputs) if isinstance(each, torch.Tensor) and each.requires_grad]
        if ends:
            gradients = [torch.ones_like(each) for each in ends]
            _synchronise(devices)
            begin = clock()
            torch.autograd.backward(ends, gradients)
            _synchronise(devices)
            seconds += clock() - begin
        times.append(seconds)
    return statistics.median(times[_NUM_WARM_UPS:]), tree_map(_cut_off, outputs)


def _as_given(value: Any) -> Any:
    """The value as an earlier child gives it: not a leaf, so that the child may change it in place; for one run."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().requires_grad_().clone() if value.requires_grad else value.detach().clone()


def _cut_off(value: Any) -> Any:
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def _devices_of(values: Sequence[Any]) -> set[torch.device]:
    """Those that compute on while the program goes on."""
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
def _random_states_kept() -> Iterator[None]:
    """Set back, at the end, the default generators of Python, NumPy and torch, also those of GPUs in use."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    has_gpus = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if has_gpus else ()):
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)
