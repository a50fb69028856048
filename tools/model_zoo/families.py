"""Families of models, each as a tiny model of random weights with a batch: most of Hugging Face's transformers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn
from torch.nn import functional

import ferrodist as fd

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

transformers: Any = import_module("transformers")  # without its types, which take minutes to check
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

Batch = dict[str, Any]
Plan: TypeAlias = "Mapping[str, Any] | None"

TOKENS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LAYERS: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
SIZES: dict[str, Any] = {**LAYERS, "vocab_size": 64, "max_position_embeddings": 64}
NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
STACKS: dict[str, Any] = {
    "vocab_size": 64,
    "d_model": 32,
    "dropout": 0,
    **{f"{stack}_{name}": 2 for stack in ("encoder", "decoder") for name in ("layers", "attention_heads")},
    **{f"{stack}_ffn_dim": 48 for stack in ("encoder", "decoder")},
}

IMAGES = "its inputs are images, not sequences of tokens"
SOUNDS = "its inputs are sounds, not sequences of tokens"
TWO_STACKS = "an encoder and a decoder have a sequence each; context parallelism is for one"
RECURRENT = "its layers pass a state from token to token, without attention"
OWN_POSITIONS = "it numbers positions in a way of its own, from the index of padding on: pass it position_ids"
OWN_BIASES = "its attention is its own, with biases by position, and not torch's scaled_dot_product_attention"
NO_TEXT = "it generates no text"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family: a model of it, and what the ways to distribute it need to know."""

    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    blocks: str
    """The class of the blocks, which are units of FSDP; several are separated by spaces."""
    prompt: Batch | None = None
    """The inputs of ``generate``; None for a model without."""
    plan: Plan = None
    """The plan of tensor parallelism for a model that "auto" has none for."""
    context: bool | str = NO_TEXT
    """Whether attention is causal; or the reason why the sequence can't be sharded."""
    experts: str = ""
    """The path of the experts."""
    is_divisible: bool = True
    """Whether the mean of the losses of a batch's parts is that of the batch."""
    own_loss: Callable[[Any], torch.Tensor] | None = None
    """The loss of a result without labels."""

    def model(self, seed: int = 0) -> nn.Module:
        """The model in float64, the same for the same seed."""
        torch.manual_seed(seed)
        return self.make().double().train()

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The loss, in float64: that of transformers' language models is in float32."""
        result = model(**batch)
        if self.own_loss is not None:
            return self.own_loss(result)
        return functional.cross_entropy(result["logits"].double().flatten(0, -2), batch["labels"].flatten())

    def is_block(self, _: str, module: nn.Module) -> bool:
        """Whether a module is a block, as ``wrap=`` of FSDP takes it."""
        return type(module).__name__ in self.blocks.split()


def words(*shape: int, seed: int = 1) -> torch.Tensor:
    """Tokens that are none of the special ones."""
    return torch.randint(3, 60, shape, generator=torch.Generator().manual_seed(seed))


def numbers(*shape: int) -> torch.Tensor:
    """Random numbers in float64."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def text(num_labels: int = 10) -> Batch:
    """Four rows of tokens and labels."""
    return {"input_ids": words(4, 10), "labels": words(4, num_labels, seed=2)}


def padded_text() -> Batch:
    """Four rows, of which the first ends with padding, whose labels count like others."""
    mask = torch.ones(4, 10, dtype=torch.long)
    mask[0, 7:] = 0
    return {**text(), "attention_mask": mask}


def images(size: int = 16) -> Batch:
    """Four images of three channels, and their classes."""
    return {"pixel_values": numbers(4, 3, size, size), "labels": torch.arange(4) % 3}


def pairs() -> Batch:
    """Four images with their texts."""
    return {"input_ids": words(4, 10), "pixel_values": numbers(4, 3, 16, 16)}


def sounds(shape: tuple[int, ...], labels: torch.Tensor, name: str) -> Batch:
    """Four sounds, with labels."""
    return {name: numbers(4, *shape), "labels": labels}


def captioned(rows: int) -> Batch:
    """Rows of tokens, four of which stand for an image's patches, and the images."""
    tokens = words(rows, 12)
    tokens[:, 1:5] = 63
    return {"input_ids": tokens, "pixel_values": numbers(rows, 3, 16, 16)}


def detection(result: Any) -> torch.Tensor:
    """A loss of found objects, whose own one needs SciPy's assignment of them to true ones."""
    total: torch.Tensor = result["logits"].square().mean() + result["pred_boxes"].square().mean()
    return total


def contrast(result: Any) -> torch.Tensor:
    """The loss of pairs: each image against all texts, and each text against all images."""
    scores = result["logits_per_text"]
    targets = torch.arange(len(scores))
    return (functional.cross_entropy(scores, targets) + functional.cross_entropy(scores.t(), targets)) / 2


def columns_and_rows(columns: Sequence[str], rows: Sequence[str], embedding: str = "") -> dict[str, Any]:
    """A plan by hand: layers by columns and by rows, and an embedding by the vocabulary."""
    plan: dict[str, Any] = {**dict.fromkeys(columns, fd.ColumnParallel()), **dict.fromkeys(rows, fd.RowParallel())}
    return plan | {embedding: fd.VocabularyParallel()} if embedding else plan


def of_transformers(kind: str, config: str, **options: Any) -> nn.Module:
    """A model of transformers with a configuration."""
    model: nn.Module = getattr(transformers, kind)(getattr(transformers, config)(**options))
    return model


def decoder(name: str, *, blocks: str = "", config: str = "", **options: Any) -> Family:
    """A language model that has only a decoder."""
    options = {**SIZES, **TOKENS, **options}
    return Family(
        make=partial(of_transformers, f"{name}ForCausalLM", config or f"{name}Config", **options),
        batch=padded_text,
        blocks=blocks or f"{name}DecoderLayer",
        prompt={"input_ids": words(2, 5)},
        context=True,
        experts="model.layers.*.mlp.experts" if options.get("experts_implementation") else "",
    )


def recurrent(kind: str, blocks: str, *, plan: Plan = None, **options: Any) -> Family:
    """A language model without attention."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, **TOKENS}
    return Family(
        make=partial(of_transformers, f"{kind}ForCausalLM", f"{kind}Config", **sizes, **options),
        batch=text,
        blocks=blocks,
        plan=plan,
        prompt={"input_ids": words(2, 5)},
        context=RECURRENT,
    )


def masked(name: str, blocks: str, *, context: bool | str = False, **options: Any) -> Family:
    """An encoder that predicts masked tokens."""
    return Family(
        make=partial(of_transformers, f"{name}ForMaskedLM", f"{name}Config", **SIZES, **NO_DROPOUT, **options),
        batch=padded_text,
        blocks=blocks,
        context=context,
    )


def classifier(name: str, blocks: str, *, is_divisible: bool = True, **options: Any) -> Family:
    """A model that classifies images."""
    return Family(
        make=partial(of_transformers, f"{name}ForImageClassification", f"{name}Config", num_labels=3, **options),
        batch=images,
        blocks=blocks,
        context=IMAGES,
        is_divisible=is_divisible,
    )


class Encoder(nn.Module):
    """An encoder of torch's own layers, as in its tutorials."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 64)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """The scores, and the loss."""
        mask = nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1], dtype=self.head.weight.dtype)
        logits = self.head(self.layers(self.embedding(input_ids), mask=mask, is_causal=True))
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Recurrent(nn.Module):
    """A language model of torch's LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(nn.LSTM(32, 32, batch_first=True) for _ in range(2))
        self.head = nn.Linear(32, 64)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """The scores, and the loss."""
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)[0]
        logits = self.head(hidden)
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


GROUPED: dict[str, Any] = {"num_key_value_heads": 2}
EXPERTS: dict[str, Any] = {"experts_implementation": "eager"}  # the others take no float64
SMALL_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    **EXPERTS,
    **GROUPED,
}
LATENT: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_key_value_heads": 4,
}
HYBRID: dict[str, Any] = {
    **{f"{name}_layer_{key}": value for name in ("expert", "attn") for key, value in (("period", 2), ("offset", 1))},
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "mamba_d_state": 4,
    "mamba_dt_rank": 4,
    "use_mamba_kernels": False,
    **GROUPED,
    **EXPERTS,
}
GATED_DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
HEADS_OF_MAMBA: dict[str, Any] = {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 4}
PATCHES: dict[str, Any] = {
    "image_size": 16,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": [1, 1],
    "num_heads": [2, 4],
    "window_size": 2,
}
STAGES: dict[str, Any] = {"num_stages": 2, "patch_size": 2, "drop_path_rate": 0}
LEVELS: dict[str, Any] = {"hidden_sizes": [8, 16], "depths": [1, 1]}
SMALL_RESNET: dict[str, Any] = {"embedding_size": 8, "layer_type": "basic"}
MODERN: dict[str, Any] = {"pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2}
PICTURES: dict[str, Any] = {"image_size": 16, "patch_size": 8}

FAMILIES: dict[str, Family] = {
    "Llama": decoder("Llama", **GROUPED),
    "Llama, tied": decoder("Llama", **GROUPED, tie_word_embeddings=True),
    "Mistral": decoder("Mistral", **GROUPED, sliding_window=4),
    "Qwen2": decoder("Qwen2", **GROUPED),
    "Qwen3": decoder("Qwen3", **GROUPED, head_dim=8),
    "Gemma 2": decoder("Gemma2", **GROUPED, head_dim=8, sliding_window=4, query_pre_attn_scalar=8),
    "Gemma 3": decoder("Gemma3", config="Gemma3TextConfig", **GROUPED, head_dim=8, sliding_window=4),
    "Phi-3": decoder("Phi3", **GROUPED),
    "Phi": decoder("Phi"),
    "Gemma": decoder("Gemma", **GROUPED, head_dim=8),
    "OLMo 2": decoder("Olmo2", **GROUPED),
    "StableLM": decoder("StableLm", **GROUPED),
    "Falcon": decoder("Falcon", multi_query=False),
    "OPT": decoder("OPT", ffn_dim=48, word_embed_proj_dim=32, dropout=0),
    "GPT-NeoX": decoder("GPTNeoX", blocks="GPTNeoXLayer"),
    "GPT-2": Family(
        make=partial(
            of_transformers,
            "GPT2LMHeadModel",
            "GPT2Config",
            **{"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **TOKENS},
            **{f"{name}_pdrop": 0 for name in ("resid", "embd", "attn")},
        ),
        batch=padded_text,
        blocks="GPT2Block",
        prompt={"input_ids": words(2, 5)},
        context=True,
    ),
    "Bloom": Family(
        make=partial(
            of_transformers,
            "BloomForCausalLM",
            "BloomConfig",
            **{"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4, **TOKENS},
        ),
        batch=padded_text,
        blocks="BloomBlock",
        prompt={"input_ids": words(2, 5)},
        context=OWN_BIASES,
    ),
    "T5": Family(
        make=partial(
            of_transformers,
            "T5ForConditionalGeneration",
            "T5Config",
            **{"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
            **{"dropout_rate": 0, "decoder_start_token_id": 0},
        ),
        batch=partial(text, 7),
        blocks="T5Block",
        prompt={"input_ids": words(2, 5)},
        context=TWO_STACKS,
    ),
    "BART": Family(
        make=partial(
            of_transformers,
            "BartForConditionalGeneration",
            "BartConfig",
            **{**STACKS, **TOKENS, "max_position_embeddings": 64, "decoder_start_token_id": 2},
        ),
        batch=partial(text, 7),
        blocks="BartEncoderLayer BartDecoderLayer",
        prompt={"input_ids": words(2, 5)},
        context=TWO_STACKS,
    ),
    "Whisper": Family(
        make=partial(
            of_transformers,
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            **{**STACKS, **TOKENS, "num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 32},
            **{"decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None},
        ),
        batch=partial(sounds, (8, 24), words(4, 7), "input_features"),
        blocks="WhisperEncoderLayer WhisperDecoderLayer",
        prompt={"input_features": numbers(2, 8, 24)},
        context=TWO_STACKS,
    ),
    "BERT": masked("Bert", "BertLayer"),
    "ALBERT": masked("Albert", "AlbertLayerGroup", embedding_size=16),
    "RoBERTa": masked("Roberta", "RobertaLayer", context=OWN_POSITIONS, pad_token_id=1),
    "ModernBERT": masked("ModernBert", "ModernBertEncoderLayer", **MODERN, local_attention=4),
    "DistilBERT": Family(
        make=partial(
            of_transformers,
            "DistilBertForMaskedLM",
            "DistilBertConfig",
            **{"vocab_size": 64, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
            **{"max_position_embeddings": 64, "dropout": 0, "attention_dropout": 0},
        ),
        batch=padded_text,
        blocks="TransformerBlock",
        context=False,
    ),
    "ViT": classifier("ViT", "ViTLayer", **LAYERS, **NO_DROPOUT, **PICTURES),
    "CLIP": Family(
        make=partial(
            of_transformers,
            "CLIPModel",
            "CLIPConfig",
            text_config={**SIZES, **TOKENS, "projection_dim": 16},
            vision_config={**LAYERS, **PICTURES, "projection_dim": 16},
            projection_dim=16,
        ),
        batch=pairs,
        blocks="CLIPEncoderLayer",
        context=IMAGES,
        is_divisible=False,
        own_loss=contrast,
    ),
    "DeBERTa-v2": masked(
        "DebertaV2",
        "DebertaV2Layer",
        context=OWN_BIASES,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
    ),
    "wav2vec2": Family(
        make=partial(
            of_transformers,
            "Wav2Vec2ForSequenceClassification",
            "Wav2Vec2Config",
            **{**LAYERS, "vocab_size": 64, "conv_dim": (8, 8), "conv_stride": (4, 2), "conv_kernel": (8, 3)},
            **{"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "num_labels": 3},
            **{"apply_spec_augment": False, "classifier_proj_size": 16, "layerdrop": 0},
            **{f"{name}_dropout": 0 for name in ("hidden", "attention", "feat_proj", "final", "activation")},
        ),
        batch=partial(sounds, (200,), torch.arange(4) % 3, "input_values"),
        blocks="Wav2Vec2EncoderLayer",
        context=SOUNDS,
    ),
    "Swin": classifier("Swin", "SwinStage", **PATCHES, **NO_DROPOUT, drop_path_rate=0),
    "DINOv2": classifier("Dinov2", "Dinov2Layer", **LAYERS, **NO_DROPOUT, **PICTURES, mlp_ratio=2, drop_path_rate=0),
    "Mamba": recurrent("Mamba", "MambaBlock", state_size=4),
    "Mamba-2": recurrent("Mamba2", "Mamba2Block", **HEADS_OF_MAMBA),
    "RWKV": recurrent(
        "Rwkv",
        "RwkvBlock",
        **{"attention_hidden_size": 32, "intermediate_size": 48, "context_length": 64},
        plan=columns_and_rows(
            ["rwkv.blocks.*.feed_forward.key", "head"], ["rwkv.blocks.*.feed_forward.value"], "rwkv.embeddings"
        ),
    ),
    "Mixtral": decoder("Mixtral", **GROUPED, **EXPERTS, num_local_experts=4),
    "Qwen2-MoE": decoder("Qwen2Moe", **SMALL_EXPERTS, shared_expert_intermediate_size=16),
    "Qwen3-MoE": decoder("Qwen3Moe", **SMALL_EXPERTS, head_dim=8),
    "OLMoE": decoder("Olmoe", **GROUPED, **EXPERTS, num_experts=4, num_experts_per_tok=2),
    "DeepSeek-V3": decoder("DeepseekV3", **LATENT, **EXPERTS),
    "gpt-oss": decoder(
        "GptOss", **GROUPED, **EXPERTS, num_local_experts=4, num_experts_per_tok=2, head_dim=8, sliding_window=4
    ),
    "Qwen3-Next": replace(
        decoder("Qwen3Next", **SMALL_EXPERTS, **GATED_DELTA, head_dim=8, shared_expert_intermediate_size=16),
        context=RECURRENT,
    ),
    "Jamba": replace(
        decoder("Jamba", blocks="JambaAttentionDecoderLayer JambaMambaDecoderLayer", **HYBRID),
        context=RECURRENT,
        experts="model.layers.*.feed_forward.experts",
    ),
    "LLaVA": Family(
        make=partial(
            of_transformers,
            "LlavaForConditionalGeneration",
            "LlavaConfig",
            text_config={"model_type": "llama", **SIZES, **TOKENS, **GROUPED},
            vision_config={"model_type": "clip_vision_model", **LAYERS, **PICTURES, "projection_dim": 16},
            **{"image_token_id": 63, "image_token_index": 63, "vision_feature_layer": -1, "image_seq_length": 4},
        ),
        batch=lambda: {**captioned(4), "labels": words(4, 12, seed=2)},
        blocks="CLIPEncoderLayer LlamaDecoderLayer",
        prompt=captioned(2),
        context=IMAGES,
    ),
    "DETR": Family(
        make=partial(
            of_transformers,
            "DetrForObjectDetection",
            "DetrConfig",
            **{name: value for name, value in STACKS.items() if name != "vocab_size"},
            backbone_config={"model_type": "resnet", **LEVELS, **SMALL_RESNET, "out_features": ["stage2"]},
            **{"num_queries": 5, "num_labels": 3, "attention_dropout": 0, "activation_dropout": 0},
        ),
        batch=lambda: {"pixel_values": numbers(4, 3, 32, 32)},
        blocks="DetrEncoderLayer DetrDecoderLayer",
        context=IMAGES,
        own_loss=detection,
    ),
    "ConvNeXt": classifier("ConvNext", "ConvNextStage", **LEVELS, **STAGES),
    "ResNet": classifier("ResNet", "ResNetStage", **LEVELS, **SMALL_RESNET, is_divisible=False),
    "TransformerEncoder": Family(make=Encoder, batch=text, blocks="TransformerEncoderLayer", context=True),
    "LSTM": Family(
        make=Recurrent, batch=text, blocks="LSTM", context=RECURRENT, plan=columns_and_rows(["head"], [], "embedding")
    ),
}
"""The families by name, in the order of the page."""
