"""Fully sharded data parallelism: every rank has a shard of the model and a share of each batch.

::

    fsdp.py            FSDP, the wrapper                        config.py            dtypes, sharding strategies
    init.py            units made, with rank 0's values         wrap.py              the modules that become units
    scheduler.py       hooks: what to gather, free, reduce      backward_plan.py     the backward's order, as data
    unit.py            Unit, gathered and reduced together      flat_param.py        its parameters and gradients
    flat_layout.py     offsets of parameters and shards         flat_memory.py       shared memory of one host
    shard_tensors.py   shards as tensors, for torch's norms     dtensor_params.py    parameters that are DTensors
    clip_grad.py       norms of sharded gradients               state_dict.py        the model's state dict
    layout_ids.py      ids that tell layouts apart              optim_state_dict.py  the optimizer's state dict
    forward_methods.py methods such as generate                 method_rounds.py     gathers that ranks agree on in them
"""

from ferrodist.parallel.fsdp.config import MixedPrecision, ShardingStrategy
from ferrodist.parallel.fsdp.forward_methods import join_forward_method, register_forward_method
from ferrodist.parallel.fsdp.fsdp import FSDP
from ferrodist.parallel.fsdp.wrap import by_class, by_size

__all__ = [
    "FSDP",
    "MixedPrecision",
    "ShardingStrategy",
    "by_class",
    "by_size",
    "join_forward_method",
    "register_forward_method",
]


def __dir__() -> list[str]:
    return sorted(__all__)
