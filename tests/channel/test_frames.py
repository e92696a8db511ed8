"""Frames: what is written is read, however it is cut; what is no frame is refused."""

import struct
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_decentral.channel.frames import (
    MOST_BODY,
    PREAMBLE,
    Abandoned,
    Acknowledged,
    FrameWriter,
    Goodbye,
    Ping,
    Refused,
    Type,
)
from flwr_decentral.channel.heads import MessageHead
from flwr_decentral.channel.reader import FrameReader
from flwr_decentral.channel.refusals import Reason, Refusal
from flwr_decentral.core import (
    HEADER_BYTES,
    WIRES,
    AlgorithmError,
    ConfigurationError,
    Message,
)
from flwr_decentral.ops.codecs import encode, rounded

from . import fuzz_frames
from .loopback import hello, same

LIMIT = 1 << 20
INTEGERS = st.integers(-(2**63), 2**63 - 1)
NAMES = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), max_size=8)
NUMBERS = st.one_of(INTEGERS, st.floats(allow_nan=False, allow_infinity=False))
PAYLOADS = st.one_of(
    st.none(),
    st.binary(max_size=200).map(lambda raw: np.frombuffer(raw[: len(raw) // 4 * 4], "<f4")),
    st.integers(0, 40_000).map(lambda size: np.arange(size, dtype=np.float32)),
)
MESSAGES = st.builds(
    Message,
    kind=NAMES,
    step=INTEGERS,
    payload=PAYLOADS,
    header=st.dictionaries(NAMES, NUMBERS, max_size=5),
)
SHORT = st.builds(
    lambda size, wire: Message(
        kind="m", step=1, wire=wire, payload=rounded(np.arange(size, dtype=np.float32), wire)
    ),
    st.integers(0, 3000),
    st.sampled_from(WIRES),
)
ITEMS = st.one_of(
    MESSAGES,
    SHORT,
    st.builds(Acknowledged, st.integers(0, 2**64 - 1)),
    st.builds(Ping),
    st.builds(Goodbye),
    st.builds(Refused, NAMES, NAMES),
    st.builds(hello, st.integers(0, 2**32 - 1), run=NAMES, epoch=st.integers(0, 2**64 - 1)),
)


def body_of(message: Message) -> memoryview:
    payload = message.payload
    return memoryview(b"" if payload is None else encode(payload, message.wire).tobytes())


written = partial(fuzz_frames.written, limit=LIMIT)


def read(reader: FrameReader, data: bytes, most: int = 1 << 30) -> list[object]:
    """Feed bytes the way a socket does: as many as there is room for, at most so many at once."""
    items: list[object] = []
    while data:
        buffer = reader.buffer()
        taken = min(len(buffer), len(data), most)
        buffer[:taken] = data[:taken]
        data = data[taken:]
        items += reader.advance(taken)
    return items


def equal(a: object, b: object) -> bool:
    return same(a, b) if isinstance(a, Message) and isinstance(b, Message) else a == b


def reader_of(checked: bool = False) -> FrameReader:
    """Make a reader whose stream has been opened."""
    reader = FrameReader(limit=LIMIT, checked=checked)
    assert read(reader, PREAMBLE) == []
    return reader


@settings(max_examples=60, deadline=None)
@given(st.lists(ITEMS, max_size=5), st.booleans(), st.integers(1, 50_000), st.data())
def test_whatever_the_cuts_the_same_items_come_out(items, checked, piece, data):
    writer = FrameWriter(checked=checked)
    stream = PREAMBLE + b"".join(written(item, writer, piece) for item in items)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    reader = FrameReader(limit=LIMIT, checked=checked)
    got: list[object] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        got += read(reader, stream[start:end])
    assert len(got) == len(items)
    assert all(map(equal, got, items))
    assert reader.cut == 0


def test_byte_by_byte():
    items = [Message(kind="a", step=1, payload=np.arange(30, dtype=np.float32)), Ping()]
    stream = PREAMBLE + b"".join(written(item, FrameWriter(checked=True), 7) for item in items)
    got = read(FrameReader(limit=LIMIT, checked=True), stream, most=1)
    assert all(map(equal, got, items))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400), st.booleans())
def test_garbage_is_refused_or_waited_for_and_nothing_else(data, checked):
    for opening in (b"", PREAMBLE):
        reader = FrameReader(limit=LIMIT, checked=checked)
        try:
            read(reader, opening + data)
        except Refusal as refusal:
            assert refusal.reason in Reason


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8]), st.binary(max_size=300), st.binary(max_size=40))
def test_frames_of_any_type_with_any_content_are_refused_or_read(kind, head, body):
    reader = reader_of()
    try:
        read(reader, struct.pack("<BBHII", kind, 0, len(head), len(body), 0) + head + body)
    except Refusal as refusal:
        assert refusal.reason in Reason


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.lists(ITEMS, min_size=1, max_size=3), st.data())
def test_no_change_of_a_plaintext_stream_goes_unnoticed(items, data):
    """A flipped bit is refused, or leaves the reader waiting for more than ever comes."""
    writer = FrameWriter(checked=True)
    stream = bytearray(PREAMBLE + b"".join(written(item, writer, 1000) for item in items))
    where = data.draw(st.integers(0, len(stream) - 1))
    stream[where] ^= 1 << data.draw(st.integers(0, 7))
    got: list[object] = []
    try:
        got += read(FrameReader(limit=LIMIT, checked=True), bytes(stream))
    except Refusal:
        return
    assert len(got) < len(items)
    assert all(map(equal, got, items))


def frame(kind: int, head: bytes = b"", body: bytes = b"", *, zero: int = 0, check: int = 0):
    return struct.pack("<BBHII", kind, zero, len(head), len(body), check) + head + body


def message_head(length: int | None, **other) -> bytes:
    usual = {"kind": "m", "step": 1, "numbers": {}, "length": length, "wire": "float32"}
    return MessageHead(**{**usual, **other}).encode()


NAMED = struct.pack("<qI", 1, 2**32 - 1) + b"\1m" + b"\1" + b"\1a"
FORMLESS = struct.pack("<qI", 1, 3) + b"\1m" + bytes([len(WIRES) << 4])
NAN = NAMED + b"d" + struct.pack("<d", np.nan)
TWICE = NAMED[:-3] + b"\2" + b"\1ab\0" * 2


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (frame(0), "there is no frame of type 0"),
        (frame(9), "there is no frame of type 9"),
        (frame(Type.PING, zero=1), "there is no frame of type 7, 1"),
        (frame(Type.PING, check=1), "under TLS carries a checksum"),
        (struct.pack("<BBHII", Type.HELLO, 0, 513, 0, 0), "a HELLO cannot have a head of 513"),
        (struct.pack("<BBHII", Type.MORE, 0, 0, MOST_BODY + 1, 0), "cannot have a head of 0 and 1"),
        (struct.pack("<BBHII", Type.PING, 0, 0, 4, 0), "a PING cannot have a head of 0 and 4"),
        (frame(Type.PING, b"x"), "too long"),
        (frame(Type.ACK, b"x"), "too short"),
        (frame(Type.MORE, b"", b"1234"), "nothing to go on with"),
        (frame(Type.ABANDON), "nothing to abandon"),
        (frame(Type.MESSAGE, message_head(1)), "a body of 0 bytes where 4 are missing"),
        (frame(Type.MESSAGE, message_head(1), b"12345678"), "8 bytes where 4 are missing"),
        (frame(Type.MESSAGE, message_head(None), b"1234"), "4 bytes where 0 are missing"),
        (frame(Type.MESSAGE, message_head(LIMIT // 4 + 1), b"1234"), "payload of 262145 values"),
        (frame(Type.MESSAGE, message_head(2), b"1234") + frame(Type.MORE), "nothing to go on"),
        (frame(Type.MESSAGE, message_head(2), b"1234") * 2, "begins inside of another"),
        (frame(Type.MESSAGE, message_head(LIMIT // 4 + 1, wire="int8"), b"1234"), "longest has"),
        (frame(Type.MESSAGE, message_head(2, wire="int8"), b"1234567"), "7 bytes where 6"),
        (frame(Type.MESSAGE, FORMLESS, b"1234"), "no form of payloads has the number 4"),
        (frame(Type.MESSAGE, message_head(None) + b"x"), "too long"),
        (frame(Type.MESSAGE, message_head(None)[:-1]), "too short"),
        (frame(Type.MESSAGE, NAN), "cannot have the header {'a': nan}"),
        (frame(Type.MESSAGE, NAMED + b"?" + bytes(8)), "number 'a' of a message cannot be read"),
        (frame(Type.MESSAGE, TWICE), "number 'a' of a message cannot be read"),
        (frame(Type.HELLO, hello(0).encode()[:-1]), "too short"),
        (frame(Type.REFUSED, b"\2\xff\xfe\0"), "is no text"),
        (frame(Type.REFUSED, b"\2a\n\0"), "is no text"),
    ],
)
def test_what_is_no_frame_is_refused_and_named(data, complaint):
    with pytest.raises(Refusal, match=complaint) as caught:
        read(reader_of(), data)
    assert caught.value.reason is Reason.FRAME


@pytest.mark.parametrize(
    ("opening", "reason"),
    [
        (b"G", Reason.GARBAGE),
        (b"flwrdex", Reason.GARBAGE),
        (b"\x16\x03\x01\x02", Reason.TLS),
        (b"\x15\x03", Reason.TLS),
        (b"\x16\x02", Reason.GARBAGE),
        (PREAMBLE[:-1] + b"\x63", Reason.PROTOCOL),
    ],
)
def test_a_stream_that_begins_otherwise_is_refused_at_its_first_wrong_byte(opening, reason):
    for most in (1, 100):
        reader = FrameReader(limit=LIMIT, checked=True)
        with pytest.raises(Refusal) as caught:
            read(reader, opening, most)
        assert caught.value.reason is reason


def test_what_came_before_a_bad_frame_is_not_lost():
    reader = reader_of()
    data = frame(Type.PING) + frame(77)
    reader.buffer()[: len(data)] = data
    items = reader.advance(len(data))
    assert next(items) == Ping()
    with pytest.raises(Refusal):
        next(items)


def test_an_abandoned_message_says_what_came_in_vain_and_makes_room_for_the_next():
    writer, reader = FrameWriter(checked=False), reader_of()
    half = frame(Type.MESSAGE, message_head(2), b"1234")
    assert read(reader, half) == []
    assert reader.cut == 4
    rest = b"".join(writer.abandon()) + frame(Type.MESSAGE, message_head(None))
    abandoned, message = read(reader, rest)
    assert abandoned == Abandoned(4)
    assert message.payload is None


def test_signs_of_life_may_come_between_the_pieces_of_a_message():
    item = Message(kind="m", step=0, payload=np.arange(100, dtype=np.float32))
    writer = FrameWriter(checked=True)
    first = writer.first(MessageHead.of(item, LIMIT).encode(), body_of(item)[:100])
    between = [*writer.ping(), *writer.acknowledge(3)]
    last = writer.more(body_of(item)[100:])
    data = b"".join(map(bytes, [*first, *between, *last]))
    ping, ack, message = read(reader_of(checked=True), data)
    assert (ping, ack) == (Ping(), Acknowledged(3))
    assert same(message, item)


def test_a_large_body_is_received_straight_into_its_array():
    """The buffer that the socket fills *is* the payload, but for what came with the head."""
    reader = reader_of()
    head = frame(Type.MESSAGE, message_head(100_000), b"")[:8]
    data = struct.pack("<BBHII", Type.MESSAGE, 0, len(message_head(100_000)), 400_000, 0)
    assert head[:1] == data[:1]
    assert read(reader, data + message_head(100_000)) == []
    buffer = reader.buffer()
    assert len(buffer) == 400_000
    buffer[:] = np.ones(100_000, np.float32).tobytes()
    (message,) = reader.advance(400_000)
    assert np.shares_memory(message.payload, np.frombuffer(buffer, np.float32))
    assert not message.payload.flags.writeable


# --- heads ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message"),
    [
        Message(kind="fragment", step=1000, header={"fragment": 255, "fragments": 400}),
        Message(kind="relay", step=1000, header={"tree": 1, "count": 1000, "members": 2**40}),
        Message(kind="model", step=10**9),
    ],
)
def test_a_message_costs_no_more_than_the_emulated_network_says(message):
    (raw,) = FrameWriter(checked=True).first(MessageHead.of(message, LIMIT).encode(), b"")
    assert len(raw) <= HEADER_BYTES


@pytest.mark.parametrize("bits", [8, 16, 32, 64])
def test_an_integer_takes_the_fewest_bytes_that_it_fits_in(bits):
    edges = [-(2 ** (bits - 1)), 2 ** (bits - 1) - 1]
    for value in edges:
        raw = message_head(None, numbers={"a": value})
        assert MessageHead.decode(raw).numbers == {"a": value}
        assert len(raw) == len(message_head(None)) + 3 + bits // 8


def test_numpy_numbers_are_numbers():
    message = Message(kind="m", step=0, header={"a": np.int64(3), "b": np.float32(0.5)})
    decoded = MessageHead.decode(MessageHead.of(message, LIMIT).encode())
    assert decoded.numbers == {"a": 3, "b": 0.5}
    assert {type(value) for value in decoded.numbers.values()} == {int, float}


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (Message(kind="m\n", step=0), "cannot name a message"),
        (Message(kind="m", step=2**63), "no integer of 64 bits"),
        (Message(kind="m", step=0.5), "no integer of 64 bits"),
        (Message(kind="m", step=0, header={"a": "b"}), "no finite number"),
        (Message(kind="m", step=0, header={"a": np.inf}), "no finite number"),
        (Message(kind="m", step=0, header={"a": 2**63}), "does not fit into 64 bits"),
        (Message(kind="m", step=0, header={"k" * 33: 1}), "cannot name a message"),
        (Message(kind="m", step=0, header=dict.fromkeys("abcdef", 1)), "which holds 5"),
        (Message(kind="m", step=0, payload=np.zeros(LIMIT, np.float32)), "longest may have"),
    ],
)
def test_a_head_that_could_not_be_read_is_not_written(message, complaint):
    with pytest.raises(AlgorithmError, match=complaint):
        MessageHead.of(message, LIMIT).encode()


@pytest.mark.parametrize(
    "wrong",
    [{"run": "x" * 65}, {"run": "a\0"}, {"epoch": -1}, {"index": 2**32}, {"incarnation": 2**64}],
)
def test_a_hello_that_could_not_be_said_is_not_made(wrong):
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        replace(hello(0), **wrong)


def test_what_is_said_of_a_refusal_is_cut_and_cleaned():
    (raw,) = FrameWriter(checked=False).refused("reason", "line\nline \x1b[31m" + "ä" * 300)
    (item,) = read(reader_of(), raw)
    assert item.reason == "reason"
    assert item.detail.startswith("line?line ?[31mää")
    assert len(item.detail.encode()) <= 240
