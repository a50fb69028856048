"""The ferrodist command: parsing, usage errors, and what it must not import."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ferrodist.launch
from ferrodist.cli import main as cli
from ferrodist.cli.main import build_parser, main
from ferrodist.launch import host_limits, options
from ferrodist.launch.options import spec_from_arguments
from ferrodist.launch.spec import LaunchSpec, ProgramKind

SOURCE = Path(ferrodist.launch.__file__).parents[2]


def parse(*arguments: str) -> LaunchSpec:
    return spec_from_arguments(build_parser().parse_args(["run", *arguments]))


def test_defaults():
    """A script alone is one rank on one host without restarts."""
    spec = parse(__file__)
    assert (spec.nproc_per_node, spec.nnodes, spec.max_restarts, spec.timeout_before_kill) == (1, 1, 0, 5.0)
    assert (spec.master_addr, spec.master_port, spec.kind) == (None, None, ProgramKind.SCRIPT)


@pytest.mark.parametrize("separator", ["-", "_"])
def test_hyphens_and_underscores(monkeypatch, separator):
    """Both of torchrun's spellings are accepted for every option."""
    monkeypatch.setenv("FERRODIST_SECRET", "s")
    options = {
        "nproc-per-node": "4",
        "nnodes": "2",
        "node-rank": "1",
        "master-addr": "host0",
        "master-port": "29400",
        "max-restarts": "3",
        "timeout-before-kill": "1.5",
        "rdzv-id": "job7",
    }
    words = [word for name, value in options.items() for word in ("--" + name.replace("-", separator), value)]
    spec = parse(*words, "-m", "pkg.mod")
    assert (spec.nproc_per_node, spec.nnodes, spec.node_rank) == (4, 2, 1)
    assert (spec.master_addr, spec.master_port, spec.max_restarts) == ("host0", 29400, 3)
    assert (spec.timeout_before_kill, spec.run_id, spec.kind) == (1.5, "job7", ProgramKind.MODULE)


@pytest.mark.parametrize(
    "rest",
    [
        ["--nproc-per-node", "9", "-m", "--", "-x"],
        ["--", "--help"],
        ["--help", "--version", "-h"],
        ["", "two words", "-", "-5", "--m=1", "@file"],
        ["run", "secret"],
    ],
)
def test_arguments_of_the_program_are_left_alone(rest):
    """Everything after the program belongs to it, also what looks like our own options."""
    spec = parse("--nproc-per-node", "2", __file__, *rest)
    assert spec.nproc_per_node == 2
    assert spec.arguments == tuple(rest)
    assert parse("-m", "mod", *rest).arguments == tuple(rest)
    assert parse("--", __file__, *rest).arguments == tuple(rest)


@pytest.mark.parametrize("word", ["auto", "cpu"])
def test_a_rank_for_each_usable_core(word, monkeypatch):
    """torchrun's words for the number of ranks mean the usable cores."""
    monkeypatch.setattr(options, "usable_cores", lambda: 7)
    assert parse("--nproc-per-node", word, __file__).nproc_per_node == 7


@pytest.mark.parametrize("backend", ["c10d", "static"])
def test_the_rendezvous_backends_of_torchrun_are_accepted(backend):
    """Both name what ferrodist does anyway, so they change nothing."""
    assert parse("--rdzv-backend", backend, "--nnodes", "1:1", __file__) == parse(__file__)
    assert parse("--rdzv_backend", backend, __file__) == parse(__file__)


@pytest.mark.parametrize("option", ["--monitor-interval=5", "--start_method=spawn", "--event-log-handler=null"])
def test_settings_of_torchruns_own_work_change_nothing(option):
    """Command lines written for torchrun run as they are where what they set is of no use here."""
    assert parse(option, __file__) == parse(__file__)


def test_a_script_whose_name_looks_like_an_option(tmp_path, monkeypatch):
    """Python is given a path that it can't take for an option of its own."""
    monkeypatch.chdir(tmp_path)
    Path("-c").touch()
    assert parse("--", "-c", "print(1)").command()[1:] == ("./-c", "print(1)")


def test_a_wrong_timeout_of_the_environment_is_told_before_ranks_start(monkeypatch, capsys):
    """Once, and not by every rank; an option stands before it."""
    monkeypatch.setenv("FERRODIST_TIMEOUT", "soon")
    with pytest.raises(SystemExit):
        main(["run", __file__])
    assert "FERRODIST_TIMEOUT must be a number of seconds above 0" in capsys.readouterr().err
    assert parse("--timeout", "5", __file__).timeout == 5.0


def test_endpoint_is_address_and_port():
    """--rdzv-endpoint stands for both halves of the address."""
    spec = parse("--rdzv-endpoint", "[::1]:29400", __file__)
    assert (spec.master_addr, spec.master_port) == ("::1", 29400)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: COMMAND"),
        (["nonsense"], "invalid choice"),
        (["run"], "required: program"),
        (["run", "--"], "program"),
        (["run", "--nproc-per-node", "two", __file__], "invalid value: 'two'; give a number, or auto"),
        (["run", "--nproc-per-node", "0", __file__], "--nproc-per-node must be 1 or more"),
        (["run", "--nproc-per-node", "gpu", __file__], "auto or cpu for one rank on each usable core"),
        (["run", "--nproc-per-node", "100000000", __file__], "more than this host allows: 47 ranks"),
        (["run", "--nproc-per-node", "9" * 5000, __file__], "invalid value"),
        (["run", "--nnodes", "0", __file__], "--nnodes must be 1 or more, not 0"),
        (["run", "--node-rank", "1", __file__], "--node-rank 1 is not one of the 1 host; leave it out"),
        (
            ["run", "--node-rank", "-1", "--nnodes", "3", __file__],
            "--node-rank -1 is not one of the 3 hosts; give 0 to 2",
        ),
        (["run", "--master-port", "0", __file__], "--master-port must be 1 to 65535, not 0"),
        (["run", "--master-port", "1e3", __file__], "invalid int value: '1e3'"),
        (["run", "--master-addr", "", __file__], "--master-addr must name a host"),
        (
            ["run", "--rdzv-endpoint", "host:99999", __file__],
            "--rdzv-endpoint must have a port of 1 to 65535, not 99999",
        ),
        (["run", "--rdzv-endpoint", "host:" + "9" * 5000, __file__], "--rdzv-endpoint must have a port"),
        (["run", "--max-restarts", "-1", __file__], "--max-restarts must be 0 or more, not -1"),
        (["run", "--timeout", "0", __file__], "--timeout must be a number of seconds above 0, not 0"),
        (["run", "--timeout", "nan", __file__], "--timeout must be a number of seconds above 0, not nan"),
        (["run", "--timeout-before-kill", "-1", __file__], "--timeout-before-kill must be 0 or more seconds, not -1"),
        (["run", "--timeout-before-kill", "nan", __file__], "--timeout-before-kill must be 0 or more seconds, not nan"),
        (["run", "--timeout-before-kill", "soon", __file__], "invalid float value: 'soon'"),
        (["demo", "--ranks", "48"], "--ranks 48 is more than this host allows: 47 ranks"),
        (["run", "--nnodes", "1:2", __file__], "1:2 is an elastic range"),
        (["run", "--nnodes", "x", __file__], "invalid value: 'x'"),
        (["run", "--rdzv-backend", "etcd", __file__], "there is no 'etcd'"),
        (
            ["run", "--nproc", "2", __file__],
            "ferrodist run: unrecognized arguments: --nproc; is it --nproc-per-node? (see 'ferrodist run",
        ),
        (["run", "--log-dir", __file__, __file__], "is a file; name a folder"),
        (["run", "--logs-specs", "x", __file__], "--logs-specs is an option of torchrun's: --log-dir, --redirects and"),
        (["run", "--logs_specs=x", __file__], "--logs_specs is an option of torchrun's"),
        (["run", "-t", "4", __file__], "argument --tee/-t: must be 1 (stdout), 2 (stderr) or 3 (both)"),
        (["run", "-r", "1:3", __file__], "--redirects names local rank 1, and this host has 1 rank"),
        (["run", "--local-ranks-filter", "0,x", __file__], "invalid value: '0,x'; give local ranks with commas"),
        (["run", "--log-line-prefix-template", "${x}", __file__], "must have no other fields than ${role_name}"),
        (["run", "--signals-to-handle", "SIGTERM,TERM", __file__], "there is no signal 'TERM'; give names as SIGTERM"),
        (["run", "--signals-to-handle", "SIGKILL", __file__], "SIGKILL can't end the ranks; leave it out"),
        (["run", "--run-path", "-m", "json"], "--module and --run-path exclude each other"),
        (["run", "--mpi", "mpiexec", "--tee", "3", __file__], "go with --mpi pmi: mpiexec carries its ranks' output"),
        (["run", "--mpi", "mpiexec", "--role", "x", __file__], "--role and --signals-to-handle go with --mpi pmi"),
        (["run", "--rdzv-conf", "timeout=900", __file__], "--timeout S is ours"),
        (["run", "no/such.py"], "there is no script 'no/such.py'"),
        (["run", "--no-python", "-m", "sh"], "exclude each other"),
        (["run", "--standalone", "--nnodes", "2", __file__], "--standalone is for one host"),
        (["run", "--rdzv-endpoint", "host", __file__], "must be HOST:PORT"),
        (["run", "--rdzv-endpoint", "a:1", "--master-addr", "b", __file__], "give one or the other"),
        (["run", "--nnodes", "2", __file__], "need --node-rank"),
        (
            ["run", "--nnodes=2", "--node-rank=0", "--master-addr=a", "--master-port=1", __file__],
            "set FERRODIST_SECRET",
        ),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(arguments, message, capsys, monkeypatch):
    """Wrong usage says in one line what to do, and starts nothing."""
    monkeypatch.delenv("FERRODIST_SECRET", raising=False)
    monkeypatch.setattr(host_limits, "rank_limit", lambda _num_files: (47, "open files"))
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert message in shown.err
    assert shown.err.count("\n") == 1


def test_secret_prints_a_new_secret(capsys):
    """Each call prints another one, alone on its line."""
    assert main(["secret"]) == 0
    assert main(["secret"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first != second
    assert len(first) >= 32


def test_version(capsys):
    """--version prints the name and exits with 0."""
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out.startswith("ferrodist ")


@pytest.mark.parametrize("command", ["secret", "--version", "run --help"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("pipe without a reader", ""),
        pytest.param(
            "full device",
            "No space left",
            marks=pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full"),
        ),
        ("closed", "is closed"),
    ],
)
def test_output_that_cannot_be_written(kind, message, unbuffered, command):
    """A closed pipe is silent, another failure is one line; neither is a traceback nor a success."""
    options = {}
    read_end, write_end = os.pipe()
    os.close(read_end)
    if kind == "full device":
        os.dup2(full := os.open("/dev/full", os.O_WRONLY), write_end)
        os.close(full)
    elif kind == "closed":
        options["preexec_fn"] = lambda: os.close(1)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "ferrodist", *command.split()],
            env={**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONUNBUFFERED": unbuffered},
            stdout=write_end,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            **options,
        )
    finally:
        os.close(write_end)
    assert done.returncode == 1
    assert message in done.stderr
    assert done.stderr.count("\n") == bool(message)


@pytest.mark.parametrize(("arguments", "code"), [(["nonsense"], 2), (["run", "no/such.py"], 2), (["secret"], 1)])
def test_both_streams_closed(arguments, code):
    """If neither stream can be written, the exit code is the same."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        [sys.executable, "-m", "ferrodist", *arguments],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        stdout=write_end,
        stderr=write_end,
        check=False,
    )
    os.close(write_end)
    assert done.returncode == code


def test_an_interrupt_is_130(monkeypatch, capsys):
    """Ctrl-C in a command that does not handle it gives a shell's exit code and no traceback."""

    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "make_secret", interrupt)
    assert main(["secret"]) == 130
    assert capsys.readouterr() == ("", "")


def test_the_launcher_starts_without_torch():
    """Neither the command line nor the launcher imports torch."""
    code = "import sys, ferrodist.cli.main; ferrodist.cli.main.build_parser(); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(SOURCE)}, check=True)


@pytest.mark.parametrize("command", [["--print-completion"], ["run", "--print_completion"]])
def test_completion_in_bash(command, tmp_path):
    """The script completes commands, their options, and names of files."""
    pytest.importorskip("shtab")
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    script = tmp_path / "completion.sh"
    with script.open("w") as file, contextlib.redirect_stdout(file), pytest.raises(SystemExit) as exit_:
        main([*command, "bash"])
    assert exit_.value.code == 0
    (tmp_path / "train.py").touch()

    def complete(*words: str) -> list[str]:
        program = f"source {script}; COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}"
        program += '; _shtab_ferrodist; printf "%s\\n" "${COMPREPLY[@]}"'
        done = subprocess.run(["bash", "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.split()

    assert complete("ferrodist", "do") == ["doctor"]
    assert "--log-line-prefix-template" in complete("ferrodist", "run", "--log-l")
    assert complete("ferrodist", "run", "tr") == ["train.py"]


def test_completion_without_its_package(capsys, monkeypatch):
    """The message says what to install."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(SystemExit) as exit_:
        main(["--print-completion", "zsh"])
    assert exit_.value.code == 2
    assert "--print-completion needs shtab, which is not installed here: " in capsys.readouterr().err
