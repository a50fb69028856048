"""How a model is spread over ranks."""

__all__ = ["ddp", "fsdp", "pipeline", "tensor_parallel"]


def __dir__() -> list[str]:
    return sorted(__all__)
