"""The launcher behind ``ferrodist run``: starts the ranks of a host, watches them, and ends them together."""

from ferrodist.launch.launcher import launch
from ferrodist.launch.spec import LaunchSpec, ProgramKind

__all__ = ["LaunchSpec", "ProgramKind", "launch"]


def __dir__() -> list[str]:
    return sorted(__all__)
