"""Log files of the launcher's ranks, as processes."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

import ferrodist.launch
from ferrodist.launch import LaunchSpec, launch, rank_logs

SOURCE = Path(ferrodist.launch.__file__).parents[2]
LIMIT = 30

RANK = """
import os, sys
rank = os.environ["RANK"]
os.write(1, b"out \\xff " + rank.encode() + b"\\r\\nunfinished")
print("err", rank, file=sys.stderr)
if "fail" in sys.argv and rank == "1":
    raise KeyError("of the program")
"""


@pytest.fixture
def script(tmp_path):
    """A script that writes to both streams."""
    path = tmp_path / "rank_script.py"
    path.write_text(RANK)
    return str(path)


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("FERRODIST_", "TORCHELASTIC_"))}
    return subprocess.run(
        [sys.executable, "-m", "ferrodist", "run", *arguments],
        env={**kept, "PYTHONPATH": str(SOURCE), **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=LIMIT,
        check=False,
    )


def files_in(folder: Path) -> dict[str, bytes]:
    """The contents of all files of the only job in a folder, by their paths in it."""
    (job,) = folder.iterdir()
    return {str(path.relative_to(job)): path.read_bytes() for path in sorted(job.rglob("*")) if path.is_file()}


def test_teed_streams_are_shown_and_kept_as_they_are(script, tmp_path):
    """The files have every byte of the ranks; what is shown has prefixes and whole lines."""
    folder = tmp_path / "logs"
    done = run("--nproc-per-node", "2", "--rdzv-id", "job", "--log-dir", str(folder), "--tee", "3", script)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        line
        for rank in (b"0", b"1")
        for line in (b"[rank %b] out \xff %b" % (rank, rank), b"[rank %b] unfinished" % rank)
    ]
    assert next(folder.iterdir()).name.startswith("job_")
    assert files_in(folder) == {
        f"attempt_0/{rank}/{name}": data
        for rank in range(2)
        for name, data in (("stderr.log", b"err %d\n" % rank), ("stdout.log", b"out \xff %d\r\nunfinished" % rank))
    }


def test_a_redirected_error_is_in_the_file_and_in_the_report(script, tmp_path):
    """The report of a failure shows the end of a stream that was not shown, and says where the rest is."""
    done = run("--nproc-per-node", "2", "--log-dir", str(tmp_path / "logs"), "-r", "3", script, "fail")
    assert done.returncode == 1
    assert done.stdout == b""
    assert b"[rank" not in done.stderr
    assert b"  | KeyError: 'of the program'" in done.stderr
    files = files_in(tmp_path / "logs")
    assert b"KeyError: 'of the program'" in files["attempt_0/1/stderr.log"]
    folder = next((tmp_path / "logs").iterdir()) / "attempt_0" / "1"
    assert f"  its logs: {folder}\n".encode() in done.stderr


def test_a_restart_has_files_of_its_own(script, tmp_path):
    """What the first start wrote is kept."""
    done = run("--max-restarts", "1", "--log-dir", str(tmp_path), "-t", "2", "--nproc-per-node=2", script, "fail")
    assert done.returncode == 1
    (tmp_path / "rank_script.py").unlink()
    files = files_in(tmp_path)
    assert sorted(files) == [f"attempt_{attempt}/{rank}/stderr.log" for attempt in range(2) for rank in range(2)]
    assert b"KeyError" in files["attempt_0/1/stderr.log"]
    assert b"KeyError" in files["attempt_1/1/stderr.log"]


def test_filters_and_prefixes(script, tmp_path):
    """Only some ranks are shown; lines of all with a text go to a common file; templates come by two ways."""
    arguments = ["--nproc-per-node", "2", "--log-dir", str(tmp_path / "logs"), "--local-ranks-filter", "1"]
    template = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "${role_name}${local_rank}|"}
    done = run(*arguments, "--duplicate-stdout-filters", "out,,x,out", "--role", "r", script, **template)
    assert done.stdout == b"r1|out \xff 1\nr1|unfinished\n"
    filtered = files_in(tmp_path / "logs")["attempt_0/filtered_stdout.log"]
    assert sorted(filtered.splitlines()) == [b"r0|out \xff 0", b"r1|out \xff 1"]
    done = run("--log-line-prefix-template", "${rank}: ", script, **template)
    assert done.stdout == b"0: out \xff 0\n0: unfinished\n"


def test_a_temporary_folder_is_named(script):
    """Without --log-dir the files are in a temporary folder, and the launcher says where."""
    done = run("--tee", "1", script)
    line = done.stderr.splitlines()[0]
    assert line.startswith(b"ferrodist: logs are in ")
    folder = Path(os.fsdecode(line.removeprefix(b"ferrodist: logs are in ")))
    assert (folder / "attempt_0" / "0" / "stdout.log").read_bytes() == b"out \xff 0\r\nunfinished"


def test_a_log_file_that_cannot_be_written(script, tmp_path, capfd, monkeypatch):
    """The ranks go on and are shown; the exit code says that the output is not whole."""

    class FullFile:
        name = "full.log"

        def write(self, data: bytes) -> None:
            raise OSError(28, "No space left on device")

        def __enter__(self):
            return self

        def __exit__(self, *_error: object) -> None:
            pass

    monkeypatch.setattr(rank_logs, "_open", lambda _path: FullFile())
    monkeypatch.setenv("PYTHONPATH", str(SOURCE))
    choice = rank_logs.StreamChoice.parse("1")
    spec = LaunchSpec(program=script, logs=rank_logs.LogOptions(folder=tmp_path / "logs", tee=choice))
    assert launch(spec) == 1
    shown = capfd.readouterr()
    assert "unfinished" in shown.out
    assert "the output of the ranks is not whole: [Errno 28] No space left on device: 'full.log'" in shown.err


def test_an_error_of_an_earlier_start_counts(script, tmp_path):
    """A file that was cut before the restart is not whole, though the job succeeded."""
    path = tmp_path / "restarted.py"
    path.write_text(
        "import os, sys\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    os.write(1, b'a' * 3000)\n"
        "    sys.exit(3)\n"
    )
    command = [sys.executable, "-m", "ferrodist", "run", "--max-restarts", "1", "-r", "1"]
    shell = f"ulimit -f 1; {' '.join(command)} --log-dir {tmp_path / 'logs'} {path}"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(["bash", "-c", shell], env=environment, capture_output=True, timeout=LIMIT, check=False)
    assert done.returncode == 1, done.stderr
    assert b"the output of the ranks is not whole: [Errno 27] File too large: '" in done.stderr
    assert files_in(tmp_path / "logs")["attempt_0/0/stdout.log"] == b"a" * 1024


def test_filters_see_lines_and_not_what_is_shown(tmp_path):
    """On a terminal a prompt is shown before its line ends, in colours; the file has the line, without them."""
    path = tmp_path / "prompt.py"
    path.write_text("import time\nprint('loss: ', end='', flush=True)\ntime.sleep(0.5)\nprint('0.5')\nprint('rank')\n")
    controller, terminal = pty.openpty()
    command = [sys.executable, "-m", "ferrodist", "run", "--duplicate-stdout-filters", "loss,0]"]
    with subprocess.Popen(
        [*command, "--log-dir", str(tmp_path / "logs"), str(path)],
        env={**os.environ, "PYTHONPATH": str(SOURCE), "TERM": "xterm"},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
    ) as launcher:
        os.close(terminal)
        shown = b""
        with contextlib.suppress(OSError):  # the terminal's end
            while data := os.read(controller, 4096):
                shown += data
        assert launcher.wait(LIMIT) == 0
    os.close(controller)
    assert b"\x1b[" in shown
    assert files_in(tmp_path / "logs")["attempt_0/filtered_stdout.log"] == b"[rank 0] loss: 0.5\n"
