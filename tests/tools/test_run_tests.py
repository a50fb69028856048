"""The runner of ``make test``: its parts cover all tests, and its summary and exit status show every failure."""

from __future__ import annotations

import pytest
import run_tests

PROGRAMS = {
    "good": "def test_passes(): pass",
    "bad": (
        "import pytest\ndef test_fails(): assert 1 == 2\n@pytest.mark.skip(reason='no GPU')\ndef test_skipped(): pass"
    ),
    "crash": "import os\ndef test_exits(): os._exit(3)",
    "segfault": (
        "import ctypes, threading\n"
        "def test_beside(): threading.Thread(target=crash).start(); threading.Event().wait()\n"
        "def crash(): ctypes.string_at(0)"
    ),
    run_tests.RUN_ALONE: "def test_fails(): assert False",
}


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """Have the runner run programs of this file, each as a part."""

    def use(*names):
        for name in names:
            (tmp_path / f"test_{name}.py").write_text(PROGRAMS[name])
        monkeypatch.setattr(run_tests, "PARTS", {name: (str(tmp_path / f"test_{name}.py"),) for name in names})
        monkeypatch.setattr(run_tests, "FOLDER", tmp_path / "build")

    return use


def test_all_paths_of_the_parts_exist():
    """The folders of a part may be renamed; what no part names is in "others"."""
    assert all((run_tests.ROOT / path).exists() for paths in run_tests.PARTS.values() for path in paths)
    ignored = [f"--ignore={path}" for name in run_tests.PARTS for path in run_tests.PARTS[name]]
    assert run_tests.arguments_of("others") == ignored


def test_programs_run_only_by_their_name(parts, capsys):
    parts("good", run_tests.RUN_ALONE)
    assert run_tests.main([]) == 0
    assert capsys.readouterr().out.endswith("\n1 passed\n")
    assert run_tests.main(["--part", run_tests.RUN_ALONE]) == 1


def test_passing_parts_give_status_0(parts, capsys):
    parts("good")
    assert run_tests.main([]) == 0
    assert capsys.readouterr().out.endswith("\n1 passed\n")


def test_failures_and_crashes_of_all_parts_are_in_one_summary(parts, capsys):
    """A part that ends without a report counts as a failure."""
    parts("good", "bad", "crash")
    assert run_tests.main([]) == 1
    out = capsys.readouterr().out
    assert out.endswith("\n1 failed, 1 passed, 1 skipped\n")
    failures = out[out.rindex("\nFailures\n") :]
    assert "test_bad.py::test_fails\n" in failures
    assert "crash ended with exit code 3\n" in failures
    assert "     1  no GPU\n" in out
    assert "assert 1 == 2" in out


def test_a_crash_of_the_interpreter_is_told_by_stack_and_test(parts, capsys):
    """The stack of the thread that crashed, and the tests that ran meanwhile; not dozens of pytest's own frames."""
    parts("segfault")
    assert run_tests.main([]) == 1
    out = capsys.readouterr().out
    crash = out[out.rindex("\n--- segfault ended with exit code -11\n") : out.rindex("\nFailures\n")]
    stack, others = crash.split("Tests in the other threads:")
    assert "Fatal Python error: Segmentation fault\nCurrent thread " in stack
    assert "in string_at\n" in stack
    assert "in crash\n" in stack
    assert "test_segfault.py" in others
    assert "in test_beside" in others
    assert "_pytest" not in crash
