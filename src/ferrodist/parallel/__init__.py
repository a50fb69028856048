"""Data, sharded, tensor and pipeline parallelism.

::

    ddp/                data parallelism                        module_guard.py     a wrapper's view of its module
    fsdp/               fully sharded data parallelism          module_init.py      ranks' modules compared, and made
    tensor_parallel/    layers sharded over ranks               wrapped_names.py    parameter names without wrappers
    pipeline/           stages on ranks, and microbatches       local_sgd.py        averages once in several steps
    sync_batch_norm.py  statistics over all ranks' batches
"""

__all__ = ["ddp", "fsdp", "pipeline", "tensor_parallel"]


def __dir__() -> list[str]:
    return sorted(__all__)
