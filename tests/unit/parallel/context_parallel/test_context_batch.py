"""`context_shard_batch`: what it refuses, and the models that it checks."""

import copy

import pytest
import torch
import transformers
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import ferrodist as fd
from ferrodist.testing import run_ranks

IDS = torch.randint(5, 37, (1, 12), generator=torch.Generator().manual_seed(0))


ONES = torch.ones(1, 4, dtype=torch.int64)
BATCHES = {
    "no ids": ({"labels": torch.ones(1, 4, dtype=torch.int64)}, "no 'input_ids'"),
    "unknown": ({"input_ids": ONES, "token_type_ids": ONES}, "token_type_ids"),
    "shape": ({"input_ids": torch.ones(4)}, r"\(batch, tokens\)"),
    "labels": ({"input_ids": ONES, "labels": torch.ones(1, 5, dtype=torch.int64)}, "labels must be of the shape"),
    "padding": ({"input_ids": ONES, "attention_mask": torch.tensor([[1, 1, 1, 0]])}, "padding"),
    "no label": ({"input_ids": ONES, "labels": torch.full((1, 4), -100)}, "no label that counts"),
}


@pytest.mark.parametrize("name", BATCHES)
def test_batches_that_cannot_be_sharded(name):
    """Padding and unknown entries would be silently wrong."""
    batch, match = BATCHES[name]
    group = fd.SimulatedBackend.create_group(1)[0]
    before = copy.deepcopy(batch)
    with pytest.raises(ValueError, match=match):
        fd.context_shard_batch(batch, group)
    assert all(torch.equal(batch[each], before[each]) for each in batch)
    with pytest.raises(ValueError, match="cu_seqlens ends at 3"):
        fd.context_shard_batch({"input_ids": ONES}, group, cu_seqlens=[0, 3])
    with pytest.raises(TypeError, match="mapping"):
        fd.context_shard_batch([1], group)
    with pytest.raises(TypeError, match=r"batch\['labels'\] must be of int64 or int32, not"):
        fd.context_shard_batch({"input_ids": ONES, "labels": torch.ones(1, 4)}, group)


def test_ranks_with_different_batches_are_found_by_check():
    """Each rank would have tokens of another text, and the loss would be of none."""

    def program(group):
        batch = {"input_ids": IDS, "labels": IDS}
        checked = fd.context_shard_batch(batch, group, check=True)
        plain = fd.context_shard_batch(batch, group)
        assert list(checked) == list(plain)
        assert all(torch.equal(checked[name], plain[name]) for name in plain)
        other = {"input_ids": IDS, "labels": IDS + group.rank}
        with pytest.raises(
            fd.CollectiveMismatchError, match=r"arguments differ. Rank 0: input_ids .*, labels .*digest"
        ):
            fd.context_shard_batch(other, group, check=True)
        with pytest.raises(fd.CollectiveMismatchError, match="ignore_index=-101"):
            fd.context_shard_batch(batch, group, ignore_index=-100 - group.rank, check=True)
        kind, match = (TypeError, "mapping") if group.rank else (fd.CollectiveMismatchError, "rank 1 are wrong")
        with pytest.raises(kind, match=match):
            fd.context_shard_batch([1] if group.rank else batch, group, check=True)
        with pytest.raises(TypeError, match="check must be True or False"):
            fd.context_shard_batch(batch, group, check=1)

    run_ranks(program, 2)


@pytest.mark.parametrize("length", [1, 2])
def test_a_rank_without_tokens_raises_on_all_ranks(length):
    """The loss of no tokens is not a number, and a model fails on that rank only."""

    def program(group):
        with pytest.raises(ValueError, match="each of 3 ranks must have one"):
            fd.context_shard_batch({"input_ids": IDS[:, :length]}, group)
        assert fd.context_shard_batch({"input_ids": IDS[:, :3]}, group)["input_ids"].shape == (1, 1)

    run_ranks(program, 3)


SIZES = {
    "vocab_size": 37,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "attn_implementation": "sdpa",
    "pad_token_id": 0,
}
BART = {"vocab_size": 37, "d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
MODELS = {
    "keywords that it ignores": (
        transformers.BartForCausalLM,
        transformers.BartConfig(**BART, decoder_attention_heads=2, decoder_ffn_dim=8, encoder_ffn_dim=8),
        (TypeError, "does not take position_ids by name"),
    ),
    "a window": (
        transformers.MistralForCausalLM,
        transformers.MistralConfig(**SIZES, sliding_window=11),
        (ValueError, "sliding window of 11 tokens, and the sequence has 12"),
    ),
    "layers with a window": (
        transformers.Gemma3ForCausalLM,
        transformers.Gemma3TextConfig(**SIZES, sliding_window=4, layer_types=["sliding_attention"]),
        (ValueError, "sliding window of 4 tokens"),
    ),
    "layers with chunks": (
        transformers.Qwen3ForCausalLM,
        transformers.Qwen3Config(**SIZES, layer_types=["chunked_attention"]),
        (ValueError, "layers of the kind 'chunked_attention'"),
    ),
    "attention of its own": (
        transformers.LlamaForCausalLM,
        transformers.LlamaConfig(**SIZES | {"attn_implementation": "eager"}),
        (ValueError, "attn_implementation='eager'"),
    ),
    "positions of its own": (
        transformers.RobertaForCausalLM,
        transformers.RobertaConfig(**SIZES, is_decoder=True, max_position_embeddings=16),
        (ValueError, "pass position_ids"),
    ),
    "a window of the sequence": (
        transformers.MistralForCausalLM,
        transformers.MistralConfig(**SIZES, sliding_window=12),
        None,
    ),
    "full attention": (transformers.Qwen3ForCausalLM, transformers.Qwen3Config(**SIZES, sliding_window=4), None),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_that_would_be_wrong_without_an_error(name):
    """Each ignores an entry or has attention that is not that of the whole sequence."""
    kind, config, expected = MODELS[name]
    model = kind(config)
    group = fd.SimulatedBackend.create_group(1)[0]
    for each in (model, fd.DDP(model, group)):
        if expected is None:
            fd.context_shard_batch({"input_ids": IDS, "labels": IDS}, group, model=each)
            continue
        with pytest.raises(expected[0], match=expected[1]):
            fd.context_shard_batch({"input_ids": IDS, "labels": IDS}, group, model=each)


def test_a_model_with_positions_of_its_own_takes_them_from_the_batch():
    """RoBERTa numbers tokens from the index of padding on; with its positions the loss is that of one process."""
    _, config, _ = MODELS["positions of its own"]
    model = transformers.RobertaForCausalLM(config).eval()
    batch = {"input_ids": IDS, "labels": IDS, "position_ids": 1 + torch.arange(12)[None]}

    def program(group):
        with torch.no_grad(), fd.context_parallel(fd.DeviceMesh(group, (2,)), causal=True):
            loss = model(**fd.context_shard_batch(batch, group, model=model)).loss
        return fd.allreduce(loss, fd.ReduceOp.MEAN, group=group)

    for loss in run_ranks(program, 2):
        expected = model(input_ids=IDS, labels=IDS).loss.double()
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)  # two sums in float32


class Small(nn.Module):
    """A model whose loss has one label that does not count."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(37, 4)

    def forward(self, input_ids, position_ids, attention_mask, labels, shift_labels, num_items_in_batch):
        raise NotImplementedError


def test_the_ignored_label_reaches_the_loss():
    """A loss that goes by -100 would count the labels that are to be ignored, or index by them."""
    config = transformers.LlamaConfig(**SIZES)
    model = transformers.LlamaForCausalLM(config)
    labels = IDS.clone()
    labels[:, 2:5] = 0
    expected = model(input_ids=IDS, labels=labels, ignore_index=0).loss

    def program(group):
        batch = {"input_ids": IDS, "labels": labels}
        assert "ignore_index" not in fd.context_shard_batch(batch, group, model=Small())
        with pytest.raises(TypeError, match="does not take ignore_index by name"):
            fd.context_shard_batch(batch, group, ignore_index=0, model=Small())
        with torch.no_grad(), fd.context_parallel(fd.DeviceMesh(group, (2,)), causal=True):
            loss = model(**fd.context_shard_batch(batch, group, ignore_index=0, model=model)).loss
        return fd.allreduce(loss, fd.ReduceOp.MEAN, group=group)

    for loss in run_ranks(program, 2):
        torch.testing.assert_close(loss, expected.detach().double())


def test_masks_of_one_element_are_no_marks():
    """A model's own mask of one token, or an expanded one, says nothing of other ranks' tokens."""
    group = fd.SimulatedBackend.create_group(1)[0]
    q = torch.randn(1, 2, 1, 4, generator=torch.Generator().manual_seed(0))
    own = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    mark = fd.context_shard_batch({"input_ids": IDS[:, :1]}, group)["attention_mask"]
    mesh = fd.DeviceMesh(group, (1,))
    for mask in (own, torch.ones((), dtype=torch.bool).expand(1, 2, 1, 1), mark.clone()):
        with pytest.raises(ValueError, match="mask of shape"), fd.context_parallel(mesh, causal=False):
            scaled_dot_product_attention(q, q, q, mask)
    with fd.context_parallel(mesh, causal=False):
        scaled_dot_product_attention(q, q, q, mark[:, :, :, :1])
