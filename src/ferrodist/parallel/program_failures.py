"""Reports of a program's failure on some ranks to the other ranks of a collective step."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from ferrodist.backends.signature import FAILED_PROGRAM, MAX_PAYLOAD
from ferrodist.collectives.engines.host import share_bytes
from ferrodist.errors import DistributedError, describe_error, to_utf8

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ferrodist.backends.base import Backend

_MEETING_SECONDS = 10.0  # the wait for ranks that may have failed alike


def report_failure(group: Backend, where: str, error: Exception, *, ends_with_it: Iterable[Backend] = ()) -> None:
    """Let the other ranks know of an error of the program, which this rank then raises.

    Every rank on which it failed calls this. If all did, they meet here, and the group stays usable. Else the group
    ends: the others raise RankFailedError, which says where and how it failed, in the collective that they are in or
    call next, within 10 s; and the groups ``ends_with_it`` end, too. A group that has failed already stays as it is.
    """
    if group.world_size > 1 and group.failure is None:
        text = to_utf8(f"{where}: {describe_error(error)}").encode()[:MAX_PAYLOAD]
        with contextlib.suppress(DistributedError):
            share_bytes(group, FAILED_PROGRAM, text, min(group.timeout, _MEETING_SECONDS))
    failure = group.failure
    for other in ends_with_it:
        if failure is not None and other.failure is None:
            other.abort(failure)
