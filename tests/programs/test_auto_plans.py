"""`parallelize(model, mesh, "auto")`: whole models by their own plans, or their families', compute as one process."""

import copy
import warnings

import pytest
import torch
import transformers
from test_transformers import SIZES, TOKENS, bert, gpt2, llama, mixtral, t5, whisper, words, write
from torch import nn

import ferrodist as fd
from ferrodist import ColumnParallel, DTensor, Replicate, Shard
from ferrodist.errors import UnsupportedOpError
from ferrodist.testing import run_ranks


def decoder(kind, **options):
    config = getattr(transformers, f"{kind}Config")(**SIZES, **TOKENS, **options)
    batch = {"input_ids": words(2, 10), "labels": words(2, 10)}
    return getattr(transformers, f"{kind}ForCausalLM")(config), None, batch, {"input_ids": words(2, 5)}


def phi3():
    """A fused layer of queries, keys and values, which is gathered."""
    return decoder("Phi3", num_key_value_heads=2)


def gpt_neox():
    return decoder("GPTNeoX")


def deepseek_v3():
    """Latent attention, and experts of which each is sharded."""
    sizes = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
    experts["experts_implementation"] = "eager"  # others take no float64
    return decoder("DeepseekV3", num_key_value_heads=4, n_group=1, topk_group=1, **sizes, **experts)


def gpt_oss():
    """Experts for which transformers has no plan but that of whole ones on each rank."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
    return decoder("GptOss", num_key_value_heads=2, head_dim=8, **experts)


def longcat():
    """Experts of which some return their tokens, and have no parameters."""
    sizes = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    experts = {"n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 2, "expert_ffn_hidden_size": 16}
    return decoder("LongcatFlash", num_layers=1, ffn_hidden_size=48, head_dim=8, **sizes, **experts)


def mamba2():
    """State spaces, of which the embedding alone is sharded."""
    config = transformers.Mamba2Config(
        vocab_size=64, hidden_size=32, state_size=8, head_dim=16, num_heads=4, n_groups=1, num_hidden_layers=1, **TOKENS
    )
    batch = {"input_ids": words(2, 10), "labels": words(2, 10)}
    return transformers.Mamba2ForCausalLM(config), None, batch, None


def bloom():
    config = transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4, **TOKENS)
    batch = {"input_ids": words(2, 10), "labels": words(2, 10)}
    return transformers.BloomForCausalLM(config), None, batch, {"input_ids": words(2, 5)}


def bart():
    sizes = {"d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "dropout": 0}
    layers = {f"{stack}_{name}": 2 for stack in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    config = transformers.BartConfig(vocab_size=64, **sizes, **layers, **TOKENS, decoder_start_token_id=2)
    batch = {"input_ids": words(2, 10), "labels": words(2, 7, seed=2)}
    return transformers.BartForConditionalGeneration(config), None, batch, None


def roberta():
    """A head that is a module of its own."""
    config = transformers.RobertaConfig(**SIZES, hidden_dropout_prob=0, attention_probs_dropout_prob=0)
    return transformers.RobertaForMaskedLM(config), None, {"input_ids": words(2, 10), "labels": words(2, 10)}, None


def clip():
    """Text and pictures, whose similarity is the loss."""
    sizes = {name: size for name, size in SIZES.items() if name not in ("vocab_size", "max_position_embeddings")}
    text = {"vocab_size": 64, "max_position_embeddings": 16, **TOKENS, **sizes, "projection_dim": 16}
    vision = {"image_size": 16, "patch_size": 8, **sizes, "projection_dim": 16}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    pixels = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    batch = {"input_ids": words(2, 10), "pixel_values": pixels, "return_loss": True}
    return transformers.CLIPModel(config), None, batch, None


def opt():
    """A family without a plan of its own, whose layers have usual names."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "ffn_dim": 48, "num_attention_heads": 4}
    config = transformers.OPTConfig(**sizes, word_embed_proj_dim=32, max_position_embeddings=64, dropout=0, **TOKENS)
    return transformers.OPTForCausalLM(config), None, {"input_ids": words(2, 10), "labels": words(2, 10)}, None


def modern_bert():
    """Fused layers: queries, keys and values in blocks, and gates beside what they gate."""
    tokens = {"pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2}
    config = transformers.ModernBertConfig(**SIZES, **tokens, local_attention=4)
    return transformers.ModernBertForMaskedLM(config), None, {"input_ids": words(2, 10), "labels": words(2, 10)}, None


def longformer():
    """Attention that writes to its inputs in place, and to overlapping views of memory."""
    dropouts = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    config = transformers.LongformerConfig(**SIZES, **dropouts, attention_window=4)
    return transformers.LongformerForMaskedLM(config), None, {"input_ids": words(2, 8), "labels": words(2, 8)}, None


def llama4():
    """Experts that compute all tokens, by products of the stacked weights."""
    sizes = {"head_dim": 8, "num_local_experts": 4, "intermediate_size_mlp": 48, "interleave_moe_layer_step": 2}
    config = transformers.Llama4TextConfig(**SIZES, **TOKENS, **sizes, num_key_value_heads=2, attention_chunk_size=16)
    batch = {"input_ids": words(2, 10), "labels": words(2, 10)}
    return transformers.Llama4ForCausalLM(config), None, batch, None


def qwen2_vl():
    """Pictures among the text, whose places in it are lists of numbers."""
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2]}
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
    marks = {"image_token_id": 62, "video_token_id": 63, "vision_start_token_id": 59, "vision_end_token_id": 61}
    config = transformers.Qwen2VLConfig(
        text_config={**SIZES, **TOKENS, "num_key_value_heads": 2, "rope_scaling": rope}, vision_config=vision, **marks
    )
    tokens = words(2, 10)
    tokens[:, 1:4] = torch.tensor([59, 62, 61])
    batch = {
        "input_ids": tokens,
        "labels": words(2, 10),
        "pixel_values": torch.randn(2 * 4, 3 * 2 * 4 * 4, dtype=torch.float64),
        "image_grid_thw": torch.tensor([[1, 2, 2]] * 2),
        "mm_token_type_ids": (tokens == 62).long(),
    }
    return transformers.Qwen2VLForConditionalGeneration(config), None, batch, None


def gradients(model, batch):
    """The loss of a model, and its gradients, full ones."""
    loss = model(**batch).loss
    loss.backward()
    found = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return loss.detach(), {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in found.items()}


@pytest.mark.parametrize(
    ("family", "num_sharded"),
    [
        (llama, 16),
        (phi3, 10),
        (gpt_neox, 13),
        (mixtral, 14),
        (deepseek_v3, 10),
        (gpt_oss, 24),
        (longcat, 16),
        (mamba2, 2),
        (gpt2, 13),
        (bloom, 13),
        (bert, 22),
        (roberta, 22),
        (t5, 33),
        (bart, 55),
        (whisper, 49),
        (clip, 41),
        (opt, 21),
        (modern_bert, 10),
        (longformer, 22),
        (llama4, 18),
        (qwen2_vl, 22),
    ],
)
@pytest.mark.filterwarnings("ignore:aten.as_strided.default in module 'longformer")
def test_a_whole_model_by_its_own_plan(family, num_sharded):
    """One line shards the layers that transformers shards, or that have usual names; the rest is replicated."""
    torch.manual_seed(0)
    model, _, batch, _ = family()
    model = model.double()
    expected = gradients(copy.deepcopy(model), batch)

    def program(group):
        mesh = fd.DeviceMesh(group, (-1,), ("tensor",))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="the plan of Mamba2ForCausalLM shards no layer")
            mine = fd.parallelize(copy.deepcopy(model), mesh, "auto")
        # Some of transformers' own steps are in float32.
        torch.testing.assert_close(gradients(mine, batch), expected, rtol=1e-5, atol=1e-6, check_dtype=False)
        return sum(one.placements != (Replicate(),) for one in mine.parameters())

    assert run_ranks(program, 2, backend="native") == [num_sharded] * 2


@pytest.mark.parametrize("family", [llama, mixtral])
def test_writing_by_its_own_plan(family):
    """``generate`` writes the tokens of one process."""
    torch.manual_seed(0)
    model, _, _, beginning = family()
    model = model.double()
    tokens = write(copy.deepcopy(model), beginning)

    def program(group):
        mine = fd.parallelize(copy.deepcopy(model), fd.DeviceMesh(group, (-1,), ("tensor",)), "auto")
        assert write(mine, beginning).tolist() == tokens.tolist()

    run_ranks(program, 2, backend="native")


def test_experts_by_the_plan_of_transformers():
    """``ep_plan`` beside ``tp_plan``: experts are distributed whole, and their tokens travel."""
    torch.manual_seed(0)
    model, _, batch, _ = mixtral()
    model = model.double()
    expected = gradients(copy.deepcopy(model), batch)

    def program(group):
        mesh = fd.DeviceMesh(group, (-1,), ("tensor",))
        mine = fd.parallelize(copy.deepcopy(model), mesh, {**model.tp_plan, **model.ep_plan})
        assert mine.model.layers[0].mlp.experts.down_proj.placements == (Shard(0),)
        torch.testing.assert_close(gradients(mine, batch), expected, rtol=1e-5, atol=1e-6, check_dtype=False)

    run_ranks(program, 2, backend="native")


class Planned(nn.Sequential):
    """A model that brings a plan, as those of transformers do."""

    def __init__(self, plan):
        super().__init__(nn.Linear(6, 8), nn.Linear(8, 6))
        self.tp_plan = plan


@pytest.mark.parametrize(
    ("model", "plan", "error", "message"),
    [
        (nn.Linear(2, 2), "auto", ValueError, "its attribute tp_plan, or finds blocks of layers by their usual names"),
        (nn.Linear(2, 2), "best", ValueError, "plan must be \"auto\" or a mapping from paths to styles, not 'best'"),
        (nn.Linear(2, 2), 3, TypeError, 'a plan is "auto" or a mapping from paths to styles'),
        (Planned({"layers.*": "colwise"}), "auto", ValueError, "no path of the plan of Planned matches a module"),
        (Planned({"0": "diagonal"}), "auto", UnsupportedOpError, "the plan's style 'diagonal' for '0' is not known"),
        (Planned({"0.weight": "all_reduce"}), "auto", UnsupportedOpError, "for the parameter '0.weight' is not known"),
        (Planned({}), {"7": "colwise"}, ValueError, "the plan's path '7' matches no module"),
    ],
)
def test_wrong_plans(model, plan, error, message):
    """They are refused by name on all ranks, and by `describe_plan` too."""

    def program(group):
        mesh = fd.DeviceMesh(group, (-1,), ("tensor",))
        with pytest.raises(error) as refusal:
            fd.describe_plan(model, mesh, plan)
        assert message in str(refusal.value)
        with pytest.raises((error, UnsupportedOpError)) as refusal:
            fd.parallelize(copy.deepcopy(model), mesh, plan)
        assert message in str(refusal.value)

    run_ranks(program, 2)


def test_names_of_styles_and_styles_mix():
    """A plan by hand has both, for modules and for parameters."""

    def program(group):
        mesh = fd.DeviceMesh(group, (-1,), ("tensor",))
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8, dtype=torch.float64), nn.Linear(8, 6, dtype=torch.float64))
        x = torch.ones(2, 6, dtype=torch.float64)
        expected = model(x)
        mine = fd.parallelize(copy.deepcopy(model), mesh, {"0": ColumnParallel(), "1.weight": "rowwise"})
        assert mine[0].weight.placements == (Shard(0),)
        assert mine[1].weight.placements == (Shard(1),)
        torch.testing.assert_close(mine(x), expected)

    run_ranks(program, 2, backend="native")


def test_paths_of_modules_and_of_their_parameters():
    """A parameter's placement joins its module's style, and leaves those of other modules of the same path."""
    mesh = fd.DeviceMesh(fd.SimulatedBackend.create_group(2)[0], (-1,), ("tensor",))
    table = fd.describe_plan(Planned({}), mesh, {"[01]": "colwise", "0.bias": "replicate"})
    placements = [line.split()[-2] for line in table.splitlines()[1:5]]
    assert placements == ["Shard(0)", "Replicate()", "Shard(0)", "Shard(0)"]


def test_a_plan_of_no_layer_warns():
    """Of some models transformers shards the head alone."""
    mesh = fd.DeviceMesh(fd.SimulatedBackend.create_group(2)[0], (-1,), ("tensor",))
    model = nn.ModuleDict({"head": nn.Linear(4, 4), "layers": nn.ModuleList([nn.Linear(4, 4)])})
    model.tp_plan = {"head": "colwise_gather_output"}
    with pytest.warns(UserWarning, match="the plan of ModuleDict shards no layer, only 'head'"):
        fd.describe_plan(model, mesh, "auto")


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_models_of_ones_own():
    """A layer without features, and a method called as one of transformers."""

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            layers = {"fc1": nn.Linear(4, 6), "fc2": nn.Linear(6, 4)}, {"fc1": nn.Linear(4, 0), "fc2": nn.Linear(0, 4)}
            self.layers = nn.ModuleList(map(nn.ModuleDict, layers))

        def get_input_embeddings(self, ids):
            return ids

    mesh = fd.DeviceMesh(fd.SimulatedBackend.create_group(2)[0], (-1,), ("tensor",))
    shown = str(fd.describe_plan(Own(), mesh, "auto"))
    assert "layers.0.fc1.weight" in shown


def test_describe_plan():
    """Placements, bytes and collectives, of a model on the meta device, without another rank's help."""
    mesh = fd.DeviceMesh(fd.SimulatedBackend.create_group(2)[0], (-1,), ("tensor",))
    with torch.device("meta"):
        model = Planned({"0": "colwise", "1": "rowwise"})
    assert fd.describe_plan(model, mesh, "auto").splitlines() == [
        "parameter  shape   placement      MiB  forward",
        "0.weight   (8, 6)  Shard(0)     0.000",
        "0.bias     (8,)    Shard(0)     0.000",
        "1.weight   (6, 8)  Shard(1)     0.000  allreduce",
        "1.bias     (6,)    Replicate()  0.000",
        "4 parameters: 0.00 MiB on this rank of 2, of 0.00 MiB; 0.00 MiB of these replicated",
    ]


@pytest.mark.parametrize(("num_ranks", "named"), [(2, []), (3, ["num_attention_heads=4", "num_key_value_heads=2"])])
def test_heads_that_ranks_cannot_share_are_named(num_ranks, named):
    """Attention then moves heads between ranks: the plan's table says so, and only then."""
    mesh = fd.DeviceMesh(fd.SimulatedBackend.create_group(num_ranks)[0], (-1,), ("tensor",))
    options = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=1, vocab_size=32, **options))
    table = fd.describe_plan(model, mesh, "auto").splitlines()
    assert [line.split()[0] for line in table if "can't share the heads" in line] == named
    assert not any("heads" in line for line in fd.describe_plan(model, mesh, {"lm_head": "colwise"}).splitlines())
