"""Errors of FSDP are raised on all ranks, with advice; the shards survive them."""

import copy

import pytest
import torch

from ferrodist import FSDP, DeviceMesh, InvalidRankError, MixedPrecision, ShardingStrategy
from ferrodist.errors import (
    CollectiveMismatchError,
    DistributedError,
    GroupAbortedError,
    UnsupportedOpError,
)
from ferrodist.testing import run_ranks


class Twins(torch.nn.Module):
    """Two layers of one size, called in a given order."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))

    def forward(self, inputs, order=(0, 1)):
        for layer in order:
            inputs = self.layers[layer](inputs)
        return inputs


INPUTS = torch.ones(2, 4)


def make(group, **options):
    return FSDP(Twins(), group, wrap=torch.nn.Linear, **options)


def test_forward_in_another_order(run):
    """Units of one size are told apart: no rank computes with another unit's parameters."""

    def program(group):
        fsdp = make(group)
        with pytest.raises(CollectiveMismatchError, match=r"gathering unit 'layers\.[01]'.*same order"):
            fsdp(INPUTS, (0, 1) if group.rank else (1, 0))
        assert set(fsdp.sharded_state_dict()["parameters"]) == set(dict(fsdp.module.named_parameters()))

    run(program, 2)


def test_units_outside_of_forward(run):
    """A layer that is called alone raises that its parameters are not gathered; the model still works."""

    def program(group):
        for wrap in (torch.nn.Linear, None):
            fsdp = FSDP(Twins(), group, wrap=wrap)
            with pytest.raises(RuntimeError, match="summon_full_params"):
                fsdp.module.layers[0](INPUTS)
            fsdp(INPUTS).sum().backward()

    run(program, 2)


def test_parameters_changed_while_gathered(run):
    """A change that would be lost is an error that names the parameter, on all ranks."""

    def program(group):
        fsdp = make(group)
        layer = fsdp.module.layers[1]

        def change(*_):
            with torch.no_grad():
                layer.weight.add_(1)

        layer.register_forward_pre_hook(change)
        before = fsdp.sharded_state_dict()["parameters"]
        with pytest.raises(DistributedError, match=r"'layers\.1\.weight' was changed.*summon_full_params"):
            fsdp(INPUTS).sum().backward()
        after = fsdp.sharded_state_dict()["parameters"]
        assert all(torch.equal(after[name]["piece"], before[name]["piece"]) for name in before)

    run(program, 2)


class Borrowing(torch.nn.Module):
    """A module that uses the weight of a child that it doesn't call."""

    def __init__(self, use):
        super().__init__()
        self.table, self.out, self.use = torch.nn.Embedding(64, 32), torch.nn.Linear(32, 32), use

    def forward(self, inputs):
        return self.use(self.out(inputs), self.table.weight)


USES = {
    "product": lambda x, weight: x @ weight.T,
    "linear": torch.nn.functional.linear,
    "embedding": lambda x, weight: x + torch.nn.functional.embedding(torch.zeros(4, dtype=torch.int64), weight),
    "elementwise": lambda x, weight: x * weight,
    "elementwise, the other way": lambda x, weight: weight[:1] + x,
    "its shape": lambda x, weight: x * weight.shape[0],
    "joined": lambda x, weight: torch.cat([x, weight]),
    "its data": lambda x, weight: x + weight.data.mean(),
    "another's memory": lambda x, weight: x + torch.zeros(1).copy_(weight.sum()),
}


@pytest.mark.parametrize("use", USES)
def test_a_parameter_that_is_read_outside_of_its_modules_call(use):
    """It is named, where its shard would be used in its place."""

    def program(group):
        fsdp = FSDP(Borrowing(USES[use]), group, wrap=torch.nn.Embedding)
        with pytest.raises(RuntimeError, match=r"parameter 'table.weight' of unit 'table' \(Embedding\).*wrap="):
            fsdp(torch.rand(4, 32))

    run_ranks(program, 2)


def test_metadata_of_shards_may_be_read_in_forward():
    """Dtype, device and requires_grad are those of the full parameter."""

    def program(group):
        fsdp = FSDP(
            Borrowing(lambda x, weight: x.to(weight.device, weight.dtype) * weight.requires_grad),
            group,
            wrap=torch.nn.Embedding,
        )
        fsdp(torch.rand(4, 32)).sum().backward()

    run_ranks(program, 2)


@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_a_rank_that_fails_in_the_middle(run, stage):
    """The others raise in their next collective, with intact shards, and don't hang."""

    def program(group):
        fsdp = make(group)
        expected = fsdp.sharded_state_dict()["parameters"]

        def fail(*_):
            if group.rank == 1:
                raise KeyError("on purpose")

        if stage == "forward":
            fsdp.module.layers[0].register_forward_hook(fail)
        output = None
        try:
            output = fsdp(INPUTS)
            if stage == "backward":
                hooked = fsdp(INPUTS.clone().requires_grad_())
                hooked.register_hook(fail)
                output = hooked
            output.sum().backward()
        except KeyError:
            group.abort("rank 1 failed on purpose")
        except DistributedError:
            assert group.rank == 0
        now = fsdp.sharded_state_dict()["parameters"]
        assert all(torch.equal(now[name]["piece"], expected[name]["piece"]) for name in expected)
        with pytest.raises(DistributedError):
            fsdp(INPUTS)

    run(program, 2)


def test_a_forward_after_a_backward_that_was_cut_short(run):
    """It aborts the group, since the others wait for the rest of that backward."""

    def program(group):
        fsdp = make(group)
        output = fsdp(INPUTS)
        if group.rank == 1:

            def fail(_):
                raise KeyError("on purpose")

            fsdp._units[1].flats[0].full_params[0].register_hook(fail)
            with pytest.raises(KeyError):
                output.sum().backward()
            with pytest.raises(GroupAbortedError, match="earlier backward of FSDP on rank 1"):
                fsdp(INPUTS)
        else:
            with pytest.raises(DistributedError, match="earlier backward of FSDP on rank 1"):
                output.sum().backward()

    run(program, 2)


def test_different_modules():
    """Every rank raises with the difference; the group stays usable."""

    def program(group):
        with pytest.raises(CollectiveMismatchError, match=r"rank 1 has parameter 'weight' of shape \(4, 3\)"):
            FSDP(torch.nn.Linear(2 + group.rank, 4), group)
        with pytest.raises(CollectiveMismatchError, match="settings"):
            FSDP(torch.nn.Linear(2, 4), group, forward_prefetch=group.rank)
        group.barrier()

    run_ranks(program, 2)


def test_parameters_that_cannot_be_divided():
    """Each is named, with advice, on all ranks."""

    def program(group):
        for module, message in [
            (torch.nn.LazyLinear(3), "'weight' is lazy.*run the module once"),
            (torch.nn.ParameterDict({"odd": torch.nn.Parameter(torch.ones(2, dtype=torch.int32), False)}), None),
        ]:
            if message is None:
                FSDP(module, group)
                continue
            with pytest.raises(UnsupportedOpError, match=message):
                FSDP(module, group)
        module = torch.nn.Linear(2, 2)
        module(torch.ones(1, 2)).sum().backward()
        with pytest.raises(UnsupportedOpError, match="zero_grad"):
            FSDP(module, group)

    run_ranks(program, 2)


def test_sparse_gradients(run):
    """They raise on all ranks, and name the parameter."""

    def program(group):
        fsdp = FSDP(torch.nn.Embedding(5, 3, sparse=group.rank == 0), group)
        with pytest.raises(DistributedError, match=r"'weight'.*sparse=False"):
            fsdp(torch.tensor([1])).sum().backward()

    run(program, 2)


def test_wrong_arguments():
    """Each is refused with the allowed values."""

    def program(group):
        layer = torch.nn.Linear(2, 2)
        for message, keywords in [
            ("strategy must be", {"strategy": "FULL_SHARD"}),
            ("mixed_precision must be", {"mixed_precision": torch.float16}),
            ("forward_prefetch must be", {"forward_prefetch": -1}),
            ("backward_prefetch must be", {"backward_prefetch": True}),
            ("cpu_offload must be", {"cpu_offload": 1}),
            ("wrap must be", {"wrap": 5}),
            ("init must be", {"init": 5}),
            ("groups of 3", {"strategy": ShardingStrategy.hybrid(3)}),
        ]:
            with pytest.raises((TypeError, ValueError), match=message):
                FSDP(layer, group, **keywords)
        with pytest.raises(TypeError, match=r"wraps a torch\.nn\.Module"):
            FSDP(3, group)
        with pytest.raises(TypeError, match="a DeviceMesh or None, not int"):
            FSDP(layer, 3)
        with pytest.raises(ValueError, match="can't take a mesh of 3 axes"):
            FSDP(layer, DeviceMesh(group, (1, 1, 2)))
        with pytest.raises(ValueError, match="NO_SHARD can't take a mesh of 2 axes"):
            FSDP(layer, DeviceMesh(group, (1, 2)), strategy=ShardingStrategy.NO_SHARD)
        with pytest.raises(InvalidRankError):
            FSDP(layer, DeviceMesh(group, (1,), ranks=[1 - group.rank]))
        inner = FSDP(torch.nn.Linear(2, 2), group)
        with pytest.raises(ValueError, match="contains an FSDP"):
            FSDP(torch.nn.Sequential(inner), group)
        with pytest.raises(ValueError, match="build it anew"):
            FSDP(inner.module, group)
        with pytest.raises(ValueError, match="max_norm"):
            FSDP(torch.nn.Linear(2, 2), group).clip_grad_norm_(-1.0)

    run_ranks(program, 2)
    with pytest.raises(TypeError, match="16 bits"):
        MixedPrecision(param_dtype=torch.int8)
    with pytest.raises(TypeError, match=r"torch\.dtype"):
        MixedPrecision(reduce_dtype="bf16")
    with pytest.raises(ValueError, match="at least 1"):
        ShardingStrategy.hybrid(0)


def test_meta_modules_without_an_initialiser():
    """The module is named, with the missing argument, which then works."""

    class Scale(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.empty(3))

    with torch.device("meta"):
        module = torch.nn.Sequential(Scale())

    def program(group):
        with pytest.raises(UnsupportedOpError, match=r"'0' \(Scale\).*init="):
            FSDP(copy.deepcopy(module), group)
        fsdp = FSDP(copy.deepcopy(module), group, init=lambda each: torch.nn.init.ones_(each.scale))
        return fsdp.full_state_dict()["0.scale"]

    for value in run_ranks(program, 2):
        assert torch.equal(value, torch.ones(3))


@pytest.mark.parametrize("wrap", [None, torch.nn.Linear])
@pytest.mark.parametrize("how", ["replaced", "deleted"])
def test_parameters_that_the_program_replaces(how, wrap):
    """The new parameter would not be sharded: the next forward names it, on all ranks."""

    def program(group):
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
        fsdp = FSDP(model, group, wrap=wrap)
        fsdp(torch.ones(1, 3)).sum().backward()
        if how == "replaced":
            model[1].weight = torch.nn.Parameter(torch.ones(2, 3))
        else:
            del model[1].weight
        group.barrier()  # an error ends the group, which the other rank may still be using
        with pytest.raises(
            UnsupportedOpError, match=r"parameter '1.weight' (of Sequential )?was (replaced by another|removed)"
        ):
            fsdp(torch.ones(1, 3))

    run_ranks(program, 2)


def test_shards_are_back_when_summoning_fails(run, monkeypatch):
    """Also those of a unit's first dtype, when that of its second dtype can't be gathered."""

    def program(group):
        fsdp = FSDP(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4).double()), group)
        shards = list(fsdp.parameters())
        monkeypatch.setattr(fsdp._units[0].flats[1], "gather_full", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError), fsdp.summon_full_params():
            pass
        assert all(one is other for one, other in zip(fsdp.parameters(), shards, strict=True))

    run(program, 2)


def test_a_full_state_that_no_rank_has(run):
    """The error says so on all ranks."""

    def program(group):
        with pytest.raises(ValueError, match="on all ranks, or on rank 0 alone, but no rank passed it"):
            make(group).load_full_state_dict(None)

    run(program, 2)


def test_an_fsdp_that_is_made_in_inference_mode(run):
    """It trains as another does."""

    def program(group):
        model = Twins()
        with torch.inference_mode():
            fsdp = FSDP(model, group, wrap=torch.nn.Linear)
        fsdp(INPUTS).sum().backward()
        assert all(shard.grad is not None for shard in fsdp.parameters())

    run(program, 2)
