"""A stream: what is written comes out, in any mood of the socket, and its end is told once."""

import asyncio
import errno
import socket
import ssl

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_decentral.channel.seal import Seal
from flwr_decentral.channel.stream import GULP, Stream, shake_hands
from flwr_decentral.channel.tls import fingerprint

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


async def sealed(passports) -> tuple[Stream, Stream]:
    """Shake hands over two sockets that do not block."""
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    contexts = [passports.good[node].security.load() for node in (0, 1)]
    (a, seen), (b, shown) = await asyncio.gather(
        shake_hands(ends[0], contexts[0].client, server_side=False, linger=1.0),
        shake_hands(ends[1], contexts[1].server, server_side=True, linger=1.0),
    )
    assert [fingerprint(seen), fingerprint(shown)] == [
        passports.good[node].fingerprint for node in (1, 0)
    ]
    return a, b


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


@pytest.mark.parametrize("mood", [BlockingIOError(), InterruptedError()])
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


def test_a_socket_that_is_interrupted_is_read_again():
    async def work():
        a, moody, b = pair()
        notes = Notes()
        a.start(notes)
        moody.reading_moods = [InterruptedError(), BlockingIOError()]
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


LENGTHS = st.one_of(st.integers(0, 40), st.integers(16_000, 17_000), st.integers(0, 3 * GULP))


@settings(max_examples=30, deadline=None)
@given(there=st.lists(LENGTHS, max_size=8), back=st.lists(LENGTHS, max_size=8))
def test_what_is_written_under_tls_comes_out_both_ways(passports, there, back):
    def text(lengths, first):
        return [bytes(range(first + i, first + i + 8)) * (n // 8) for i, n in enumerate(lengths)]

    async def work():
        a, b = await sealed(passports)
        notes, other = Notes(), Notes()
        a.start(notes), b.start(other)
        one, two = text(there, 0), text(back, 100)
        for stream, parts in ((a, one), (b, two)):
            stream.write(parts[:1])
            stream.write([memoryview(part) for part in parts[1:]])
        await until(lambda: other.got == b"".join(one) and notes.got == b"".join(two))
        assert a.pending == b.pending == 0
        assert a.written >= len(other.got)
        a.finish(5.0)
        await until(lambda: b.over.done() and a.over.done())
        assert other.told[-1] == ("lost", None)

    run(work())


def test_what_comes_with_the_handshake_is_read_though_nothing_more_arrives(passports):
    async def work():
        near, far = socket.socketpair()
        near.setblocking(False), far.setblocking(False)
        client = Seal(passports.good[0].security.load().client, server_side=False)
        context = passports.good[1].security.load().server
        server = asyncio.ensure_future(shake_hands(far, context, server_side=True, linger=1.0))
        memory = memoryview(bytearray(GULP))
        while not client.shake_hands():
            near.send(client.take())
            nbytes = await asyncio.get_running_loop().sock_recv_into(near, memory)
            client.feed(memory[:nbytes])
        client.write(b"hello" * 10_000)
        near.send(client.take())  # its part of the handshake, and more
        stream, _ = await server
        notes = Notes()
        stream.start(notes)
        await until(lambda: notes.got == b"hello" * 10_000)
        stream.abort(), near.close()

    run(work())


def test_under_tls_a_socket_that_is_full_is_written_to_when_it_is_not(passports):
    async def work():
        a, b = await sealed(passports)
        notes, other = Notes(), Notes()
        a.start(notes)
        whole = bytes(8 << 20)
        a.write([whole])
        assert 0 < a.pending < len(whole)
        assert a.written > 0
        b.start(other)
        await until(lambda: len(other.got) == len(whole))
        await until(lambda: "drained" in notes.told)
        assert a.pending == 0
        a.abort(), b.abort()

    run(work())


def test_a_broken_record_ends_the_stream_and_the_other_end_is_told(passports):
    async def work():
        a, b = await sealed(passports)
        notes, other = Notes(), Notes()
        a.start(notes), b.start(other)
        b.write([b"before"])
        await until(lambda: notes.got == b"before")
        b._socket.send(b"\x17\x03\x03\x00\x20" + bytes(32))  # a record that nobody has encrypted
        await until(lambda: a.over.done() and b.over.done())
        error = dict(each for each in notes.told if each[0] == "lost")["lost"]
        assert isinstance(error, ssl.SSLError)
        error = dict(each for each in other.told if each[0] == "lost")["lost"]
        assert "ALERT_BAD_RECORD_MAC" in error.reason

    run(work())


def test_an_end_in_the_middle_of_a_record_is_an_end(passports):
    async def work():
        a, b = await sealed(passports)
        notes = Notes()
        a.start(notes)
        b._seal.write(b"whole")
        b._seal.write(b"cut off")
        b._socket.send(b._seal.take()[:-3])
        b.abort()
        await until(lambda: a.over.done())
        assert notes.got == b"whole"
        assert notes.told[-1] == ("lost", None)

    run(work())


def test_a_stream_that_has_much_takes_turns_with_others(passports):
    async def work():
        a, b = await sealed(passports)
        notes = Notes()
        b._seal.write(bytes(4 << 20))
        a._seal.feed(memoryview(b._seal.take()))
        a.start(notes)
        shares = []
        while len(notes.got) < 4 << 20:
            before = len(notes.got)
            await asyncio.sleep(0)
            shares.append(len(notes.got) - before)
        assert max(shares) < 2 << 20
        a.abort(), b.abort()

    run(work())


class Chatty(Seal):
    """A peer of it asks for new keys all the time: nothing can be read, and each is answered."""

    answer = b""

    def read(self, buffer: memoryview) -> int:
        self.write(self.answer)
        return 0


def chatty(stream: Stream, answer: bytes) -> None:
    """Let the peer of a stream be such a one from now on."""
    stream._seal.__class__ = Chatty
    stream._seal.answer = answer


def test_what_is_answered_and_not_taken_ends_the_stream_before_it_piles_up(passports):
    async def work():
        a, b = await sealed(passports)
        chatty(a, bytes(1000))
        notes = Notes()
        a.start(notes)
        sent = 0
        while not a.over.done():  # and b reads nothing
            sent += b._socket.send(bytes(1000)) if sent < 8 << 20 else 0
            assert a.pending < 1 << 20
            await asyncio.sleep(0)
        (_, error), *_ = [each for each in notes.told if each[0] == "lost"]
        assert isinstance(error, ConnectionAbortedError)
        b.abort()

    run(work())


class Flooded(socket.socket):
    """A socket at which something new is always there."""

    came = 0

    def recv_into(self, buffer, nbytes: int = 0, flags: int = 0) -> int:
        self.came += len(buffer)
        if self.came > 64 << 20:
            raise BlockingIOError
        return len(buffer)


def flooded(stream: Stream) -> Flooded:
    """Let something new be always there at the socket of a stream."""
    stream._socket = Flooded(fileno=stream._socket.detach())
    return stream._socket


def test_who_sends_what_cannot_be_read_holds_up_nobody(passports):
    async def work():
        a, b = await sealed(passports)
        chatty(a, b"")
        flood = flooded(a)
        a.start(Notes())
        await asyncio.sleep(0)
        assert 0 < flood.came < 4 << 20
        a.abort(), b.abort()

    run(work())


def test_who_never_ceases_to_send_gets_one_share_in_each_turn(passports):
    async def work():
        a, b = await sealed(passports)
        chatty(a, b"")
        flood = flooded(a)
        b._socket.send(b"!")  # so that the socket is readable in every turn
        a.start(Notes())
        shares = []
        for _ in range(12):
            before = flood.came
            await asyncio.sleep(0)
            shares.append(flood.came - before)
        assert shares[-1] > 0
        assert max(shares) < 2 << 20
        a.abort(), b.abort()

    run(work())
