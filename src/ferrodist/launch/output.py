"""Forwarding of the ranks' output to the launcher's own streams, one prefixed line at a time."""

from __future__ import annotations

import errno
import math
import os
import re
import select
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ferrodist.launch.rank_logs import StreamOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


MAX_LINE_BYTES = 64 * 1024
"""The size from which an unfinished line is cut, so that no rank can fill the launcher's memory."""

REDRAW_INTERVAL = 1.0  # seconds between two shown states of a progress bar

PROMPT_DELAY = 0.1  # seconds after which an unfinished line is shown as a prompt, on terminals

TAIL_LINES = 20  # the number of lines of standard error kept for the failure report

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
    """Return ``[rank 3] ``, optionally in a colour of the rank's own."""
    label = f"[rank {rank}]"
    if colour:
        label = f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{label}\x1b[0m"
    return label.encode() + b" "


class LinePrefixer:
    r"""Splits a stream of bytes into prefixed lines, however the stream arrives.

    Bytes are passed on unchanged, whatever their encoding. ``\r\n`` becomes ``\n``. Text that ends in a lone ``\r`` is
    a state of a progress bar, which a terminal would overwrite: it becomes a line of its own, at most one every
    `REDRAW_INTERVAL`, and those between are dropped. The last state, which ends in a newline or at the end of the
    stream, is always kept. Lines longer than `MAX_LINE_BYTES` are split.

    Args:
        prefix: The prefix of each line.
        clock: The clock for progress bars, in seconds.
    """

    def __init__(self, prefix: bytes, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.tail: deque[bytes] = deque(maxlen=TAIL_LINES)
        self._prefix = prefix
        self._clock = clock
        self._partial = bytearray()
        self._last_redraw = -math.inf
        self._is_redrawing = False
        self._num_prompted = 0  # bytes of the partial line that `take_prompt` gave
        self._last_fed = -math.inf

    def feed(self, data: bytes) -> bytes:
        """Add bytes of the stream, and return the completed lines with prefix and newline."""
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
        while body_size > MAX_LINE_BYTES:
            self._emit(lines, bytes(self._partial[:MAX_LINE_BYTES]))
            del self._partial[:MAX_LINE_BYTES]
            body_size -= MAX_LINE_BYTES
        return b"".join(lines)

    def flush(self) -> bytes:
        """End the stream, and return its last line if that had no newline."""
        lines: list[bytes] = []
        body = bytes(self._partial).rstrip(b"\r")
        if body:
            self._add(lines, body, redraw=False)
        self._partial.clear()
        return b"".join(lines)

    def seconds_to_prompt(self) -> float:
        """Return the seconds until `take_prompt` has text; infinity without any."""
        if len(self._partial) == self._num_prompted or self._is_redrawing or b"\r" in self._partial:
            return math.inf
        return max(0.0, self._last_fed + PROMPT_DELAY - self._clock())

    def take_prompt(self) -> bytes:
        """Return the new text of an unfinished line if nothing followed it for a while.

        Text after it gets a prefix again: usually a user has typed an answer, which ended the line.
        """
        if self.seconds_to_prompt() > 0:
            return b""
        text = bytes(self._partial[self._num_prompted :])
        self._num_prompted = len(self._partial)
        return self._prefix + text

    def interrupt_prompt(self) -> bytes:
        """Return the newline that ends a prompt before another stream's output; the prompt will be shown again."""
        end = b"\n" if self._num_prompted else b""
        self._num_prompted = 0
        return end

    def _add(self, lines: list[bytes], text: bytes, *, redraw: bool) -> None:
        self._is_redrawing = redraw
        while len(text) > MAX_LINE_BYTES:
            self._emit(lines, text[:MAX_LINE_BYTES])
            text = text[MAX_LINE_BYTES:]
        if redraw:
            now = self._clock()
            if not self._num_prompted and (not text or now - self._last_redraw < REDRAW_INTERVAL):
                return
            self._last_redraw = now
        self._emit(lines, text)

    def _emit(self, lines: list[bytes], text: bytes) -> None:
        self.tail.append(text)
        rest = text[self._num_prompted :]
        lines.append(self._prefix + rest + b"\n" if rest or not self._num_prompted else b"\n")
        self._num_prompted = 0


@dataclass(frozen=True, slots=True)
class _Route:
    prefixer: LinePrefixer
    sink: int
    prompts: bool
    output: StreamOutput
    lines: LinePrefixer | None  # of the stream as it is, if they are filtered


class OutputPump:
    """Moves bytes from the ranks' pipes to the sinks, in the launcher's event loop and without blocking it.

    All sinks share one queue. Only its head is written, so that a line is finished before another begins, even if
    standard output and standard error are the same terminal. While output waits nothing is read: a reader that pauses
    (``| less``) pauses the ranks, as it would without a launcher, and memory stays bounded.

    The pump closes its sources, but not its sinks. A sink that fails is dropped, and the ranks continue.
    """

    def __init__(self) -> None:
        self._routes: dict[int, _Route] = {}
        self._queue: deque[tuple[int, memoryview]] = deque()
        self._closed_sinks: set[int] = set()
        self._prompter: _Route | None = None  # the one that wrote last, of those that may show a prompt
        self.error: OSError | None = None
        """The error for which a sink or a log file was dropped, unless a sink's reader had closed it."""

    def add(
        self,
        source: int,
        sink: int,
        prefixer: LinePrefixer,
        *,
        prompts: bool = False,
        output: StreamOutput | None = None,
    ) -> None:
        """Own and forward ``source`` to ``sink``: with ``prompts``, a terminal where a user answers its writer.

        ``output`` says whether the sink gets it, and which files do; None is the sink alone.
        """
        output = StreamOutput() if output is None else output
        lines = LinePrefixer(b"") if output.is_filtered else None
        self._routes[source] = _Route(prefixer, sink, prompts and output.is_shown, output, lines)

    @property
    def sources(self) -> frozenset[int]:
        """Descriptors to poll for reading; empty while earlier output waits to be written."""
        return frozenset() if self._queue else frozenset(self._routes)

    @property
    def blocked_sink(self) -> int | None:
        """The descriptor to poll for writing, if output waits."""
        return self._queue[0][0] if self._queue else None

    @property
    def at_end(self) -> bool:
        """True once every source has ended; their output may still wait to be written."""
        return not self._routes

    def read(self, sources: Iterable[int]) -> None:
        """Read once from each of these readable sources."""
        for source in sources:
            if source in self._routes:
                self._read_one(source)

    def seconds_to_prompt(self) -> float:
        """Return the seconds until `show_prompt` has text; infinity without any."""
        return math.inf if self._prompter is None or self._queue else self._prompter.prefixer.seconds_to_prompt()

    def show_prompt(self) -> None:
        """Queue an unfinished line that may be a prompt."""
        if self._prompter is not None and not self._queue:
            data = self._prompter.prefixer.take_prompt()
            if data:
                self._queue.append((self._prompter.sink, memoryview(data)))

    def write(self) -> None:
        """Write what the sinks accept now."""
        while self._queue:
            sink, data = self._queue[0]
            if sink not in self._closed_sinks:
                if not _is_ready(sink, select.POLLOUT):
                    return
                try:
                    data = data[os.write(sink, data[:_WRITE_SIZE]) :]
                except BlockingIOError:  # a sink that somebody else made non-blocking
                    return
                except OSError as error:
                    self._closed_sinks.add(sink)
                    if error.errno not in (errno.EPIPE, errno.EIO):  # the latter from a terminal
                        self.error = self.error or error
            if data and sink not in self._closed_sinks:
                self._queue[0] = (sink, data)
            else:
                self._queue.popleft()

    def read_rest(self) -> None:
        """Read the remaining data of all sources and close them; their writers have ended."""
        for source in list(self._routes):
            self._read_available(source)
            if source in self._routes:
                self._end(source)

    def catch_up(self, prefixer: LinePrefixer) -> None:
        """Read a source's remaining data, also while earlier output waits; its writer has ended."""
        for source, route in list(self._routes.items()):
            if route.prefixer is prefixer:
                self._read_available(source)

    def close(self) -> None:
        """Close the sources and drop unwritten output."""
        for source in self._routes:
            os.close(source)
        self._routes.clear()
        self._queue.clear()

    def _read_available(self, source: int) -> None:
        # A pipe holds no more, so that an escaped process that never stops writing can't block the launcher.
        for _ in range(_LARGEST_PIPE // _READ_SIZE):
            if source in self._routes and _is_ready(source, select.POLLIN):
                self._read_one(source)

    def _read_one(self, source: int) -> None:
        data = os.read(source, _READ_SIZE)
        if data:
            route = self._routes[source]
            if route.prompts and route is not self._prompter:
                self._interrupt_prompt()
                self._prompter = route
            self._forward(
                route, data, route.prefixer.feed(data), b"" if route.lines is None else route.lines.feed(data)
            )
        else:
            self._end(source)

    def _end(self, source: int) -> None:
        route = self._routes.pop(source)
        self._forward(route, b"", route.prefixer.flush(), b"" if route.lines is None else route.lines.flush())
        if route is self._prompter:
            self._prompter = None
        os.close(source)

    def _forward(self, route: _Route, data: bytes, shown: bytes, lines: bytes) -> None:
        """Write bytes, and the lines that they completed, to their files, and queue lines for the sink."""
        self.error = self.error or route.output.write(data)
        for line in lines.splitlines():
            self.error = self.error or route.output.write_line(line)
        if route.output.is_shown:
            self._enqueue(route, shown)

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


def _is_ready(descriptor: int, event: int) -> bool:
    poller = select.poll()
    poller.register(descriptor, event)
    return bool(poller.poll(0))
