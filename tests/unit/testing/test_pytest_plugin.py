"""The pytest plugin: tests that run as every rank."""

import subprocess
import sys
from importlib.metadata import entry_points

import pytest

# A pytest in this process forgets the modules that it was the first to import, and numpy can't be imported twice.
import ferrodist.backends.process_group
import ferrodist.testing.process_ranks
import ferrodist.testing.ranks  # noqa: F401
from ferrodist.backends.native import NativeBackend
from ferrodist.testing import RANKS_BACKENDS

INSTALLED = any(entry.name == "ferrodist" for entry in entry_points(group="pytest11"))
# The import hook of an editable installation is loaded before pytest, which warns that it can't rewrite it.
EDITABLE = "ignore:Module already imported so cannot be rewritten; _editable:pytest.PytestAssertRewriteWarning"
PLUGIN = [] if INSTALLED else ["-p", "ferrodist.testing.pytest_plugin"]


@pytest.fixture
def run(pytester):
    """Run the given test module in a pytest of its own, in this process, with warnings as errors."""

    def run(source, *args):
        pytester.makepyfile(source)
        return pytester.runpytest_inprocess(*PLUGIN, "-W", "error", "-W", EDITABLE, "--strict-markers", *args)

    return run


@pytest.mark.ranks(3)
def test_marker_works_here(group):
    """The marker works in this very test run."""
    group.barrier()
    assert group.world_size == 3


@pytest.mark.parametrize("backend", ["simulated", "tcp", "tcp-threads"])
def test_body_runs_on_every_rank(run, backend):
    """Every rank runs the body with its own group, which also is the default group."""
    result = run(
        f"""
        import os, pytest
        from ferrodist.backends.process_group import default_group

        @pytest.mark.ranks(3, backend={backend!r})
        def test_ranks(group, tmp_path):
            assert default_group() is group
            (tmp_path / str(group.rank)).touch()
            group.barrier()
            assert sorted(os.listdir(tmp_path)) == ["0", "1", "2"]
        """
    )
    result.assert_outcomes(passed=1)


def test_fixtures_and_parameters_work(run):
    """Fixtures are set up once for all ranks, beside parameters, in classes, wherever the group stands."""
    result = run(
        """
        import pytest

        set_up = []

        @pytest.fixture
        def number():
            set_up.append(1)
            yield 42
            set_up.append(-1)

        class TestRanks:
            @pytest.mark.ranks(2)
            @pytest.mark.parametrize("factor", [1, 2])
            def test_ranks(self, number, group, factor):
                assert number * factor in (42, 84)
                assert sum(set_up) == 1

        def test_after():
            assert set_up == [1, -1] * 2
        """
    )
    result.assert_outcomes(passed=3)


@pytest.mark.parametrize("backend", ["simulated", "tcp"])
def test_failures_are_readable(run, backend):
    """A failing rank shows its traceback with the rewritten assertion, and none of what ran it."""
    result = run(
        """
        import pytest

        @pytest.mark.ranks(3)
        def test_ranks(group):
            values = [1, 2, group.rank]
            if group.rank == 1:
                assert values == [1, 2, 3]
            group.barrier()
        """,
        f"--ranks-backend={backend}",
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "rank 1 of 3 failed: AssertionError: assert *1, 2, 1* == *1, 2, 3*",
            "-------- rank 1 --------",
            "*assert values == [[]1, 2, 3]",
            "*At index 2 diff: 1 != 3",
            "as a consequence:",
            "*rank 0: GroupAbortedError: *",
            "FAILED *test_ranks - rank 1 of 3 failed: *",
        ]
    )
    result.stdout.no_fnmatch_line("*supervision.py*")
    result.stdout.no_fnmatch_line("*rank_program.py*")


def test_option_overrides_the_default_only(run):
    """``--ranks-backend`` is for tests whose marker names no backend."""
    source = """
        import os, pytest

        parent = os.getpid()

        @pytest.mark.ranks(2)
        def test_default(group):
            assert os.getpid() != parent

        @pytest.mark.ranks(2, backend="simulated")
        def test_named(group):
            assert os.getpid() == parent
        """
    run(source, "--ranks-backend=tcp").assert_outcomes(passed=2)


def test_output_of_a_failing_process_is_shown(run):
    """What a rank printed before it failed is in pytest's report, though the rank is a process."""
    result = run(
        """
        import pytest

        @pytest.mark.ranks(2, backend="tcp")
        def test_ranks(group):
            print("printed by", group.rank)
            assert group.rank == 0
        """,
        "--capture=fd",
    )
    result.stdout.fnmatch_lines_random(["printed by 0", "printed by 1"])


def test_skips_and_expected_failures_work(run):
    """`pytest.skip`, `pytest.xfail` and the xfail marker in a rank mean what they mean elsewhere."""
    result = run(
        """
        import pytest

        @pytest.mark.ranks(2)
        def test_skips(group):
            pytest.skip("not here")

        @pytest.mark.ranks(2, backend="tcp")
        def test_skips_in_processes(group):
            pytest.skip("not here")

        @pytest.mark.ranks(2)
        def test_xfails(group):
            pytest.xfail("known")

        @pytest.mark.ranks(2)
        @pytest.mark.xfail(strict=True)
        def test_marked(group):
            assert group.rank == 0
        """
    )
    result.assert_outcomes(skipped=2, xfailed=2)


def test_group_without_the_marker_is_explained(run):
    """A test that takes ``group`` and has no marker fails with what to do."""
    result = run("def test_ranks(group): pass")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*needs the marker: @pytest.mark.ranks(world_size)*"])


def test_marker_without_group_is_explained(run):
    """A marked test that does not take ``group`` fails with what to do."""
    result = run("import pytest\n@pytest.mark.ranks(2)\ndef test_ranks(): pass")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*must take the argument 'group'*"])


def test_a_fixture_of_the_users_own_called_group_goes_on(run):
    """A project's own fixture ``group`` hides the plugin's in tests without the marker, and not in those with it."""
    result = run(
        """
        import pytest

        @pytest.fixture
        def group():
            return "mine"

        def test_mine(group):
            assert group == "mine"

        @pytest.mark.ranks(2)
        def test_ranks(group):
            assert group.world_size == 2
        """
    )
    result.assert_outcomes(passed=2)


def test_unknown_backend_is_explained(run):
    """A backend that there is not fails the test with those that there are."""
    result = run("import pytest\n@pytest.mark.ranks(2, backend='smoke')\ndef test_ranks(group): pass")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*simulated, tcp, tcp-threads, native, * gloo-threads, not 'smoke'*"])


def test_wrong_markers_are_explained(run):
    """One sentence says what the marker takes, without the traceback of the library."""
    wrong = {
        "[1, 2, 3]": "takes one number of ranks, not [[]1, 2, 3]: *pytest.param(n, marks=pytest.mark.ranks(n))*",
        "range(1, 4)": "takes one number of ranks, not range(1, 4): *",
        "": "takes (world_size, backend=None, timeout=60), not ()",
        "2, time=3": "takes (world_size, backend=None, timeout=60), not (2, time=3)",
        "0": "takes a number of ranks, of 1 or more, not 0",
        "'2'": "takes a number of ranks, of 1 or more, not '2'",
        "2, timeout='long'": "takes as timeout a number of seconds, not 'long'",
    }
    tests = [f"@pytest.mark.ranks({each})\ndef test_{n}(group): pass" for n, each in enumerate(wrong)]
    result = run("\n".join(["import pytest", *tests]))
    result.assert_outcomes(failed=len(wrong))
    result.stdout.fnmatch_lines([f"the marker ranks {sentence}" for sentence in wrong.values()])
    result.stdout.no_fnmatch_line("*Traceback*")
    result.stdout.no_fnmatch_line("*another exception occurred*")


def test_an_async_test_does_not_pass_without_running(run):
    """Ranks call the test's body; of one that is async they would get a coroutine, which nobody runs."""
    result = run("import pytest\n@pytest.mark.ranks(2)\nasync def test_ranks(group): assert False")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*this one is async; call asyncio.run in it*"])


def test_a_marker_for_each_parameter_gives_several_world_sizes(run):
    """The way that the error shows for several numbers of ranks works."""
    result = run(
        """
        import pytest

        @pytest.mark.parametrize('n', [pytest.param(n, marks=pytest.mark.ranks(n)) for n in [1, 2, 3]])
        def test_ranks(group, n):
            assert group.world_size == n
        """
    )
    result.assert_outcomes(passed=3)


@pytest.mark.parametrize("backend", RANKS_BACKENDS)
def test_every_backend_by_option(run, backend):
    """What `run_ranks` takes as a name, the option takes too."""
    result = run(
        f"""
        import pytest

        @pytest.mark.ranks(2)
        def test_ranks(group):
            group.barrier()
            assert type(group).__name__.removesuffix("Backend").lower() == {backend.removesuffix("-threads")!r}
        """,
        f"--ranks-backend={backend}",
    )
    result.assert_outcomes(passed=1)


@pytest.mark.ranks(2, "native-threads")
def test_other_backends_by_marker(group):
    """The marker takes the same names, in the place that its help gives them."""
    assert type(group) is NativeBackend


def test_a_function_that_makes_groups(run):
    """A backend of one's own is tested by the marker as by `run_ranks`."""
    result = run(
        """
        import pytest
        from ferrodist.backends.simulated import SimulatedBackend

        @pytest.mark.ranks(2, backend=lambda n: SimulatedBackend.create_group(n, name="mine"))
        def test_ranks(group):
            assert group.name == "mine"
        """
    )
    result.assert_outcomes(passed=1)


def test_importing_the_plugin_is_cheap():
    """pytest imports the plugin at every start, so that must not bring torch, numpy or the backends."""
    code = "import sys, ferrodist.testing.pytest_plugin; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    loaded = set(done.stdout.split())
    assert loaded.isdisjoint({"torch", "numpy", "msgspec", "ferrodist.backends", "ferrodist.testing.ranks"})
