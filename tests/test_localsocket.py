"""Frames: cut out of any stream of bytes; and a socket that lets in who has a business there."""

import json
import os
import socket
import struct
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flwr_decentral.core import RuntimeFault
from flwr_decentral.localsocket import Connection, Frame, FrameBuffer, Listener, encode_frame

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's")

VALUES = st.one_of(st.integers(), st.text(max_size=5), st.booleans(), st.none())
HEADERS = st.dictionaries(st.text(max_size=5).filter(lambda key: key != "lengths"), VALUES)
FRAMES = st.lists(st.tuples(HEADERS, st.lists(st.binary(max_size=30), max_size=3)), max_size=4)


@pytest.mark.slow
@given(FRAMES, st.data())
def test_any_chunking_gives_the_same_frames(frames, data):
    stream = b"".join(encode_frame(header, blobs) for header, blobs in frames)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    buffer = FrameBuffer()
    received = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        received += buffer.feed(stream[start:end])
    assert received == [Frame(header, tuple(blobs)) for header, blobs in frames]


def stated(head: bytes, count: int = 0, length: int | None = None) -> bytes:
    return struct.pack("<II", len(head) if length is None else length, count) + head


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (stated(b"", length=2**32 - 1), "claims a header of 4294967295 bytes"),
        (stated(b"no json"), "no header"),
        (stated(b"\xff\xfe"), "no header"),
        (stated(b"[]"), "no header"),
        (stated(b'"text"'), "no header"),
        (stated(b"{}"), "no header"),
        (stated(b'{"lengths": 3}'), "no header"),
        (stated(b'{"lengths": ["3"]}'), "no header"),
        (stated(b'{"lengths": [1]}', count=2), r"claims 2 byte strings of lengths \[1\]"),
        (stated(b'{"lengths": [-1, 1]}', count=2), r"claims 2 byte strings of lengths \[-1, 1\]"),
    ],
)
def test_what_is_no_frame_is_refused_at_once(data, complaint):
    with pytest.raises(RuntimeFault, match=complaint):
        FrameBuffer().feed(data)


def test_a_huge_header_is_refused_before_it_is_there():
    with pytest.raises(RuntimeFault, match="claims a header"):
        FrameBuffer().feed(struct.pack("<II", (1 << 24) + 1, 0))
    assert FrameBuffer().feed(struct.pack("<II", 1 << 24, 0)) == []


# --- sockets --------------------------------------------------------------------------------------


@pytest.fixture
def listener():
    listener = Listener()
    yield listener
    listener.close()


def sockets() -> str:
    return Path("/proc/net/unix").read_text()


def test_a_listener_leaves_no_file_and_no_name(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    listener = Listener()
    try:
        assert listener.address.startswith("@")
        assert listener.address in sockets()
        assert list(tmp_path.iterdir()) == []
    finally:
        listener.close()
    assert listener.address not in sockets()
    with pytest.raises(ConnectionRefusedError):
        Connection(listener.address, listener.token, 1.0)


def test_two_listeners_share_neither_address_nor_token(listener):
    other = Listener()
    other.close()
    assert other.address != listener.address
    assert other.token != listener.token


def test_nobody_waits_to_be_let_in(listener):
    assert listener.accept() is None


def test_frames_go_both_ways_until_the_engine_closes(listener):
    connection = Connection(listener.address, listener.token, 5.0)
    engine = listener.accept()
    assert engine is not None
    opening = FrameBuffer().feed(engine.recv(1 << 16))
    assert opening == [Frame({"token": listener.token, "pid": os.getpid()}, ())]
    engine.sendall(encode_frame({"a": 1}, [b"xyz", b""]) + encode_frame({"a": 2}))
    engine.close()
    assert connection.receive() == Frame({"a": 1}, (b"xyz", b""))
    assert connection.receive() == Frame({"a": 2}, ())
    assert connection.receive() is None
    connection.close()


def test_another_user_is_not_let_in(listener, monkeypatch):
    connection = Connection(listener.address, listener.token, 5.0)
    another = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: another)
    assert listener.accept() is None
    with pytest.raises(ConnectionResetError):  # closed with our opening unread
        connection.receive()
    connection.close()


def test_nothing_is_waited_for_longer_than_patience(listener):
    connection = Connection(listener.address, listener.token, 0.01)
    with pytest.raises(TimeoutError):
        connection.receive()
    connection.close()


def test_a_connection_that_fails_leaves_no_socket_open(listener):
    listener.close()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="refused"):
        Connection(listener.address, listener.token, 1.0)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_frame_is_plain_json_and_bytes():
    data = encode_frame({"do": "x"}, [b"12", b"345"])
    length, count = struct.unpack_from("<II", data)
    assert count == 2
    assert json.loads(data[8 : 8 + length]) == {"do": "x", "lengths": [2, 3]}
    assert data[8 + length :] == b"12345"


# --- addresses that are given ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["path", "name"])
def test_one_process_listens_at_an_address(kind, tmp_path):
    address = str(tmp_path / "socket") if kind == "path" else f"@flwr-decentral-test-{os.getpid()}"
    first = Listener(address)
    try:
        assert first.address == address
        with pytest.raises(RuntimeFault, match=f"another process listens at {address} already"):
            Listener(address)
        Connection(address, "", 1.0).close()
        accepted = first.accept()
        assert accepted is not None, "it is not disturbed by one that was refused"
        accepted.close()
    finally:
        first.close()
    Listener(address).close()


def test_only_its_user_can_open_a_socket_that_is_a_file(tmp_path):
    path = tmp_path / "socket"
    listener = Listener(str(path))
    assert path.stat().st_mode & 0o777 == 0o600
    listener.close()
    assert not path.exists()


def test_a_socket_that_was_left_behind_is_replaced(tmp_path):
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.exists()
    listener = Listener(str(path))
    Connection(str(path), "", 1.0).close()
    listener.close()


def test_an_address_that_cannot_be_is_refused(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    for path in (tmp_path / "none" / "socket", tmp_path / ("long" * 60)):
        with pytest.raises(RuntimeFault, match="cannot listen at .*(No such file|too long)"):
            Listener(str(path))
    assert len(os.listdir("/proc/self/fd")) == before
