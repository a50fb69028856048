"""Carry the ranks' output to the launcher's own streams, one prefixed line at a time.

What a command says: on standard output, and on standard error, which may be full, closed, or without a reader.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import select
import sys
import time
from collections import deque
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from _typeshed import SupportsWrite


def say(text: str, file: SupportsWrite[str] | None = None) -> None:
    """Write to a file, by default standard output. Raises OSError when that is closed, or does not take it."""
    file = file or sys.stdout
    if file is None:
        raise OSError(errno.EBADF, "standard output is closed")
    file.write(text)


def print_warning(text: str) -> None:
    """Write whole lines to standard error, if they can be written: never a reason to fail."""
    if sys.stderr is None:  # started with standard error closed
        return
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        discard(sys.stderr)


def discard(stream: IO[str] | None) -> None:
    """Let what is left in the stream's buffer, which the interpreter will flush at exit, go nowhere."""
    if stream is None:
        return
    with contextlib.suppress(OSError):  # a stream without a descriptor: nothing to do
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)


LONGEST_LINE = 64 * 1024
"""Bytes after which a line without an end is cut, so that no rank can fill the launcher's memory."""

REDRAW_INTERVAL = 1.0
"""Seconds between two shown states of a progress bar."""

PROMPT_SECONDS = 0.1
"""How long a line may stay without an end before it is shown as a prompt, where prompts are."""

TAIL_LINES = 20
"""Lines of standard error kept for the failure report."""

_READ_SIZE = 64 * 1024
_LARGEST_PIPE = 1024 * 1024  # /proc/sys/fs/pipe-max-size; a fresh pipe holds 64 KiB
# After poll() says that a pipe is writable, this much goes in without blocking: POSIX promises atomic writes
# up to it.
_WRITE_SIZE = select.PIPE_BUF

# A line's end, or a carriage return that does not belong to one: the sign of a progress bar. A carriage
# return at the end of the data is neither yet. Runs of carriage returns are made one first, or the search for
# an end would take quadratic time.
_RETURNS = re.compile(rb"\r+")
_LINE_END = re.compile(rb"\r?\n|\r(?=[^\n])")
_COLOURS = (36, 33, 32, 35, 34, 31)


def rank_prefix(rank: int, *, colour: bool) -> bytes:
    """``[rank 3] ``, in a colour of the rank's own if asked."""
    label = f"[rank {rank}]"
    if colour:
        label = f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{label}\x1b[0m"
    return label.encode() + b" "


class LinePrefixer:
    r"""Turns one stream of bytes into whole prefixed lines; how the stream was cut up makes no difference.

    Bytes are passed on as they are, whatever their encoding. ``\r\n`` becomes ``\n``. Text that ends in a
    lone ``\r`` is a state of a progress bar, which a terminal would overwrite: it becomes a line of its own,
    at most one every `REDRAW_INTERVAL`, and those between are dropped. The last state, which ends in a
    newline or the stream's end, is always kept. Lines longer than `LONGEST_LINE` are cut into several.

    Args:
        prefix: Put before each line.
        clock: Where the time comes from, for progress bars.
    """

    def __init__(self, prefix: bytes, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.tail: deque[bytes] = deque(maxlen=TAIL_LINES)
        self._prefix = prefix
        self._clock = clock
        self._partial = bytearray()
        self._last_redraw = -math.inf
        self._is_redrawing = False
        self._num_shown = 0  # bytes of the partial line that `take_prompt` gave
        self._last_fed = -math.inf

    def feed(self, data: bytes) -> bytes:
        """Add bytes of the stream; returns the lines they completed, each with prefix and newline."""
        lines: list[bytes] = []
        self._last_fed = self._clock()
        if b"\n" in data or b"\r" in data or self._partial.endswith(b"\r"):
            text, start = _RETURNS.sub(b"\r", bytes(self._partial) + data), 0
            for match in _LINE_END.finditer(text):
                self._add(lines, text[start : match.start()], redraw=not match[0].endswith(b"\n"))
                start = match.end()
            self._partial[:] = text[start:]
        else:
            self._partial += data
        body_size = len(self._partial) - self._partial.endswith(b"\r")
        while body_size > LONGEST_LINE:
            self._emit(lines, bytes(self._partial[:LONGEST_LINE]))
            del self._partial[:LONGEST_LINE]
            body_size -= LONGEST_LINE
        return b"".join(lines)

    def flush(self) -> bytes:
        """End the stream; returns its last line if that had no newline."""
        lines: list[bytes] = []
        body = bytes(self._partial).rstrip(b"\r")
        if body:
            self._add(lines, body, redraw=False)
        self._partial.clear()
        return b"".join(lines)

    def seconds_to_prompt(self) -> float:
        """Seconds until `take_prompt` has something to give; infinity while it has not."""
        if len(self._partial) == self._num_shown or self._is_redrawing or b"\r" in self._partial:
            return math.inf
        return max(0.0, self._last_fed + PROMPT_SECONDS - self._clock())

    def take_prompt(self) -> bytes:
        """What the line that has no end yet has gained, if nothing followed for a while.

        What comes after it has a prefix again: most often somebody has typed an answer, with the end of that line.
        """
        if self.seconds_to_prompt() > 0:
            return b""
        text = bytes(self._partial[self._num_shown :])
        self._num_shown = len(self._partial)
        return self._prefix + text

    def interrupt_prompt(self) -> bytes:
        """The end of a line that `take_prompt` began, before another stream's; it will be given again."""
        end = b"\n" if self._num_shown else b""
        self._num_shown = 0
        return end

    def _add(self, lines: list[bytes], text: bytes, *, redraw: bool) -> None:
        self._is_redrawing = redraw
        while len(text) > LONGEST_LINE:
            self._emit(lines, text[:LONGEST_LINE])
            text = text[LONGEST_LINE:]
        if redraw:
            now = self._clock()
            if not self._num_shown and (not text or now - self._last_redraw < REDRAW_INTERVAL):
                return
            self._last_redraw = now
        self._emit(lines, text)

    def _emit(self, lines: list[bytes], text: bytes) -> None:
        self.tail.append(text)
        rest = text[self._num_shown :]
        lines.append(self._prefix + rest + b"\n" if rest or not self._num_shown else b"\n")
        self._num_shown = 0


@dataclass(frozen=True, slots=True)
class _Route:
    prefixer: LinePrefixer
    sink: int
    prompts: bool


class OutputPump:
    """Moves bytes from the ranks' pipes to the sinks, within the launcher's event loop and never blocking it.

    All sinks share one queue. Only its head is written, so a line is finished before another begins, even
    when standard output and standard error are the same terminal. While anything waits there nothing is read:
    a reader that pauses (``| less``) pauses the ranks, as it would without a launcher, and memory stays
    bounded.

    Sources are closed by the pump. Sinks are not; one that can't be written any more is dropped, and the ranks go on.
    """

    def __init__(self) -> None:
        self._routes: dict[int, _Route] = {}
        self._queue: deque[tuple[int, memoryview]] = deque()
        self._gone: set[int] = set()
        self._prompter: _Route | None = None  # the last one with prompts that said something
        self.error: OSError | None = None
        """Why a sink was dropped, if it was not because its reader had left."""

    def add(self, source: int, sink: int, prefixer: LinePrefixer, *, prompts: bool = False) -> None:
        """Carry what arrives at ``source`` to ``sink``; takes ownership of ``source``.

        With ``prompts`` the sink is a terminal at which somebody answers whoever writes to the source.
        """
        self._routes[source] = _Route(prefixer, sink, prompts)

    @property
    def sources(self) -> frozenset[int]:
        """Descriptors to wait on for reading; none while earlier output still waits to be written."""
        return frozenset() if self._queue else frozenset(self._routes)

    @property
    def blocked_sink(self) -> int | None:
        """Descriptor to wait on for writing, if output waits."""
        return self._queue[0][0] if self._queue else None

    @property
    def at_end(self) -> bool:
        """Whether every source has ended (what they sent may still wait to be written)."""
        return not self._routes

    def read(self, sources: Iterable[int]) -> None:
        """Read once from each of these sources, which must be readable."""
        for source in sources:
            if source in self._routes:
                self._read_one(source)

    def seconds_to_prompt(self) -> float:
        """Seconds until `show_prompt` has something to do; infinity while it has not."""
        return math.inf if self._prompter is None or self._queue else self._prompter.prefixer.seconds_to_prompt()

    def show_prompt(self) -> None:
        """Queue the line that has no end yet, where somebody may be waiting for it."""
        if self._prompter is not None and not self._queue:
            data = self._prompter.prefixer.take_prompt()
            if data:
                self._queue.append((self._prompter.sink, memoryview(data)))

    def write(self) -> None:
        """Write what the sinks accept now."""
        while self._queue:
            sink, data = self._queue[0]
            if sink not in self._gone:
                if not _is_writable(sink):
                    return
                try:
                    data = data[os.write(sink, data[:_WRITE_SIZE]) :]
                except BlockingIOError:  # a sink that somebody else made non-blocking
                    return
                except OSError as error:
                    self._gone.add(sink)
                    if error.errno not in (errno.EPIPE, errno.EIO):  # the latter from a terminal
                        self.error = self.error or error
            if data and sink not in self._gone:
                self._queue[0] = (sink, data)
            else:
                self._queue.popleft()

    def read_rest(self) -> None:
        """Read what the sources hold now and close them: nobody whom we wait for writes any more."""
        for source in list(self._routes):
            self._read_held(source)
            if source in self._routes:
                self._end(source)

    def catch_up(self, prefixer: LinePrefixer) -> None:
        """Read what a source holds now, also while earlier output waits: its writer has ended, and it is wanted."""
        for source, route in list(self._routes.items()):
            if route.prefixer is prefixer:
                self._read_held(source)

    def close(self) -> None:
        """Close the sources and forget what was not written."""
        for source in self._routes:
            os.close(source)
        self._routes.clear()
        self._queue.clear()

    def _read_held(self, source: int) -> None:
        # No pipe holds more than this, so a process that escaped and writes for ever cannot keep us here.
        for _ in range(_LARGEST_PIPE // _READ_SIZE):
            if source in self._routes and _is_readable(source):
                self._read_one(source)

    def _read_one(self, source: int) -> None:
        data = os.read(source, _READ_SIZE)
        if data:
            route = self._routes[source]
            if route.prompts and route is not self._prompter:
                self._interrupt_prompt()
                self._prompter = route
            self._enqueue(route, route.prefixer.feed(data))
        else:
            self._end(source)

    def _end(self, source: int) -> None:
        route = self._routes.pop(source)
        self._enqueue(route, route.prefixer.flush())
        if route is self._prompter:
            self._prompter = None
        os.close(source)

    def _enqueue(self, route: _Route, data: bytes) -> None:
        if not data:
            return
        if route is not self._prompter:
            self._interrupt_prompt()
        self._queue.append((route.sink, memoryview(data)))

    def _interrupt_prompt(self) -> None:
        if self._prompter is not None:
            end = self._prompter.prefixer.interrupt_prompt()
            if end:
                self._queue.append((self._prompter.sink, memoryview(end)))


def _is_writable(descriptor: int) -> bool:
    poller = select.poll()
    poller.register(descriptor, select.POLLOUT)
    return bool(poller.poll(0))


def _is_readable(descriptor: int) -> bool:
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(0))
