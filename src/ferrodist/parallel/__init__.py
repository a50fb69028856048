"""How a model is spread over ranks."""

__all__ = ["data", "pipeline", "sharded", "tensor"]


def __dir__() -> list[str]:
    return sorted(__all__)
