"""A rank's last words tell whether another rank was the reason for its failure."""

import textwrap

import pytest

from ferrodist.launch.process_watch import is_secondary_failure

OWN = """
    Traceback (most recent call last):
      File "train.py", line 4, in <module>
        raise ValueError("bad luck")
    ValueError: bad luck
"""
LOST = """
    Traceback (most recent call last):
      File "train.py", line 5, in <module>
        fd.barrier()
    ferrodist.errors.PeerLostError: rank 1 of group 'world' has left
"""
ABORTED = """
    Traceback (most recent call last):
      File "train.py", line 5, in <module>
        fd.barrier()
    ferrodist.errors.GroupAbortedError: rank 1 aborted group 'world': its program failed with ValueError: bad luck
"""
BROKEN = """
    Traceback (most recent call last):
      File "train.py", line 9, in <module>
        loss.backward()
    ferrodist.errors.GroupAbortedError: an earlier backward of DDP on rank 1 of group 'world' ended in an error
"""
UNREACHABLE = "    ferrodist.errors.NoConnectionError: rank 2 of group 'world' can't be reached"
DIRECT = "\n    The above exception was the direct cause of the following exception:\n"
DURING = "\n    During handling of the above exception, another exception occurred:\n"
GROUP = """
      + Exception Group Traceback (most recent call last):
      |   File "train.py", line 5, in <module>
      | ExceptionGroup: several (1 sub-exception)
      +-+---------------- 1 ----------------
        | Traceback (most recent call last):
        |   File "train.py", line 5, in <module>
        | ferrodist.errors.PeerLostError: rank 1 of group 'world' has left
        +------------------------------------
"""
SOURCE_LINE = """
    Traceback (most recent call last):
      File "train.py", line 5, in <module>
        check(ferrodist.errors.PeerLostError)
    TypeError: no
"""

CASES = {
    "nothing": ("", False),
    "an error of its own": (OWN, False),
    "a lost peer": (LOST, True),
    "an abort by another": (ABORTED, True),
    "a group that another broke": (BROKEN, True),
    "no way to a rank": (UNREACHABLE, True),
    "words after it": (LOST + "    terminate called\n", True),
    "raised from a secondary failure": (LOST + DIRECT + OWN, True),
    "while a secondary failure was handled": (ABORTED + DURING + OWN, True),
    "a secondary failure after its own": (OWN + DURING + LOST, True),
    "logged, gone on, failed of itself": (LOST + OWN, False),
    "within an exception group": (GROUP, True),
    "a line of source": (SOURCE_LINE, False),
}


@pytest.mark.parametrize("case", CASES)
def test_secondary_failures(case):
    """The last exception counts, with those that it came from."""
    text, expected = CASES[case]
    lines = [line.encode() for line in textwrap.dedent(text).splitlines()]
    assert is_secondary_failure(lines, rank=0) is expected


@pytest.mark.parametrize("text", [ABORTED, BROKEN])
def test_an_abort_by_itself_is_not_secondary(text):
    """A rank that ended the group raises what the others raise, and is the reason."""
    lines = [line.encode() for line in textwrap.dedent(text).splitlines()]
    assert not is_secondary_failure(lines, rank=1)
    assert is_secondary_failure(lines, rank=11)
