"""Models of Hugging Face's transformers, given whole to a plan: they train and write as they do in one process."""

import copy

import pytest
import torch
import transformers

import ferrodist as fd
from ferrodist import ColumnParallel, DTensor, RowParallel, Shard, Style, VocabularyParallel
from ferrodist.testing import run_ranks

TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}


def columns(*paths):
    return dict.fromkeys(paths, ColumnParallel())


def rows(*paths):
    return dict.fromkeys(paths, RowParallel())


def words(*shape, seed=1):
    return torch.randint(3, 60, shape, generator=torch.Generator().manual_seed(seed))


LAYERS = {
    "model.embed_tokens": VocabularyParallel(),
    **columns(*(f"model.layers.*.self_attn.{name}_proj" for name in "qkv"), "lm_head"),
    **rows("model.layers.*.self_attn.o_proj"),
}


def llama():
    config = transformers.LlamaConfig(**SIZES, **TOKENS, num_key_value_heads=2)
    plan = {
        **LAYERS,
        **columns("model.layers.*.mlp.gate_proj", "model.layers.*.mlp.up_proj"),
        **rows("model.layers.*.mlp.down_proj"),
    }
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[0, :3] = 0
    batch = {"input_ids": words(2, 10), "attention_mask": mask, "labels": words(2, 10)}
    return transformers.LlamaForCausalLM(config), plan, batch, {"input_ids": words(2, 5)}


def uneven_llama():
    """Three heads, which two ranks can't have as many of."""
    sizes = SIZES | {"num_attention_heads": 3, "hidden_size": 24, "tie_word_embeddings": True}
    plan = LAYERS | {"lm_head": ColumnParallel()}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **TOKENS, num_key_value_heads=3))
    return model, plan, {"input_ids": words(2, 6), "labels": words(2, 6)}, {"input_ids": words(2, 5)}


def mixtral():
    config = transformers.MixtralConfig(
        **SIZES, **TOKENS, num_key_value_heads=2, num_local_experts=4, experts_implementation="eager"
    )
    model = transformers.MixtralForCausalLM(config)
    batch = {"input_ids": words(2, 10), "labels": words(2, 10), "output_router_logits": True}
    return model, LAYERS, batch, {"input_ids": words(2, 5)}


def gpt2():
    dropouts = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, **dropouts, **TOKENS
    )
    # Their linear layers have weights the other way round.
    plan = {
        "transformer.wte": VocabularyParallel(),
        "lm_head": ColumnParallel(),
        "transformer.h.*.attn.c_attn": Style(
            parameters={"weight": Shard(1, blocks=3), "bias": Shard(0, blocks=3)}, outputs=Shard(-1, blocks=3)
        ),
        "transformer.h.*.mlp.c_fc": Style(parameters={"weight": Shard(1), "bias": Shard(0)}, outputs=Shard(-1)),
    }
    model = transformers.GPT2LMHeadModel(config)
    return model, plan, {"input_ids": words(2, 10), "labels": words(2, 10)}, {"input_ids": words(2, 5)}


def bert():
    config = transformers.BertConfig(**SIZES, hidden_dropout_prob=0, attention_probs_dropout_prob=0)
    layer = "bert.encoder.layer.*"
    plan = {
        "bert.embeddings.word_embeddings": VocabularyParallel(),
        **columns(*(f"{layer}.attention.self.{name}" for name in ("query", "key", "value"))),
        **columns(f"{layer}.intermediate.dense", "cls.predictions.decoder"),
        **rows(f"{layer}.attention.output.dense", f"{layer}.output.dense"),
    }
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[0, 7:] = 0
    batch = {"input_ids": words(2, 10), "attention_mask": mask, "labels": words(2, 10)}
    return transformers.BertForMaskedLM(config), plan, batch, None


def t5():
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0, decoder_start_token_id=0
    )
    plan = {"shared": VocabularyParallel(), "lm_head": ColumnParallel()}
    for block, kinds in (("encoder", ["SelfAttention"]), ("decoder", ["SelfAttention", "EncDecAttention"])):
        for kind in kinds:
            plan |= columns(*(f"{block}.block.*.layer.*.{kind}.{name}" for name in "qkv"))
            plan |= rows(f"{block}.block.*.layer.*.{kind}.o")
        plan |= columns(f"{block}.block.*.layer.*.DenseReluDense.wi")
        plan |= rows(f"{block}.block.*.layer.*.DenseReluDense.wo")
    batch = {"input_ids": words(2, 10), "labels": words(2, 7, seed=2)}
    return transformers.T5ForConditionalGeneration(config), plan, batch, {"input_ids": words(2, 5)}


def whisper():
    config = transformers.WhisperConfig(
        vocab_size=64,
        num_mel_bins=8,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_source_positions=12,
        max_target_positions=32,
        dropout=0,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **TOKENS,
    )
    plan = {"model.decoder.embed_tokens": VocabularyParallel(), "proj_out": ColumnParallel()}
    for block, kinds in (("encoder", ["self_attn"]), ("decoder", ["self_attn", "encoder_attn"])):
        for kind in kinds:
            plan |= columns(*(f"model.{block}.layers.*.{kind}.{name}_proj" for name in "qkv"))
            plan |= rows(f"model.{block}.layers.*.{kind}.out_proj")
        plan |= columns(f"model.{block}.layers.*.fc1")
        plan |= rows(f"model.{block}.layers.*.fc2")
    sounds = torch.randn(2, 8, 24, generator=torch.Generator().manual_seed(2)).double()
    batch = {"input_features": sounds, "labels": words(2, 7)}
    return transformers.WhisperForConditionalGeneration(config), plan, batch, {"input_features": sounds}


def mamba():
    config = transformers.MambaConfig(vocab_size=64, hidden_size=32, state_size=4, num_hidden_layers=2, **TOKENS)
    plan = {"backbone.embeddings": VocabularyParallel(), "lm_head": ColumnParallel()}
    batch = {"input_ids": words(2, 6), "labels": words(2, 6)}
    return transformers.MambaForCausalLM(config), plan, batch, {"input_ids": words(2, 5)}


def step(model, batch):
    """The gradients of a loss, and the one that the model computes, in float32 whatever it is itself."""
    out = model(**batch)
    logits = out.logits.flatten(0, -2)
    loss = torch.nn.functional.cross_entropy(logits, batch["labels"].flatten())
    loss = loss + out.aux_loss if out.get("aux_loss") is not None else loss
    loss.backward()
    return loss.item(), out.loss.item()


def train(model, batch):
    """Five steps of AdamW with clipping: the losses, the norms, and the model's own losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.train()
    figures = []
    for _ in range(5):
        optimizer.zero_grad()
        loss, own = step(model, batch)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        figures.append((loss, float(norm), own))
    return torch.tensor(figures, dtype=torch.float64)


def write(model, beginning, **how):
    model.eval()
    with torch.no_grad():
        return model.generate(**copy.deepcopy(beginning), max_new_tokens=6, do_sample=False, **how)


@pytest.mark.parametrize("family", [llama, uneven_llama, mixtral, gpt2, bert, t5, whisper, mamba])
def test_a_model_trains_and_writes_as_in_one_process(family):
    """Position ids, masks, empty caches and lists of its code, padded labels, chosen tokens; the encoder by itself."""
    torch.manual_seed(0)
    model, plan, batch, beginning = family()
    model = model.double()
    alone = copy.deepcopy(model)
    tokens = None if beginning is None else write(alone, beginning)
    figures = train(alone, batch)
    expected = dict(alone.named_parameters())

    def program(group):
        mesh = fd.DeviceMesh(group, (-1,), ("tensor",))
        mine = fd.parallelize(copy.deepcopy(model), mesh, plan)
        if beginning is not None:
            got = write(mine, beginning)
            assert type(got) is torch.Tensor
            assert got.tolist() == tokens.tolist()
        got = train(mine, batch)
        torch.testing.assert_close(got[:, :2], figures[:, :2], rtol=1e-9, atol=0)
        torch.testing.assert_close(got[:, 2], figures[:, 2], rtol=1e-5, atol=0)
        for name, parameter in mine.named_parameters():
            assert isinstance(parameter, DTensor)
            scale = expected[name].abs().max().item()
            torch.testing.assert_close(
                parameter.full_tensor(), expected[name].data, rtol=0, atol=1e-8 * max(scale, 1e-2), msg=name
            )

    run_ranks(program, 2, backend="native")


@pytest.mark.parametrize("how", [{"num_beams": 2}, {"cache_implementation": "static"}, {"use_cache": False}])
def test_other_ways_to_write(how):
    """Beams move what is in the cache, between forwards; a static cache is written in place."""
    torch.manual_seed(0)
    model, plan, _, beginning = llama()
    model = model.double()
    tokens = write(copy.deepcopy(model), beginning, **how)

    def program(group):
        mine = fd.parallelize(copy.deepcopy(model), fd.DeviceMesh(group, (-1,), ("tensor",)), plan)
        assert write(mine, beginning, **how).tolist() == tokens.tolist()

    run_ranks(program, 2, backend="native")
