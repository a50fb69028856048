"""Options of a DDP."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from ferrodist.arguments import check_bool

if TYPE_CHECKING:
    from ferrodist.parallel.ddp.bucket import CommHook

_MEGABYTE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """`DDP`'s keyword arguments, which are explained there; raises TypeError or ValueError if one is wrong."""

    bucket_size_mb: float
    overlap_comm: bool
    broadcast_buffers: bool
    find_unused_parameters: bool
    static_graph: bool
    gradient_as_bucket_view: bool
    comm_hook: CommHook | None

    def __post_init__(self) -> None:
        size = self.bucket_size_mb
        if isinstance(size, bool) or not isinstance(size, (int, float)):
            raise TypeError(f"bucket_size_mb must be a number, not {type(size).__name__}")
        if not size > 0:
            raise ValueError(f"bucket_size_mb must be above 0, not {size}")
        for field in fields(self):
            if field.type == "bool":  # a string, as all annotations of this module
                check_bool(field.name, getattr(self, field.name))
        if self.comm_hook is not None and not callable(self.comm_hook):
            raise TypeError(
                f"comm_hook must be a function of a bucket, not {type(self.comm_hook).__name__}: see fd.comm_hooks"
            )
        if isinstance(self.comm_hook, type):
            raise TypeError(
                f"comm_hook is the class {self.comm_hook.__name__}: pass an instance, {self.comm_hook.__name__}()"
            )

    @property
    def max_bytes(self) -> float:
        """Size limit of a bucket."""
        return self.bucket_size_mb * _MEGABYTE

    def describe(self) -> list[str]:
        """A line for each option, for comparison between ranks; a hook may have a ``describe()`` of its own."""
        lines = []
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "comm_hook" and value is not None:
                name = getattr(value, "__qualname__", type(value).__qualname__)
                value = value.describe() if callable(getattr(value, "describe", None)) else name
            lines.append(f"{field.name}={float(value) if field.name == 'bucket_size_mb' else value}")
        return lines
