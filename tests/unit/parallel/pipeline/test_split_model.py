"""Models that are not Sequential in stages: losses, gradients, names and checkpoints are those of one process."""

import copy
import tempfile

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional

from ferrodist import DDP, FSDP, DeviceMesh, parallelize, split_model
from ferrodist.checkpoint import load_distributed, save_distributed
from ferrodist.errors import CollectiveMismatchError, UnsupportedOpError
from ferrodist.parallel.pipeline import Balance, Pipeline, PipelineSchedule, find_shared
from ferrodist.testing import run_ranks

TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
}
BOTH_SIDES = {
    **{
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in {"layers": 2, "attention_heads": 2, "ffn_dim": 24}.items()
    },
    "vocab_size": 32,
    "d_model": 16,
    "dropout": 0,
    "decoder_start_token_id": 2,
}
NO_DROPOUT = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}


def words(*shape, seed=1):
    return torch.randint(3, 30, shape, generator=torch.Generator().manual_seed(seed))


def numbers(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def text():
    mask = torch.ones(4, 6, dtype=torch.long)
    mask[0, -2:] = 0
    return {"input_ids": words(4, 6), "attention_mask": mask, "labels": words(4, 6, seed=2)}


def images():
    return {"pixel_values": numbers(4, 3, 8, 8), "labels": torch.arange(4) % 3}


def sound():
    return {"input_features": numbers(4, 4, 20), "labels": words(4, 6)}


def causal(name, **options):
    config = getattr(transformers, f"{name}Config")(**SIZES, **TOKENS, **options)
    return getattr(transformers, f"{name}ForCausalLM")(config)


def gpt2():
    dropout = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    config = transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=3, n_head=2, n_positions=32, **dropout, **TOKENS)
    return transformers.GPT2LMHeadModel(config)


def bloom():
    sizes = {"vocab_size": 32, "hidden_size": 16, "n_layer": 3, "n_head": 2}
    return transformers.BloomForCausalLM(
        transformers.BloomConfig(**sizes, **TOKENS, hidden_dropout=0, attention_dropout=0)
    )


def mamba():
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 3, "state_size": 4}
    return transformers.MambaForCausalLM(transformers.MambaConfig(**sizes, **TOKENS))


def t5():
    sizes = {"vocab_size": 32, "d_model": 16, "d_ff": 24, "d_kv": 8, "num_layers": 2, "num_heads": 2}
    config = transformers.T5Config(**sizes, **TOKENS, dropout_rate=0, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


def bart():
    config = transformers.BartConfig(**BOTH_SIDES, **TOKENS, max_position_embeddings=32)
    return transformers.BartForConditionalGeneration(config)


def whisper():
    lengths = {"num_mel_bins": 4, "max_source_positions": 10, "max_target_positions": 12}
    config = transformers.WhisperConfig(
        **BOTH_SIDES, **TOKENS, **lengths, suppress_tokens=None, begin_suppress_tokens=None
    )
    return transformers.WhisperForConditionalGeneration(config)


def vit():
    sizes = {name: SIZES[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
    config = transformers.ViTConfig(
        **sizes, **NO_DROPOUT, intermediate_size=24, image_size=8, patch_size=4, num_labels=3
    )
    return transformers.ViTForImageClassification(config)


MODELS = {
    "llama": (lambda: causal("Llama", num_key_value_heads=1), text),
    "tied_llama": (lambda: causal("Llama", tie_word_embeddings=True), text),
    "mistral": (lambda: causal("Mistral", num_key_value_heads=1, sliding_window=3), text),
    "qwen3": (lambda: causal("Qwen3", num_key_value_heads=1, head_dim=8), text),
    "gemma3": (lambda: causal("Gemma3", num_key_value_heads=1, head_dim=8, sliding_window=3), text),
    "gpt_neox": (lambda: causal("GPTNeoX"), text),
    "mixtral": (
        lambda: causal("Mixtral", num_key_value_heads=1, num_local_experts=3, experts_implementation="eager"),
        text,
    ),
    "gpt2": (gpt2, text),
    "bloom": (bloom, text),
    "mamba": (mamba, text),
    "bert": (lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, **NO_DROPOUT)), text),
    "vit": (vit, images),
    "t5": (t5, text),
    "bart": (bart, text),
    "whisper": (whisper, sound),
}


def gemma3():
    config = transformers.Gemma3TextConfig(**SIZES, **TOKENS, num_key_value_heads=1, head_dim=8, sliding_window=3)
    return transformers.Gemma3ForCausalLM(config)


MODELS["gemma3"] = gemma3, text


def without_cache(model):
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "use_cache"):
            module.config.use_cache = False
    return model


def part_of(batch, index, count):
    return {name: tensor.tensor_split(count)[index] for name, tensor in batch.items()}


def one_process(model, batch, num_microbatches=2):
    """Losses of the microbatches and gradients by all names."""
    model = without_cache(copy.deepcopy(model))
    losses = []
    for index in range(num_microbatches):
        loss = model(**part_of(batch, index, num_microbatches)).loss
        (loss / num_microbatches).backward()
        losses.append(loss.item())
    return losses, {name: each.grad for name, each in model.named_parameters(remove_duplicate=False)}


def check_gradients(pipeline, expected):
    for name, parameter in pipeline.named_parameters():
        gradient = torch.zeros_like(parameter) if expected[name] is None else expected[name]
        found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(found, gradient, rtol=1e-12, atol=1e-15, msg=name)


@pytest.mark.parametrize("name", MODELS)
def test_families(name):
    """Hugging Face's models train in three stages as in one process, without a change of theirs."""
    make, make_batch = MODELS[name]
    torch.manual_seed(0)
    model, batch = make().double().train(), make_batch()
    losses, gradients = one_process(model, batch)

    def program(group):
        own = copy.deepcopy(model)
        pipeline = Pipeline(
            split_model(own, 3, group, sample=part_of(batch, 0, 2)), group, 2, schedule=PipelineSchedule.ONE_F_ONE_B
        )
        pipeline.step(batch)
        torch.testing.assert_close(pipeline.losses, losses, rtol=1e-14, atol=0)
        check_gradients(pipeline, gradients)
        return set(pipeline.state_dict())

    names = set().union(*run_ranks(program, 3))
    assert names == set(model.state_dict())


class Block(nn.Module):
    """A layer that gets what the embeddings made, besides the hidden state."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, hidden, *, start, scale):
        return {"hidden": hidden + self.layer(hidden).tanh() * scale, "norm": hidden.norm(), "text": "unused"}


class Model(nn.Module):
    """A model with what self-written ones have: own parameters, code between blocks, residuals across all."""

    def __init__(self, num_blocks=4):
        super().__init__()
        self.positions = nn.Parameter(torch.randn(5, 6, generator=torch.Generator().manual_seed(3)))
        self.register_buffer("scale", torch.tensor(0.5))
        self.dropout = nn.Dropout(0.0)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.tokens = nn.Embedding(9, 6)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens, targets=None, *, factor=1.0):
        start = hidden = self.dropout(self.tokens(tokens) + self.positions)
        for index, block in enumerate(self.blocks):
            hidden = block(hidden, start=start, scale=self.scale)["hidden"] * factor
            if index % 2:
                hidden = hidden + 0.1 * start + self.positions
        scores = self.head(hidden)
        return scores if targets is None else functional.cross_entropy(scores.transpose(1, 2), targets)


class TappedModel(Model):
    """A model with a list of one module, which the code between blocks calls."""

    def __init__(self):
        super().__init__()
        self.taps = nn.ModuleList([nn.Linear(6, 6)])

    def forward(self, tokens, targets=None, *, factor=1.0):
        start = hidden = self.tokens(tokens) + self.positions
        for index, block in enumerate(self.blocks):
            hidden = block(hidden, start=start, scale=self.scale)["hidden"] * factor
            hidden = hidden + self.taps[index](hidden) if index < len(self.taps) else hidden
        return functional.cross_entropy(self.head(hidden).transpose(1, 2), targets)


def own_model(num_blocks=4):
    torch.manual_seed(0)
    return Model(num_blocks).double()


BATCH = torch.arange(20).reshape(4, 5) % 9, torch.arange(20).flip(0).reshape(4, 5) % 9


def test_lists_that_are_not_blocks():
    """Their modules are called by the model's code, and may be in any stage."""
    torch.manual_seed(0)
    model = TappedModel().double()
    model(*BATCH).backward()
    expected = {name: each.grad for name, each in model.named_parameters(remove_duplicate=False)}
    model.zero_grad(set_to_none=True)

    def program(group):
        pipeline = Pipeline(split_model(copy.deepcopy(model), 2, group, sample=BATCH), group, 1)
        pipeline.step(BATCH)
        check_gradients(pipeline, expected)

    run_ranks(program, 2)


@pytest.mark.parametrize("backend", ["simulated", "native"])
@pytest.mark.parametrize(
    ("kind", "num_ranks", "num_stages"),
    [
        (PipelineSchedule.GPIPE, 1, 1),
        (PipelineSchedule.GPIPE, 2, 2),
        (PipelineSchedule.ONE_F_ONE_B, 3, 3),
        (PipelineSchedule.INTERLEAVED_ONE_F_ONE_B, 2, 4),
        (PipelineSchedule.ZERO_BUBBLE_V, 2, 4),
        (PipelineSchedule.ONE_F_ONE_B, 4, 4),
    ],
)
def test_own_models(kind, num_ranks, num_stages, backend):
    """Own parameters, values used in all stages, and tied ones get one process's gradients, with every schedule."""
    model = own_model()
    reference, losses = copy.deepcopy(model), []
    for tokens, targets in zip(BATCH[0].tensor_split(2), BATCH[1].tensor_split(2), strict=True):
        losses.append(reference(tokens, targets))
        (losses[-1] / 2).backward()
    expected = {name: each.grad for name, each in reference.named_parameters(remove_duplicate=False)}

    def program(group):
        stages = split_model(copy.deepcopy(model), num_stages, group, sample=BATCH)
        pipeline = Pipeline(stages, group, 2, schedule=kind)
        pipeline.step(BATCH)
        torch.testing.assert_close(pipeline.losses, [each.item() for each in losses], rtol=1e-14, atol=0)
        check_gradients(pipeline, expected)

    run_ranks(program, num_ranks, backend=backend)


@pytest.mark.parametrize("sizes", [(3, 4), (5, 2)])
def test_batches_of_other_shapes(sizes):
    """Uneven microbatches, and lengths other than the sample's, need no new split; results come out by name."""
    model = gpt2().double().eval()
    tokens = words(*sizes)

    def program(group):
        stages = split_model(copy.deepcopy(model), 2, group, output="logits")
        pipeline = Pipeline(stages, group, 2)
        with torch.no_grad():
            found = pipeline({"input_ids": tokens})
            if found is not None:
                torch.testing.assert_close(found, model(tokens).logits, rtol=1e-12, atol=1e-14)

    run_ranks(program, 2)


@pytest.mark.parametrize("wrapper", [DDP, FSDP])
def test_data_parallel_on_another_axis(wrapper):
    """Stages in DDP and FSDP average over the other axis: one step is that of the whole batch."""
    torch.manual_seed(0)
    model, batch = causal("Llama").double(), text()
    del batch["attention_mask"]
    _, gradients = one_process(model, batch, 4)
    expected = copy.deepcopy(model)
    for name, parameter in expected.named_parameters():
        parameter.data -= gradients[name]

    def program(group, folder):
        mesh = DeviceMesh(group, (2, 2), ("pipeline", "data"))
        across, along = mesh["pipeline"].group, mesh["data"].group
        stages = split_model(copy.deepcopy(model), 2, mesh["pipeline"], sample=part_of(batch, 0, 4))
        stages[across.rank] = wrapper(stages[across.rank], along)
        pipeline = Pipeline(stages, across, 2)
        pipeline.step(part_of(batch, along.rank, 2))
        torch.optim.SGD(pipeline.parameters(), lr=1).step()
        save_distributed({"model": pipeline}, folder, group=group)

    return_to_whole(program, expected)


def return_to_whole(program, expected):
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(lambda group: program(group, f"{folder}/checkpoint"), 4)
        found = copy.deepcopy(expected)
        for parameter in found.parameters():
            parameter.data.zero_()
        run_ranks(lambda group: load_distributed(f"{folder}/checkpoint", {"model": found}, group=group), 1)
    for name, tensor in found.state_dict().items():
        torch.testing.assert_close(tensor, expected.state_dict()[name], rtol=1e-12, atol=1e-14, msg=name)


def test_checkpoints_and_meta(tmp_path):
    """A model on meta becomes real stage by stage, loads the whole model's checkpoint, and saves one of it."""
    torch.manual_seed(0)
    whole = causal("Llama", tie_word_embeddings=True).double()
    run_ranks(lambda group: save_distributed({"model": whole}, tmp_path / "whole", group=group), 1)
    tokens = words(4, 6)

    def program(group):
        with torch.device("meta"):
            model = causal("Llama", tie_word_embeddings=True).double()
        stages = split_model(model, 2, group, output="logits")
        stages[group.rank].materialise(model._init_weights)
        assert any(each.is_meta for each in model.parameters())
        pipeline = Pipeline(stages, group, 2)
        assert find_shared(stages) == []  # no longer one object, but known from before
        assert "lm_head.weight" in pipeline.first_names
        load_distributed(tmp_path / "whole", {"model": pipeline}, group=group)
        with torch.no_grad():
            found = pipeline({"input_ids": tokens})
            if found is not None:
                torch.testing.assert_close(found, whole(tokens).logits, rtol=1e-12, atol=1e-14)
        save_distributed({"model": pipeline}, tmp_path / "stages", group=group)

    run_ranks(program, 2)
    again = causal("Llama", tie_word_embeddings=True).double()
    run_ranks(lambda group: load_distributed(tmp_path / "stages", {"model": again}, group=group), 1)
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, whole.state_dict()[name]), name


def test_balance():
    """Stages are divided by parameters, by costs, by numbers of parts, and by times that rank 0 measures."""
    model = own_model()
    assert "tokens" in split_model(model, 2, sample=BATCH).describe()
    by_costs = split_model(model, 2, sample=BATCH, costs=[0, 1, 1, 1, 9, 0])
    assert by_costs.costs == (3, 9)
    by_numbers = split_model(model, 3, None, [1, 1, 4], sample=BATCH)
    assert [[name for name, _ in stage.named_parameters() if "weight" in name] for stage in by_numbers] == [
        ["tokens.weight"],
        ["blocks.0.layer.weight"],
        ["head.weight", *(f"blocks.{index}.layer.weight" for index in (1, 2, 3))],
    ]

    def program(group):
        return split_model(own_model(), 2, group, Balance.TIMES, sample=BATCH).costs

    one, other = run_ranks(program, 2)
    assert one == other
    assert min(one) > 0


class Reads(Model):
    """Reads a parameter outside of its module's call."""

    def forward(self, tokens):
        return super().forward(tokens) @ self.blocks[3].layer.weight.new_zeros(9, 1) + self.blocks[0].layer.weight[0, 0]


class ReadsDefault(Model):
    """Reads a buffer outside of its module's call, as the default of an input."""

    def __init__(self):
        super().__init__()
        self.blocks[3].layer.register_buffer("kinds", torch.zeros(6, dtype=torch.long), persistent=False)

    def forward(self, tokens):
        return super().forward(tokens + self.blocks[3].layer.kinds)


class Leaks(Model):
    """Takes a tensor from a block that the block didn't return."""

    def forward(self, tokens):
        seen = []
        self.blocks[0].layer.register_forward_hook(lambda *args: seen.append(args[2]))
        return super().forward(tokens) + seen[0].sum()


class Writes(Model):
    """Has a block that writes to its argument."""

    def __init__(self):
        super().__init__()
        self.blocks[1].forward = lambda hidden, **_: {"hidden": hidden.add_(1)}


class Draws(Model):
    """Draws numbers that two stages use."""

    def forward(self, tokens):
        noise = torch.rand(6)
        hidden = self.blocks[0](self.tokens(tokens) + noise, start=None, scale=self.scale)["hidden"]
        return self.head(self.blocks[3](hidden + noise, start=None, scale=self.scale)["hidden"])


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Reads, r"reads the parameter or buffer 'blocks.3.layer.weight' outside of its module's call"),
        (ReadsDefault, r"'blocks.3.layer.kinds' outside .* pass the input that it is the default of"),
        (Leaks, r"gets a tensor that module 'blocks.0' made, but didn't return"),
        (Writes, r"module 'blocks.1' writes to its arguments in place"),
        (Draws, r"gets random numbers of aten::rand, .* another stage uses, too"),
    ],
)
def test_models_that_do_not_fit(kind, text):
    """Code whose stages would compute something else is refused, with module and reason."""
    with pytest.raises(ValueError, match=text):
        split_model(kind(), 2, None, [2, 4], sample=BATCH[0])


def test_wrong_arguments():
    """Each wrong argument is named, with what to do."""
    model = own_model()
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, not int"):
        split_model(3, 2)
    with pytest.raises(ValueError, match=r"6 parts makes from 1 to 6 stages, not 7: pass fewer"):
        split_model(model, 7, sample=BATCH)
    with pytest.raises(ValueError, match=r"sample= is needed"):
        split_model(model, 2)
    with pytest.raises(ValueError, match=r"fails on its inputs"):
        split_model(model, 2, sample=torch.ones(3))
    with pytest.raises(ValueError, match=r"no ModuleList or Sequential of at least two blocks.*blocks="):
        split_model(nn.Linear(2, 2), 2, sample=torch.ones(3))
    with pytest.raises(ValueError, match=r"'layers' in blocks is not a list of modules"):
        split_model(model, 2, sample=BATCH, blocks=["layers"])
    with pytest.raises(TypeError, match=r"output must be the name of an item"):
        split_model(model, 2, sample=BATCH, output=3)
    with pytest.raises(ValueError, match=r"no item 'logits', which output= names"):
        split_model(model, 2, sample=BATCH, output="logits")
    with pytest.raises(ValueError, match=r"2 costs for 6 parts"):
        split_model(model, 2, sample=BATCH, costs=[1, 2])
    with pytest.raises(ValueError, match=r"\[1, 2\] does not divide 6 parts"):
        split_model(model, 2, None, [1, 2], sample=BATCH)
    with pytest.raises(ValueError, match=r"pass it or costs=, not both"):
        split_model(model, 2, None, Balance.TIMES, sample=BATCH, costs=[1] * 6)
    stages = split_model(model, 2, sample=BATCH)
    for wrong in [(BATCH,), (), (stages[0](*BATCH), 3)]:
        with pytest.raises(TypeError, match="stage 1 of a divided model takes what stage 0 returned, not"):
            stages[1](*wrong)
    with pytest.raises(TypeError, match="can't be copied or pickled"):
        copy.deepcopy(stages[0])


def test_sharded_models_are_refused():
    """A stage would run without the code that gathers its parameters."""

    def program(group):
        mesh = DeviceMesh(group, (2,), ("tensor",))
        with pytest.raises(ValueError, match=r"parameter '\S+' is distributed: split the model before"):
            split_model(parallelize(own_model(), mesh, {}), 2, group, sample=BATCH)
        with pytest.raises(ValueError, match=r"parameter '\S+' belongs to an FSDP.*: split the model before"):
            split_model(FSDP(own_model(), group), 2, group, sample=BATCH)

    run_ranks(program, 2)


def test_ranks_that_disagree():
    """Ranks with other models, and ranks beside one with a wrong argument, raise at once."""

    def program(group):
        with pytest.raises(CollectiveMismatchError, match=r"gave split_model different modules: rank 1 has"):
            split_model(own_model(4 + group.rank), 2, group, sample=BATCH)
        kind = ValueError if group.rank else UnsupportedOpError
        with pytest.raises(kind, match=r"fails on its inputs"):
            split_model(own_model(), 2, group, sample=torch.ones(3) if group.rank else BATCH)
        for arguments, kind, match in [
            ({"model": 3}, TypeError, "model must be a torch.nn.Module, not int"),
            ({"num_stages": "two"}, TypeError, "num_stages must be an integer, not 'two'"),
            ({"output": 3}, TypeError, "output must be the name of an item"),
            ({"blocks": "decoder"}, TypeError, "blocks must be names of lists of blocks, such as .* not 'decoder'"),
            ({"blocks": 3}, TypeError, "blocks must be names of lists of blocks"),
            ({"balance": Balance.TIMES, "costs": [1] * 6}, ValueError, "pass it or costs=, not both"),
        ]:
            given = {"model": own_model(), "num_stages": 2, "mesh_or_group": group, "sample": BATCH}
            with pytest.raises(kind if group.rank else UnsupportedOpError, match=match):
                split_model(**given | (arguments if group.rank else {}))

    run_ranks(program, 2)
