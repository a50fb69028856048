"""Plans of models that have none of their own, by the usual names of their blocks' linear layers.

Attention and feed-forward layers are sharded as in M. Shoeybi et al., "Megatron-LM", 2019, embeddings and
language-model heads by the vocabulary. A layer that is found by mistake costs messages, and no result: placements
decide where something is computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from ferrodist.parallel.tensor_parallel.styles import ColumnParallel, RowParallel, Style, VocabularyParallel
from ferrodist.tensor.placement import Replicate, Shard
from ferrodist.transformers_models import is_transformers_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


def _names(*lines: str) -> list[list[str]]:
    return [line.split() for line in lines]


_QUERY_KEY_VALUE = _names(
    "q_proj k_proj v_proj",
    "query key value",
    "q k v",
    "query_proj key_proj value_proj",
    "q_lin k_lin v_lin",
    "linear_q linear_k linear_v",
    "q_head k_head v_head",
    "Wq Wk Wv",
    "query_key_value",  # each head's queries, keys and values are together
    "c_attn",
    "qkv",
    "qkv_proj",
    "Wqkv",
)
"""Layers of an attention, all of which it has; one alone is fused."""

_FUSED_IN_BLOCKS = ("c_attn", "qkv", "qkv_proj", "Wqkv")

_ATTENTION_OUTPUTS = _names("o_proj out_proj o c_proj out_lin linear_out dense Wo proj projection post_proj output")[0]
"""The layer behind an attention, in the module of its queries; in BERT and models like it in the module around that."""

_FEED_FORWARD = _names(
    "gate_proj up_proj down_proj",
    "up_proj down_proj",
    "gate_up_proj down_proj",
    "proj_up_gate proj_up proj_down",
    "fc1 fc2",
    "mlp.fc1 mlp.fc2",
    "fc_in fc_out",
    "c_fc c_proj",
    "dense_h_to_4h dense_4h_to_h",
    "intermediate.dense output.dense",
    "intermediate_dense output_dense",
    "intermediate output",
    "lin1 lin2",
    "linear1 linear2",
    "linear_1 linear_2",
    "layer_1 layer_2",
    "dense1 dense2",
    "pwconv1 pwconv2",
    "ffn ffn_output",
    "wi wo",
    "wi_0 wi_1 wo",
    "Wi Wo",
    "w1 w3 w2",
    "w1 w2",
)
"""Layers of a feed-forward network; the last one leads back."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """A linear layer, or one of transformers' class `Conv1D`, whose weight is transposed: (C, O)."""

    module: nn.Module

    @property
    def is_transposed(self) -> bool:
        return not isinstance(self.module, nn.Linear)

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of features out and in."""
        weight = self.module.weight
        assert isinstance(weight, torch.Tensor)
        rows, columns = weight.shape
        return (columns, rows) if self.is_transposed else (rows, columns)

    def column_style(self, blocks: int = 1) -> Style:
        """The style by outputs, of which there may be several equal blocks."""
        if not self.is_transposed:
            return ColumnParallel(blocks=blocks)
        return Style(
            parameters={"weight": Shard(1, blocks=blocks), "bias": Shard(0, blocks=blocks)},
            wanted=Replicate(),
            outputs=Shard(-1, blocks=blocks),
        )

    def row_style(self) -> Style:
        """The style by inputs."""
        if not self.is_transposed:
            return RowParallel()
        return Style(parameters={"weight": Shard(0)}, wanted=Shard(-1), outputs=Replicate())


def _find_layer(module: nn.Module, name: str) -> _Layer | None:
    try:
        found = module.get_submodule(name)
    except AttributeError:
        return None
    is_layer = isinstance(found, nn.Linear) or type(found).__name__ == "Conv1D"
    return _Layer(found) if is_layer else None


def _find_layers(module: nn.Module, names: Sequence[str]) -> list[_Layer] | None:
    """The layers of some names; None unless the module has all of them."""
    found = [one for one in (_find_layer(module, name) for name in names) if one is not None]
    return found if len(found) == len(names) else None


def _attention(module: nn.Module, around: nn.Module | None) -> Iterator[tuple[nn.Module, Style]]:
    """The styles of an attention's layers; none for another module."""
    for names in _QUERY_KEY_VALUE:
        layers = _find_layers(module, names)
        if layers is None:
            continue
        candidates = [(module, name) for name in _ATTENTION_OUTPUTS]
        candidates += [] if around is None else [(around, "output.dense"), (around, "output")]
        output = next((one for candidate in candidates if (one := _find_layer(*candidate)) is not None), None)
        if output is None:
            continue
        for layer in layers:
            outputs, inputs = layer.shape
            is_in_blocks = names[0] in _FUSED_IN_BLOCKS and outputs == 3 * inputs
            yield layer.module, layer.column_style(3 if is_in_blocks else 1)
        yield output.module, output.row_style()


def _feed_forward(module: nn.Module) -> Iterator[tuple[nn.Module, Style]]:
    """The styles of the layers of a feed-forward network; none for another module."""
    for names in _feed_forward_names(module):
        layers = _find_layers(module, names)
        if layers is None:
            continue
        *first, last = layers
        inner = last.shape[1]
        if inner and all(layer.shape[0] % inner == 0 for layer in first):  # a gate may be fused with what it gates
            for layer in first:
                yield layer.module, layer.column_style(layer.shape[0] // inner)
            yield last.module, last.row_style()


def _feed_forward_names(module: nn.Module) -> list[list[str]]:
    if not isinstance(module, nn.Sequential):
        return _FEED_FORWARD
    names = [name for name, child in module.named_children() if any(True for _ in child.parameters())]
    return [names] if len(names) == 2 else []


def plan_by_names(model: nn.Module) -> dict[str, Style]:
    """The styles of the layers in a model's lists of blocks, and of its embedding and its head.

    By the paths of modules; of a module with several paths, the first.
    """
    modules = dict(model.named_modules())
    styles: dict[nn.Module, Style] = {}
    for path, module in modules.items():
        if not any(part.isdecimal() for part in path.split(".")):
            continue
        around = modules.get(path.rpartition(".")[0])
        for layer, style in (*_attention(module, around), *_feed_forward(module)):
            styles.setdefault(layer, style)
    paths = {module: path for path, module in modules.items()}
    plan = {paths[layer]: style for layer, style in styles.items()}
    return {**_embedding_and_head(paths), **plan}


def _embedding_and_head(paths: Mapping[nn.Module, str]) -> dict[str, Style]:
    """The styles of the token embeddings and the heads that models of transformers, and models in these, name."""
    found: dict[str, Style] = {}
    for module in filter(is_transformers_model, paths):
        for getter, kind, style in (
            ("get_input_embeddings", nn.Embedding, VocabularyParallel()),
            ("get_output_embeddings", nn.Linear, ColumnParallel(outputs=Replicate())),
        ):
            try:
                end = getattr(module, getter)()
            except (AttributeError, NotImplementedError):
                continue  # a model without
            if isinstance(end, kind) and end in paths:
                found.setdefault(paths[end], style)
    return found
