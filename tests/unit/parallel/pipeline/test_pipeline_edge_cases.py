"""Pipelines in unusual uses."""

import contextlib
import copy
import gc
import pickle
import time
import weakref

import pytest
import torch
from pipeline_models import Mlp, fill, seeded
from torch import nn

from ferrodist import DDP, FSDP, DeviceMesh
from ferrodist.checkpoint import load_distributed, save_distributed
from ferrodist.collectives.serialization import PackedValue
from ferrodist.errors import PipelineError, UnsupportedOpError
from ferrodist.parallel.pipeline import Microbatches, Pipeline, PipelineOutput, PipelineSchedule, Schedule
from ferrodist.parallel.pipeline.schedule_executor import PendingRecv
from ferrodist.parallel.pipeline.split import Stages
from ferrodist.testing import run_ranks


class Failing(nn.Module):
    """A layer that raises in forwards or backwards as long as it is told to; a layer may be in several."""

    def __init__(self, layer=None, fails=None):
        super().__init__()
        self.layer = fill(nn.Linear(6, 6)) if layer is None else layer
        self.fails = fails

    def forward(self, x):
        if self.fails == "forward":
            raise RuntimeError("no forward")
        made = self.layer(x)
        if self.fails == "backward":
            made.register_hook(self._backward)
        return made

    def _backward(self, gradient):
        raise RuntimeError("no backward")


def test_a_wrong_batch_after_a_failure():
    """The error is that of the batch; it names no stage of the failed step."""

    def program(group):
        stages = [Failing(fails="forward"), Failing()]
        pipeline = Pipeline(stages, group, 2, loss_fn=Mlp.loss)
        with pytest.raises(PipelineError, match="stage 0 failed in the forward"):
            pipeline.step(*Mlp.batch(4))
        kind = PipelineError if group.rank else ValueError
        with pytest.raises(kind, match="inputs has 1 sample ") as failure:
            pipeline.step(Mlp.batch(1)[0], Mlp.batch(4)[1])
        assert "stage" not in str(failure.value)

    run_ranks(program, 2)


def test_batches_and_activations_are_freed_after_a_step():
    """Also after a failed one, and after a forward for inference, without garbage collection."""

    class Watched(nn.Sequential):
        def forward(self, x):
            made = super().forward(x)
            seen.extend([weakref.ref(x), weakref.ref(made)])
            return made

    seen = []

    def use(pipeline, is_inference):
        inputs, targets = Mlp.batch(4)
        seen.extend([weakref.ref(inputs), weakref.ref(targets)])
        if is_inference:
            with torch.no_grad():
                pipeline(inputs)
        else:
            pipeline.step(inputs, targets)

    def program(group):
        failing = Failing()
        pipeline = Pipeline([Watched(nn.Linear(6, 6)), Watched(failing)], group, 2, loss_fn=Mlp.loss)
        gc.collect()
        gc.disable()  # in a process of its own
        for fails in (None, "forward", "backward", "inference"):
            failing.fails = fails
            seen.clear()
            try:
                use(pipeline, fails == "inference")
            except PipelineError:
                assert fails
            assert not any(each() is not None for each in seen), fails

    run_ranks(program, 2, backend="native")


ASIDE = """
ferrodist pipeline schedule: gradients that wait on their own rank
stage ranks: 0 1 1 0
microbatches: 3
rank 0: F0.0 F0.1 F0.2 F3.0 B3.0 F3.1 B3.1 B0.0 F3.2 B3.2 B0.1 B0.2
rank 1: F1.0 F2.0 F1.1 F2.1 B2.0 F1.2 B2.1 B1.0 F2.2 B1.1 B2.2 B1.2
"""


def test_gradients_and_receives_are_dropped_after_a_failure():
    """Stored gradients of the rank itself, and started receives, are freed though the pipeline stays."""

    def under_way():
        return {type(each) for each in gc.get_objects() if isinstance(each, (PackedValue, PendingRecv))}

    class Third(nn.Linear):
        num_calls, found = 0, None

        def forward(self, x):
            self.num_calls += 1
            if self.num_calls == 3:
                self.found = under_way()  # what B2.0 has made, and the receive of B2.1
                raise RuntimeError("no forward")
            return super().forward(x)

    def program(group):
        gc.collect()
        gc.disable()  # in a process of its own
        stages = [nn.Linear(6, 6), Third(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)]
        pipeline = Pipeline(stages, group, 3, schedule=Schedule.from_text(ASIDE), loss_fn=Mlp.loss)
        with contextlib.suppress(PipelineError):
            pipeline.step(*Mlp.batch(6))
        return stages[1].found, under_way()

    assert run_ranks(program, 2, backend="native") == [(None, set()), ({PackedValue, PendingRecv}, set())]


def test_a_dropped_pipeline_is_freed():
    """With its parameters, without garbage collection; after a failure too."""

    def program(group):
        gc.collect()
        gc.disable()  # in a process of its own
        for fails in (None, "backward"):
            pipeline = Pipeline([nn.Linear(6, 6), Failing(fails=fails)], group, 2, loss_fn=Mlp.loss)
            with contextlib.suppress(PipelineError):
                pipeline.step(*Mlp.batch(4))
            seen = [weakref.ref(each) for each in (pipeline, *pipeline.parameters())]
            del pipeline
            assert not any(each() is not None for each in seen), fails

    run_ranks(program, 2, backend="native")


def test_a_step_after_a_forward():
    """The forward is dropped: the step holds nothing of it, and there is no backward from it."""

    def program(group):
        pipeline = Pipeline(Mlp.stages(2), group, 4, schedule=PipelineSchedule.ONE_F_ONE_B, loss_fn=Mlp.loss)
        inputs, targets = Mlp.batch(4)
        pipeline.step(inputs, targets)
        expected = [parameter.grad.clone() for parameter in pipeline.parameters()]
        peak = pipeline.peak_activations
        pipeline.zero_grad()
        pipeline(inputs)
        pipeline.step(inputs, targets)
        assert all(torch.equal(one.grad, two) for one, two in zip(pipeline.parameters(), expected, strict=True))
        assert pipeline.peak_activations == peak
        with pytest.raises((RuntimeError, PipelineError), match="no forward to run backward from"):
            pipeline.backward()

    run_ranks(program, 2)


def test_failures_with_shared_parameters():
    """Ranks that wait for gradients of others get the error too; the next step is right."""

    def program(group):
        layers = [fill(nn.Linear(6, 6), seed) for seed in range(2)]
        for failing, other in ((0, 2), (1, 0)):
            stages = [Failing(layers[number in (failing, other)]) for number in range(3)]
            pipeline = Pipeline(stages, group, 2, loss_fn=Mlp.loss)
            inputs, targets = Mlp.batch(4)
            found = []
            for fails in (None, "backward", None):
                stages[failing].fails = fails
                pipeline.zero_grad()
                if fails:
                    with pytest.raises(PipelineError, match=f"stage {failing} failed in the backward of microbatch"):
                        pipeline.step(inputs, targets, timeout=5)
                else:
                    pipeline.step(inputs, targets)
                    found.append([parameter.grad.clone() for parameter in pipeline.parameters()])
            assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))

    run_ranks(program, 3, backend="native", timeout=20)


def test_wrong_names_of_shared_parameters():
    """All ranks get the error, though one of them alone can see it."""

    def program(group):
        for locations, what in (
            ([(0, "0.wieght"), (1, "0.weight")], "rank 0: stage 0 has no parameter '0.wieght' to share"),
            ([(0, "0.weight"), (2, "0.weight")], "'0.weight' of stage 2 is shared, but there are 2 stages"),
            ([(0, "0.weight"), (-1, "0.weight")], "'0.weight' of stage -1 is shared"),
        ):
            with pytest.raises(UnsupportedOpError, match=what):
                Pipeline(Mlp.stages(2), group, 2, shared=[locations])

    run_ranks(program, 2)


def test_a_shared_parameter_that_is_frozen():
    """It gets no gradient, which an optimizer would apply, even if one rank alone has frozen it."""

    def program(group):
        layer = fill(nn.Linear(6, 6))
        layer.weight.requires_grad_(False)
        layer.bias.requires_grad_(group.rank == 0)
        stages = [nn.Sequential(layer), nn.Sequential(layer)]
        Pipeline(stages, group, 2, loss_fn=Mlp.loss).step(*Mlp.batch(4))
        return layer.weight.grad is None, layer.bias.grad is not None

    assert run_ranks(program, 2, backend="native") == [(True, True), (True, False)]


def test_dropped_shared_gradients_are_freed():
    """When the program has dropped them, they are gone."""

    def program(group):
        layer = fill(nn.Linear(6, 6))
        pipeline = Pipeline([nn.Sequential(layer), nn.Sequential(layer)], group, 2, loss_fn=Mlp.loss)
        for _ in range(2):
            pipeline.step(*Mlp.batch(4))
        gradient = weakref.ref(layer.weight.grad)
        pipeline.zero_grad()
        return gradient() is None

    assert run_ranks(program, 2, backend="native") == [True] * 2


def test_shared_parameters_that_are_replaced():
    """The new ones are shared like the old ones."""

    def program(group):
        layer = fill(nn.Linear(6, 6))
        stages = [nn.Sequential(layer), nn.Sequential(layer)]
        pipeline = Pipeline(stages, group, 2, loss_fn=Mlp.loss)
        pipeline.step(*Mlp.batch(4))
        expected = layer.weight.grad
        pipeline.load_state_dict({name: value.clone() for name, value in pipeline.state_dict().items()}, assign=True)
        assert layer.weight.grad is None
        pipeline.step(*Mlp.batch(4))
        return torch.equal(layer.weight.grad, expected)

    assert run_ranks(program, 2, backend="native") == [True] * 2


def test_a_shared_parameter_that_nothing_uses():
    """It gets no gradient, as in one process; one of a previous step stays."""

    class Choosing(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.other = nn.Linear(6, 6)
            self.layer = layer
            self.takes_layer = False

        def forward(self, x):
            return (self.layer if self.takes_layer else self.other)(x)

    def program(group):
        layer = fill(nn.Linear(6, 6))
        stages = [Choosing(layer), Choosing(layer)]
        pipeline = Pipeline(stages, group, 2, loss_fn=Mlp.loss)
        pipeline.step(*Mlp.batch(4))
        assert layer.weight.grad is None
        stages[0].takes_layer = True
        pipeline.step(*Mlp.batch(4))
        found = layer.weight.grad.clone()
        stages[0].takes_layer = False
        pipeline.step(*Mlp.batch(4))
        assert torch.equal(layer.weight.grad, found)
        return found.abs().sum().item() > 0

    assert run_ranks(program, 2) == [True] * 2


class Versioned(nn.Linear):
    """A layer that reads states of its first version in another way."""

    _version = 2

    def _load_from_state_dict(self, state, prefix, metadata, *args):
        self.loaded = metadata.get("version")
        super()._load_from_state_dict(state, prefix, metadata, *args)


@pytest.mark.parametrize("prefixes", [("0.", "1."), ("", "deep.er."), ("a.", "b.")])
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.usefixtures("compiles_in_threads")
def test_states_of_modules_that_contain_a_pipeline(prefixes, is_compiled):
    """They load by names of the whole model; the pipeline also knows the versions."""

    def program(group):
        layers = [nn.Sequential(Versioned(6, 6)), Versioned(6, 6)]
        own = [torch.compile(layer, backend="eager") for layer in layers] if is_compiled else layers
        pipeline = Pipeline(Stages(own, prefixes), group, 2, loss_fn=Mlp.loss)
        outer = nn.ModuleDict({"model": pipeline, "more": nn.Linear(2, 2)})
        inner = "0.weight" if group.rank == 0 else "weight"
        name = f"model.{prefixes[group.rank]}{inner}"
        state = {key: value + 1 for key, value in outer.state_dict().items()}
        assert len(state) == 4
        assert name in state
        elsewhere = f"model.{prefixes[1 - group.rank]}elsewhere"
        outer.load_state_dict({**state, elsewhere: torch.ones(1)})
        assert torch.equal(outer.state_dict()[name], state[name])
        outer.load_state_dict({key: value.clone() for key, value in state.items()}, assign=True)
        with pytest.raises(RuntimeError, match=rf'Missing key\(s\) in state_dict: "{name}"\. $'):
            outer.load_state_dict({key: value for key, value in state.items() if key != name})
        versioned = layers[0][0] if group.rank == 0 else layers[1]
        pipeline.load_state_dict(pipeline.state_dict())
        return versioned.loaded

    assert run_ranks(program, 2) == [2, 2]


@pytest.mark.parametrize("prefixes", [None, ("", "deep.er.")])
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.usefixtures("compiles_in_threads")
def test_states_of_earlier_versions(prefixes, is_compiled):
    """Former names, and optional names, are handled as in one process."""

    def rename(module, state, prefix, *_):
        if prefix + "old" in state:
            state[prefix + "weight"] = state.pop(prefix + "old")

    def program(group):
        layers = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 6))]
        for layer in layers:
            layer[group.rank].register_load_state_dict_pre_hook(rename)
        own = [torch.compile(layer, backend="eager") for layer in layers] if is_compiled else layers
        pipeline = Pipeline(Stages(own, prefixes), group, 2, loss_fn=Mlp.loss)
        prefix = ("0." if prefixes is None else prefixes[0]) if group.rank == 0 else (prefixes or ("", "1."))[1]
        linear = f"{prefix}{group.rank}."
        state = {name: value + 1 for name, value in pipeline.state_dict().items()}
        del state[f"{prefix}{1 - group.rank}.num_batches_tracked"]  # torch's first versions had none
        expected = state.pop(linear + "weight")
        pipeline.load_state_dict({**state, linear + "old": expected})
        assert torch.equal(layers[group.rank][group.rank].weight, expected)
        missing, unexpected = pipeline.load_state_dict({**state, linear + "other": expected}, strict=False)
        assert (missing, unexpected) == ([linear + "weight"], [])

    run_ranks(program, 2)


def test_assign_to_stages_with_one_prefix():
    """Stages whose parameters have one prefix get the assigned tensors."""

    def program(group):
        stages = [nn.Linear(6, 6, bias=False), nn.PReLU(6)]
        stages[1].slope = stages[1].weight
        del stages[1].weight
        stages[1].forward = lambda x: x * stages[1].slope
        pipeline = Pipeline(Stages(stages, ["", ""]), group, 2, loss_fn=Mlp.loss)
        state = {name: value + 1 for name, value in pipeline.state_dict().items()}
        pipeline.load_state_dict(state, assign=True)
        name = ("weight", "slope")[group.rank]
        return getattr(stages[group.rank], name).data_ptr() == state[name].data_ptr()

    assert run_ranks(program, 2) == [True, True]


def test_outputs_are_microbatches_if_the_inputs_are():
    """Though the last stage's rank passed no inputs."""

    def program(group):
        pipeline = Pipeline([nn.Identity(), nn.Identity()], group, 2)
        given = Microbatches([torch.ones(1, 2), torch.ones(2, 3)])
        with torch.no_grad():
            found = pipeline(given if group.rank == 0 else None)
            joined = pipeline(torch.ones(4) if group.rank == 0 else given)
        if group.rank == 1:
            assert isinstance(found, Microbatches)
            assert [each.shape for each in found] == [(1, 2), (2, 3)]
            assert joined.tolist() == [1] * 4

    run_ranks(program, 2)


def test_a_stage_that_is_replaced():
    """The new one would have the parameters, and the old one would run: it is refused, on all ranks."""

    def program(group):
        pipeline = Pipeline(Mlp.stages(2), group, 2, loss_fn=Mlp.loss)
        if group.rank == 1:
            pipeline.stages["1"] = nn.Linear(6, 6)
        with pytest.raises(RuntimeError, match="stage 1 was replaced: make a new Pipeline"):
            pipeline.step(*Mlp.batch(4))

    run_ranks(program, 2)


def test_a_wrong_timeout_fails_on_all_ranks():
    """The other ranks don't wait for their own."""

    def program(group):
        pipeline = Pipeline(Mlp.stages(2), group, 2, loss_fn=Mlp.loss)
        kind, timeout = ((TypeError, ValueError), "soon") if group.rank else (PipelineError, None)
        with pytest.raises(kind, match="timeout"):
            pipeline.step(*Mlp.batch(4), timeout=timeout)
        pipeline.step(*Mlp.batch(4))

    run_ranks(program, 2)


def test_conjugated_inputs():
    """Flags that are not in a tensor's memory are split with it: conj(), and the negative of conj().imag."""

    def program(group):
        pipeline = Pipeline([nn.Identity(), nn.Identity()], group, 2)
        numbers = torch.randn(4, 6, dtype=torch.complex64, generator=seeded(1))
        with torch.no_grad():
            for inputs in (numbers.conj(), numbers.conj().imag):
                found = pipeline(inputs)
                assert found is None or torch.equal(found, inputs)

    run_ranks(program, 2)


def test_another_default_device():
    """A pipeline's own tensors are on a device from which they can be sent."""

    def program(group):
        pipeline = Pipeline(Mlp.stages(2), group, 2, loss_fn=Mlp.loss)
        inputs, targets = Mlp.batch(4)
        gradients = torch.zeros_like(targets) if group.rank else None
        with torch.device("meta"):
            pipeline.step(inputs, targets)
            pipeline(inputs)
            pipeline.backward(gradients)

    run_ranks(program, 2, backend="native")


def test_steps_under_no_grad_and_inference_mode():
    """A step computes gradients there too."""

    def program(group):
        pipeline = Pipeline(Mlp.stages(2), group, 2, loss_fn=Mlp.loss)
        found = []
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            pipeline.zero_grad()
            with mode():
                pipeline.step(*Mlp.batch(4))
            found.append([parameter.grad for parameter in pipeline.parameters()])
        for others in found[1:]:
            assert all(torch.equal(one, other) for one, other in zip(found[0], others, strict=True))

    run_ranks(program, 2)


def test_a_backward_without_gradients():
    """It is an error, and not an empty backward."""

    def program(group):
        pipeline = Pipeline(Mlp.stages(2), group, 2)
        for batch in (Mlp.batch(4)[0], Microbatches([Mlp.batch(2)[0]] * 2)):
            pipeline(batch)
            gradients = Microbatches([None, None]) if isinstance(batch, Microbatches) else None
            with pytest.raises(ValueError if group.rank else PipelineError, match="no gradient to begin with"):
                pipeline.backward(gradients)

    run_ranks(program, 2)


def test_copies_and_pickles():
    """They are refused, with alternatives."""

    def program(group):
        pipeline = Pipeline(Mlp.stages(2), group, 2)
        for make in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="belongs to its group and can't be copied or pickled"):
                make(pipeline)

    run_ranks(program, 2)


class Remembering(nn.Linear):
    """A layer with state that is no tensor."""

    remembered = 0

    def get_extra_state(self):
        return self.remembered

    def set_extra_state(self, state):
        self.remembered = state


@pytest.mark.usefixtures("compiles_in_threads")
def test_states_of_stages():
    """A stage's own tensors are in the state, and assigned ones in the stage; compiled stages have usual names."""

    def program(group):
        stages = [fill(Remembering(6, 6), seed) for seed in range(2)]
        pipeline = Pipeline([torch.compile(stage, backend="eager") for stage in stages], group, 2, loss_fn=Mlp.loss)
        own, layer = f"{group.rank}.", stages[group.rank]
        state = {name: value + 1 for name, value in pipeline.state_dict().items()}
        assert state.keys() == {own + "weight", own + "bias", own + "_extra_state"}
        pipeline.load_state_dict(state, assign=True)
        assert layer.remembered == 1
        assert layer.weight.data_ptr() == state[own + "weight"].data_ptr()
        assert set(pipeline.load_state_dict({}, strict=False).missing_keys) == state.keys()
        with pytest.raises(RuntimeError, match=rf"size mismatch for stages\.{own}.*weight"):
            pipeline.load_state_dict({**state, own + "weight": torch.ones(3)})

    run_ranks(program, 2)


@pytest.mark.parametrize("wrapper", [DDP, FSDP])
def test_checkpoints_of_wrapped_layers(tmp_path, wrapper):
    """A stage of one layer, in DDP or FSDP, has the names of the whole model as well."""

    def make(seed):
        return [fill(nn.Linear(6, 6), seed), fill(nn.Linear(6, 6), seed + 1)]

    def program(group):
        mesh = DeviceMesh(group, (2, 2), ("pipeline", "data"))
        across, along = mesh["pipeline"].group, mesh["data"].group
        pipeline = Pipeline(wrapper(make(0)[across.rank], along), across)
        save_distributed({"model": pipeline}, tmp_path, group=group)

    run_ranks(program, 4)
    loaded = load_distributed(tmp_path, {"model": nn.Sequential(*make(5))})["model"]
    expected = nn.Sequential(*make(0))
    assert all(torch.equal(mine, other) for mine, other in zip(loaded.parameters(), expected.parameters(), strict=True))


class Calling(nn.Module):
    """Calls a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x, **skips):
        return self.function(x, **skips)


@pytest.mark.parametrize("num_rows", [2, 100_000])
def test_writes_to_a_skip(num_rows):
    """A stage that writes to its input does not change another rank's, however large."""

    def give(x):
        made = x.expand(num_rows, 6).clone()
        return PipelineOutput(made, made=made)

    def program(group):
        stages = [
            nn.Identity(),
            Calling(give),
            Calling(lambda x: x.zero_()),
            Calling(lambda x, made: made),
        ]
        pipeline = Pipeline(stages, group, schedule=PipelineSchedule.ZERO_BUBBLE_V, skips={"made": (1, 3)})
        with torch.no_grad():
            found = pipeline(torch.ones(1, 6))
        assert found is None or found.eq(1).all()

    run_ranks(program, 2, backend="native")


def test_large_values_are_freed_after_a_failure():
    """Values that were being sent when a stage failed don't hold the activations of that stage."""

    class Large(nn.Module):
        def __init__(self, fails):
            super().__init__()
            self.fails, self.num_calls, self.seen = fails, 0, []

        def forward(self, x):
            self.num_calls += 1
            made = x.repeat(200_000 // len(x), 1)
            self.seen.append(weakref.ref(made))
            if self.fails and self.num_calls == 2:  # the next value is on its way
                raise RuntimeError("no forward")
            return made

    def program(group):
        for _ in range(3):
            stages = [Large(fails=False), Large(fails=True)]
            with torch.no_grad(), contextlib.suppress(PipelineError):
                Pipeline(stages, group, 3)(Mlp.batch(6)[0])
            assert stages[group.rank].num_calls > 1
            end = time.monotonic() + 10  # the other rank's thread drops its own references when it gets its turn
            while any(each() is not None for each in stages[group.rank].seen) and time.monotonic() < end:
                time.sleep(0.01)
            assert not any(each() is not None for each in stages[group.rank].seen)

    run_ranks(program, 2)


@pytest.mark.parametrize(("num_ranks", "num_rows"), [(1, 1), (2, 100_000)])
def test_a_returned_buffer(num_ranks, num_rows):
    """It arrives as it was returned, in full or in part, though the next microbatch changes it."""

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(num_rows, 2))

        def forward(self, x):
            self.count += 1
            return x, self.count, self.count[:, 1]

    class Using(nn.Module):
        def forward(self, x, whole, part):
            return x * whole.mean() * part.mean()

    def program(group):
        pipeline = Pipeline([Counting(), Using()], group, 3, schedule=PipelineSchedule.LOOPED_BFS)
        with torch.no_grad():
            found = pipeline(torch.ones(3, 1))
        assert found is None or found.flatten().tolist() == [1, 4, 9]

    run_ranks(program, num_ranks, backend="native")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"stages": None}, TypeError, "stages must be a module or a list of modules"),
        ({"stages": [abs]}, TypeError, "stage 0 must be a torch.nn.Module, or None, not builtin"),
        ({"stages": []}, ValueError, "pass at least one stage"),
        ({"stages": nn.ModuleList([nn.Linear(1, 1)])}, TypeError, r"pass list\(...\) of others, not ModuleList"),
        ({"loss_fn": "mse"}, TypeError, "loss_fn must be a function of outputs and targets or None, not str"),
        ({"skips": {"a": 0}}, TypeError, "the skip 'a' must have a pair of stages, its source and its target, not 0"),
        ({"shared": [(0, "weight")]}, TypeError, r"shared must have a list of \(stage, name\) pairs"),
    ],
)
def test_wrong_arguments(arguments, error, message):
    """They are refused when the pipeline is made, by their names."""

    def make(group):
        with pytest.raises(error, match=message):
            Pipeline(**{"stages": [nn.Linear(1, 1)], "group": group, **arguments})

    run_ranks(make, 1)
