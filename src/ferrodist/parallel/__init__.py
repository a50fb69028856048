"""Data, sharded, tensor, context and pipeline parallelism.

::

    ddp/                data parallelism                     module_guard.py         changes of wrapped modules
    fsdp/               fully sharded data parallelism       module_init.py          ranks' modules compared, and made
    context_parallel/   tokens sharded over ranks
    tensor_parallel/    layers sharded over ranks            transparent_wrapper.py  parameter names without wrappers
    pipeline/           stages on ranks, and microbatches    backward_hooks.py       hooks where a backward begins
    sync_batch_norm.py  statistics over all ranks' batches   parameter_claims.py     one wrapper for each parameter
    local_sgd.py        averages once in several steps
"""

__all__ = ["context_parallel", "ddp", "fsdp", "pipeline", "tensor_parallel"]


def __dir__() -> list[str]:
    return sorted(__all__)
