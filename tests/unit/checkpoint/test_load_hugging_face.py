"""Folders of Hugging Face's load straight into the shards of a model, whatever it is sharded by."""

import copy
import json

import pytest
import torch
import transformers
from offline_states import measure_memory
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Transpose, WeightConverter

import ferrodist as fd
from ferrodist.checkpoint import load_hugging_face, save_distributed
from ferrodist.checkpoint.convert import export_hugging_face
from ferrodist.checkpoint.storage import LocalStorage
from ferrodist.errors import DistCheckpointError, UnsupportedOpError
from ferrodist.testing import run_ranks

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 31}
DECODER = {**SIZES, "intermediate_size": 24, "num_key_value_heads": 2}
VISION = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 16, "image_size": 8}


def llama(**options):
    return transformers.LlamaForCausalLM, transformers.LlamaConfig(**DECODER, **options)


FAMILIES = {
    "tied": lambda: llama(tie_word_embeddings=True),
    "experts": lambda: (transformers.MixtralForCausalLM, transformers.MixtralConfig(**DECODER, num_local_experts=3)),
    "fused": lambda: (transformers.Phi3ForCausalLM, transformers.Phi3Config(**DECODER, pad_token_id=0)),
    "composite": lambda: (
        transformers.LlavaForConditionalGeneration,
        transformers.LlavaConfig(
            text_config=transformers.LlamaConfig(**DECODER),
            vision_config=transformers.CLIPVisionConfig(**VISION, patch_size=4),
        ),
    ),
    "encoder": lambda: (transformers.BertForMaskedLM, transformers.BertConfig(**SIZES, intermediate_size=24)),
}


def on_meta(make):
    with torch.device("meta"):
        return make()


def seeded(make):
    torch.manual_seed(0)
    return make()


def tensors_of(model):
    """All tensors of a model, full ones; also buffers that its state leaves out."""
    found = {**model.state_dict(), **dict(model.named_buffers())}
    return {name: each.full_tensor() if isinstance(each, fd.DTensor) else each for name, each in found.items()}


def assert_equal(model, expected):
    found, expected = tensors_of(model), tensors_of(expected)
    assert found.keys() == expected.keys()
    differing = [name for name, value in expected.items() if not found[name].equal(value)]
    assert not differing, differing


@pytest.fixture(scope="module", params=FAMILIES)
def saved(request, tmp_path_factory):
    """A model, a function that makes it anew, and its folder, of several files."""
    transformers.utils.logging.disable_progress_bar()
    kind, config = FAMILIES[request.param]()
    model = seeded(lambda: kind(config))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder, max_shard_size="8KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return model, lambda: kind(config), folder


@pytest.mark.parametrize("is_on_meta", [True, False])
def test_whole_model(saved, is_on_meta):
    """Renamed and stacked weights, tied ones, and buffers that aren't in the files are as they were."""
    model, make, folder = saved
    found = on_meta(make) if is_on_meta else make()
    assert load_hugging_face(folder, found) is found
    assert_equal(found, model)
    assert not any(each.is_meta for each in (*found.parameters(), *found.buffers()))


@pytest.mark.parametrize(("is_on_meta", "init"), [(True, "empty"), (True, None), (False, None)])
def test_tensor_parallel(saved, is_on_meta, init):
    """Each rank reads its shards of what `parallelize` made, by the model's own plan."""
    model, make, folder = saved

    def program(group):
        found = on_meta(make) if is_on_meta else make()
        fd.parallelize(found, fd.DeviceMesh(group, (2,), ("tensor",)), "auto", init=init)
        load_hugging_face(folder, found)
        assert_equal(found, model)

    run_ranks(program, 2)


def by_layer(name, _):
    return name.rpartition(".")[2].isdigit()


@pytest.mark.parametrize(("num_ranks", "init"), [(1, "empty"), (3, "empty"), (3, None)])
def test_fsdp(saved, num_ranks, init):
    """Flat shards over any number of ranks, from the meta device."""
    model, make, folder = saved

    def program(group):
        found = fd.FSDP(on_meta(make), group, wrap=by_layer, init=init)
        load_hugging_face(folder, found)
        with found.summon_full_params():
            assert_equal(found.module, model)

    run_ranks(program, num_ranks)


def test_fsdp_of_a_tensor_parallel_model(saved):
    """Shards of shards, and rank 0 may read for all."""
    model, make, folder = saved

    def program(group):
        mesh = fd.DeviceMesh(group, (2, 2), ("data", "tensor"))
        found = on_meta(make)
        fd.parallelize(found, mesh["tensor"], "auto", init="empty")
        wrapped = fd.FSDP(found, mesh["data"], wrap=by_layer)
        load_hugging_face(folder, wrapped, one_reads=True)
        full = wrapped.full_state_dict()
        assert all(full[name].equal(value) for name, value in model.state_dict().items())

    run_ranks(program, 4)


def test_the_model_computes_the_same(tmp_path):
    """Positions are right: rotary frequencies are in no file."""
    kind, config = llama()
    model = seeded(lambda: kind(config))
    model.save_pretrained(tmp_path)
    words = torch.arange(10)[None]

    def program(group):
        found = on_meta(lambda: kind(config))
        fd.parallelize(found, fd.DeviceMesh(group, (2,), ("tensor",)), "auto")
        load_hugging_face(tmp_path, found)
        torch.testing.assert_close(found(words).logits, model(words).logits)

    run_ranks(program, 2)


@pytest.mark.parametrize("has_head", [True, False])
def test_the_base_model_s_prefix(tmp_path, has_head):
    """A body's file fits the model with a head but for that head, and the other way round."""
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=31, n_positions=8)
    whole = seeded(lambda: transformers.GPT2LMHeadModel(config))
    (whole if has_head else whole.transformer).save_pretrained(tmp_path)
    found = on_meta(lambda: (transformers.GPT2Model if has_head else transformers.GPT2LMHeadModel)(config))
    load_hugging_face(tmp_path, found)
    assert_equal(found, whole.transformer if has_head else whole)


class Tied(nn.Module):
    """An embedding that is its output layer too, a buffer that isn't saved, and one that is."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.last.weight = self.first.weight
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.full((3,), 2.0), persistent=False)

    def reset_parameters(self):
        self.scale.fill_(2.0)


@pytest.mark.parametrize("name", ["first.weight", "last.weight"])
def test_tied_parameters_of_any_module(tmp_path, name):
    """One of two names is in the file; they stay one parameter, also from the meta device."""
    model = seeded(Tied)
    state = {key: value for key, value in model.state_dict().items() if key not in ("first.weight", "last.weight")}
    save_file({**state, name: model.first.weight.data}, tmp_path / "model.safetensors")
    found = load_hugging_face(tmp_path, on_meta(Tied))
    assert_equal(found, model)
    assert found.first.weight is found.last.weight
    assert isinstance(found.first.weight, nn.Parameter)


def test_numbers_are_cast(tmp_path):
    """The model's dtypes count, and numbers beyond them are refused."""
    save_file({"weight": torch.tensor([[1.5, 2.5]], dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    found = load_hugging_face(tmp_path, on_meta(lambda: nn.Linear(2, 1, bias=False)).double())
    assert found.weight.dtype is torch.float64
    assert found.weight.tolist() == [[1.5, 2.5]]
    save_file({"weight": torch.tensor([[1e30, 0]])}, tmp_path / "model.safetensors")
    with pytest.raises(DistCheckpointError, match=r"'weight' was saved as torch.float32, with numbers beyond"):
        load_hugging_face(tmp_path, nn.Linear(2, 1, bias=False).half())


def test_an_exported_checkpoint_is_such_a_folder(tmp_path):
    """What `export_hugging_face` writes has a manifest too."""
    model = seeded(lambda: nn.Linear(3, 2))
    save_distributed({"model": model}, tmp_path / "own", group=fd.SimulatedBackend.create_group(1)[0])
    export_hugging_face(tmp_path / "own", tmp_path / "hf", part="model")
    assert_equal(load_hugging_face(tmp_path / "hf", on_meta(lambda: nn.Linear(3, 2))), model)


def test_each_rank_reads_its_rows_only(tmp_path, monkeypatch):
    """The bytes that ranks read of a weight are the weight's, not that for each rank."""
    save_file({"weight": torch.randn(64, 50)}, tmp_path / "model.safetensors")
    read, original = [], LocalStorage.read

    def count(self, name, start, into):
        read.append(len(into))
        return original(self, name, start, into)

    monkeypatch.setattr(LocalStorage, "read", count)

    def program(group):
        model = nn.Linear(50, 64, bias=False)
        fd.parallelize(model, fd.DeviceMesh(group, (4,), ("tensor",)), {"": fd.ColumnParallel()})
        load_hugging_face(tmp_path, model)

    run_ranks(program, 4)
    assert 64 * 50 * 4 <= sum(read) < 64 * 50 * 4 + 1000


@pytest.mark.parametrize("way", ["tensor", "fsdp"])
def test_no_rank_holds_the_whole_model(tmp_path, way):
    """A rank's peak is its shards and a little more, not the model."""
    width, sizes = 1024, {"small": 4, "large": 24}
    for name, layers in sizes.items():
        (tmp_path / name).mkdir()
        state = {f"layers.{index}.weight": torch.full((width, width), float(index)) for index in range(layers)}
        save_file(state, tmp_path / name / "model.safetensors")

    class Stack(nn.Module):
        def __init__(self, name):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(sizes[name]))

    def load(group, name):
        model = on_meta(lambda: Stack(name))
        if way == "fsdp":
            fd.FSDP(model, group, wrap=nn.Linear, init="empty")
        else:
            plan = {"layers.*": fd.ColumnParallel()}
            fd.parallelize(model, fd.DeviceMesh(group, (2,), ("tensor",)), plan, init="empty")
        load_hugging_face(tmp_path / name, model, group=group)
        first, last = model.layers[1].weight, model.layers[sizes[name] - 1].weight
        return (first.to_local() if way == "tensor" else first).eq(1).all() and last.shape

    def program(group):
        assert load(group, "small")  # also what a group needs for messages of this size
        return measure_memory(lambda: load(group, "large")) / (sizes["large"] * width * width * 4)

    assert max(run_ranks(program, 2, backend="native")) < 0.65


class Both(nn.Module):
    """Parameters, and a buffer of the same module that is in no file."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.weight, self.frozen = nn.Parameter(torch.ones(5, 2)), nn.Parameter(torch.ones(3), requires_grad=False)
        self.numbers = nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False)
        self.inner = nn.BatchNorm1d(3)
        self.last = nn.Linear(3, 2, dtype=dtype)

    def reset_parameters(self):
        raise AssertionError("it has parameters alone")


@pytest.mark.parametrize("way", ["tensor", "fsdp", "replicas"])
def test_empty_parameters_until_they_are_loaded(way):
    """NaN, so that a model whose load was forgotten shows it; buffers and modules that have some are initialised."""

    def program(group):
        model = on_meta(Both)
        if way == "tensor":
            fd.parallelize(model, fd.DeviceMesh(group, (4,), ("tensor",)), {"last": fd.ColumnParallel()}, init="empty")
            state = {name: value.full_tensor() for name, value in model.state_dict().items()}
        else:
            mesh = fd.DeviceMesh(group, (2, 2), ("replicate", "shard")) if way == "replicas" else group
            state = fd.FSDP(model, mesh, wrap=nn.Linear, init="empty").full_state_dict()
        assert all(state[name].isnan().all() for name in ("weight", "frozen", "last.weight", "last.bias"))
        assert state["numbers"].eq(0).all()
        assert state["inner.weight"].eq(1).all()
        assert state["inner.running_var"].eq(1).all()

    run_ranks(program, 4)


def test_wrong_initialisers():
    """Another string, and a model that is on the meta device on one rank alone, are errors on all ranks."""

    def program(group):
        mesh = fd.DeviceMesh(group, (2,), ("tensor",))
        for make in (
            lambda init: fd.parallelize(nn.Linear(2, 2), mesh, {}, init=init),
            lambda init: fd.FSDP(nn.Linear(2, 2), init=init),
        ):
            with pytest.raises(ValueError, match="init must be a function of a module, \"empty\" or None, not 'nan'"):
                make("nan")
            with pytest.raises(TypeError, match='init must be a function of a module, "empty" or None, not int'):
                make(3)
        one = on_meta(lambda: nn.Linear(2, 2)) if group.rank else nn.Linear(2, 2)
        with pytest.raises(fd.CollectiveMismatchError, match="empty \\['weight', 'bias'\\]"):
            fd.FSDP(one, init="empty")
        with pytest.raises(fd.CollectiveMismatchError, match="on the meta device"):
            fd.parallelize(one, mesh, {}, init="empty")

    run_ranks(program, 2)


def save_linear(folder, **others):
    save_file({"weight": torch.ones(2, 3), "bias": torch.ones(2), **others}, folder / "model.safetensors")


def fails(folder, make, num_ranks=2, **options):
    """The errors of all ranks."""

    def program(group):
        with pytest.raises((DistCheckpointError, TypeError, ValueError)) as caught:
            load_hugging_face(folder, make(group), **options)
        return str(caught.value)

    return run_ranks(program, num_ranks)


def test_missing_and_unexpected_tensors(tmp_path):
    """Both are named on all ranks; strict=False leaves what is missing, or initialises it on the meta device."""
    save_linear(tmp_path)
    for message in fails(tmp_path, lambda _: nn.Sequential(nn.Linear(3, 2))):
        assert "lacks ['0.weight'], ['0.bias'], which rank 0 wants" in message
    for message in fails(tmp_path, lambda _: nn.Linear(3, 2, bias=False)):
        assert "has ['bias'], which no rank loads" in message
    save_file({"weight": torch.ones(2, 3)}, tmp_path / "model.safetensors")
    kept = load_hugging_face(tmp_path, nn.Linear(3, 2), strict=False)
    assert kept.weight.eq(1).all()
    fresh = load_hugging_face(tmp_path, on_meta(lambda: nn.Linear(3, 2)), strict=False)
    assert fresh.weight.eq(1).all()
    assert fresh.bias.abs().max() <= 3**-0.5
    filled = load_hugging_face(
        tmp_path, on_meta(lambda: nn.Linear(3, 2)), strict=False, init=lambda one: nn.init.constant_(one.bias, 7.0)
    )
    assert filled.weight.eq(1).all()
    assert filled.bias.eq(7).all()


def test_wrong_input_on_one_rank(tmp_path):
    """A model of another shape, no model at all, or no folder, on one rank: all ranks have an error that says so."""
    save_linear(tmp_path)
    for message in fails(tmp_path, lambda group: nn.Linear(3 + group.rank, 2)):
        assert "['weight'] has shape (2, 4), and was saved with shape (2, 3)" in message
    for message in fails(tmp_path, lambda group: None if group.rank else nn.Linear(3, 2)):
        assert "load_hugging_face takes a torch.nn.Module, not NoneType" in message
    for message in fails(tmp_path / "none", lambda _: nn.Linear(3, 2)):
        assert "has neither model.safetensors nor model.safetensors.index.json" in message
    for message in fails(tmp_path, lambda _: nn.Linear(3, 2), init=3):
        assert "init must be a function" in message

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("weight", torch.ones(2, 3))
            self.register_buffer("bias", torch.ones(2))
            self.register_buffer("other", torch.ones(2), persistent=False)

    for message in fails(tmp_path, lambda _: on_meta(Own)):
        assert (
            "(Own) is on the meta device, has tensors that the files don't have, and no reset_parameters()" in message
        )


def test_damaged_folders(tmp_path):
    """A file that is cut off, or that the index names and isn't there."""
    save_linear(tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-4])
    for message in fails(tmp_path, lambda _: nn.Linear(3, 2)):
        assert "is damaged or cut off" in message
    (tmp_path / "model.safetensors").unlink()
    index = {"weight_map": {"weight": "model-1.safetensors", "bias": "model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for message in fails(tmp_path, lambda _: nn.Linear(3, 2)):
        assert "model-1.safetensors is missing" in message


@pytest.mark.parametrize("way", ["stage", "pipeline"])
def test_stages_of_a_pipeline(saved, way):
    """Each rank allocates and reads its stage only, by the whole model's names: conversions and tied tensors too."""
    model, make, folder = saved
    sample = {"input_ids": torch.arange(6).view(1, 6)}
    whole = on_meta(make) if way == "stage" else make()

    def program(group):
        stages = fd.split_model(copy.deepcopy(whole), 2, group, sample=sample)
        stage = stages[group.rank]
        if way == "stage":
            load_hugging_face(folder, stage)
        else:
            load_hugging_face(folder, fd.Pipeline(stages, group, num_microbatches=1), one_reads=True)
        expected = tensors_of(model)
        found = tensors_of(stage)
        assert all(found[name].equal(expected[name]) for name in found)
        assert not any(each.is_meta for each in found.values())
        return set(found)

    names = run_ranks(program, 2)
    assert names[0] | names[1] >= set(model.state_dict())
    assert names[0] - names[1]
    assert names[1] - names[0]


def test_models_with_adapters_are_refused(tmp_path):
    """Their layers have other names than the files; the error says what to do."""

    class Adapted(nn.Module):
        __module__ = "peft.tuners.lora.layer"

        def __init__(self):
            super().__init__()
            self.base_layer = nn.Linear(3, 2)

    save_linear(tmp_path)
    for message in fails(tmp_path, lambda _: nn.Sequential(Adapted())):
        assert "module '0' (Adapted) is an adapter around '0.base_layer': load the model first" in message


def test_names_of_modules_of_ones_own(tmp_path):
    """A module may be called as a layer of PEFT, and have an attribute called as a method of a pipeline."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.base_layer = nn.Linear(3, 2)
            self.inner_modules = nn.ModuleList([nn.Linear(2, 2)])

    model = Model()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    loaded = Model()
    load_hugging_face(tmp_path, loaded)
    assert torch.equal(loaded.base_layer.weight, model.base_layer.weight)
    assert torch.equal(loaded.inner_modules[0].weight, model.inner_modules[0].weight)


def test_tensors_that_no_stage_has(tmp_path):
    """They are errors on all ranks, as for a whole model."""
    kind, config = llama()
    state = seeded(lambda: kind(config)).state_dict()
    whole = on_meta(lambda: kind(config))

    def make(group):
        return fd.split_model(copy.deepcopy(whole), 2, group)[group.rank]

    save_file({**state, "more.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    assert all("'more.weight'" in message for message in fails(tmp_path, make))
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, tmp_path / "model.safetensors")
    assert all(
        "lacks ['model.layers.1.mlp.up_proj.weight'], which rank" in message for message in fails(tmp_path, make)
    )


def test_weights_that_can_not_be_read_in_parts(tmp_path):
    """A transposition is refused by its name; what transformers writes in the model's own names is read."""
    kind, config = llama()
    own = type("TransposedLlama", (kind,), {})
    turn = WeightConverter("mlp.turned_proj.weight", "mlp.up_proj.weight", [Transpose(0, 1)])
    register_checkpoint_conversion_mapping("TransposedLlama", [turn], overwrite=True)
    model = seeded(lambda: own(config))
    state = {name.replace("up_proj", "turned_proj"): value for name, value in model.state_dict().items()}
    turned = {name: value.T.contiguous() if "turned" in name else value for name, value in state.items()}
    save_file(turned, tmp_path / "model.safetensors")
    for message in fails(tmp_path, lambda _: on_meta(lambda: own(config)), num_ranks=1):
        assert "makes 'model.layers.0.mlp.up_proj.weight' of" in message
        assert "by Transpose" in message
        assert "save_original_format=False" in message
    model.save_pretrained(tmp_path, save_original_format=False)
    assert "model.layers.0.mlp.up_proj.weight" in load_file(tmp_path / "model.safetensors")
    assert_equal(load_hugging_face(tmp_path, on_meta(lambda: own(config))), model)


def test_unsupported_modules_beside_a_transformers_model():
    """A module on the meta device that nothing initialises: the error says how to."""

    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

    kind, config = llama()
    both = on_meta(lambda: nn.ModuleList([kind(config), Bare()]))

    def program(group):
        with pytest.raises(UnsupportedOpError, match="a Bare is on the meta device, in no transformers model"):
            fd.FSDP(both, group)

    run_ranks(program, 1)
