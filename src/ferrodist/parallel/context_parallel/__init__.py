"""Context parallelism: the tokens of a long sequence are sharded over the ranks of a mesh axis.

::

    ring.py           keys and values around a ring   block_attention.py  blocks of queries and keys, and merging
    layout.py         which rank has which tokens     blocks.py           pieces of keys, and blocks of them
    arguments.py      arguments of attention          ring_messages.py    messages around a ring
    agreement.py      ranks' calls, compared         ulysses.py          heads exchanged for tokens
    context.py        attention of whole models      batch.py            a batch of a language model
    backward.py       backward of checkpoints in it  multi_head.py       torch.nn.MultiheadAttention in it
"""

from ferrodist.parallel.context_parallel.batch import context_shard_batch
from ferrodist.parallel.context_parallel.context import context_parallel
from ferrodist.parallel.context_parallel.layout import context_shard, context_unshard
from ferrodist.parallel.context_parallel.ring import ring_attention
from ferrodist.parallel.context_parallel.ulysses import ulysses_attention

__all__ = [
    "context_parallel",
    "context_shard",
    "context_shard_batch",
    "context_unshard",
    "ring_attention",
    "ulysses_attention",
]


def __dir__() -> list[str]:
    return sorted(__all__)
