"""Prefixing, and the pump that carries output without blocking."""

from __future__ import annotations

import itertools
import math
import os
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrodist.launch import output
from ferrodist.launch.output import MAX_LINE_BYTES, TAIL_LINES, LinePrefixer, OutputPump, rank_prefix

# Few different bytes, so that line ends meet each other and the cuts; \xff and \xc3 are not UTF-8.
STREAMS = st.lists(st.sampled_from([b"a", b"b", b"\xff\xc3", b"\n", b"\r", b"\r\n", b"abcdefghij"])).map(b"".join)


def prefix_all(chunks: list[bytes], **options) -> bytes:
    prefixer = LinePrefixer(b"> ", clock=lambda: 0.0, **options)
    return b"".join(prefixer.feed(chunk) for chunk in chunks) + prefixer.flush()


@settings(deadline=None, max_examples=300)
@given(STREAMS, st.lists(st.integers(0, 200), max_size=30))
def test_chunk_boundaries_make_no_difference(stream, positions):
    """However the stream is cut up, also inside a line end or a long line, the output is the same."""
    cuts = [0, *sorted(min(position, len(stream)) for position in positions), len(stream)]
    chunks = [stream[start:end] for start, end in itertools.pairwise(cuts)]
    with mock.patch.object(output, "MAX_LINE_BYTES", 8):
        whole = prefix_all([stream])
        assert prefix_all(chunks) == whole
        assert prefix_all([stream[i : i + 1] for i in range(len(stream))]) == whole


@settings(deadline=None, max_examples=200)
@given(st.lists(st.binary().map(lambda line: line.replace(b"\r", b"").replace(b"\n", b""))))
def test_lines_of_any_bytes_survive(lines):
    """Lines come out in order, each with one prefix and every byte, whatever the encoding."""
    stream = b"".join(line + b"\n" for line in lines)
    assert prefix_all([stream]) == b"".join(b"> " + line + b"\n" for line in lines)


def test_a_partial_last_line_is_flushed():
    """A rank's last line appears even without a newline."""
    assert prefix_all([b"one\ntw", b"o"]) == b"> one\n> two\n"
    assert prefix_all([]) == b""


def test_empty_lines_are_lines():
    """Blank lines keep their place."""
    assert prefix_all([b"\n\na\n"]) == b"> \n> \n> a\n"


def test_a_carriage_return_before_a_newline_is_dropped():
    """Windows line ends become plain ones, also when cut in the middle."""
    assert prefix_all([b"a\r\nb\r", b"\nc\r\r\n"]) == b"> a\n> b\n> c\n"


def test_a_progress_bar_shows_one_state_a_second_and_its_last():
    """Redrawn states are thinned out by time; the final one is always there."""
    now = 0.0
    prefixer = LinePrefixer(b"", clock=lambda: now)
    shown = []
    for step in range(1, 51):
        now += 0.1
        shown.append(prefixer.feed(b"\r%d%%" % step))
    shown.append(prefixer.feed(b"\rdone\n"))
    lines = b"".join(shown).split()
    assert lines[0] == b"1%"
    assert lines[-1] == b"done"
    assert 5 <= len(lines) <= 7


def test_a_line_without_end_is_cut():
    """Memory stays bounded: a stream without newlines comes out in pieces, and no byte is lost."""
    prefixer = LinePrefixer(b"> ")
    pieces = []
    for _ in range(40):
        pieces.append(prefixer.feed(b"x" * 10_000))
        assert len(prefixer._partial) <= MAX_LINE_BYTES
    lines = (b"".join(pieces) + prefixer.flush()).split(b"\n")
    assert max(len(line) for line in lines) == MAX_LINE_BYTES + len(b"> ")
    assert sum(line.count(b"x") for line in lines) == 400_000


@pytest.mark.timeout(20)
@pytest.mark.parametrize("unit", [b"x", b"\r", b"\n" + b"x" * 50_000, b"\r" * 50_000 + b"x", b"x\r\n\r"])
def test_no_stream_takes_more_than_linear_time(unit):
    """Long lines and runs of carriage returns cost no more than others (quadratic would take minutes)."""
    stream = unit * (4_000_000 // len(unit))
    assert prefix_all([stream[start : start + 65536] for start in range(0, len(stream), 65536)]) is not None


def test_the_tail_is_the_last_lines():
    """The prefixer keeps the last lines, unprefixed, for the report."""
    prefixer = LinePrefixer(b"> ")
    prefixer.feed(b"".join(b"%d\n" % number for number in range(100)) + b"end")
    prefixer.flush()
    assert list(prefixer.tail) == [b"%d" % number for number in range(81, 100)] + [b"end"]
    assert len(prefixer.tail) == TAIL_LINES


def test_colour_only_when_asked():
    """The plain prefix has no escape sequences; the coloured one ends what it begins."""
    assert rank_prefix(3, colour=False) == b"[rank 3] "
    coloured = rank_prefix(3, colour=True)
    assert coloured.startswith(b"\x1b[")
    assert coloured.endswith(b"[rank 3]\x1b[0m ")


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_prompt_is_shown_when_nothing_follows():
    """Text without a line's end appears after a moment, once, and what answers it has a prefix of its own."""
    clock = _Clock()
    prefixer = LinePrefixer(b"> ", clock=clock)
    assert prefixer.feed(b"line\n(Pdb) ") == b"> line\n"
    assert prefixer.take_prompt() == b""
    assert prefixer.seconds_to_prompt() == pytest.approx(output.PROMPT_DELAY)
    clock.now += 1
    assert prefixer.take_prompt() == b"> (Pdb) "
    assert prefixer.seconds_to_prompt() == math.inf
    assert prefixer.feed(b"84\nworking") == b"> 84\n"
    clock.now += 1
    assert prefixer.take_prompt() == b"> working"
    assert prefixer.feed(b"\nnext\n") == b"\n> next\n"
    assert list(prefixer.tail) == [b"line", b"(Pdb) 84", b"working", b"next"]


def test_a_progress_bar_is_no_prompt():
    """Bars stay at one state a second, whichever end of a state has the carriage return."""
    clock = _Clock()
    prefixer = LinePrefixer(b"> ", clock=clock)
    for text in (b"\r 0%", b"\r 10%", b" 20%\r", b" 30%"):
        prefixer.feed(text)
        clock.now += 0.5
        assert prefixer.take_prompt() == b""


def test_another_ranks_line_interrupts_a_prompt():
    """The other rank's line is separate, and the prompt appears again after it."""
    pump = OutputPump()
    ours, sink = os.pipe()
    clock = _Clock()
    sides, sources = [], []
    for rank in range(2):
        source, side = os.pipe()
        pump.add(source, sink, LinePrefixer(b"[%d] " % rank, clock=clock), prompts=rank == 0)
        sides.append(side)
        sources.append(source)
    try:
        for side, text in ((0, b"(Pdb) "), (1, b"hello\n"), (0, b"42\n")):
            os.write(sides[side], text)
            pump.read([sources[side]])
            while pump.blocked_sink is not None:
                pump.write()
            clock.now += 1
            pump.show_prompt()
            pump.write()
        assert os.read(ours, 4096) == b"[0] (Pdb) \n[1] hello\n[0] (Pdb) [0] 42\n"
    finally:
        pump.close()
        for descriptor in (*sides, ours, sink):
            os.close(descriptor)


def test_the_pump_pauses_reading_while_its_reader_pauses():
    """A reader that does not read blocks neither the pump nor loses a byte."""
    pump = OutputPump()
    source, rank_side = os.pipe()
    reader, sink = os.pipe()
    data = b"".join(b"%06d\n" % number for number in range(8_000))
    os.set_blocking(rank_side, False)
    try:
        pump.add(source, sink, LinePrefixer(b"[rank 0] "))
        written, received = 0, b""
        while pump.sources:  # fill the way until the sink takes no more
            written += os.write(rank_side, data[written:]) if written < len(data) else 0
            pump.read(pump.sources)
            pump.write()
        assert pump.blocked_sink == sink
        while written < len(data) or pump.blocked_sink is not None:
            received += os.read(reader, 65536)
            pump.write()
            if pump.sources and written < len(data):
                written += os.write(rank_side, data[written:])
                pump.read(pump.sources)
        os.set_blocking(reader, False)
        while chunk := _read_now(reader):
            received += chunk
        assert received == b"".join(b"[rank 0] " + line + b"\n" for line in data.split())
    finally:
        pump.close()
        for descriptor in (rank_side, reader, sink):
            os.close(descriptor)


def _read_now(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except BlockingIOError:
        return b""


def test_a_sink_whose_reader_has_gone_is_dropped():
    """When nobody reads one stream any more, the pump goes on with the other."""
    pump = OutputPump()
    gone_reader, gone_sink = os.pipe()
    reader, sink = os.pipe()
    first, first_writer = os.pipe()
    second, second_writer = os.pipe()
    os.close(gone_reader)
    try:
        pump.add(first, gone_sink, LinePrefixer(b""))
        pump.add(second, sink, LinePrefixer(b""))
        for writer in (first_writer, second_writer):
            os.write(writer, b"text\n")
            os.close(writer)
        while not pump.at_end:
            pump.read(pump.sources)
            pump.write()
        assert pump.blocked_sink is None
        assert os.read(reader, 100) == b"text\n"
    finally:
        pump.close()
        for descriptor in (gone_sink, reader, sink):
            os.close(descriptor)


def test_read_rest_does_not_wait_for_writers_that_stay():
    """A process that escaped and holds the pipe open does not hold the launcher."""
    pump = OutputPump()
    source, writer = os.pipe()
    reader, sink = os.pipe()
    try:
        pump.add(source, sink, LinePrefixer(b""))
        os.write(writer, b"last words")
        pump.read_rest()
        pump.write()
        assert pump.at_end
        assert os.read(reader, 100) == b"last words\n"
    finally:
        pump.close()
        for descriptor in (writer, reader, sink):
            os.close(descriptor)
