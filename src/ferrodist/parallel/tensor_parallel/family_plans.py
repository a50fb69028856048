"""Plans of Hugging Face's families of models that have no plan of their own, by ``config.model_type``.

Paths are those of the base model, to which the prefix of the models with a head is added, and of heads. Attention and
feed-forward layers are sharded as in M. Shoeybi et al., "Megatron-LM", 2019, embeddings and language-model heads by the
vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ferrodist.parallel.tensor_parallel.styles import Style
from ferrodist.tensor.placement import Replicate, Shard

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_Plan = dict[str, "Style | str"]

# Layers of the class `Conv1D`, whose weights are transposed: (C, O).
_CONV1D_COLUMN = Style(parameters={"weight": Shard(1), "bias": Shard(0)}, wanted=Replicate(), outputs=Shard(-1))
_CONV1D_QKV = Style(
    parameters={"weight": Shard(1, blocks=3), "bias": Shard(0, blocks=3)},
    wanted=Replicate(),
    outputs=Shard(-1, blocks=3),
)
_CONV1D_ROW = Style(parameters={"weight": Shard(0)}, wanted=Shard(-1), outputs=Replicate())


def _columns(layer: str, *names: str) -> _Plan:
    return {f"{layer}.{name}": "colwise" for name in names}


def _rows(layer: str, *names: str) -> _Plan:
    return {f"{layer}.{name}": "rowwise" for name in names}


def _encoder_of_bert(layer: str, query_key_value: Iterable[str]) -> _Plan:
    return {
        **_columns(layer, *(f"attention.self.{name}" for name in query_key_value), "intermediate.dense"),
        **_rows(layer, "attention.output.dense", "output.dense"),
    }


def _layers_of_bart(*stacks: str) -> _Plan:
    plan: _Plan = {}
    for stack in stacks:
        for attention in ("self_attn", "encoder_attn"):
            plan |= _columns(f"{stack}.layers.*.{attention}", "q_proj", "k_proj", "v_proj")
            plan |= _rows(f"{stack}.layers.*.{attention}", "out_proj")
        plan |= _columns(f"{stack}.layers.*", "fc1", "mlp.fc1") | _rows(f"{stack}.layers.*", "fc2", "mlp.fc2")
    return plan


def _layers_of_t5(stack: str) -> _Plan:
    plan: _Plan = {}
    for attention in ("SelfAttention", "EncDecAttention"):
        plan |= _columns(f"{stack}.block.*.layer.*.{attention}", "q", "k", "v")
        plan |= _rows(f"{stack}.block.*.layer.*.{attention}", "o")
    feed_forward = f"{stack}.block.*.layer.*.DenseReluDense"
    return plan | _columns(feed_forward, "wi", "wi_0", "wi_1") | _rows(feed_forward, "wo")


_BERT: _Plan = {
    "embeddings.word_embeddings": "embedding_rowwise",
    **_encoder_of_bert("encoder.layer.*", ("query", "key", "value")),
}
_BART: _Plan = {
    "shared": "embedding_rowwise",
    **_layers_of_bart("encoder", "decoder"),
}
_T5: _Plan = {
    "shared": "embedding_rowwise",
    **_layers_of_t5("encoder"),
    **_layers_of_t5("decoder"),
}

BASE_PLANS: Mapping[str, Mapping[str, Style | str]] = {
    "gpt2": {
        "wte": "embedding_rowwise",
        "h.*.attn.c_attn": _CONV1D_QKV,
        "h.*.attn.c_proj": _CONV1D_ROW,
        "h.*.mlp.c_fc": _CONV1D_COLUMN,
        "h.*.mlp.c_proj": _CONV1D_ROW,
    },
    "bert": _BERT,
    "roberta": _BERT,
    "xlm-roberta": _BERT,
    "electra": _BERT,
    "deberta-v2": {
        "embeddings.word_embeddings": "embedding_rowwise",
        **_encoder_of_bert("encoder.layer.*", ("query_proj", "key_proj", "value_proj")),
    },
    "t5": _T5,
    "mt5": _T5,
    "bart": _BART,
    "mbart": _BART,
    "whisper": {"decoder.embed_tokens": "embedding_rowwise", **_layers_of_bart("encoder", "decoder")},
    "vit": {
        **_columns("layers.*", "attention.q_proj", "attention.k_proj", "attention.v_proj", "mlp.fc1"),
        **_rows("layers.*", "attention.o_proj", "mlp.fc2"),
    },
    "clip": {
        "text_model.embeddings.token_embedding": "embedding_rowwise",
        **_layers_of_bart("text_model.encoder", "vision_model.encoder"),
    },
    "bloom": {
        "word_embeddings": "embedding_rowwise",
        **_columns("h.*", "self_attention.query_key_value", "mlp.dense_h_to_4h"),
        **_rows("h.*", "self_attention.dense", "mlp.dense_4h_to_h"),
    },
    "mamba": {"embeddings": "embedding_rowwise"},  # a scan over sharded features would send in each of its steps
    "mamba2": {"embeddings": "embedding_rowwise"},
    "wav2vec2": {
        **_columns("encoder.layers.*.attention", "q_proj", "k_proj", "v_proj"),
        **_rows("encoder.layers.*.attention", "out_proj"),
        **_columns("encoder.layers.*.feed_forward", "intermediate_dense"),
        **_rows("encoder.layers.*.feed_forward", "output_dense"),
    },
}
"""The plans of base models."""

HEAD_PLAN: Mapping[str, Style | str] = {
    "lm_head": "colwise_gather_output",
    "proj_out": "colwise_gather_output",
    "cls.predictions.decoder": "colwise_gather_output",
    "lm_head.decoder": "colwise_gather_output",
}
"""Heads over the vocabulary, whose weights may be those of embeddings that are sharded alike."""
