"""The error tree: what it promises to callers, to pickles and to the drawing at its top."""

import inspect
import pickle
import re

import pytest

import ferrodist as fd
from ferrodist import errors
from ferrodist.errors import DistributedError, error_from_wire, error_to_wire, ranks_text
from ferrodist.testing import run_ranks


def kinds():
    """Every class of the tree."""

    def below(kind):
        yield kind
        for child in kind.__subclasses__():
            yield from below(child)

    return [kind for kind in below(DistributedError) if kind.__module__ == errors.__name__]


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.__name__)
def test_crosses_processes_whole(kind):
    """A pickled error comes back with class, message, ranks and whatever was set on it."""
    error = kind("rank 3 said no", ranks=(3,))
    error.detail = {"elapsed": 1.5}
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is kind
    assert (str(back), back.message, back.ranks, back.rank, back.detail) == (
        "rank 3 said no",
        "rank 3 said no",
        (3,),
        3,
        {"elapsed": 1.5},
    )


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.__name__)
def test_crosses_the_wire(kind):
    """The triple that codecs carry rebuilds the same error."""
    back = error_from_wire(*error_to_wire(kind("late", ranks=(1, 2))))
    assert (type(back), back.message, back.ranks) == (kind, "late", (1, 2))
    assert back.rank is None


def test_unknown_class_on_the_wire_is_the_base():
    """A name that is not in the tree never resolves to anything else, whatever a peer sends."""
    for name in ("SystemExit", "os.system", "", "KeyError"):
        assert type(error_from_wire(name, "x", ())) is DistributedError


def test_foreign_errors_keep_their_name_on_the_wire():
    """An error that is not ours is told as text, with its class."""
    assert error_to_wire(ZeroDivisionError("by zero")) == ("DistributedError", "ZeroDivisionError: by zero", ())


@pytest.mark.parametrize("kind", [fd.PeerLostError, ValueError])
def test_what_utf8_cannot_carry_becomes_an_escape(kind):
    """A message with a file name that is no text can be sent; the rest of it is as it was."""
    _, message, _ = error_to_wire(kind("can't read caf\udce9 \u00e9.png"))
    assert message.endswith("can't read caf\\udce9 \u00e9.png")
    assert message.encode()


@pytest.mark.parametrize(("ranks", "text"), [((3,), "rank 3"), ([1, 3], "ranks 1, 3"), ({0}, "rank 0")])
def test_ranks_are_named_alike(ranks, text):
    """One rank or several, in words for a message."""
    assert ranks_text(ranks) == text


def test_drawing_is_the_tree():
    """The tree at the top of the module names every class, with the builtin it is also an instance of."""
    drawn = dict(re.findall(r"^    [|`]-- (\w+) *(?:\((\w+)\))?", inspect.getdoc(errors), re.MULTILINE))
    actual = {
        kind.__name__: next((b.__name__ for b in (ValueError, TypeError, TimeoutError) if issubclass(kind, b)), "")
        for kind in kinds()
        if kind is not DistributedError
    }
    assert drawn == actual


def test_everything_public_is_exported():
    """``__all__`` names every class of the tree."""
    assert {kind.__name__ for kind in kinds()} <= set(errors.__all__)


class JobError(fd.PeerLostError):
    """A user's own kind, with another signature."""

    def __init__(self, code):
        super().__init__(f"job error {code}", ranks=(code,))
        self.code = code


def test_subclasses_with_their_own_signature_work():
    """A user's subclass pickles, can be raised again, and reaches other ranks as the nearest class they know."""
    for error in (pickle.loads(pickle.dumps(JobError(3))), JobError(3).fresh()):
        assert (type(error), error.code, error.ranks, str(error)) == (JobError, 3, (3,), "job error 3")
    assert error_to_wire(JobError(3)) == ("PeerLostError", "job error 3", (3,))
    assert type(error_from_wire("JobError", "x", ())) is DistributedError

    def program(group):
        if group.rank == 1:
            group.abort(JobError(1))
        with pytest.raises(fd.PeerLostError, match="job error 1"):
            group.barrier()

    run_ranks(program, 2)
    run_ranks(program, 2, backend="tcp-threads")


def test_raising_again_keeps_no_frames():
    """A failed group that raises thousands of times does not pile up tracebacks."""

    def program(group):
        group.abort("over")
        lengths = []
        for _ in range(100):
            with pytest.raises(fd.GroupAbortedError) as caught:
                group.barrier()
            lengths.append(len(caught.traceback))
        assert lengths[-1] == lengths[0]

    run_ranks(program, 1)
