"""Pipelines with DDP and FSDP on another axis, shared parameters, activation checkpointing, autocast, checkpoints."""

from collections import OrderedDict

import pipeline_models
import pytest
import torch
from pipeline_models import FEW_KINDS, KINDS, Block, Embedding, Gpt, Mlp, one_process
from torch import nn
from torch.utils.checkpoint import checkpoint

from ferrodist import DDP, FSDP, DeviceMesh, new_group
from ferrodist.checkpoint import OptimizerState, load_distributed, save_distributed
from ferrodist.errors import CollectiveMismatchError, PipelineError
from ferrodist.parallel.pipeline import Pipeline, PipelineSchedule, Stages
from ferrodist.parallel.pipeline.split import split_sequential
from ferrodist.testing import run_ranks

BACKENDS = ["simulated", "native"]


@pytest.mark.parametrize("wrapper", [DDP, FSDP])
@pytest.mark.parametrize("backend", BACKENDS)
def test_data_parallel_on_another_axis(backend, wrapper):
    """Each column of ranks averages its stage's gradients, once a step; two steps of training equal one process's."""

    def program(group):
        mesh = DeviceMesh(group, (2, 2), ("pipeline", "data"))
        across, along = mesh["pipeline"].group, mesh["data"].group
        for kind, stages_per_rank in KINDS if backend == "simulated" and wrapper is DDP else FEW_KINDS:
            if stages_per_rank > 2:
                continue
            num_stages = 2 * stages_per_rank
            stages = Mlp.stages(num_stages)
            own = [stage if number % 2 == across.rank else None for number, stage in enumerate(stages)]
            if kind in (PipelineSchedule.ZERO_BUBBLE_V, PipelineSchedule.DUAL_PIPE_V):
                own = [stages[0], None, None, stages[3]] if across.rank == 0 else [None, stages[1], stages[2], None]
            wrapped = [wrapper(stage, along) if stage is not None else None for stage in own]
            pipeline = Pipeline(wrapped, across, 4, schedule=kind, loss_fn=Mlp.loss)
            optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.5)
            whole = nn.Sequential(*Mlp.stages(num_stages))
            reference = torch.optim.SGD(whole.parameters(), lr=0.5)
            inputs, targets = Mlp.batch(16)
            half = slice(8 * along.rank, 8 * along.rank + 8)
            for _ in range(2):
                optimizer.zero_grad()
                pipeline.step(inputs[half], targets[half])
                optimizer.step()
                reference.zero_grad()
                Mlp.loss(whole(inputs), targets).backward()
                reference.step()
            with torch.no_grad():
                found = pipeline(inputs[half])
                if found is not None:
                    assert torch.allclose(found, whole(inputs[half]), atol=1e-5), kind

    run_ranks(program, 4, backend=backend)


def tied_stages(count):
    """A GPT whose output layer is its embedding."""
    stages = Gpt.stages(count)
    stages[-1][-1].weight = stages[0][0].tokens.weight
    return stages


class Tied(Gpt):
    """That GPT."""

    stages = staticmethod(tied_stages)


@pytest.mark.parametrize("backend", BACKENDS)
def test_shared_parameters(backend):
    """Stages of several ranks that share a parameter get its full gradient, so that it stays equal."""

    def program(group):
        for kind, stages_per_rank in FEW_KINDS:
            num_stages = group.world_size * stages_per_rank
            stages = tied_stages(num_stages)
            pipeline = Pipeline(stages, group, 3, schedule=kind, loss_fn=Gpt.loss)
            _, gradients, _ = one_process(Tied, num_stages, 3, 7)
            for times in (1, 2):  # what an earlier step has added up is not added up again
                pipeline.step(*Gpt.batch(7))
                for number in pipeline.schedule.rank_stages[group.rank]:
                    for mine, expected in zip(stages[number].parameters(), gradients[number], strict=True):
                        assert torch.allclose(mine.grad, times * expected, atol=1e-5), (kind, number)

    for num_ranks in (1, 2, 3) if backend == "simulated" else (2,):
        for _, stages_per_rank in FEW_KINDS:
            one_process(Tied, num_ranks * stages_per_rank, 3, 7)
        run_ranks(program, num_ranks, backend=backend)


def test_shared_parameters_by_name():
    """Ranks with only their own stages name them; ranks that name none get an error."""

    def program(group):
        stages = tied_stages(2)
        own = [stage if number == group.rank else None for number, stage in enumerate(stages)]
        with pytest.raises(
            CollectiveMismatchError, match=r"shared parameter 0\.tokens\.weight of stage 0, 2\.weight of stage 1"
        ):
            Pipeline(stages if group.rank else own, group, 2)
        shared = [[(0, "0.tokens.weight"), (1, "2.weight")]]
        mine = own[group.rank].get_parameter(shared[0][group.rank][1])
        expected = mine.detach().clone()
        with torch.no_grad():
            mine += group.rank
        pipeline = Pipeline(own, group, 2, loss_fn=Gpt.loss, shared=shared)
        assert torch.equal(mine, expected), "the values of the first rank that has it"
        pipeline.step(*Gpt.batch(4))
        return mine.grad.clone(), mine.detach().clone()

    (one, value), (other, other_value) = run_ranks(program, 2, backend="native")
    assert torch.equal(one, other)
    assert torch.equal(value, other_value)


class Checkpointed(nn.Module):
    """A block whose activations are computed again in the backward."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False)


def test_activation_checkpointing():
    """Stages that recompute activations have the gradients of those that hold them."""
    for _, stages_per_rank in FEW_KINDS:
        one_process(Gpt, 2 * stages_per_rank, 3, 7)

    def program(group):
        for kind, stages_per_rank in FEW_KINDS:
            num_stages = 2 * stages_per_rank
            stages = Gpt.stages(num_stages)
            checkpointed = [
                nn.Sequential(*[Checkpointed(each) if isinstance(each, Block) else each for each in of])
                for of in stages
            ]
            pipeline = Pipeline(checkpointed, group, 3, schedule=kind, loss_fn=Gpt.loss)
            pipeline.step(*Gpt.batch(7))
            _, gradients, _ = one_process(Gpt, num_stages, 3, 7)
            for number in pipeline.schedule.rank_stages[group.rank]:
                for mine, expected in zip(stages[number].parameters(), gradients[number], strict=True):
                    assert torch.equal(mine.grad, expected), (kind, number)

    run_ranks(program, 2)


def test_mixed_precision():
    """In autocast activations travel in bfloat16, and gradients too."""

    def program(group):
        stages = Mlp.stages(2)
        pipeline = Pipeline(stages, group, 2, schedule=PipelineSchedule.ZERO_BUBBLE_H1, loss_fn=Mlp.loss)
        whole = nn.Sequential(*Mlp.stages(2))
        inputs, targets = Mlp.batch(4)
        with torch.autocast("cpu", torch.bfloat16):
            pipeline.step(inputs, targets)
            for part, target in zip(inputs.split(2), targets.split(2), strict=True):
                loss = Mlp.loss(whole(part), target)
                loss.backward(torch.full_like(loss, 1 / 2))
        for mine, expected in zip(stages[group.rank].parameters(), whole[group.rank].parameters(), strict=True):
            assert mine.grad.dtype is torch.float32
            assert torch.equal(mine.grad, expected.grad)

    run_ranks(program, 2)


def test_writes_in_place():
    """A stage may write to its input, as a layer may in one process."""

    def make(count):
        return [
            pipeline_models.fill(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6)), seed) for seed in range(count)
        ]

    class Model(Mlp):
        stages = staticmethod(make)

        @staticmethod
        def batch(size):
            inputs, targets = Mlp.batch(size)
            return inputs.clone(), targets

    def program(group):
        for kind, stages_per_rank in FEW_KINDS:
            num_stages = 2 * stages_per_rank
            stages = make(num_stages)
            pipeline = Pipeline(stages, group, 3, schedule=kind, loss_fn=Mlp.loss)
            pipeline.step(*Model.batch(6))
            losses, gradients, _ = one_process(Model, num_stages, 3, 6)
            assert pipeline.losses == losses
            for number in pipeline.schedule.rank_stages[group.rank]:
                for mine, expected in zip(stages[number].parameters(), gradients[number], strict=True):
                    assert torch.equal(mine.grad, expected)

    run_ranks(program, 2)


def whole_gpt():
    return pipeline_models.fill(nn.Sequential(Embedding(11, 5, 8), *[Block(8) for _ in range(6)], nn.Linear(8, 11)), 9)


def test_state_dicts():
    """They have the names of the whole model, of which each rank has a part, and load a state of it."""

    def program(group):
        model = whole_gpt()
        names = set(model.state_dict())
        pipeline = Pipeline(split_sequential(model, 4), group, 2, schedule=PipelineSchedule.ZERO_BUBBLE_V)
        mine = pipeline.state_dict()
        other = {name: value + 1 for name, value in model.state_dict().items()}
        pipeline.load_state_dict(other)
        assert all(torch.equal(value, other[name]) for name, value in pipeline.state_dict().items())
        with pytest.raises(RuntimeError, match="Missing key"):
            pipeline.load_state_dict({})
        listed = Pipeline(Mlp.stages(2), group, 2)
        assert set(listed.state_dict()) == {f"{group.rank}.0.weight", f"{group.rank}.0.bias"}
        return set(mine), names

    (one, names), (other, _) = run_ranks(program, 2)
    assert one | other == names
    assert not one & other


def train(model, step, optimizer_state=None):
    """Two steps of AdamW, or one more with a state of it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if optimizer_state is not None:
        optimizer_state(optimizer)
    for _ in range(2 if optimizer_state is None else 1):
        optimizer.zero_grad()
        step()
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("is_whole", [False, True])
def test_optimizers_in_checkpoints(tmp_path, is_whole):
    """States of optimizers move between pipelines of other stages, and from and to the whole model."""
    tokens, following = Gpt.batch(4)

    def pipelined(group, count, kind):
        pipeline = Pipeline(split_sequential(whole_gpt(), count), group, 2, schedule=kind, loss_fn=Gpt.loss)
        return pipeline, lambda: pipeline.step(tokens, following)

    def undivided():
        model = whole_gpt()

        def step():
            for part, target in zip(tokens.split(2), following.split(2), strict=True):
                loss = Gpt.loss(model(part), target)
                loss.backward(torch.full_like(loss, 1 / 2))

        return model, step

    def save(group):
        model, step = undivided() if is_whole else pipelined(group, 2, PipelineSchedule.ONE_F_ONE_B)
        optimizer = train(model, step)
        save_distributed({"model": model, "optimizer": OptimizerState(model, optimizer)}, tmp_path, group=group)

    def go_on(group):
        model, step = undivided() if group.world_size == 1 else pipelined(group, 6, PipelineSchedule.LOOPED_BFS)

        def load(optimizer):
            into = {"model": model, "optimizer": OptimizerState(model, optimizer)}
            load_distributed(tmp_path, into, group=group)

        train(model, step, load)
        return {name: value.clone() for name, value in model.state_dict().items()}

    run_ranks(save, 1 if is_whole else 2)
    model, step = undivided()
    optimizer = train(model, step)
    train(model, step, lambda fresh: fresh.load_state_dict(optimizer.state_dict()))
    expected = model.state_dict()
    for num_ranks in (1, 3):
        found = {name: value for own in run_ranks(go_on, num_ranks) for name, value in own.items()}
        assert found.keys() == expected.keys()
        assert all(torch.equal(value, expected[name]) for name, value in found.items())


@pytest.mark.parametrize("wrapper", [None, DDP, FSDP])
def test_checkpoints(tmp_path, wrapper):
    """Saved by a pipeline of two ranks, also with DDP or FSDP inside, and loaded by the model, and by one of three."""

    def save(group):
        mesh = DeviceMesh(group, (2, -1), ("pipeline", "data"))
        across, along = mesh["pipeline"].group, mesh["data"].group
        stages = split_sequential(whole_gpt(), 2)
        if wrapper is not None:
            own = [wrapper(stage, along) if number == across.rank else None for number, stage in enumerate(stages)]
            stages = Stages(own, stages.prefixes)
        save_distributed({"model": Pipeline(stages, across, 2)}, tmp_path, group=group)

    run_ranks(save, 2 if wrapper is None else 4)
    expected = whole_gpt()
    loaded = load_distributed(tmp_path, {"model": pipeline_models.fill(whole_gpt(), 1)})["model"]
    assert all(torch.equal(mine, other) for mine, other in zip(loaded.parameters(), expected.parameters(), strict=True))

    def load(group):
        stages = split_sequential(pipeline_models.fill(whole_gpt(), 2), 6)
        pipeline = Pipeline(stages, group, 2, schedule=PipelineSchedule.LOOPED_BFS)
        load_distributed(tmp_path, {"model": pipeline}, group=group)
        state = expected.state_dict()
        assert all(torch.equal(value, state[name]) for name, value in pipeline.state_dict().items())

    run_ranks(load, 3)


class Odd(nn.Module):
    """A layer that raises in a forward, or cuts its input off in one, where it is told to."""

    def __init__(self, seed):
        super().__init__()
        self.layer = pipeline_models.fill(nn.Linear(6, 6), seed)
        self.num_forwards, self.fails_at, self.cuts_at = 0, None, None

    def forward(self, x):
        self.num_forwards += 1
        if self.num_forwards == self.fails_at:
            raise RuntimeError("no forward")
        return self.layer(x.detach() if self.num_forwards == self.cuts_at else x)


@pytest.mark.parametrize("wrapper", [DDP, FSDP])
@pytest.mark.parametrize("kind", [PipelineSchedule.ONE_F_ONE_B, PipelineSchedule.ZERO_BUBBLE_H1])
def test_a_step_after_a_failure_in_data_parallel_stages(wrapper, kind):
    """Gradients of the failed step are not averaged."""

    def program(group):
        mesh = DeviceMesh(group, (2, 2), ("pipeline", "data"))
        across, along = mesh["pipeline"].group, mesh["data"].group
        layer, whole = Odd(across.rank), nn.Sequential(Odd(0), Odd(1))
        pipeline = Pipeline(wrapper(layer, along), across, 4, schedule=kind, loss_fn=Mlp.loss)
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.5)
        inputs, targets = Mlp.batch(16)
        half = slice(8 * along.rank, 8 * along.rank + 8)
        layer.fails_at = 4 if across.rank == 1 else None
        with pytest.raises(PipelineError, match="no forward"):
            pipeline.step(inputs[half], targets[half])
        optimizer.zero_grad()
        pipeline.step(inputs[half], targets[half])
        optimizer.step()
        Mlp.loss(whole(inputs), targets).backward()
        torch.optim.SGD(whole.parameters(), lr=0.5).step()
        with torch.no_grad():
            found = pipeline(inputs[half])
        assert found is None or torch.allclose(found, whole(inputs[half]), atol=1e-5)

    run_ranks(program, 4)


@pytest.mark.parametrize("wrapper", [DDP, FSDP])
def test_a_last_microbatch_without_gradients(wrapper):
    """Gradients of the other microbatches are averaged all the same."""

    def program(group):
        mesh = DeviceMesh(group, (2, 2), ("pipeline", "data"))
        across, along = mesh["pipeline"].group, mesh["data"].group
        layers = [Odd(0), Odd(1)]
        layers[1].cuts_at = 3
        pipeline = Pipeline(wrapper(layers[across.rank], along), across, 3, loss_fn=Mlp.loss)
        inputs, targets = Mlp.batch(12)
        half = slice(6 * along.rank, 6 * along.rank + 6)
        pipeline.step(inputs[half], targets[half])
        return torch.cat([parameter.grad.flatten() for parameter in pipeline.parameters()])

    one, two, *_ = run_ranks(program, 4)
    if wrapper is DDP:
        assert torch.equal(one, two)
    first, last = nn.Linear(6, 6), nn.Linear(6, 6)
    pipeline_models.fill(first), pipeline_models.fill(last, 1)
    inputs, targets = Mlp.batch(12)
    for number in (0, 2, 6, 8):
        of = slice(number, number + 2)
        (Mlp.loss(last(first(inputs[of])), targets[of]) / 6).backward()
    expected = torch.cat([first.weight.grad.flatten(), first.bias.grad])
    assert torch.allclose(one if wrapper is DDP else torch.cat([one, two]), expected, atol=1e-6)


def tied_model():
    """A model whose last layer has the weight of the first."""
    model = nn.Sequential(*[pipeline_models.fill(nn.Linear(6, 6), seed) for seed in range(4)])
    model[3].weight = model[0].weight
    return model


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_optimizers_of_shared_parameters_in_checkpoints(tmp_path, num_ranks):
    """Their states move to ranks that have several of the names, and back; the whole model loads them, too."""

    def make(group):
        kinds = {
            1: PipelineSchedule.LOOPED_BFS,
            2: PipelineSchedule.ZERO_BUBBLE_V,
            4: PipelineSchedule.ONE_F_ONE_B,
        }
        kind = kinds[group.world_size]
        pipeline = Pipeline(split_sequential(tied_model(), 4), group, 2, schedule=kind, loss_fn=Mlp.loss)
        return pipeline, torch.optim.AdamW(pipeline.parameters(), lr=0.01)

    def step(pipeline, optimizer):
        optimizer.zero_grad()
        pipeline.step(*Mlp.batch(4))
        optimizer.step()

    def save(group):
        pipeline, optimizer = make(group)
        step(pipeline, optimizer)
        save_distributed({"model": pipeline, "optimizer": OptimizerState(pipeline, optimizer)}, tmp_path, group=group)
        step(pipeline, optimizer)
        return {name: value.clone() for name, value in pipeline.state_dict().items()}

    def go_on(group):
        pipeline, optimizer = make(group)
        load_distributed(tmp_path, {"model": pipeline, "optimizer": OptimizerState(pipeline, optimizer)}, group=group)
        step(pipeline, optimizer)
        return {name: value.clone() for name, value in pipeline.state_dict().items()}

    expected = {name: value for own in run_ranks(save, num_ranks) for name, value in own.items()}
    for others in (4, 3 - num_ranks):
        found = {name: value for own in run_ranks(go_on, others) for name, value in own.items()}
        assert found.keys() == expected.keys()
        assert all(torch.allclose(value, expected[name], atol=1e-6) for name, value in found.items())
    model = tied_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    load_distributed(tmp_path, {"model": model, "optimizer": OptimizerState(model, optimizer)})
    assert len(optimizer.state) == 7


@pytest.mark.parametrize("prefixes", [["", ""], ["a.", "b."], ["deep.", "deep.er."]])
@pytest.mark.parametrize("wrap", [lambda stage, _: stage, DDP, FSDP])
def test_names_are_those_of_the_whole_model(prefixes, wrap):
    """named_parameters and named_buffers of a pipeline have the names of its checkpoint, wrapped stages or not."""

    def names(group):
        alone = new_group([group.rank], group=group)
        stages = [
            torch.nn.Sequential(OrderedDict({f"{number}": torch.nn.BatchNorm1d(2)})) if number == group.rank else None
            for number in range(2)
        ]
        stages[group.rank] = wrap(stages[group.rank], alone)
        pipeline = Pipeline(Stages(stages, prefixes), group)
        named = {**dict(pipeline.named_parameters()), **dict(pipeline.named_buffers())}
        assert all(pipeline.get_parameter(name) is each for name, each in pipeline.named_parameters())
        assert set(named) == set(pipeline.checkpoint_module().state_dict())
        return set(named)

    first, second = run_ranks(names, 2)
    assert f"{prefixes[0]}0.weight" in first
    assert f"{prefixes[1]}1.running_var" in second
