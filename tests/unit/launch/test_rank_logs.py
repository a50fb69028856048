"""Options for the ranks' output: how they are read, what is refused, and which stream goes where."""

from __future__ import annotations

import pytest

from ferrodist.errors import RankFailedError
from ferrodist.launch.rank_logs import JobLogs, LogOptions, StreamChoice, StreamOutput, Streams, split_filters
from ferrodist.launch.spec import LaunchSpec, ProgramKind

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
        redirects=StreamChoice.parse("--redirects", redirects),
        tee=StreamChoice.parse("--tee", tee),
        shown_ranks=shown_ranks,
    )
    with JobLogs(options, "job").attempt(0, 3) as files:
        output = files.output(local_rank, stream)
        assert output.is_shown is is_shown
        assert (output.log is not None) is has_file


@pytest.mark.parametrize("text", ["", "4", "-1", "out", "0:4", "1:1,", "a:1", "0:1;1:2"])
def test_streams_that_nobody_has(text):
    """A number for all ranks, or for each local rank; nothing else."""
    with pytest.raises(ValueError, match=r"--tee must be 1 \(stdout\), 2 \(stderr\) or 3") as error:
        StreamChoice.parse("--tee", text)
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
    options = LogOptions(tee=StreamChoice.parse("--tee", "0:1,2:1"))
    with pytest.raises(ValueError, match="--tee names local rank 2, and this host has 2 ranks"):
        LaunchSpec(program="json", kind=ProgramKind.MODULE, nproc_per_node=2, logs=options)


def test_prefixes():
    """The template's fields are torchrun's."""
    options = LogOptions(prefix="${role_name}${local_rank} of $rank$$ ")
    assert options.prefix_of(5, 1, "trainer") == "trainer1 of 5$ "
    assert LogOptions().prefix_of(5, 1, "trainer") is None


def test_each_job_and_attempt_has_a_folder(tmp_path):
    """A folder that is used again keeps the files of earlier jobs; names of jobs may have any characters."""
    options = LogOptions(folder=tmp_path / "new" / "logs", tee=StreamChoice.parse("--tee", "3"))
    folders = []
    for _ in range(2):
        logs = JobLogs(options, "a job/../x")
        assert logs.folder is not None
        assert logs.folder.parent == tmp_path / "new" / "logs"
        for number in range(2):
            with logs.attempt(number, 2) as files:
                files.output(1, Streams.STDOUT).write(b"bytes \xff", b"")
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
    logs = JobLogs(LogOptions(shown_ranks=frozenset({0})), "job")
    assert logs.folder is None
    assert logs.folder_of(0, 0) is None
    with logs.attempt(0, 2) as files:
        assert files.environment(0) == {}
        assert files.output(0, Streams.STDERR).log is None
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made(tmp_path):
    """The error has the path and the reason."""
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(RankFailedError, match=r"folder of logs in .*/file/inner can't be made: Not a directory"):
        JobLogs(LogOptions(folder=file / "inner"), "job")


def test_filtered_lines_have_their_prefix(tmp_path):
    """Each whole line with one of the texts, and no other."""
    with (tmp_path / "filtered").open("wb", buffering=0) as file:
        output = StreamOutput(filtered=file, filters=(b"apple", b"pear"))
        output.write(b"", b"> an apple\n> a plum\n> pears\n")
    assert (tmp_path / "filtered").read_text() == "> an apple\n> pears\n"
