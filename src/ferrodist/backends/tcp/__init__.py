"""The TCP star: every rank is connected to rank 0, which relays the messages between the others."""

from ferrodist.backends.tcp.backend import TcpBackend

__all__ = ["TcpBackend"]


def __dir__() -> list[str]:
    return sorted(__all__)
