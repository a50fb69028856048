"""A pipeline computes the result of one process."""

import pipeline_models
import pytest
import torch
from pipeline_models import FEW_KINDS, KINDS, Cnn, Gpt, Mlp
from torch import nn

from ferrodist.parallel.pipeline import (
    LossReduction,
    Microbatches,
    Pipeline,
    PipelineOutput,
    PipelineSchedule,
    Schedule,
)
from ferrodist.parallel.pipeline.schedule.timeline import count_activations
from ferrodist.testing import run_ranks

BACKENDS = ["simulated", "native"]


def check_step(group, model, kind, stages_per_rank, num_microbatches, size):
    """A step gives the losses, gradients and buffers of one process, bit for bit, and keeps what the schedule says."""
    num_stages = group.world_size * stages_per_rank
    stages = model.stages(num_stages)
    pipeline = Pipeline(stages, group, num_microbatches, schedule=kind, loss_fn=model.loss)
    total = pipeline.step(*model.batch(size))
    losses, gradients, buffers = pipeline_models.one_process(model, num_stages, num_microbatches, size)
    what = f"{kind.name}, {stages_per_rank} stages a rank, {num_microbatches} microbatches"
    assert pipeline.losses == losses, what
    sizes = [len(part) for part in torch.empty(size).tensor_split(num_microbatches)]
    assert total.item() == sum(of / size * loss for of, loss in zip(sizes, losses, strict=True))
    for number in pipeline.schedule.rank_stages[group.rank]:
        own = stages[number]
        for mine, expected in zip(own.parameters(), gradients[number], strict=True):
            assert torch.equal(mine.grad, expected), what
        for mine, expected in zip(own.buffers(), buffers[number], strict=True):
            assert torch.equal(mine, expected), what
    assert pipeline.peak_activations == count_activations(pipeline.schedule)[group.rank], what


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_schedule(backend, num_ranks):
    """Losses and gradients of a network are those of one process, bit for bit, for 1 to 9 microbatches."""
    # Between processes other numbers have shown nothing that they don't in one.
    counts = (5,) if backend == "native" else (1, 2, 3, 4, 5, 9) if num_ranks == 2 else (1, 5, 9)
    cases = [(*kind, num_microbatches) for kind in KINDS for num_microbatches in counts]
    for _, stages_per_rank, num_microbatches in cases:
        pipeline_models.one_process(Mlp, num_ranks * stages_per_rank, num_microbatches, 11)

    def program(group):
        for case in cases:
            check_step(group, Mlp, *case, 11)

    run_ranks(program, num_ranks, backend=backend)


@pytest.mark.parametrize("model", [Cnn, Gpt])
@pytest.mark.parametrize("backend", BACKENDS)
def test_models(backend, model):
    """Convolutions with batch norm, and a GPT: bits and running statistics of one process."""
    for _, stages_per_rank in FEW_KINDS:
        pipeline_models.one_process(model, 2 * stages_per_rank, 4, 11)

    def program(group):
        for kind, stages_per_rank in FEW_KINDS:
            check_step(group, model, kind, stages_per_rank, 4, 11)

    run_ranks(program, 2, backend=backend)


def test_steps_accumulate():
    """Gradients are added to existing ones; each step is scaled by itself."""

    def program(group):
        stages = Mlp.stages(2)
        pipeline = Pipeline(stages, group, 3, loss_fn=Mlp.loss)
        inputs, targets = Mlp.batch(6)
        pipeline.step(inputs, targets)
        once = [parameter.grad.clone() for parameter in pipeline.parameters()]
        pipeline.step(inputs, targets)
        for parameter, before in zip(pipeline.parameters(), once, strict=True):
            assert torch.allclose(parameter.grad, 2 * before)

    run_ranks(program, 2)


def test_sum_of_losses():
    """With LossReduction.SUM losses are not scaled."""

    def program(group):
        inputs, targets = Mlp.batch(6)
        results = []
        for reduction in LossReduction:
            pipeline = Pipeline(Mlp.stages(2), group, 3, loss_fn=Mlp.loss, loss_reduction=reduction)
            loss = pipeline.step(inputs, targets)
            results.append((loss.item(), [parameter.grad for parameter in pipeline.parameters()]))
        (mean, means), (total, sums) = results
        assert total == pytest.approx(3 * mean)
        assert all(torch.allclose(3 * one, other) for one, other in zip(means, sums, strict=True))

    run_ranks(program, 2)


def test_forward_and_backward():
    """Separately they are a step: outputs are joined, and their gradients are those of one process."""

    def program(group):
        for kind, stages_per_rank in KINDS:
            stages = Mlp.stages(2 * stages_per_rank)
            pipeline = Pipeline(stages, group, 4, schedule=kind)
            inputs, targets = Mlp.batch(7)
            outputs = pipeline(inputs if pipeline.schedule.stage_ranks[0] == group.rank else None)
            whole = nn.Sequential(*Mlp.stages(2 * stages_per_rank))
            assert (outputs is not None) == (pipeline.schedule.stage_ranks[-1] == group.rank)
            gradient = None
            if outputs is not None:
                assert torch.equal(outputs, torch.cat([whole(part) for part in inputs.tensor_split(4)]))
                Mlp.loss(outputs, targets).backward()
                gradient = outputs.grad
            pipeline.backward(gradient)
            Mlp.loss(whole(inputs), targets).backward()
            for number in pipeline.schedule.rank_stages[group.rank]:
                for mine, other in zip(stages[number].parameters(), whole[number].parameters(), strict=True):
                    assert torch.allclose(mine.grad, other.grad, atol=1e-6)

    run_ranks(program, 2)


IN_AN_ORDER_OF_ITS_OWN = """
ferrodist pipeline schedule: in an order of its own
stage ranks: 0 1 0 1
microbatches: 3
rank 0: F0.2 F0.0 F0.1  F2.0 F2.2 F2.1  I2.1 B2.0 W2.1 B2.2  B0.1 B0.2 B0.0
rank 1: F1.0 F3.0 F1.2 F1.1 F3.2 F3.1   B3.0 B3.1 B3.2       B1.1 I1.0 I1.2 W1.0 W1.2
"""
"""Stages take microbatches in different orders, and so ranks take messages in others than they are sent in."""


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [3, 250])
def test_a_custom_schedule(backend, width):
    """Stages may run forward and backward in any order; large activations between small gradients arrive."""
    schedule = Schedule.from_text(IN_AN_ORDER_OF_ITS_OWN)

    def make():
        return [pipeline_models.fill(nn.Sequential(nn.Linear(width, width), nn.Tanh()), seed) for seed in range(4)]

    inputs = torch.randn(900, width, generator=pipeline_models.seeded(1))
    whole = nn.Sequential(*make())
    expected = torch.cat([whole(part) for part in inputs.split(300)])
    (expected.square().mean()).backward()

    def program(group):
        stages = make()
        pipeline = Pipeline(stages, group, 3, schedule=schedule, loss_fn=lambda output, target: output.square().mean())
        for _ in range(2):
            pipeline.zero_grad()
            pipeline.step(inputs, inputs)
            check(pipeline, stages)
        pipeline.zero_grad()
        found = pipeline(inputs)
        if found is not None:
            assert torch.equal(found, expected)
            found.square().mean().backward()
        pipeline.backward(None if found is None else found.grad)
        check(pipeline, stages)

    def check(pipeline, stages):
        for number in pipeline.stages:
            for mine, other in zip(stages[int(number)].parameters(), whole[int(number)].parameters(), strict=True):
                assert torch.allclose(mine.grad, other.grad, atol=1e-5), number

    run_ranks(program, 2, backend=backend)


def test_forward_for_inference():
    """Under no_grad nothing is saved, and backward is refused."""

    def program(group):
        pipeline = Pipeline(Mlp.stages(2), group, 3)
        pipeline(Mlp.batch(6)[0])
        assert pipeline.peak_activations == 3
        with torch.no_grad():
            outputs = pipeline(Mlp.batch(6)[0])
        assert pipeline.peak_activations == 0
        if group.rank:
            assert not outputs.requires_grad
        with pytest.raises(RuntimeError, match="no forward to run backward from"):
            pipeline.backward()
        pipeline(Mlp.batch(6)[0])

    run_ranks(program, 2)


class Odd(nn.Module):
    """Takes and gives several values, nested, of shapes that differ from microbatch to microbatch."""

    def __init__(self, index):
        super().__init__()
        self.index = index
        self.layer = nn.Linear(4, 4)

    def forward(self, values, mask=None, more=None):
        if self.index == 0:
            return (
                self.layer(values),
                values.sum(1) > 0,
                {"n": len(values), "unused": values, "twice": [self.layer.bias]},
            )
        twice = more["twice"][0]
        values = torch.where(mask[:, None], self.layer(values) + twice, values) * more["n"]
        if self.index == 1:
            return values, mask, {**more, "twice": [twice * 2]}
        return values.sum() + twice.sum()


def test_nested_values_of_changing_shapes():
    """Tuples, masks, numbers, dicts, unused tensors and a parameter arrive; each microbatch has its own shape."""
    batches = [torch.randn(size, 4, generator=pipeline_models.seeded(size)) for size in (3, 1, 0, 5)]

    def program(group):
        for microbatches in (batches, batches[::-1]):
            stages = [pipeline_models.fill(Odd(index), index) for index in range(3)]
            pipeline = Pipeline(stages, group, 4, schedule=PipelineSchedule.ONE_F_ONE_B)
            for _ in range(2):
                pipeline.step(Microbatches(microbatches))
            expected = [pipeline_models.fill(Odd(index), index) for index in range(3)]
            for batch in microbatches * 2:
                value = batch
                for stage in expected:
                    value = stage(*value) if isinstance(value, tuple) else stage(value)
                (value / 4).backward()
            for mine, other in zip(stages[group.rank].parameters(), expected[group.rank].parameters(), strict=True):
                assert torch.allclose(mine.grad, other.grad)

    for backend in BACKENDS:
        run_ranks(program, 3, backend=backend)


class Skipping(nn.Module):
    """Gives something to a later stage, or takes it."""

    def __init__(self, gives=(), width=3):
        super().__init__()
        self.gives = gives
        self.layer = nn.Linear(width, width)

    def forward(self, value, **taken):
        made = torch.tanh(self.layer(value))
        for other in taken.values():
            made = made * other
        return PipelineOutput(made, **dict.fromkeys(self.gives, value + 1)) if self.gives else made


@pytest.mark.parametrize("backend", BACKENDS)
def test_skips(backend):
    """Values that bypass stages arrive, whatever ranks they are on, and so do their gradients."""
    skips = {"one": (0, 2), "two": (1, 3), "three": (0, 3)}

    def make():
        gives = [tuple(name for name, (source, _) in skips.items() if source == stage) for stage in range(4)]
        return [pipeline_models.fill(Skipping(of), stage) for stage, of in enumerate(gives)]

    def program(group):
        inputs, targets = torch.randn(2, 6, 3, generator=pipeline_models.seeded(5))
        for kind, stages_per_rank in KINDS:
            if stages_per_rank * group.world_size != 4:
                continue
            stages, expected = make(), make()
            pipeline = Pipeline(stages, group, 3, schedule=kind, skips=skips, loss_fn=Mlp.loss)
            pipeline.step(inputs, targets)
            for part, target in zip(inputs.split(2), targets.split(2), strict=True):
                value, given = part, {}
                for number, stage in enumerate(expected):
                    result = stage(value, **{name: given[name] for name, (_, end) in skips.items() if end == number})
                    value = result.value if isinstance(result, PipelineOutput) else result
                    given.update(result.skips if isinstance(result, PipelineOutput) else {})
                loss = Mlp.loss(value, target)
                loss.backward(torch.full_like(loss, 1 / 3))
            for number in pipeline.schedule.rank_stages[group.rank]:
                for mine, other in zip(stages[number].parameters(), expected[number].parameters(), strict=True):
                    assert torch.allclose(mine.grad, other.grad)

    for num_ranks in (2, 4):
        run_ranks(program, num_ranks, backend=backend)


@pytest.mark.parametrize("kind", [PipelineSchedule.LOOPED_BFS, PipelineSchedule.ZERO_BUBBLE_V])
def test_gradients_of_a_value_of_several_stages(kind):
    """They add up as in one process, to the bit."""

    class Taking(nn.Linear):
        def forward(self, value, **taken):
            made = super().forward(value)
            for other in taken.values():
                made = made + other.sin()
            return made

    def give(value):
        return PipelineOutput(value, one=value, two=value)

    def program(group):
        stages, expected = ([pipeline_models.fill(Taking(6, 6), number) for number in range(4)] for _ in range(2))
        stages[0].register_forward_hook(lambda _, __, made: give(made))
        pipeline = Pipeline(stages, group, 2, schedule=kind, skips={"one": (0, 2), "two": (0, 3)}, loss_fn=Mlp.loss)
        inputs, targets = Mlp.batch(64)
        pipeline.step(inputs, targets)
        for part, target in zip(inputs.split(32), targets.split(32), strict=True):
            made = expected[0](part)
            loss = Mlp.loss(expected[3](expected[2](expected[1](made), one=made), two=made), target)
            loss.backward(torch.full_like(loss, 1 / 2))
        for number in pipeline.schedule.rank_stages[group.rank]:
            for mine, other in zip(stages[number].parameters(), expected[number].parameters(), strict=True):
                assert torch.equal(mine.grad, other.grad)

    run_ranks(program, 2)
