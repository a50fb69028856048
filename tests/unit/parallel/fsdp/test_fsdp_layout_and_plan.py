"""FSDP's pure functions: layouts of elements, choice of units, backward plans."""

import pytest
import torch

from ferrodist import SimulatedBackend, by_class, by_size
from ferrodist.parallel.fsdp.backward_plan import CallEvent, plan_backward
from ferrodist.parallel.fsdp.flat_layout import FlatLayout
from ferrodist.parallel.fsdp.wrap import find_units


def make_layout(shapes, num_shards, group=None):
    if group is None:
        (group,) = SimulatedBackend.create_group(1)
    dtypes = dict.fromkeys(("shard_dtype", "param_dtype", "reduce_dtype"), torch.float32)
    return FlatLayout([torch.Size(shape) for shape in shapes], num_shards, group, **dtypes)


@pytest.mark.parametrize("num_shards", [1, 2, 3, 7])
@pytest.mark.parametrize("shapes", [[(5,)], [()], [(0, 3)], [(3, 7), (1,), (0,), (), (64, 65)]])
def test_shards_cover_each_parameter_once(shapes, num_shards):
    """The ranges of all ranks cover the parameter, in order, within the flat shards."""
    layout = make_layout(shapes, num_shards)
    for parameter, numel in enumerate(layout.numels):
        shards = [layout.shard_range(parameter, rank) for rank in range(num_shards)]
        covered = [element for shard in shards for element in range(shard.start, shard.start + shard.size)]
        assert covered == list(range(numel))
        for shard in shards:
            assert 0 <= shard.offset <= shard.offset + shard.size <= layout.shard_size
            if shard.size:
                where = shard.rank * layout.shard_size + shard.offset
                assert where == layout.offsets[parameter] + shard.start


def test_shards_keep_the_number_of_dims():
    """Optimizers' rules about numbers of dims, as for weight decay, treat shards as the full parameter."""
    layout = make_layout([(8, 9), (9,), (2, 3, 4)], 2)
    assert [layout.shape_shard(index, torch.zeros(0)).ndim for index in range(3)] == [2, 1, 3]


def test_layouts_of_one_size_have_different_ids():
    """Ranks that gather or reduce different ones pass other dims or counts; elements are in the same order."""
    (group,) = SimulatedBackend.create_group(1)
    layouts = [make_layout([(5,), (300, 300)], 2, group) for _ in range(20)]
    assert len({layout.shard_size for layout in layouts}) == 1
    assert len({layout.dim for layout in layouts}) == 20
    assert len({layout.index for layout in layouts}) == 20
    assert len({layout.row_size for layout in layouts}) == 20


def test_large_shards_are_whole_pages():
    """They can be mapped one behind the other; small ones waste nothing."""
    assert make_layout([(300, 300)], 2).shard_size * 4 % 4096 == 0
    assert make_layout([(30, 30)], 2).shard_size * 4 < 900 * 2 + 4 * 32


class Tied(torch.nn.Module):
    """A weight that two units share, inside a nested model."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(5, 4)
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)) for _ in range(2)
        )
        self.head = torch.nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight


def units_of(module, wrap):
    return {plan.name: sorted(plan.parameters) for plan in find_units(module, wrap)}


def test_units_by_class():
    """Modules of the class are units; the rest belongs to the outermost."""
    units = units_of(Tied(), torch.nn.Sequential)
    assert list(units) == ["", "blocks.0", "blocks.1"]
    assert units[""] == ["embedding.weight"]
    assert units["blocks.1"] == [f"blocks.1.{layer}.{part}" for layer in (0, 1) for part in ("bias", "weight")]


def test_a_shared_parameter_belongs_to_the_unit_around_both():
    """Otherwise it would be a shard when the other module is called."""
    units = units_of(Tied(), by_class(torch.nn.Embedding, torch.nn.Linear))
    assert units[""] == ["embedding.weight"]
    assert "head" not in units


def test_nested_units_divide_their_parameters():
    """A unit inside a unit takes its own parameters, and the outer one the rest."""
    module = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.PReLU()))
    units = units_of(module, (torch.nn.Sequential, torch.nn.Linear))
    assert units == {"": [], "0": ["0.1.weight"], "0.0": ["0.0.bias", "0.0.weight"]}


def test_units_by_size_and_by_function():
    """The smallest modules that are large enough; lists of modules are never units, since they are not called."""
    assert list(units_of(Tied(), by_size(40))) == ["", "blocks.0", "blocks.1"]
    layers = ["", "blocks.0.0", "blocks.0.1", "blocks.1.0", "blocks.1.1"]
    assert list(units_of(Tied(), lambda name, _: name.startswith("blocks"))) == layers


def test_wrong_policies_are_refused():
    """The error names the allowed types."""
    with pytest.raises(TypeError, match="wrap must be"):
        find_units(Tied(), 3)
    with pytest.raises(TypeError, match=r"subclass of torch\.nn\.Module"):
        find_units(Tied(), (int,))
    with pytest.raises(TypeError, match="True or False"):
        find_units(Tied(), lambda name, module: None)
    with pytest.raises(ValueError, match="min_numel"):
        by_size(0)


def chain(num_units):
    """The trace of a root, unit 0, whose forward calls the others one after the other."""
    trace = [CallEvent(unit=0, call=0, begins=True)]
    for unit in range(1, num_units + 1):
        trace += [CallEvent(unit=unit, call=unit, begins=True), CallEvent(unit=unit, call=unit, begins=False)]
    return [*trace, CallEvent(unit=0, call=0, begins=False)]


def text(steps):
    return ", ".join(f"{step.kind.value} {step.unit}" for step in steps)


def test_plan_prefetches_and_reduces_in_the_order_of_use():
    """The next unit is gathered before the one in use is reduced, and freed before the one after is gathered."""
    assert text(plan_backward(chain(2), 1, {0, 1, 2})) == (
        "gather 0, use 0, gather 2, use 2, gather 1, reduce 2, free 2, use 1, reduce 1, free 1, reduce 0, free 0"
    )


def test_plan_without_prefetch():
    """Each unit is gathered when it is needed."""
    assert text(plan_backward(chain(2), 0, {0, 2})) == (
        "gather 0, use 0, gather 2, use 2, reduce 2, free 2, gather 1, use 1, free 1, reduce 0, free 0"
    )


def test_plan_reduces_a_unit_that_was_called_twice_once():
    """Its gradients are complete only when the backward of its first call is done."""
    trace = [
        CallEvent(unit=unit, call=call, begins=begins)
        for unit, call, begins in [(0, 0, 1), (1, 1, 1), (1, 1, 0), (1, 2, 1), (1, 2, 0), (0, 0, 0)]
    ]
    assert text(plan_backward(trace, 0, {1})) == (
        "gather 0, use 0, gather 1, use 1, free 1, gather 1, use 1, reduce 1, free 1, free 0"
    )


def test_plan_skips_calls_that_failed():
    """A call that raised, and was caught by the program, has no backward."""
    trace = [event for event in chain(2) if event.begins or event.unit != 1]
    assert "1" not in text(plan_backward(trace, 1, {0, 1, 2}))
