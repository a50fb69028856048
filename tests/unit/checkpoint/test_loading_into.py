"""Targets of a load: modules, optimizers, objects, and mismatches."""

import re

import pytest
import torch
from divided_tensors import bits_of, divide, part_of
from safetensors.torch import load_file
from torch import nn

from ferrodist import DDP, DeviceMesh, DTensor, Replicate, Shard, distribute
from ferrodist.checkpoint import (
    DistributedCheckpoint,
    OptimizerState,
    PerRank,
    Placed,
    inspect_checkpoint,
    load_distributed,
    save_distributed,
    verify,
)
from ferrodist.checkpoint.convert import import_dcp, import_hugging_face, import_torch_file
from ferrodist.checkpoint.format import safetensors
from ferrodist.errors import DistCheckpointError
from ferrodist.tensor.local_shards import FlatShard, annotate_flat_shard
from ferrodist.testing import run_ranks


class Counter:
    """An object with a state of its own."""

    def __init__(self, count=0):
        self.count = count

    def state_dict(self):
        """The count."""
        return {"count": self.count, "seen": torch.arange(self.count)}

    def load_state_dict(self, state):
        """Take it back."""
        if state["seen"].shape != (state["count"],):
            raise ValueError("another number than seen")
        self.count = state["count"]


class Extra(nn.Linear):
    """A module with extra state that is not a tensor."""

    note = None

    def get_extra_state(self):
        """The extra state."""
        return {"note": self.note, "tensor": torch.ones(1)}

    def set_extra_state(self, state):
        """Take it back."""
        self.note = state["note"]


def make_model(value, kind=nn.Linear):
    """A model with buffers, all of one value, and a tied weight."""
    model = nn.Sequential(kind(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3, bias=False))
    model[2].weight = model[0].weight
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(value)
    return model


def assert_all(model, value):
    """Every tensor of a model is this."""
    assert all((tensor == value).all() for tensor in model.state_dict().values())


def test_modules(tmp_path):
    """Parameters and buffers are filled in place; tied weights are written once and stay tied."""
    save_distributed({"model": make_model(2)}, tmp_path)
    model = make_model(0)
    tensors = dict(model.named_parameters())
    loaded = load_distributed(tmp_path, {"model": model})
    assert loaded["model"] is model
    assert_all(model, 2)
    assert all(model.get_parameter(name) is tensor for name, tensor in tensors.items())
    assert model[2].weight is model[0].weight
    (path,) = tmp_path.glob("*.safetensors")
    assert "model.2.weight" not in load_file(path)
    untied = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3, bias=False))
    load_distributed(tmp_path, {"model": untied})
    assert_all(untied, 2)


def test_a_module_is_a_state_by_itself(tmp_path):
    """Saved alone, and loaded from a dict of the same names, or into one."""
    save_distributed(make_model(3), tmp_path)
    model = make_model(0)
    assert load_distributed(tmp_path, model) is model
    assert_all(model, 3)
    state = make_model(0).state_dict()
    loaded = load_distributed(tmp_path, state)
    assert loaded["0.bias"] is state["0.bias"]
    assert all((tensor == 3).all() for tensor in state.values())


class Wrapper(nn.Module):
    """A wrapper that names its inner module."""

    def __init__(self, module):
        super().__init__()
        self.inside = module

    def checkpoint_module(self):
        """The module."""
        return self.inside


class Compiled(nn.Module):
    """A stand-in for torch.compile's result, without the seconds that it takes to load."""

    def __init__(self, module):
        super().__init__()
        self._orig_mod = module


@pytest.mark.parametrize("wrap", [Wrapper, Compiled, lambda module: Wrapper(Compiled(module))])
def test_wrappers_add_no_names(tmp_path, wrap):
    """A checkpoint has the names of the module inside, and fits it wrapped or not."""
    save_distributed({"m": wrap(make_model(4))}, tmp_path)
    for around in (lambda module: module, wrap):
        model = make_model(0)
        load_distributed(tmp_path, {"m": around(model)})
        assert_all(model, 4)


def test_extra_state_of_modules(tmp_path):
    """A module gets its extra state back."""
    model = make_model(1, Extra)
    model[0].note = "here"
    save_distributed(model, tmp_path)
    other = make_model(0, Extra)
    load_distributed(tmp_path, other)
    assert other[0].note == "here"
    assert_all(make_model(1), 1)


def test_objects_with_a_state(tmp_path):
    """Objects get their full state; their errors are raised on all ranks, with the path."""
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.ones(1)], lr=1.0), 1)
    save_distributed({"c": Counter(3), "s": scheduler, "bad": {"count": 4, "seen": torch.ones(1)}}, tmp_path)

    def program(group):
        counter = Counter()
        assert load_distributed(tmp_path, {"c": counter})["c"] is counter
        assert counter.count == 3
        with pytest.raises(DistCheckpointError, match="another number than seen"):
            load_distributed(tmp_path, {"bad": counter} if group.rank else {})

    run_ranks(program, 2)


def test_missing_and_unexpected(tmp_path):
    """Both are errors on all ranks that name the place, unless ``strict`` is off, and nothing was filled before."""
    save_distributed({"model": make_model(5), "n": 1}, tmp_path)

    def program(group):
        larger = nn.Sequential(*make_model(0), nn.Linear(3, 1))
        smaller = make_model(0)[:2]
        into = {"model": larger if group.rank else smaller}
        with pytest.raises(DistCheckpointError, match=r"lacks \['model'\]\['3.weight'\].* rank 1 wants.*strict=False"):
            load_distributed(tmp_path, into)
        assert_all(smaller, 0)
        before = larger[3].weight.clone()
        load_distributed(tmp_path, into, strict=False)
        assert torch.equal(larger[3].weight, before)
        assert_all(larger[:3] if group.rank else smaller, 5)
        smaller = make_model(0)[:1]
        with pytest.raises(DistCheckpointError, match=r"has \['model'\]\['1.weight'\].*, which no rank loads"):
            load_distributed(tmp_path, {"model": smaller})
        with pytest.raises(DistCheckpointError, match=r"lacks \['other'\]"):
            load_distributed(tmp_path, {"other": None})
        assert load_distributed(tmp_path, {"other": 7, "n": None}, strict=False) == {"other": 7, "n": 1}

    run_ranks(program, 2)


def test_pipeline_stages_together_have_all_tensors(tmp_path):
    """A tensor that one rank's module lacks is expected if another rank's has it."""
    save_distributed({"model": {"a.weight": torch.ones(1, 1), "b.weight": torch.ones(1, 1)}}, tmp_path)

    def program(group):
        model = nn.ModuleDict({"ab"[group.rank]: nn.Linear(1, 1, bias=False)})
        load_distributed(tmp_path, {"model": model})
        assert_all(model, 1)

    run_ranks(program, 2)


@pytest.mark.parametrize(
    ("into", "message"),
    [
        ({"x": torch.ones(2, 4)}, r"\['x'\] has shape \(2, 4\), and was saved with shape \(2, 3\)"),
        ({"x": torch.ones(6)}, r"\['x'\] has shape \(6,\)"),
        ({"n": torch.ones(1)}, r"\['n'\] should be a tensor"),
        ({"x": {"a": None}}, r"\['x'\] should be a dict"),
        ({"l": [None]}, r"\['l'\] should be a list of 1, and was saved as 2 members"),
        ({"l": (None, None)}, r"\['l'\] should be a tuple of 2, and was saved as something else"),
        ({"l": [None, {"k": torch.ones(2)}]}, r"\['l'\]\[1\]\['k'\] has shape"),
        ({"x": PerRank(None)}, r"\['x'\] should be PerRank"),
        ({"x": torch.ones(2, 3, device="meta")}, r"\['x'\] is on the meta device.*materialize"),
        ({"x": torch.ones(2, 3).to_sparse()}, r"\['x'\] is a torch.sparse_coo tensor"),
        ({"x": nn.Linear(1, 1)}, r"\['x'\] should be a dict"),
        ({"x": torch.zeros(1, 3).expand(2, 3)}, "single memory location"),
    ],
)
def test_mismatches_are_errors(tmp_path, into, message):
    """The error names the path, on all ranks."""
    save_distributed({"x": torch.ones(2, 3), "n": 1, "l": [1, {"k": torch.ones(1)}]}, tmp_path)

    def program(group):
        with pytest.raises((DistCheckpointError, TypeError), match=message):
            load_distributed(tmp_path, into if group.rank else {"n": None})

    run_ranks(program, 2)


def test_targets_that_contain_themselves(tmp_path):
    """An ``into`` that contains itself is refused, like such a state in a save."""
    save_distributed({"a": {}}, tmp_path)
    looped = {}
    looped["a"] = looped
    with pytest.raises(DistCheckpointError, match=r"lacks \['a'\]\['a'\]"):
        load_distributed(tmp_path, looped)


def test_impossible_placements_are_errors(tmp_path):
    """Placements that a tensor of this shape can't have."""
    save_distributed({"x": torch.ones(2, 3)}, tmp_path)

    def program(group):
        mesh = DeviceMesh(group, (2,))
        for placements in (Shard(2), Shard(1, 2), [Shard(0), Shard(1)], "no"):
            with pytest.raises((DistCheckpointError, ValueError, TypeError)):
                load_distributed(tmp_path, {"x": Placed(mesh, placements)})
        loaded = load_distributed(tmp_path, {"x": Placed(mesh, Shard(-1), dtype=torch.float64)})["x"]
        assert loaded.placements == (Shard(1),)
        assert (loaded.dtype, loaded.to_local().dtype) == (torch.float64, torch.float64)

    run_ranks(program, 2)


ALLOWED = {
    (saved, wanted)
    for saved, targets in {
        "float32": "float64 float16 bfloat16 float8_e4m3fn complex64 float32",
        "bfloat16": "float32 float16",
        "int32": "int64 float32 int32 complex64",
        "uint8": "int16 uint16 int32 float16",
        "int8": "int16",
        "bool": "int8 float32 bool uint8",
        "complex64": "complex128",
    }.items()
    for wanted in targets.split()
}
REFUSED = {
    ("float32", "int32"),
    ("complex64", "float32"),
    ("int64", "int32"),
    ("int8", "uint8"),
    ("uint8", "int8"),
    ("uint64", "int64"),
    ("int32", "bool"),
    ("float32", "bool"),
}


def test_conversion(tmp_path):
    """To what keeps values but for digits, whole and divided; else an error that names both."""
    bits = torch.tensor([[0, 1, 1], [1, 0, 1], [0, 0, 1]])
    state = {saved: bits.to(safetensors.dtype_from_name(saved)) for saved, _ in ALLOWED | REFUSED}
    save_distributed(state, tmp_path)

    def program(group):
        mesh = DeviceMesh(group, (2,))
        for saved, wanted in sorted(ALLOWED | REFUSED):
            dtype = safetensors.dtype_from_name(wanted)
            into = {saved: torch.zeros(3, 3, dtype=dtype)}, {saved: Placed(mesh, Shard(1), dtype=dtype)}
            if (saved, wanted) in REFUSED:
                for each in into:
                    with pytest.raises(DistCheckpointError, match=f"is torch.{wanted}.*saved as torch.{saved},"):
                        load_distributed(tmp_path, each)
                continue
            expected = state[saved].to(dtype)
            plain, divided = (load_distributed(tmp_path, each)[saved] for each in into)
            assert bits_of(plain) == bits_of(expected), (saved, wanted)
            assert bits_of(divided.to_local()) == bits_of(part_of(expected, mesh, [Shard(1)])), (saved, wanted)

    run_ranks(program, 2)


def test_every_pair_of_dtypes_is_decided(tmp_path):
    """Each conversion is done or refused, by nothing but its dtypes."""
    state = {name: torch.zeros(2).to(dtype) for name, dtype in safetensors._DTYPES.items() if name != "complex32"}
    save_distributed(state, tmp_path)
    for name in state:
        for other in state:
            into = torch.zeros(2).to(safetensors.dtype_from_name(other))
            try:
                load_distributed(tmp_path, {name: into})
            except DistCheckpointError as error:
                assert "doesn't convert" in error.message, (name, other)  # noqa: PT017


def trained(build, steps=2):
    """A model with its optimizer, after steps."""
    model = make_model(0.5)
    optimizer = build(model)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.arange(6.0).reshape(2, 3)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def adam(model):
    """AdamW with two groups of parameters."""
    weights = [each for each in model.parameters() if each.dim() > 1]
    others = [each for each in model.parameters() if each.dim() <= 1]
    return torch.optim.AdamW([{"params": weights, "lr": 0.1}, {"params": others, "lr": 0.2}], amsgrad=True)


def momentum(model):
    """SGD with momentum."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def same_state(one, other):
    """Return whether two optimizers have the same state, bit by bit."""
    one, other = one.state_dict(), other.state_dict()
    assert one["param_groups"] == other["param_groups"]
    assert one["state"].keys() == other["state"].keys()
    for number, entries in one["state"].items():
        assert entries.keys() == other["state"][number].keys()
        for name, value in entries.items():
            there = other["state"][number][name]
            assert (bits_of(value), value.dtype) == (bits_of(there), there.dtype)


@pytest.mark.parametrize("build", [adam, momentum])
@pytest.mark.parametrize("steps", [0, 3])
def test_optimizers(tmp_path, build, steps):
    """State, groups and all, also into an optimizer that has made other steps, or none; training goes on as before."""
    model, optimizer = trained(build, 2)
    save_distributed({"model": model, "optimizer": OptimizerState(model, optimizer)}, tmp_path)
    other, into = trained(build, steps)
    into.param_groups[0]["lr"] = 7.0
    load_distributed(tmp_path, {"model": other, "optimizer": OptimizerState(other, into)})
    same_state(optimizer, into)
    for one, opt in ((model, optimizer), (other, into)):
        opt.zero_grad()
        one(torch.ones(2, 3)).sum().backward()
        opt.step()
    assert all(bits_of(a) == bits_of(b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    same_state(optimizer, into)


def test_an_optimizer_before_its_first_step(tmp_path):
    """Saved without a state, and loaded over one."""
    model, optimizer = trained(adam, 0)
    save_distributed({"o": OptimizerState(model, optimizer)}, tmp_path)
    other, into = trained(adam, 2)
    load_distributed(tmp_path, {"o": OptimizerState(other, into)})
    same_state(optimizer, into)
    trained(adam)  # and it can go on
    other(torch.ones(2, 3)).sum().backward()
    into.step()


def test_optimizers_of_other_dtypes(tmp_path):
    """A state keeps its own dtype where parameters are of another one."""
    model, optimizer = trained(adam)
    save_distributed({"o": OptimizerState(model, optimizer)}, tmp_path)
    other = make_model(0.5).bfloat16()
    into = adam(other)
    load_distributed(tmp_path, {"o": OptimizerState(other, into)})
    assert {value.dtype for entries in into.state.values() for value in entries.values()} == {torch.float32}


def test_optimizers_with_other_groups(tmp_path):
    """Different groups are refused before anything is filled, with both numbers and advice."""
    model, optimizer = trained(adam)
    save_distributed({"model": model, "o": OptimizerState(model, optimizer)}, tmp_path)
    other, into = trained(momentum, 1)
    before = [bits_of(each) for each in other.parameters()]

    def program(group):
        with pytest.raises(DistCheckpointError, match=r"\['o'\] has 4 parameters in 1 group, .* 4 in 2.*Make the"):
            load_distributed(tmp_path, {"model": other, "o": OptimizerState(other, into)} if group.rank else {})

    run_ranks(program, 2)
    assert [bits_of(each) for each in other.parameters()] == before
    small = nn.Linear(3, 3)
    with pytest.raises(DistCheckpointError, match="only in one of them"):
        load_distributed(tmp_path, {"o": OptimizerState(small, torch.optim.AdamW(small.parameters()))})
    with pytest.raises(DistCheckpointError, match="should be an OptimizerState"):
        load_distributed(tmp_path, {"model": OptimizerState(other, into)})


def test_optimizers_of_other_models():
    """A parameter that the model has not has no name."""
    model = make_model(0)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(5))], lr=1.0)
    with pytest.raises(ValueError, match=r"shape \(5,\) that the model has not"):
        OptimizerState(model, optimizer).state_dict()
    with pytest.raises(TypeError, match="takes a module and its optimizer"):
        OptimizerState(optimizer, model)


class Divided(nn.Module):
    """A model whose parameters are distributed."""

    def __init__(self, mesh, placements, value):
        super().__init__()
        whole = torch.arange(15.0).reshape(5, 3) + value
        self.weight = nn.Parameter(divide(whole, mesh, placements))
        self.bias = nn.Parameter(divide(torch.zeros(3) + value, mesh, [Replicate()] * mesh.ndim))


def test_optimizers_of_distributed_parameters(tmp_path):
    """Their state is divided as they are, and comes back divided in another way."""

    def saving(group):
        model = Divided(DeviceMesh(group, (2,)), [Shard(0)], 1)
        optimizer = torch.optim.AdamW(model.parameters())
        (model.weight * model.weight).sum().backward()
        (model.bias * 2).sum().backward()
        optimizer.step()
        save_distributed({"m": model, "o": OptimizerState(model, optimizer)}, tmp_path)
        return optimizer.state[model.weight]["exp_avg_sq"].full_tensor()

    expected = run_ranks(saving, 2)[0]

    def loading(group):
        model = Divided(DeviceMesh(group, (3,)), [Shard(1)], 0)
        optimizer = torch.optim.AdamW(model.parameters())
        load_distributed(tmp_path, {"m": model, "o": OptimizerState(model, optimizer)})
        state = optimizer.state[model.weight]
        assert isinstance(state["exp_avg_sq"], DTensor)
        assert state["exp_avg_sq"].placements == (Shard(1),)
        assert bits_of(state["exp_avg_sq"].full_tensor()) == bits_of(expected)
        assert state["step"].item() == 1
        assert not isinstance(state["step"], DTensor)
        (model.weight * model.weight).sum().backward()
        (model.bias * 2).sum().backward()
        optimizer.step()

    run_ranks(loading, 3)


def test_optimizers_of_flat_shards(tmp_path):
    """The state of a flat shard is the same shard of the state, as in FSDP."""
    whole = torch.arange(15.0).reshape(5, 3)

    def make(group, cuts):
        model = nn.Module()
        begin, end = cuts[group.rank], cuts[group.rank + 1]
        model.weight = nn.Parameter(whole.reshape(-1)[begin:end].clone())
        annotate_flat_shard(
            model.weight, FlatShard(shape=(5, 3), start=begin, spec=None, num_shards=len(cuts) - 1, num_copies=1)
        )
        return model, torch.optim.Adam(model.parameters())

    def saving(group):
        model, optimizer = make(group, [0, 4, 15])
        (model.weight * model.weight).sum().backward()
        optimizer.step()
        save_distributed({"m": model, "o": OptimizerState(model, optimizer)}, tmp_path)

    def loading(group):
        model, optimizer = make(group, [0, 5, 5, 15])
        load_distributed(tmp_path, {"m": model, "o": OptimizerState(model, optimizer)})
        state = optimizer.state[model.weight]
        assert state["exp_avg"].shape == model.weight.shape
        return state["exp_avg"]

    run_ranks(saving, 2)
    moments = torch.cat(run_ranks(loading, 3))
    saved = load_distributed(tmp_path)["o"]["state"]["weight"]["exp_avg"]
    assert saved.shape == (5, 3)
    assert bits_of(moments) == bits_of(saved)


def test_tied_full_tensors_stay_tied(tmp_path):
    """Tied tensors are tied after a full load; the caller's own tensors are not tied."""
    shared = torch.arange(3.0)
    save_distributed({"a": shared, "b": [shared], "c": shared.numpy()}, tmp_path)
    loaded = load_distributed(tmp_path)
    assert loaded["a"] is loaded["b"][0]
    mine = torch.zeros(3, dtype=torch.float64)
    loaded = load_distributed(tmp_path, {"a": mine, "b": None, "c": None})
    assert loaded["a"] is mine
    assert loaded["b"][0].dtype == torch.float32
    assert (loaded["c"] == shared.numpy()).all()


def test_loading_ddp(tmp_path):
    """A module in DDP has the module's names."""

    def program(group):
        model = DDP(make_model(6), group)
        save_distributed({"m": model}, tmp_path)
        plain = make_model(0)
        load_distributed(tmp_path, {"m": plain})
        assert_all(plain, 6)

    run_ranks(program, 2)


def test_a_missing_checkpoint_is_an_error(tmp_path):
    """An empty folder, a folder in another format and a missing one have different errors."""
    for path, message in [
        (tmp_path / "none", "nothing in it, or is not there"),
        (tmp_path, "nothing in it, or is not there"),
    ]:
        with pytest.raises(DistCheckpointError, match=message):
            load_distributed(path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(DistCheckpointError, match=r"no checkpoint in it: metadata.json is missing"):
        load_distributed(tmp_path)
    with pytest.raises(DistCheckpointError, match=r"file is a file, and a checkpoint is a folder\. .*--from torch "):
        load_distributed(tmp_path / "file")
    with pytest.raises(DistCheckpointError, match=r"metadata\.json can't be read: .*Not a directory"):
        load_distributed(tmp_path / "file" / "below")
    for path in (3, "", None):
        with pytest.raises((TypeError, ValueError), match="path"):
            load_distributed(path)


READERS = (load_distributed, verify, inspect_checkpoint, DistributedCheckpoint)
IMPORTS = {"hf": import_hugging_face, "dcp": import_dcp, "torch": import_torch_file}


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("model.safetensors", "hf"),
        ("model.safetensors.index.json", "hf"),
        (".metadata", "dcp"),
        ("state.pt", "torch"),
        ("pytorch_model.bin", "torch"),
    ],
)
def test_a_folder_of_another_kind(tmp_path, file, kind):
    """The error says what it is, and by which command and function it becomes a checkpoint; so do wrong imports."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / file).write_bytes(b"x")
    source = f"{tmp_path}/{file}" if kind == "torch" else str(tmp_path)
    advice = f"`ferrodist ckpt convert --from {kind} --to ferrodist {source} NEW`"
    for read in READERS:
        with pytest.raises(DistCheckpointError, match=re.escape(advice)) as failure:
            read(tmp_path)
        assert IMPORTS[kind].__name__ in str(failure.value)
    for other, run in IMPORTS.items():
        if other != kind:
            with pytest.raises(DistCheckpointError, match=re.escape(advice)):
                run(tmp_path, tmp_path / "new")


def test_a_folder_of_checkpoints(tmp_path):
    """The error names one of its folders."""
    for step in (1, 2):
        save_distributed({"a": torch.ones(2)}, tmp_path / f"step-{step}")
    with pytest.raises(DistCheckpointError, match=r"There are folders in it, as step-2: .*find_latest\(\)"):
        load_distributed(tmp_path)


def test_an_empty_container_takes_all(tmp_path):
    """As None does: what is there, as it was saved."""
    save_distributed({"metrics": {"loss": 1.5}, "steps": [1, 2], "own": PerRank(7)}, tmp_path)
    assert load_distributed(tmp_path, {"metrics": {}, "steps": []}) == {"metrics": {"loss": 1.5}, "steps": [1, 2]}


def test_values_of_ranks_without_ranks(tmp_path):
    """One process that loads all of it has each rank's value."""
    run_ranks(lambda group: save_distributed({"own": PerRank(group.rank * 10)}, tmp_path, group=group), 3)
    assert load_distributed(tmp_path) == {"own": {0: 0, 1: 10, 2: 20}}


def test_an_object_with_sharded_tensors(tmp_path):
    """Its tensors are loaded with their present sharding, as an average of a sharded model's parameters needs them."""

    class Average:
        def __init__(self, value):
            self.value = value

        def state_dict(self):
            return {"value": self.value, "decay": 0.5}

        def load_state_dict(self, state):
            assert type(state["value"]) is type(self.value)
            self.value = state["value"]

    values = torch.arange(7.0)

    def program(group):
        mesh = DeviceMesh(group, (group.world_size,))
        save_distributed({"average": Average(distribute(values, mesh, Shard(0)))}, tmp_path, group=group)
        other = Average(distribute(torch.zeros(7), mesh, Shard(0)))
        load_distributed(tmp_path, {"average": other}, group=group)
        assert torch.equal(other.value.full_tensor(), values)

    run_ranks(program, 2)
