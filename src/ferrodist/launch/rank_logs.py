"""Log files of the ranks' output: torchrun's ``--log-dir``, ``--redirects``, ``--tee``, filters and line prefixes."""

from __future__ import annotations

import contextlib
import enum
import os
import re
import socket
import string
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING

from ferrodist.errors import RankFailedError
from ferrodist.resource_limits import limit_text
from ferrodist.wording import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from typing_extensions import Self

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""The variable that names the file in which torch's ``record`` writes a rank's exception."""

PREFIX_VARIABLE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
"""The variable with torchrun's template of prefixes, unless an option gives one."""

_MACROS = ("role_name", "local_rank", "rank", "hostname")


class Streams(enum.Flag):
    """Output streams of a rank, numbered as in torchrun's options."""

    NONE = 0
    STDOUT = 1
    STDERR = 2
    BOTH = 3


@dataclass(frozen=True, slots=True)
class StreamChoice:
    """Streams that are chosen for each rank of this host: for all, or by local rank."""

    default: Streams = Streams.NONE
    by_local_rank: Mapping[int, Streams] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse "3", or "0:1,1:2". Raises ValueError for anything else."""
        if re.fullmatch(r"[0-3]", text):
            return cls(Streams(int(text)))
        chosen: dict[int, Streams] = {}
        for part in text.split(","):
            found = re.fullmatch(r"(\d{1,9}):([0-3])", part.strip())
            if found is None or int(found[1]) in chosen:
                raise ValueError(
                    "must be 1 (stdout), 2 (stderr) or 3 (both), or one such number for each local rank, as in 0:3,1:2;"
                    f" not {text!r}"
                )
            chosen[int(found[1])] = Streams(int(found[2]))
        return cls(by_local_rank=chosen)

    def of(self, local_rank: int) -> Streams:
        """The streams of a rank."""
        return self.by_local_rank.get(local_rank, self.default)

    @property
    def is_empty(self) -> bool:
        """True if no stream of any rank is chosen."""
        return not self.default and not any(self.by_local_rank.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions:
    """The destinations of the ranks' output; by default the launcher's streams alone.

    Args:
        folder: The folder in which the job gets one of its own; None makes a temporary one if files are wanted.
        redirects: Streams that go to a file, and not to the launcher's streams.
        tee: Streams that go to both.
        shown_ranks: Local ranks whose output goes to the launcher's streams; None is all.
        stdout_filters: Lines of standard output that contain one of these texts also go to a common file.
        stderr_filters: Texts of lines of standard error.
        prefix: A template of the prefix of lines, with ``${role_name}``, ``${local_rank}``, ``${rank}`` and
            ``${hostname}``; None is ``[rank N] ``.

    Raises:
        ValueError: The template has other fields, or the folder is a file.
    """

    folder: Path | None = None
    redirects: StreamChoice = field(default_factory=StreamChoice)
    tee: StreamChoice = field(default_factory=StreamChoice)
    shown_ranks: frozenset[int] | None = None
    stdout_filters: tuple[str, ...] = ()
    stderr_filters: tuple[str, ...] = ()
    prefix: str | None = None

    def __post_init__(self) -> None:
        with contextlib.suppress(OSError):  # `JobLogs` says why it can't be used
            if self.folder is not None and self.folder.is_file():
                raise ValueError(f"--log-dir: {self.folder} is a file; name a folder")
        if self.prefix is not None:
            try:
                string.Template(self.prefix).substitute(dict.fromkeys(_MACROS, ""))
            except (KeyError, ValueError):
                names = ", ".join(f"${{{name}}}" for name in _MACROS)
                raise ValueError(
                    f"--log-line-prefix-template {self.prefix!r} must have no other fields than {names}; $$ is a $"
                ) from None

    def check_local_ranks(self, num_ranks: int) -> None:
        """Raise ValueError if an option names a local rank that this host does not have."""
        for option, named in (
            ("--redirects", self.redirects.by_local_rank),
            ("--tee", self.tee.by_local_rank),
            ("--local-ranks-filter", self.shown_ranks or ()),
        ):
            if wrong := sorted(rank for rank in named if rank >= num_ranks):
                raise ValueError(
                    f"{option} names local rank {wrong[0]}, and this host has {counted(num_ranks, 'rank')}: they count"
                    " from 0"
                )

    @property
    def has_folder(self) -> bool:
        """True if the job has a folder of files."""
        return self.folder is not None or self._has_streams

    @property
    def needs_pipes(self) -> bool:
        """True if the ranks' output has to go through the launcher, and can't go to a terminal at once."""
        return self._has_streams or self.shown_ranks is not None or self.prefix is not None

    @property
    def _has_streams(self) -> bool:
        filters = self.stdout_filters or self.stderr_filters
        return bool(filters or not (self.redirects.is_empty and self.tee.is_empty))

    def num_files(self, num_ranks: int) -> int:
        """The number of files that are open while so many ranks run."""
        named = {*self.redirects.by_local_rank, *self.tee.by_local_rank}
        streams = [self.redirects.of(rank) | self.tee.of(rank) for rank in named]
        others = max(0, num_ranks - len(named)) * (self.redirects.default | self.tee.default).value.bit_count()
        filters = bool(self.stdout_filters) + bool(self.stderr_filters)
        return sum(each.value.bit_count() for each in streams) + others + filters

    def prefix_of(self, rank: int, local_rank: int, role: str) -> str | None:
        """The prefix of a rank's lines; None for the usual one."""
        if self.prefix is None:
            return None
        values = {"role_name": role, "local_rank": local_rank, "rank": rank, "hostname": socket.gethostname()}
        return string.Template(self.prefix).substitute(values)


def split_filters(text: str) -> tuple[str, ...]:
    """Texts of a list with commas; two commas are one in a text."""
    parts = re.split(r"(?<!,),(?!,)", text)
    return tuple(part.replace(",,", ",") for part in parts if part)


class JobLogs:
    """The folder of a job's log files: ``FOLDER/RUN_ID_XXXX/attempt_N/LOCAL_RANK``, as torchrun has it.

    Args:
        options: The options of the launch.
        run_id: The name of the job.
        role: The ranks' role.
        ranks: The ranks of this host, by local rank.

    Raises:
        RankFailedError: The folder can't be made.
    """

    def __init__(self, options: LogOptions, *, run_id: str, role: str, ranks: Sequence[int]) -> None:
        self._options, self._role, self._ranks = options, role, ranks
        self.folder: Path | None = None
        if options.has_folder:
            name = re.sub(r"[^\w.-]", "_", run_id, flags=re.ASCII)[:64]
            with _naming_path(f"the folder of logs in {options.folder or tempfile.gettempdir()}"):
                if options.folder is not None:
                    options.folder.mkdir(parents=True, exist_ok=True)
                prefix = f"{name}_" if options.folder is not None else f"ferrodist_{name}_"
                self.folder = Path(tempfile.mkdtemp(prefix=prefix, dir=options.folder)).absolute()

    def attempt(self, number: int) -> AttemptLogs:
        """Make the files of a start of all ranks of this host; the first is 0. RankFailedError: one can't be made."""
        folder = None if self.folder is None else self.folder / f"attempt_{number}"
        return AttemptLogs(self._options, folder, role=self._role, ranks=self._ranks)

    def folder_of(self, attempt: int, local_rank: int) -> Path | None:
        """The folder of a rank's files; None if it has none."""
        if self.folder is None:
            return None
        folder = self.folder / f"attempt_{attempt}" / str(local_rank)
        with contextlib.suppress(OSError):
            return folder if any(folder.iterdir()) else None
        return None


class StreamOutput:
    """The destinations of one stream of a rank.

    Args:
        is_shown: Whether to the launcher's own stream.
        log: The file for its bytes, if there is one.
        filtered: The file for lines with one of ``filters``, if there is one.
        filters: The texts.
        prefix: The prefix of lines in the filtered file.
    """

    def __init__(
        self,
        *,
        is_shown: bool = True,
        log: IO[bytes] | None = None,
        filtered: IO[bytes] | None = None,
        filters: tuple[bytes, ...] = (),
        prefix: bytes = b"",
    ) -> None:
        self.is_shown = is_shown
        self._log, self._filtered, self._filters, self._prefix = log, filtered, filters, prefix

    @property
    def is_filtered(self) -> bool:
        """True if `write_line` is to be called."""
        return self._filtered is not None

    def write(self, data: bytes) -> OSError | None:
        """Write bytes of the stream to its file; returns the error after which the file is dropped."""
        error = None if self._log is None else _write_all(self._log, data)
        self._log = None if error is not None else self._log
        return error

    def write_line(self, line: bytes) -> OSError | None:
        """Write a line of the stream to the filtered file, if it has one of the texts; returns as `write`."""
        if self._filtered is None or not any(each in line for each in self._filters):
            return None
        error = _write_all(self._filtered, self._prefix + line + b"\n")
        self._filtered = None if error is not None else self._filtered
        return error


class AttemptLogs:
    """The open log files of a start of all ranks, which the ``with`` block closes."""

    def __init__(self, options: LogOptions, folder: Path | None, *, role: str, ranks: Sequence[int]) -> None:
        self._options, self._folder = options, folder
        self._outputs: dict[tuple[int, Streams], StreamOutput] = {}
        with contextlib.ExitStack() as stack:
            filtered: dict[Streams, IO[bytes]] = {}
            for local_rank in range(len(ranks)):
                if folder is not None:
                    with _naming_path(f"the folder of logs {folder}"):
                        (folder / str(local_rank)).mkdir(parents=True)
            for stream, filters in self._filters().items():
                if filters and folder is not None:
                    filtered[stream] = stack.enter_context(_open(folder / f"filtered_{_name(stream)}.log"))
            for local_rank, rank in enumerate(ranks):
                prefix = options.prefix_of(rank, local_rank, role) or f"[rank {rank}] "
                for stream in (Streams.STDOUT, Streams.STDERR):
                    log = self._open_log(local_rank, stream, stack)
                    self._outputs[local_rank, stream] = StreamOutput(
                        is_shown=self._is_shown(local_rank, stream),
                        log=log,
                        filtered=filtered.get(stream),
                        filters=tuple(os.fsencode(each) for each in self._filters()[stream]),
                        prefix=os.fsencode(prefix),
                    )
            self._files = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._files.close()

    def environment(self, local_rank: int) -> dict[str, str]:
        """The variables by which a rank finds its files."""
        if self._folder is None:
            return {}
        return {ERROR_FILE_VARIABLE: str(self._folder / str(local_rank) / "error.json")}

    def output(self, local_rank: int, stream: Streams) -> StreamOutput:
        """The destinations of a rank's standard output or standard error."""
        return self._outputs[local_rank, stream]

    def _open_log(self, local_rank: int, stream: Streams, stack: contextlib.ExitStack) -> IO[bytes] | None:
        chosen = self._options.redirects.of(local_rank) | self._options.tee.of(local_rank)
        if self._folder is None or stream not in chosen:
            return None
        return stack.enter_context(_open(self._folder / str(local_rank) / f"{_name(stream)}.log"))

    def _is_shown(self, local_rank: int, stream: Streams) -> bool:
        options = self._options
        is_redirected = stream in options.redirects.of(local_rank) and stream not in options.tee.of(local_rank)
        return not is_redirected and (options.shown_ranks is None or local_rank in options.shown_ranks)

    def _filters(self) -> dict[Streams, tuple[str, ...]]:
        options = self._options
        return {Streams.STDOUT: options.stdout_filters, Streams.STDERR: options.stderr_filters}


def _open(path: Path) -> IO[bytes]:
    with _naming_path(f"the log file {path}"):
        return path.open("ab", buffering=0)


def _write_all(file: IO[bytes], data: bytes) -> OSError | None:
    """Write bytes to an unbuffered file, which may take a part at a time; returns the error, with the file's name."""
    view = memoryview(data)
    try:
        while view:
            view = view[file.write(view) :]
    except OSError as error:
        return OSError(error.errno, error.strerror, file.name)
    return None


@contextlib.contextmanager
def _naming_path(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RankFailedError(
            f"{what} can't be made: {limit_text(error) or error.strerror}; the ranks were not started"
        ) from error


def _name(stream: Streams) -> str:
    return "stdout" if stream is Streams.STDOUT else "stderr"
