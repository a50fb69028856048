"""Models divided into stages of a pipeline: as evenly as possible, complete and unchanged."""

import copy
import itertools
import pickle
import random
from collections import OrderedDict
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_models import Wrapped
from torch import nn

from ferrodist.errors import CollectiveMismatchError, UnsupportedOpError
from ferrodist.parallel.pipeline import Pipeline, measure
from ferrodist.parallel.pipeline.split import Balance, Stages, find_shared, partition, split_sequential
from ferrodist.testing import run_ranks

ROWS = st.lists(
    st.one_of(st.integers(0, 6), st.floats(0, 8), st.sampled_from([0.1, 0.2, 0.3, 5e-324, 1e300])),
    min_size=1,
    max_size=8,
)


def best_by_trying(costs, num_parts):
    """What `partition` promises, found among all divisions."""
    exact = [Fraction(cost) for cost in costs] if any(costs) else [Fraction(1)] * len(costs)

    def rank(cuts):
        parts = [sum(exact[start:end]) for start, end in itertools.pairwise(cuts)]
        return (
            max(parts),
            sum(part**2 for part in parts),
            [(part, -cut) for part, cut in zip(parts, cuts[1:], strict=True)],
        )

    inner = itertools.combinations(range(1, len(costs)), num_parts - 1)
    best = min(((0, *cuts, len(costs)) for cuts in inner), key=rank)
    return tuple(end - start for start, end in itertools.pairwise(best))


@given(costs=ROWS, data=st.data())
@settings(max_examples=400, deadline=None)
def test_partition_is_the_best_of_all(costs, data):
    """No division has a smaller largest part, nor is more even among those, to the last bit of floats."""
    num_parts = data.draw(st.integers(1, len(costs)))
    assert partition(costs, num_parts) == best_by_trying(costs, num_parts)


@pytest.mark.parametrize(
    ("costs", "sizes"),
    [
        ([5, 0, 5, 0, 0, 5], (2, 3, 1)),
        ([0, 5, 0, 5, 5], (3, 1, 1)),
        ([1, 1, 1, 1, 1], (1, 2, 2)),
        ([9, 1, 1, 1, 1], (1, 2, 2)),
        ([0, 0, 0, 0, 0, 0], (2, 2, 2)),
        ([0.1] * 6, (2, 2, 2)),
        ([7, 0, 0], (1, 1, 1)),
        ([1, 4, 2, 2, 1, 3], (1, 1, 2, 2)),  # 5, 2, 3, 3 would be more even, but for its largest part
    ],
)
def test_partition_of_known_rows(costs, sizes):
    """Layers without cost stay with the one before; remainders go to the last stages."""
    assert partition(costs, len(sizes)) == sizes


def test_partition_of_a_thousand():
    """Models of a thousand children are divided quickly, and as well."""
    generator = random.Random(3)
    costs = [generator.random() for _ in range(1000)]
    sizes = partition(costs, 16)
    ends = list(itertools.accumulate(sizes))
    parts = [sum(costs[end - size : end]) for end, size in zip(ends, sizes, strict=True)]
    assert ends[-1] == 1000
    assert max(parts) < sum(costs) / 16 + 0.5


class Pair(nn.Module):
    """Takes a tensor or a pair, and returns a pair."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, inputs):
        values, number = inputs if isinstance(inputs, tuple) else (inputs, 0)
        return self.layer(values), number + 1


class Join(nn.Module):
    """Takes a pair, and returns a tensor."""

    def forward(self, inputs):
        values, number = inputs
        return values * number


def make_model():
    torch.manual_seed(1)
    return nn.Sequential(
        OrderedDict(
            first=nn.Linear(4, 6),
            norm=nn.BatchNorm1d(6),
            relu=nn.ReLU(inplace=True),
            one=Pair(),
            two=Pair(),
            join=Join(),
            dropout=nn.Dropout(0.5),
            last=nn.Linear(6, 3),
        )
    )


def names(stages):
    return [[name for name, _ in stage.named_children()] for stage in stages]


SAMPLE = torch.linspace(-1, 1, 20).reshape(5, 4)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 8])
def test_stages_are_the_model(num_stages):
    """In sequence they compute the model's result, bit for bit; children and the keys of states are the model's own."""
    model = make_model()
    stages = split_sequential(model, num_stages)
    assert isinstance(stages, Stages)
    assert stages.prefixes == ("",) * num_stages
    assert len(stages) == num_stages
    keys = [key for stage in stages for key in stage.state_dict()]
    assert keys == list(model.state_dict())
    assert [id(each) for stage in stages for each in stage.parameters()] == [id(each) for each in model.parameters()]
    assert [child for stage in stages for child in stage] == list(model)

    def run(parts):
        torch.manual_seed(2)
        values = SAMPLE
        for part in parts:
            values = part(values)
        return values

    expected = run([copy.deepcopy(model)])
    assert torch.equal(run(stages), expected)


def test_stages_keep_modes():
    """A stage is in the mode of the model, and its children in their own."""
    model = make_model().eval()
    model.dropout.train()
    stages = split_sequential(model, 2)
    assert not any(stage.training for stage in stages)
    assert model.dropout.training
    assert not model.norm.training
    assert split_sequential(make_model(), 2)[0].training


def test_balance_by_parameters():
    """Elements are counted, also frozen ones and on meta; layers without stay with the one before."""
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Flatten(), nn.Linear(4, 10), nn.ReLU(), nn.Linear(10, 4), nn.ReLU(), nn.Linear(4, 10), nn.ReLU()
        ).requires_grad_(False)
    stages = split_sequential(model, 3)
    assert names(stages) == [["0", "1", "2"], ["3", "4"], ["5", "6"]]
    assert stages.costs == (50, 44, 50)
    assert stages.imbalance == pytest.approx(50 * 3 / 144)


def test_balance_by_numbers_of_children_and_by_costs():
    """A user passes the number of children of each stage, or the cost of each child."""
    model = make_model()
    stages = split_sequential(model, 3, [1, 2, 5])
    assert [len(stage) for stage in stages] == [1, 2, 5]
    assert sum(stages.costs) == sum(each.numel() for each in model.parameters())
    stages = split_sequential(model, 2, costs=[1, 1, 1, 1, 1, 1, 1, 7.5])
    assert [len(stage) for stage in stages] == [7, 1]
    assert stages.costs == (7, 7.5)
    stages = split_sequential(model, 2, [2, 6], costs=np.arange(8.0).tolist())
    assert stages.costs == (1, 27)


def test_lazy_children():
    """They are divided by numbers, but not by parameters without a shape."""
    model = nn.Sequential(nn.Linear(2, 3), nn.LazyLinear(4))
    with pytest.raises(ValueError, match=r"child '1' \(a LazyLinear\) is lazy.*call the model once before"):
        split_sequential(model, 2)
    stages = split_sequential(model, 2, [1, 1])
    assert stages.costs == (9, None)
    assert "unknown" in stages.describe()


class Clock:
    """Time that passes when a layer says so."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def __deepcopy__(self, memo):
        return self


class _Delay(torch.autograd.Function):
    @staticmethod
    def forward(context, values, layer):
        context.layer = layer
        layer.spend(layer.forward_seconds)
        return values.clone()

    @staticmethod
    def backward(context, gradients):
        context.layer.spend(context.layer.backward_seconds)
        return gradients.clone(), None


class Slow(nn.Module):
    """Takes given times, and more where it is warmed up, and in two more runs."""

    def __init__(self, clock, forward_seconds, backward_seconds):
        super().__init__()
        self.clock, self.forward_seconds, self.backward_seconds = clock, forward_seconds, backward_seconds
        self.num_runs = 0

    def spend(self, seconds):
        self.clock.now += seconds * (100 if self.num_runs in {1, 2, 4, 5} else 1)

    def forward(self, values):
        self.num_runs += 1
        return _Delay.apply(values, self)


def test_balance_by_times():
    """Forward and backward are measured together, without warm-up and single delays."""
    clock = Clock()
    model = nn.Sequential(*(Slow(clock, *each) for each in [(1, 2), (3, 1), (1, 1), (2, 4)]))
    inputs = torch.ones(2, requires_grad=True)
    stages = split_sequential(model, 2, Balance.TIMES, sample=inputs, clock=clock)
    assert stages.costs == (7, 8)
    assert names(stages) == [["0", "1"], ["2", "3"]]
    assert "measured times" in stages.describe()
    assert inputs.grad is None
    assert [layer.num_runs for layer in model] == [0] * 4


def test_times_without_gradients():
    """No backward is measured where no gradient is needed, as in training."""
    clock = Clock()
    model = nn.Sequential(Slow(clock, 1, 50), Slow(clock, 2, 50), nn.Linear(2, 2), Slow(clock, 1, 2))
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            stages = split_sequential(model, 4, Balance.TIMES, sample=torch.ones(2), clock=clock)
        assert stages.costs == (1, 2, 0, 3)


class Random(nn.Module):
    """Draws from all generators, and remembers what came."""

    def __init__(self):
        super().__init__()
        self.seen = []
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, values):
        self.seen.append(random.random() + np.random.random() + torch.rand(()).item())
        self.mean = self.mean + values.mean().detach()
        return values + self.seen[-1]


def snapshot(model):
    """The model's tensors by name, with their identity, and everything else that measuring could change."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return (
        {name: (id(each), each.detach().clone(), each._version) for name, each in tensors.items()},
        {
            name: each.grad if each.grad is None else (id(each.grad), each.grad.clone())
            for name, each in tensors.items()
        },
        [module.training for module in model.modules()],
    )


@pytest.mark.parametrize("is_training", [True, False])
def test_measuring_changes_nothing(is_training):
    """Parameters, gradients, buffers, modes, other attributes, generators and the sample stay unchanged."""
    model = make_model()
    model.add_module("random", Random())
    model.train(is_training)
    model.first.eval()
    model(SAMPLE).sum().backward()
    model.last.weight.grad = None
    model.random.seen.clear()
    for parameter in model.parameters():  # an optimizer inside of the backward
        parameter.register_post_accumulate_grad_hook(lambda each: each.data.add_(1))
    sample = SAMPLE.clone()
    before = snapshot(model)
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    states = random.getstate(), torch.get_rng_state(), np.random.get_state()[1].copy()

    stages = split_sequential(model, 3, Balance.TIMES, sample=sample)

    assert all(cost > 0 for cost in stages.costs)
    after = snapshot(model)
    for (name, old), new in zip(before[0].items(), after[0].values(), strict=True):
        assert (old[0], old[2]) == (new[0], new[2]), name
        assert torch.equal(old[1], new[1]), name
    for (name, old), new in zip(before[1].items(), after[1].values(), strict=True):
        assert (old is None) == (new is None), name
        assert old is None or (old[0] == new[0] and torch.equal(old[1], new[1])), name
    assert before[2] == after[2]
    assert model.random.seen == []
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
    assert np.array_equal(np.random.get_state()[1], states[2])
    assert torch.equal(sample, SAMPLE)
    assert not sample.requires_grad
    assert sample._version == 0


def test_random_state_after_a_failure():
    """Generators are restored too when a child fails."""

    class Failing(nn.Module):
        def forward(self, values):
            torch.rand(3)
            random.random()
            np.random.random()
            raise KeyError("on purpose")

    states = random.getstate(), torch.get_rng_state(), np.random.get_state()[1].copy()
    position = np.random.get_state()[2]
    with pytest.raises(ValueError, match=r"child '0' \(Failing\) fails.*torch.float32 of shape \(1,\).*on purpose"):
        split_sequential(nn.Sequential(Failing()), 1, Balance.TIMES, sample=torch.ones(1))
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
    assert np.array_equal(np.random.get_state()[1], states[2])
    assert np.random.get_state()[2] == position


def test_children_change_their_inputs_in_place():
    """Each run has fresh inputs, and so has the next child."""
    seen = []

    class Doubling(nn.Module):
        def forward(self, values):
            seen.append(values[0].item())
            return values.mul_(2)

    model = nn.Sequential(Doubling(), nn.Linear(2, 2), Doubling())
    sample = torch.ones(2)
    split_sequential(model, 2, Balance.TIMES, sample=sample)
    assert torch.equal(sample, torch.ones(2))
    assert seen[:7] == [1] * 7
    assert seen[7:] == [model[1](2 * sample)[0].item()] * 7


def test_times_wait_for_devices(monkeypatch):
    """The clock is read after asynchronous devices have finished."""
    clock = Clock()
    events = []
    monkeypatch.setattr(measure, "_devices_of", lambda _values: {torch.device("meta")})
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda _device: events.append("done"))

    def read():
        events.append("read")
        return clock()

    split_sequential(nn.Sequential(nn.Linear(1, 1)), 1, Balance.TIMES, sample=torch.ones(1), clock=read)
    assert events == ["done", "read"] * 4 * 7
    assert measure._devices_of([torch.ones(1, device="meta"), torch.ones(1), None]) == {torch.device("meta")}


def test_ranks_divide_alike_though_their_clocks_differ():
    """Rank 0's times are used on all ranks, and so are its costs; other ranks need no sample."""

    def program(group):
        clock = Clock()
        seconds = [1, 1, 4] if group.rank == 0 else [4, 1, 1]
        model = nn.Sequential(*(Slow(clock, each, each) for each in seconds))
        sample = torch.ones(2, requires_grad=True) if group.rank == 0 else None
        stages = split_sequential(model, 2, Balance.TIMES, sample=sample, group=group, clock=clock)
        given = split_sequential(model, 2, costs=seconds, group=group)
        alone = split_sequential(model, 2, costs=seconds)
        return names(stages), stages.costs, names(given), [len(stage) for stage in alone], clock.now

    results = run_ranks(program, 2)
    for found, costs, by_costs, *_ in results:
        assert found == by_costs == [["0", "1"], ["2"]]
        assert costs == (4, 8)
    assert [result[3] for result in results] == [[2, 1], [1, 2]]
    assert results[1][4] == 100  # only rank 0 measured


def test_ranks_raise_together():
    """When rank 0 can't measure, or ranks divide differently, all of them raise, and the group stays usable."""

    def program(group):
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(4, 2))
        error, message = (ValueError, "child '1'") if group.rank == 0 else (UnsupportedOpError, "rank 0: child '1'")
        with pytest.raises(error, match=message) as caught:
            split_sequential(model, 2, Balance.TIMES, sample=torch.ones(2), group=group)
        assert group.rank or isinstance(caught.value.__cause__, RuntimeError)
        with pytest.raises((ValueError, UnsupportedOpError), match="needs sample="):
            split_sequential(model, 2, Balance.TIMES, group=group)
        with pytest.raises(CollectiveMismatchError, match="rank 1 has 2 stages by parameters where rank 0 has 1"):
            split_sequential(model, group.rank + 1, group=group)
        with pytest.raises(CollectiveMismatchError, match=r"stages of \(2,\) children by costs where rank 0 has 1"):
            split_sequential(model, 1, [2] if group.rank else Balance.PARAMETERS, costs=[1, 1], group=group)
        other = nn.Sequential(nn.Linear(2, 3), nn.Identity() if group.rank else nn.ReLU())
        with pytest.raises(CollectiveMismatchError, match="child '1', an Identity where rank 0 has child '1', a ReLU"):
            split_sequential(other, 2, group=group)
        return names(split_sequential(model, 2, group=group, timeout=30))

    assert run_ranks(program, 2) == [[["0"], ["1"]]] * 2


def test_shared_parameters():
    """Parameters that stages share are found with their first names; those shared inside one stage are not."""
    shared = nn.Linear(3, 3)
    tied = nn.Linear(3, 3, bias=False)
    tied.weight = shared.weight
    model = nn.Sequential(
        OrderedDict(a=shared, b=nn.Linear(3, 3), c=tied, d=nn.Linear(3, 3, bias=False), e=shared, f=nn.Tanh(), g=shared)
    )
    model.d.weight = model.b.weight
    stages = split_sequential(model, 3, [3, 1, 3])
    assert [len(stage) for stage in stages] == [3, 1, 3]
    assert [key for stage in stages for key in stage.state_dict()] == list(model.state_dict())
    assert find_shared(stages) == [
        ((0, "a.weight"), (2, "e.weight")),
        ((0, "a.bias"), (2, "e.bias")),
        ((0, "b.weight"), (1, "d.weight")),
    ]
    assert torch.equal(stages[2](stages[1](stages[0](torch.ones(3)))), model(torch.ones(3)))
    assert find_shared([shared, None, tied]) == [((0, "weight"), (2, "weight"))]
    assert find_shared([None, nn.Linear(1, 1), nn.Linear(1, 1)]) == []
    assert find_shared(split_sequential(model, 1)) == []


def test_a_child_that_appears_twice():
    """It is in the stages of both, and is measured in both."""
    layer = nn.Linear(2, 2)
    model = nn.Sequential(layer, nn.Tanh(), layer)
    stages = split_sequential(model, 2)
    assert [list(stage.state_dict()) for stage in stages] == [["0.weight", "0.bias"], ["2.weight", "2.bias"]]
    assert find_shared(stages) == [((0, "0.weight"), (1, "2.weight")), ((0, "0.bias"), (1, "2.bias"))]
    assert all(split_sequential(model, 3, Balance.TIMES, sample=torch.ones(2)).costs)


def test_description():
    """The table has each stage's contents and its share, also after other ranks' stages were dropped."""
    stages = split_sequential(nn.Sequential(nn.Linear(10, 99), nn.ReLU(), nn.Linear(99, 1), nn.Sigmoid()), 2)
    expected = (
        "stage     modules  parameters  share of parameters\n"
        "    0  0 to 1 (2)       1,089                91.6%\n"
        "    1  2 to 3 (2)         100                 8.4%\n"
        "The largest stage has 1.83 times the mean.\n"
    )
    assert stages.describe() == expected
    stages[1] = None
    assert stages.describe() == expected


def test_stages_made_by_hand():
    """Any modules are stages; their names in the whole model are those of a Sequential, or the given ones."""
    stages = Stages([nn.Linear(2, 2), None, nn.Sequential(nn.Tanh())])
    assert stages.prefixes == ("0.", "1.", "2.")
    assert stages.costs == (6, None, 0)
    assert stages.imbalance == 2
    lines = stages.describe().splitlines()
    assert [line.split() for line in lines[1:4]] == [
        ["0", "Linear", "6", "100.0%"],
        ["1", "elsewhere", "unknown", "unknown"],
        ["2", "0", "0", "0.0%"],
    ]
    stages = Stages([nn.Linear(2, 2), nn.Linear(2, 2)], prefixes=["embed.", "head."], costs=[0, 0])
    assert stages.prefixes == ("embed.", "head.")
    assert stages.imbalance == 1
    assert [line.split()[-1] for line in stages.describe().splitlines()[1:3]] == ["50.0%", "50.0%"]
    Stages([nn.Sequential(nn.Tanh()), nn.Sequential(nn.Tanh())], prefixes=["", ""])  # "0" has nothing to be saved
    assert copy.deepcopy(stages).prefixes == pickle.loads(pickle.dumps(stages)).prefixes == stages.prefixes


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"stages": []}, ValueError, "at least one stage"),
        ({"stages": [nn.Tanh(), 3]}, TypeError, "stage 1 must be a torch.nn.Module, or None, not int"),
        ({"stages": [nn.Tanh()], "prefixes": ["a.", "b."]}, ValueError, "1 stage, 2 prefixes"),
        ({"stages": [nn.Tanh()], "costs": []}, ValueError, "0 costs"),
        ({"stages": [nn.Tanh()], "prefixes": ["head"]}, ValueError, "end it with a dot.*'head.weight'"),
        ({"stages": [nn.Linear(1, 1)] * 2, "prefixes": ["", ""]}, ValueError, "stages 0 and 1 both have 'weight'"),
        (
            {"stages": [nn.BatchNorm1d(2, affine=False)] * 2, "prefixes": ["a."] * 2},
            ValueError,
            r"both have 'a\.running_mean'",
        ),
        (
            {"stages": [nn.Sequential(nn.Linear(1, 1)), nn.Linear(1, 1)], "prefixes": ["a.", "a.0.b."]},
            ValueError,
            r"stages 0 and 1 both have parts of 'a\.0'",
        ),
        (
            {
                "stages": [nn.Sequential(nn.Linear(1, 1)), nn.Sequential(nn.BatchNorm1d(1, affine=False))],
                "prefixes": ["", ""],
            },
            ValueError,
            "stages 0 and 1 both have parts of '0'",
        ),
        (
            {"stages": [Wrapped(nn.Linear(1, 1)), nn.Linear(1, 1)], "prefixes": ["a.", "a."]},
            ValueError,
            r"stages 0 and 1 both have 'a\.weight'",
        ),
        (
            {
                "stages": [
                    Wrapped(nn.Sequential(nn.Linear(1, 1))),
                    nn.Sequential(nn.BatchNorm1d(1, affine=False)),
                ],
                "prefixes": ["", ""],
            },
            ValueError,
            "stages 0 and 1 both have parts of '0'",
        ),
    ],
)
def test_wrong_stages(arguments, error, message):
    """Modules that can't be the stages of one model are refused, with the reason."""
    with pytest.raises(error, match=message):
        Stages(**arguments)


class Residual(nn.Sequential):
    """No chain of its children."""

    def forward(self, values):
        return values + super().forward(values)


def with_own(register):
    model = nn.Sequential(nn.Linear(1, 1))
    register(model)
    return model


CHAIN = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4), nn.Linear(4, 5))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((nn.Linear(1, 1), 1), TypeError, "divides a torch.nn.Sequential.*not Linear"),
        ((Residual(nn.Linear(1, 1)), 1), TypeError, "not Residual"),
        ((with_own(lambda m: m.register_buffer("scale", torch.ones(1))), 1), ValueError, "'scale' is the model's own"),
        ((with_own(lambda m: m.register_parameter("bias", nn.Parameter(torch.ones(1)))), 1), ValueError, "'bias' is"),
        ((CHAIN, 4), ValueError, "from 1 to 3 stages, not 4"),
        ((CHAIN, 0), ValueError, "not 0: pass fewer"),
        ((nn.Sequential(), 1), ValueError, "not 1: pass fewer"),
        ((CHAIN, 2.0), TypeError, "num_stages must be an integer"),
        ((CHAIN, 2, "parameters"), TypeError, "balance must be Balance.PARAMETERS.*not 'parameters'"),
        ((CHAIN, 2, None), TypeError, "not None"),
        ((CHAIN, 2, [1, 1]), ValueError, r"\[1, 1\] does not divide 3 children into 2 stages"),
        ((CHAIN, 2, [3]), ValueError, r"\[3\]"),
        ((CHAIN, 2, [0, 3]), ValueError, r"\[0, 3\]"),
        ((CHAIN, 2, [1.0, 2.0]), TypeError, "a number of children must be an integer"),
        ((CHAIN, 2, {"costs": [1, 2]}), ValueError, "2 costs for 3 children"),
        ((CHAIN, 2, {"costs": [1, -2, 1]}), ValueError, "costs -2.0"),
        ((CHAIN, 2, {"costs": [1, float("nan"), 1]}), ValueError, "costs nan"),
        ((CHAIN, 2, {"costs": [1, float("inf"), 1]}), ValueError, "costs inf"),
        ((CHAIN, 2, {"costs": ["1", 2, 3]}), TypeError, "a list of numbers"),
        ((CHAIN, 2, Balance.TIMES), ValueError, "needs sample="),
        ((CHAIN, 2, {"sample": torch.ones(2)}), ValueError, "pass Balance.TIMES"),
        ((CHAIN, 2, Balance.TIMES, {"costs": [1, 2, 3]}), ValueError, "not both"),
        ((CHAIN, 2, Balance.TIMES, {"sample": torch.ones(3)}), ValueError, r"child '0' \(Linear\) fails"),
        (
            (copy.deepcopy(CHAIN).to("meta"), 2, Balance.TIMES, {"sample": torch.ones(2, device="meta")}),
            ValueError,
            "child '0'.*meta device",
        ),
    ],
)
def test_wrong_arguments(arguments, error, message):
    """Each is refused with the value and advice."""
    keywords = arguments[-1] if isinstance(arguments[-1], dict) else {}
    with pytest.raises(error, match=message):
        split_sequential(*(each for each in arguments if each is not keywords), **keywords)


def test_children_that_cannot_be_measured():
    """A child that fails in its backward, or can't be copied, is named."""

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(context, values):
            return values.clone()

        @staticmethod
        def backward(context, gradients):
            raise OverflowError("no way back")

    class OneWay(nn.Module):
        def forward(self, values):
            return Wrong.apply(values)

    class Locked(nn.Linear):
        def __deepcopy__(self, memo):
            raise TypeError("there is one of these")

    model = nn.Sequential(OrderedDict(begin=nn.Linear(2, 2), middle=OneWay()))
    with pytest.raises(ValueError, match=r"child 'middle' \(OneWay\) fails.*no way back"):
        split_sequential(model, 2, Balance.TIMES, sample=torch.ones(1, 2))
    with pytest.raises(ValueError, match=r"child '0' \(Locked\) can't be copied.*pass costs=.*there is one"):
        split_sequential(nn.Sequential(Locked(1, 1)), 1, Balance.TIMES, sample=torch.ones(1))


class Wrapping(nn.Module):
    """What DDP is to a pipeline: a module that says whose names count."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def checkpoint_module(self):
        return self.module

    def forward(self, *args):
        return self.module(*args)


class TwoWays(nn.Module):
    """A child that takes and gives a tuple, of one, two or three values."""

    def __init__(self, num_given):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.num_given = num_given

    def forward(self, values):
        first, *rest = values if isinstance(values, tuple) else (values,)
        made = self.linear(first) + sum(each.mean() if isinstance(each, torch.Tensor) else each for each in rest)
        return (made, made * 2, 3)[: self.num_given] if self.num_given else made


@pytest.mark.parametrize("wrap", [lambda stage: stage, Wrapping])
@pytest.mark.parametrize(("is_pair", "num_stages"), [(False, 2), (False, 5), (True, 3)])
def test_children_that_pass_tuples(is_pair, num_stages, wrap):
    """A Sequential whose children pass tuples to each other computes in stages the same as on one rank."""
    torch.manual_seed(0)
    model = nn.Sequential(*[TwoWays(given) for given in (2, 3, 1, 2, 0)])
    batch = torch.randn(4, 3)
    inputs = (batch, batch + 1) if is_pair else batch
    expected = model(inputs)
    expected.sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()

    def program(group):
        stages = [wrap(stage) for stage in split_sequential(copy.deepcopy(model), num_stages)]
        pipeline = Pipeline(stages, group, loss_fn=lambda output, _: output.sum())
        return pipeline(inputs), pipeline.step(inputs, batch), [each.grad for each in pipeline.parameters()]

    outputs = run_ranks(program, num_stages)
    assert torch.equal(outputs[-1][0], expected)
    assert float(outputs[0][1]) == pytest.approx(expected.sum().item())
    for found, wanted in zip([each for _, _, rank in outputs for each in rank], gradients, strict=True):
        torch.testing.assert_close(found, wanted)


def test_a_tuple_of_one_input_is_one_argument():
    """A program's tuple of one input is that input, for a Sequential, too."""

    def program(group):
        return Pipeline(split_sequential(nn.Sequential(nn.Flatten(), nn.ReLU()), 2), group)((torch.ones(2, 1, 1),))

    assert torch.equal(run_ranks(program, 2)[1], torch.ones(2, 1))
