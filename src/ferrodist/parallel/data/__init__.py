"""Data parallelism: every rank has the whole model and a part of each batch."""

from __future__ import annotations

from ferrodist.parallel.data.ddp import DDP

__all__ = ["DDP"]
