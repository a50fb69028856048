"""Ranks as a grid: `DeviceMesh`."""

from __future__ import annotations

from ferrodist.mesh.device_mesh import DeviceMesh

__all__ = ["DeviceMesh"]


def __dir__() -> list[str]:
    return sorted(__all__)
