"""Data, sharded, tensor and pipeline parallelism."""

__all__ = ["ddp", "fsdp", "pipeline", "tensor_parallel"]


def __dir__() -> list[str]:
    return sorted(__all__)
