"""Options for the ranks' output: how they are read, what is refused, and which stream goes where."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from ferrodist.errors import RankFailedError
from ferrodist.launch.rank_logs import JobLogs, LogOptions, StreamChoice, StreamOutput, Streams, split_filters
from ferrodist.launch.spec import LaunchSpec, ProgramKind


def spec_of(options: LogOptions, num_ranks: int) -> LaunchSpec:
    return LaunchSpec(program="json", kind=ProgramKind.MODULE, nproc_per_node=num_ranks, logs=options)


def logs_of(options: LogOptions, num_ranks: int, run_id: str = "job") -> JobLogs:
    return JobLogs(options, run_id=run_id, role="default", ranks=range(num_ranks))


ROUTES = [
    # redirects, tee, shown ranks, local rank, stream: whether it is shown, and whether it has a file
    ("0", "0", None, 1, Streams.STDOUT, True, False),
    ("3", "0", None, 1, Streams.STDERR, False, True),
    ("1", "0", None, 1, Streams.STDERR, True, False),
    ("0", "3", None, 1, Streams.STDOUT, True, True),
    ("3", "3", None, 1, Streams.STDOUT, True, True),
    ("0:1,1:2", "0", None, 1, Streams.STDERR, False, True),
    ("0:1,1:2", "0", None, 1, Streams.STDOUT, True, False),
    ("0:1,1:2", "0", None, 2, Streams.STDERR, True, False),
    ("0", "3", frozenset({0}), 1, Streams.STDOUT, False, True),
    ("0", "0", frozenset({0}), 1, Streams.STDOUT, False, False),
    ("0", "0", frozenset({0}), 0, Streams.STDOUT, True, False),
]


@pytest.mark.parametrize(("redirects", "tee", "shown_ranks", "local_rank", "stream", "is_shown", "has_file"), ROUTES)
def test_streams_go_where_the_options_say(
    tmp_path, redirects, tee, shown_ranks, local_rank, stream, is_shown, has_file
):
    """As torchrun: a redirected stream goes to its file alone, and one that is both is shown, too."""
    options = LogOptions(
        folder=tmp_path,
        redirects=StreamChoice.parse(redirects),
        tee=StreamChoice.parse(tee),
        shown_ranks=shown_ranks,
    )
    logs = logs_of(options, 3)
    with logs.attempt(0) as files:
        output = files.output(local_rank, stream)
        assert output.is_shown is is_shown
        assert output.write(b"bytes") is None
    folder = logs.folder_of(0, local_rank)
    found = [] if folder is None else [path.name for path in folder.iterdir() if path.stat().st_size]
    assert found == ([f"{stream.name.lower()}.log"] if has_file else [])


@pytest.mark.parametrize("text", ["", "4", "-1", "out", "0:4", "1:1,", "a:1", "0:1;1:2", "0:1,0:2"])
def test_streams_that_nobody_has(text):
    """A number for all ranks, or for each local rank; nothing else."""
    with pytest.raises(ValueError, match=r"must be 1 \(stdout\), 2 \(stderr\) or 3") as error:
        StreamChoice.parse(text)
    assert repr(text) in str(error.value)


def test_filters_are_split_at_single_commas():
    """Two commas are one in a text."""
    assert split_filters("apple,orange") == ("apple", "orange")
    assert split_filters("a,,b,c") == ("a,b", "c")
    assert split_filters("") == ()


def test_wrong_options(tmp_path):
    """What can't be done is refused before a rank starts."""
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ValueError, match="is a file; name a folder"):
        LogOptions(folder=file)
    for template in ("${rnk}", "$", "${"):
        with pytest.raises(ValueError, match="must have no other fields than"):
            LogOptions(prefix=template)
    options = LogOptions(tee=StreamChoice.parse("0:1,2:1"))
    with pytest.raises(ValueError, match="--tee names local rank 2, and this host has 2 ranks"):
        LaunchSpec(program="json", kind=ProgramKind.MODULE, nproc_per_node=2, logs=options)


def test_prefixes():
    """The template's fields are torchrun's."""
    options = LogOptions(prefix="${role_name}${local_rank} of $rank$$ ")
    assert options.prefix_of(5, 1, "trainer") == "trainer1 of 5$ "
    assert LogOptions().prefix_of(5, 1, "trainer") is None


def test_each_job_and_attempt_has_a_folder(tmp_path):
    """A folder that is used again keeps the files of earlier jobs; names of jobs may have any characters."""
    options = LogOptions(folder=tmp_path / "new" / "logs", tee=StreamChoice.parse("3"))
    folders = []
    for _ in range(2):
        logs = logs_of(options, 2, "a job/../x")
        assert logs.folder is not None
        assert logs.folder.parent == tmp_path / "new" / "logs"
        for number in range(2):
            with logs.attempt(number) as files:
                files.output(1, Streams.STDOUT).write(b"bytes \xff")
                error_file = files.environment(1)["TORCHELASTIC_ERROR_FILE"]
            folder = logs.folder_of(number, 1)
            assert folder is not None
            assert error_file == str(folder / "error.json")
            assert (folder / "stdout.log").read_bytes() == b"bytes \xff"
            folders.append(folder)
    assert len(set(folders)) == 4


def test_no_files_without_an_option(tmp_path, monkeypatch):
    """Nothing is made, and no variable set."""
    monkeypatch.chdir(tmp_path)
    options = LogOptions(shown_ranks=frozenset({0}))
    logs = logs_of(options, 2)
    assert logs.folder is None
    assert logs.folder_of(0, 0) is None
    with logs.attempt(0) as files:
        assert files.environment(0) == {}
        assert files.output(0, Streams.STDERR).write(b"bytes") is None
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made(tmp_path):
    """The error has the path and the reason."""
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(RankFailedError, match=r"folder of logs in .*/file/inner can't be made: Not a directory"):
        logs_of(LogOptions(folder=file / "inner"), 1)


def test_filtered_lines_have_their_prefix(tmp_path):
    """Lines with one of the texts, and no other; the prefix is not searched."""
    with (tmp_path / "filtered").open("wb", buffering=0) as file:
        output = StreamOutput(filtered=file, filters=(b"apple", b"pear"), prefix=b"pear 0> ")
        for line in (b"an apple", b"a plum", b"pears"):
            assert output.write_line(line) is None
    assert (tmp_path / "filtered").read_text() == "pear 0> an apple\npear 0> pears\n"


def test_a_file_that_takes_a_part_at_a_time(tmp_path):
    """What a write leaves is written by the next one, and an error names the file and ends the writing."""

    class SlowFile:
        name = "slow.log"

        def __init__(self, room: int) -> None:
            self.data, self.room = b"", room

        def write(self, data: memoryview) -> int:
            taken = bytes(data[: min(3, self.room - len(self.data))])
            if not taken:
                raise OSError(28, "No space left on device")
            self.data += taken
            return len(taken)

    file = SlowFile(10)
    output = StreamOutput(log=file)
    assert output.write(b"01234567") is None
    error = output.write(b"89ab")
    assert file.data == b"0123456789"
    assert str(error) == "[Errno 28] No space left on device: 'slow.log'"
    assert output.write(b"more") is None
    assert file.data == b"0123456789"


def test_the_folder_without_a_stream(tmp_path):
    """It is there for files of errors, the ranks keep a terminal, and an empty one is not named."""
    options = LogOptions(folder=tmp_path)
    assert options.has_folder
    assert not options.needs_pipes
    logs = logs_of(options, 1)
    with logs.attempt(0) as files:
        assert logs.folder_of(0, 0) is None
        Path(files.environment(0)["TORCHELASTIC_ERROR_FILE"]).touch()
        assert logs.folder_of(0, 0) is not None


def test_open_files_count_for_the_number_of_ranks(monkeypatch):
    """Each stream with a file has a descriptor in the launcher."""
    options = LogOptions(tee=StreamChoice.parse("0:3,1:1"), redirects=StreamChoice.parse("2"), stdout_filters=("x",))
    assert options.num_files(3) == 2 + 2 + 1 + 1
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (62, 62))
    assert spec_of(LogOptions(), 10).nproc_per_node == 10
    with pytest.raises(ValueError, match="--nproc-per-node 10 is more than this host allows: 3 ranks, for the limit"):
        spec_of(LogOptions(tee=StreamChoice.parse("3")), 10)
