"""Groups of torch's, made of ours."""

from __future__ import annotations

from ferrodist.interop.process_group import FerrodistProcessGroup
from ferrodist.testing import run_ranks


def run(program, size=2, **kwargs):
    """Run ``program(process_group)`` on each rank."""
    return run_ranks(lambda group: program(FerrodistProcessGroup(group)), size, timeout=60, **kwargs)


def test_torch_names_groups():
    """What torch calls a group is what it answers, to C++ too, whose property `group_name` is."""

    def program(made):
        made._set_group_name("pipeline")
        made._set_group_desc("stages")
        return made.group_name, made.group_desc

    assert run(program) == [("pipeline", "stages")] * 2
