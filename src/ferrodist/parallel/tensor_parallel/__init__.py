"""Tensor parallelism: each layer is sharded over the ranks of a mesh axis.

::

    parallelize.py    a plan applied to a module       plan.py              the style of each module, by name
    styles.py         Style and the styles of layers   wrapped_forwards.py  inputs and outputs with placements
    layers.py         layers that are made sharded     async_linear.py      gathering overlapped with products
    experts.py        styles of experts                expert_forwards.py   experts' code on local tensors
    token_routing.py  tokens on their way to experts   expert_load.py       how many each expert got
    model_plan.py     a model's own plan, by names     layer_names.py      plans of models that have none
    plan_description.py     a plan as a table
    compiled_forwards.py    placements in graphs of torch.compile
    forward_wrappers.py     what wraps a module's forward, and what is inside
    gathered_method.py      methods such as generate
    local_blocks.py         blocks that compute on local tensors; local_calls.py, their layers; local_caches.py,
                            caches in them; local_modules.py, without gradients; local_forwards.py, single layers;
                            block_trials.py, trials of them; trial_queue.py, when; block_state.py, attributes
                            that change a path
    parallelize_experts.py  experts of a model whose ranks have different tokens
"""

from ferrodist.parallel.tensor_parallel.expert_load import ExpertLoad, expert_loads, update_expert_bias
from ferrodist.parallel.tensor_parallel.experts import ExpertParallel, TensorParallelExperts
from ferrodist.parallel.tensor_parallel.layers import (
    ColumnParallelLinear,
    ParallelAttention,
    ParallelEmbedding,
    RowParallelLinear,
)
from ferrodist.parallel.tensor_parallel.parallelize import parallelize
from ferrodist.parallel.tensor_parallel.parallelize_experts import parallelize_experts
from ferrodist.parallel.tensor_parallel.plan_description import describe_plan
from ferrodist.parallel.tensor_parallel.styles import (
    ColumnParallel,
    RowParallel,
    SequenceParallel,
    Style,
    VocabularyParallel,
)

__all__ = [
    "ColumnParallel",
    "ColumnParallelLinear",
    "ExpertLoad",
    "ExpertParallel",
    "ParallelAttention",
    "ParallelEmbedding",
    "RowParallel",
    "RowParallelLinear",
    "SequenceParallel",
    "Style",
    "TensorParallelExperts",
    "VocabularyParallel",
    "describe_plan",
    "expert_loads",
    "parallelize",
    "parallelize_experts",
    "update_expert_bias",
]


def __dir__() -> list[str]:
    return sorted(__all__)
