"""Pooling, padding and interpolation: each plane of pixels is independent, so batches and channels may be sharded."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from ferrodist.tensor.op_strategy import EinsumPattern, OpRule, einsum_rule, make_zeros, rule_table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ferrodist.tensor.op_strategy import LocalFunction, OpCall


def _pattern(num_spatial: int, linear: Sequence[Sequence[int]], call: OpCall) -> EinsumPattern:
    """The labels of the dims before the spatial ones, which are the same in all inputs and results."""

    def labels(shape: Sequence[int]) -> list[int | None]:
        return [dim if dim < len(shape) - num_spatial else None for dim in range(len(shape))]

    is_exact = call.inputs[0].dtype.is_floating_point  # integers are rounded, so that partial sums don't add up
    return EinsumPattern(
        inputs=[labels(spec.shape) for spec in call.inputs],
        outputs=[labels(result.shape) for result in call.results],
        linear=linear if is_exact else (),
    )


def _local_input_size(call: OpCall) -> Mapping[str, Any]:
    """The sizes of the gradient's shard, for operators to which the input's are given."""
    return {"input_size": list(call.outputs[0].local_shape)} if "input_size" in call.arguments else {}


def _empty(call: OpCall) -> LocalFunction | None:
    """Empty results on a rank without planes, which torch's kernels refuse."""
    if all(0 not in spec.local_shape for spec in call.placed_inputs):
        return None
    outputs = call.outputs

    def compute(*_: Any, **__: Any) -> Any:
        zeros = make_zeros(outputs)
        return zeros[0] if len(zeros) == 1 else zeros

    return compute


def _rule(num_spatial: int, linear: Sequence[Sequence[int]] = ((0,),)) -> OpRule:
    pattern = partial(_pattern, num_spatial, linear)
    return einsum_rule(pattern, arguments=_local_input_size, local=_empty)


RULES = rule_table(
    (
        _rule(1),
        (
            "reflection_pad1d.default reflection_pad1d_backward.default replication_pad1d.default"
            " replication_pad1d_backward.default upsample_nearest1d.default upsample_nearest1d_backward.default"
            " _upsample_nearest_exact1d.default _upsample_nearest_exact1d_backward.default upsample_linear1d.default"
            " upsample_linear1d_backward.default"
        ),
    ),
    (
        _rule(2),
        (
            "reflection_pad2d.default reflection_pad2d_backward.default replication_pad2d.default"
            " replication_pad2d_backward.default upsample_nearest2d.default upsample_nearest2d_backward.default"
            " _upsample_nearest_exact2d.default _upsample_nearest_exact2d_backward.default upsample_bilinear2d.default"
            " upsample_bilinear2d_backward.default upsample_bicubic2d.default upsample_bicubic2d_backward.default"
            " _upsample_bilinear2d_aa.default _upsample_bilinear2d_aa_backward.default _upsample_bicubic2d_aa.default"
            " _upsample_bicubic2d_aa_backward.default avg_pool2d.default avg_pool2d_backward.default"
            " _adaptive_avg_pool2d.default _adaptive_avg_pool2d_backward.default"
        ),
    ),
    (
        _rule(3),
        (
            "reflection_pad3d.default reflection_pad3d_backward.default replication_pad3d.default"
            " replication_pad3d_backward.default upsample_nearest3d.default upsample_nearest3d_backward.default"
            " _upsample_nearest_exact3d.default _upsample_nearest_exact3d_backward.default upsample_trilinear3d.default"
            " upsample_trilinear3d_backward.default avg_pool3d.default avg_pool3d_backward.default"
            " _adaptive_avg_pool3d.default _adaptive_avg_pool3d_backward.default"
        ),
    ),
    (_rule(2), "max_unpool2d.default"),
    (_rule(3), "max_unpool3d.default"),
    (_rule(2, ()), "max_pool2d_with_indices.default adaptive_max_pool2d.default"),
    (_rule(2), "max_pool2d_with_indices_backward.default adaptive_max_pool2d_backward.default"),
    (_rule(3, ()), "max_pool3d_with_indices.default adaptive_max_pool3d.default"),
    (_rule(3), "max_pool3d_with_indices_backward.default adaptive_max_pool3d_backward.default"),
)
