"""Yes, or no and why: how a server or a rendezvous answers."""

from __future__ import annotations

import msgspec

from ferrodist.errors import error_from_wire

__all__ = ["Verdict", "read_verdict"]


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    """What was decided.

    Args:
        error: The refusal as `error_to_wire` gives it; None accepts.
    """

    error: tuple[str, str, tuple[int, ...]] | None = None

    def check(self) -> None:
        """Raise the refusal, if it is one."""
        if self.error is not None:
            raise error_from_wire(*self.error)


_DECODER = msgspec.msgpack.Decoder(Verdict)


def read_verdict(data: bytes) -> Verdict:
    """Decode a verdict; msgspec.MsgspecError if it is none."""
    return _DECODER.decode(data)
