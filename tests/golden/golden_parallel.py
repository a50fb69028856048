"""What training in parallel sends: the calls that ranks compare, and the values that stages of a pipeline pass on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from golden_collectives import words
from golden_support import Recording, Step, Tape, run_ranks, taped_group
from torch import nn

import ferrodist as fd

if TYPE_CHECKING:
    from collections.abc import Callable

_CALLS = 1


def _layer(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    with torch.no_grad():
        layer.weight.copy_((torch.arange(inputs * outputs) % 3).view_as(layer.weight))
        layer.bias.fill_(1)
    return layer


def _ddp(group: Any) -> None:
    model = fd.DDP(nn.Sequential(_layer(3, 4), nn.BatchNorm1d(4), _layer(4, 2)), group)
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()


def _fsdp(group: Any) -> None:
    model = fd.FSDP(nn.Sequential(_layer(3, 5), _layer(5, 2)), group, wrap=fd.by_class(nn.Linear))
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()


def _dtensors(group: Any) -> None:
    mesh = fd.DeviceMesh(group, [group.world_size], ["ranks"])
    rows = fd.distribute(torch.arange(16.0).view(4, 4), mesh, fd.Shard(0))
    rows.redistribute([fd.Shard(1)])
    rows.redistribute([fd.Replicate()])
    (rows @ fd.distribute(torch.arange(16.0).view(4, 4), mesh, fd.Shard(0))).full_tensor()
    rows.sum().full_tensor()


def _tensor_parallel(group: Any) -> None:
    mesh = fd.DeviceMesh(group, [group.world_size], ["ranks"])
    plan = {"0": fd.ColumnParallel(), "1": fd.RowParallel()}
    model = fd.parallelize(nn.Sequential(_layer(4, 4), _layer(4, 2)), mesh, plan, local_blocks=False)
    model(torch.ones(2, 4)).sum().backward()


class _Stage(nn.Module):
    """A stage whose value for the next one is nested."""

    def __init__(self, layer: nn.Module, *, is_first: bool) -> None:
        super().__init__()
        self.layer = layer
        self.is_first = is_first

    def forward(self, given: Any) -> Any:
        """Call the layer."""
        if self.is_first:
            return {"hidden": self.layer(given), "more": (1, "text", None)}
        return self.layer(given["hidden"])


def _pipeline(schedule: Any) -> Callable[[Any], None]:
    def run(group: Any) -> None:
        last = group.world_size - 1
        stages: list[nn.Module | None] = [None] * group.world_size
        if group.rank in (0, last):
            stages[group.rank] = _Stage(_layer(3, 3), is_first=group.rank == 0)
        pipeline = fd.Pipeline(
            *(stages, group, 2), schedule=schedule, loss_fn=lambda output, target: (output - target).sum()
        )
        pipeline.step(torch.ones(4, 3), torch.zeros(4, 3))

    return run


_STEPS = [
    (Step("data parallel", _ddp), False),
    (Step("sharded data parallel", _fsdp), False),
    (Step("tensors over ranks", _dtensors), False),
    (Step("tensor parallel", _tensor_parallel), False),
    (Step("a pipeline, GPipe", _pipeline(fd.PipelineSchedule.GPIPE)), True),
    (Step("a pipeline, 1F1B", _pipeline(fd.PipelineSchedule.ONE_F_ONE_B)), True),
]
"""Each with whether all is recorded: else the calls, for what sums are of may be padded with any bytes."""


def record() -> Recording:
    """All of these, on two ranks."""
    tape = Tape()
    groups = taped_group(2, tape)
    run_ranks([lambda group=group: group for group in groups], [step for step, _ in _STEPS], tape.begin)
    for group in groups:
        group.close()
    is_whole = {step.name: whole for step, whole in _STEPS}
    found: Recording = {}
    for step, streams in tape.recording(words).items():
        if step:
            found[step] = {
                name: messages
                for name, messages in streams.items()
                if is_whole[step] or int(name.rpartition(" ")[2], 16) >> 56 == _CALLS
            }
    return found
