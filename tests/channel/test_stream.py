"""A stream: what is written comes out, in any mood of the socket, and its end is told once."""

import asyncio
import errno
import socket
import ssl

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_decentral.channel.stream import Stream

from .loopback import run, until

pytestmark = pytest.mark.net


class Notes:
    """A user that remembers."""

    def __init__(self) -> None:
        self.memory = memoryview(bytearray(1 << 16))
        self.got = bytearray()
        self.told: list[object] = []

    def buffer(self) -> memoryview:
        return self.memory

    def arrived(self, nbytes: int) -> None:
        self.got += self.memory[:nbytes]

    def settled(self) -> None:
        self.told.append("settled")

    def drained(self) -> None:
        self.told.append("drained")

    def lost(self, error: OSError | None) -> None:
        self.told.append(("lost", error))


class Moody(socket.socket):
    """A socket that does not always want to."""

    moods: list[Exception]
    reading_moods: list[Exception]

    def send(self, data, flags: int = 0) -> int:
        if self.moods:
            raise self.moods.pop()
        return super().send(data, flags)

    def recv_into(self, buffer, nbytes: int = 0, flags: int = 0) -> int:
        if self.reading_moods:
            raise self.reading_moods.pop()
        return super().recv_into(buffer, nbytes, flags)


def pair() -> tuple[Stream, Moody, Stream]:
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    moody = Moody(fileno=ends[0].detach())
    moody.setblocking(False)
    moody.moods, moody.reading_moods = [], []
    return Stream(moody), moody, Stream(ends[1])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.one_of(st.binary(max_size=50), st.integers(0, 200_000).map(bytes)), max_size=12))
def test_what_is_written_comes_out(parts):
    async def work():
        a, _, b = pair()
        notes, other = Notes(), Notes()
        a.start(notes)
        b.start(other)
        whole = b"".join(parts)
        half = len(parts) // 2
        a.write(parts[:half])
        a.write([memoryview(part) for part in parts[half:]])
        await until(lambda: len(other.got) == len(whole))
        assert other.got == whole
        assert (a.pending, a.written) == (0, len(whole))
        a.finish(5.0)
        await until(lambda: b.over.done())
        await until(lambda: a.over.done())
        assert other.told[-1] == ("lost", None)
        assert notes.told.count(("lost", None)) == 0  # it has ended it itself

    run(work())


@pytest.mark.parametrize("mood", [BlockingIOError(), ssl.SSLWantWriteError(), InterruptedError()])
def test_a_socket_that_is_full_is_written_to_when_it_is_not(mood):
    async def work():
        a, moody, b = pair()
        notes, other = Notes(), Notes()
        a.start(notes), b.start(other)
        moody.moods = [mood, mood]
        a.write([b"one"])
        assert a.pending == 3
        a.write([b"two"])
        assert a.pending == 6
        await until(lambda: other.got == b"onetwo")
        assert notes.told == ["drained"]
        a.abort(), b.abort()

    run(work())


def test_a_write_that_has_to_read_first_waits_for_that_and_spins_not():
    async def work():
        a, moody, b = pair()
        notes, other = Notes(), Notes()
        a.start(notes), b.start(other)
        moody.moods = [ssl.SSLWantReadError()]
        a.write([b"later"])
        for _ in range(20):
            await asyncio.sleep(0)
        assert other.got == b""
        b.write([b"now"])
        await until(lambda: other.got == b"later")
        assert notes.told == ["drained", "settled"]
        a.abort(), b.abort()

    run(work())


def test_a_read_that_has_to_write_first_is_tried_again():
    async def work():
        a, moody, b = pair()
        notes, other = Notes(), Notes()
        a.start(notes), b.start(other)
        moody.reading_moods = [ssl.SSLWantWriteError()]
        b.write([b"hello"])
        await until(lambda: notes.got == b"hello")
        a.abort(), b.abort()

    run(work())


def test_an_error_of_a_write_is_told_later_and_once():
    async def work():
        a, moody, b = pair()
        notes = Notes()
        a.start(notes)
        error = OSError(errno.ECONNRESET, "reset")
        moody.moods = [error]
        a.write([b"x"])
        assert notes.told == []
        await until(lambda: notes.told)
        a.write([b"y"])
        a.finish(1.0)
        a.abort()
        assert notes.told == [("lost", error)]
        assert a.over.done()
        b.abort()

    run(work())


def test_who_does_not_close_is_closed_when_the_time_is_up():
    async def work():
        a, _, b = pair()
        a.start(Notes())
        a.write([bytes(1 << 20)])
        assert a.pending
        a.finish(0.05)
        await until(lambda: a.over.done())
        assert a.pending == 0
        b.abort()

    run(work())
