"""The handle of a group on a rank that is not in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ferrodist.backends.base import Backend
from ferrodist.errors import InvalidRankError, ranks_text
from ferrodist.wording import with_article

if TYPE_CHECKING:
    from typing_extensions import Self


class NonMemberGroup:
    """A group that this rank is not in: the result of `new_group` on the ranks outside.

    Only members make its calls. Functions that take a group refuse this one with `InvalidRankError`, and so do its own
    methods and properties other than the following. Its truth value is false.

    Args:
        parent: The group that the members were taken from.
        members: The members, as ranks of ``parent``.
    """

    is_member: Literal[False] = False
    """False: this rank is not in the group. True for every `Backend`."""

    def __init__(self, parent: Backend, members: tuple[int, ...]) -> None:
        self._parent = parent
        self._members = members

    @property
    def parent(self) -> Backend:
        """The group that the members were taken from."""
        return self._parent

    @property
    def members(self) -> tuple[int, ...]:
        """The members, as ranks of the parent, in the group's order."""
        return self._members

    @property
    def name(self) -> str:
        """The group's name in error messages."""
        return f"{self._parent.name}{list(self._members)}"

    def close(self, timeout: float | None = None) -> None:
        """Do nothing: there is nothing to leave. Programs may close a group on all ranks."""

    def refusal(self) -> InvalidRankError:
        """The error of every call that needs a member."""
        parent = self._parent
        return InvalidRankError(
            f"rank {parent.rank} of group {parent.name!r} is not in group {self.name!r}, which has"
            f" {ranks_text(self._members)} of {parent.name!r}: only members make its calls;"
            " put them below `if group.is_member:`",
            ranks=(parent.rank,),
        )

    def __getattr__(self, name: str) -> Any:
        """Refuse the attributes of a member's handle; private names are missing."""
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        raise self.refusal()

    def __bool__(self) -> Literal[False]:
        return False

    def __reduce_ex__(self, protocol: object) -> Any:
        """Refuse to be pickled: the parent belongs to this process."""
        name = with_article(type(self).__name__)
        raise TypeError(f"{name} is not pickled: make it anew where it is needed, by new_group()")

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        """Return the same handle: its parent belongs to this process."""
        return self

    def __repr__(self) -> str:
        members, rank = list(self._members), self._parent.rank
        return f"{type(self).__name__}(name={self.name!r}, members={members}, rank_outside={rank})"


def check_group(group: object) -> Backend:
    """Return the user's argument; InvalidRankError if this rank is not in that group, TypeError if it is no group."""
    if isinstance(group, Backend):
        return group
    if isinstance(group, NonMemberGroup):
        raise group.refusal()
    kind = type(group).__name__
    hint = ": pass ferrodist.torch_backend.group_of(group)" if kind.endswith("ProcessGroup") else ""
    raise TypeError(f"group must be a ferrodist Backend or None, not {kind}{hint}")
