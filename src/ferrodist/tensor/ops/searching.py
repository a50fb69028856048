"""Searches in sorted or other small tensors, whose values may be sharded, and samples of images at any positions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ferrodist.tensor.op_strategy import EinsumPattern, OpRule, all_replicated, einsum_rule, rule_table
from ferrodist.tensor.spec import DTensorSpec

if TYPE_CHECKING:
    from ferrodist.tensor.op_strategy import OpCall


def _search_in_second(call: OpCall) -> EinsumPattern:
    """Each element of the first input by itself, in all of the second."""
    values, *searched = call.inputs
    labels = range(values.ndim)
    return EinsumPattern(inputs=[labels, *[[None] * one.ndim for one in searched]], outputs=[labels])


def _search_sorted(call: OpCall) -> EinsumPattern:
    """Each value in the sequence of its row, or in the only sequence."""
    sequence, values = call["sorted_sequence"], call.arguments["self"]
    rows: list[Any] = [*range(sequence.ndim - 1)]
    sequences = [[*rows, None]] * (len(call.inputs) - 1)
    if not isinstance(values, DTensorSpec):
        return EinsumPattern(inputs=[[None] * one.ndim for one in call.inputs], outputs=[[None] * call.results[0].ndim])
    labels = list(range(values.ndim)) if values.ndim else []
    if sequence.ndim == 1:
        sequences = [[None]] * (len(call.inputs) - 1)
    return EinsumPattern(inputs=[sequences[0], labels, *sequences[1:]], outputs=[labels])


def _take(call: OpCall) -> EinsumPattern:
    spec, index = call.inputs
    return EinsumPattern(inputs=[[None] * spec.ndim, range(index.ndim)], outputs=[range(index.ndim)], linear=((0,),))


def _grid_sample(call: OpCall) -> EinsumPattern:
    image, grid = call.inputs
    space: list[Any] = [None] * (image.ndim - 2)
    return EinsumPattern(
        inputs=[["n", "c", *space], ["n", *[None] * (grid.ndim - 1)]], outputs=[["n", "c", *space]], linear=((0,),)
    )


def _grid_sample_backward(call: OpCall) -> EinsumPattern:
    def labels(ndim: int) -> list[Any]:
        return ["n", *[None] * (ndim - 1)]

    return EinsumPattern(
        inputs=[labels(spec.ndim) for spec in call.inputs], outputs=[labels(result.ndim) for result in call.results]
    )


RULES = rule_table(
    (einsum_rule(_search_in_second), "bucketize.Tensor isin.Tensor_Tensor isin.Tensor_Scalar"),
    (einsum_rule(_search_sorted), "searchsorted.Tensor"),
    (einsum_rule(_take), "take.default"),
    (einsum_rule(_grid_sample), "grid_sampler_2d.default grid_sampler_3d.default"),
    (einsum_rule(_grid_sample_backward), "grid_sampler_2d_backward.default grid_sampler_3d_backward.default"),
    (
        OpRule(strategies=all_replicated),
        (
            "put.default _unsafe_masked_index.default"
            " _unsafe_masked_index_put_accumulate.default segment_reduce.default _segment_reduce_backward.default"
            " isin.Scalar_Tensor nonzero_static.default"
            " linspace.Tensor_Tensor linspace.Tensor_Scalar linspace.Scalar_Tensor logspace.Tensor_Tensor"
            " logspace.Tensor_Scalar logspace.Scalar_Tensor"
        ),
    ),
)
