"""The star: every rank is connected to rank 0, which passes on what ranks say to each other."""

from ferrodist.backends.tcp.backend import TcpBackend

__all__ = ["TcpBackend"]


def __dir__() -> list[str]:
    return sorted(__all__)
