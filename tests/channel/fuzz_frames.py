"""Fuzz the frame decoder: mutate streams of real frames, and keep what reaches code that is new.

    python tests/channel/fuzz_frames.py --inputs 10000000

A stream is fed whole, and then in random cuts, byte by byte at times. What must hold:

* nothing comes out but items and, at most once and at the end, a ``Refusal`` with a known reason;
* the items, the refusal's reason and what has come of a message do not depend on the cuts;
* the reader holds no more than its scratch, one payload of the longest length and, in a shorter
  form, the bytes that it came in;
* each item can be written and is then read again as the same one.

The branches of ``reader.py``, ``heads.py`` and ``frames.py`` that an input takes, from line to
line, are followed by ``sys.settrace``, or by ``sys.monitoring`` where there is one. An input that
takes a new one is kept and mutated further. Tracing costs many times what decoding does, so only
one input in ``--trace-every`` is traced. The same seed makes the same inputs.
"""

from __future__ import annotations

import argparse
import random
import struct
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np

from flwr_decentral.channel import frames, heads, reader
from flwr_decentral.channel.frames import (
    MOST_BODY,
    PREAMBLE,
    PREFIX,
    Abandoned,
    Acknowledged,
    FrameWriter,
    Goodbye,
    Item,
    Ping,
    Refused,
)
from flwr_decentral.channel.heads import Hello, MessageHead
from flwr_decentral.channel.reader import FrameReader
from flwr_decentral.channel.refusals import Reason, Refusal
from flwr_decentral.core import WIRES, Message, wire_bytes
from flwr_decentral.ops.codecs import encode, rounded

LIMIT = 1 << 17
"""Bytes of the longest payload: more than the reader's scratch, and what it receives directly."""

SCRATCH = 1 << 16
FILES = {module.__file__ for module in (frames, heads, reader)}
MOST_INPUT = 3 * LIMIT
MOST_KEPT = 2000


# --- inputs ---------------------------------------------------------------------------------------


def written(
    item: Item, writer: FrameWriter, piece: int = MOST_BODY, *, limit: int = LIMIT
) -> bytes:
    """Write an item as the network does, a message in pieces."""
    match item:
        case Message():
            head = MessageHead.of(item, limit).encode()
            body = b"" if item.payload is None else encode(item.payload, item.wire).tobytes()
            parts = writer.first(head, body[:piece])
            for start in range(piece, len(body), piece):
                parts += writer.more(body[start : start + piece])
        case Acknowledged():
            parts = writer.acknowledge(item.count)
        case Refused():
            parts = writer.refused(item.reason, item.detail)
        case Hello():
            parts = writer.hello(item)
        case Ping():
            parts = writer.ping()
        case Goodbye():
            parts = writer.goodbye()
        case _:
            parts = writer.abandon()
    return b"".join(map(bytes, parts))


def messages() -> Iterator[Message]:
    """Make messages of all forms and lengths that the reader treats differently."""
    numbers = {"a": 1, "b": -300, "c": 2**31, "d": -(2**63), "e": 0.5}
    yield Message(kind="hi", step=-3, header=numbers)
    yield Message(kind="", step=2**63 - 1, payload=np.empty(0, np.float32))
    for wire in WIRES:
        for length in (1, 7, 300, 4096, 4097, 17_000, LIMIT // 4):
            values = np.linspace(-2, 2, length).astype(np.float32)
            payload = rounded(values, wire)
            yield Message(kind="m", step=1, payload=payload, header={"k": length}, wire=wire)


def seeds(*, checked: bool) -> list[bytes]:
    """Write valid streams, and some that end otherwise than by a frame."""
    writer = FrameWriter(checked=checked)
    greeting = Hello(
        run="7", epoch=0, index=1, incarnation=2**40, algorithm="dpsgd", version="0", layout="ab"
    )
    small: list[Item] = [
        greeting,
        Refused("other-run", "node 1 has run '8', node 0 has '7'"),
        Acknowledged(3),
        Ping(),
        Goodbye(),
    ]
    found = [PREAMBLE + b"".join(written(item, writer) for item in small)]
    found += [PREAMBLE + written(item, writer) for item in small]
    for message in messages():
        for piece in (MOST_BODY, 1 + len(found) % 977):
            whole = written(message, writer, max(piece, 1 if message.payload is None else 1000))
            found.append(PREAMBLE + written(Ping(), writer) + whole + written(Ping(), writer))
    half = Message(kind="m", step=1, payload=np.ones(8, np.float32))
    first = b"".join(writer.first(MessageHead.of(half, LIMIT).encode(), bytes(12)))
    abandon = b"".join(writer.abandon())
    found.append(PREAMBLE + first + written(Ping(), writer) + abandon + written(half, writer))
    found += [b"", PREAMBLE, b"\x16\x03\x01", b"\x15\x03\x03", PREAMBLE[:-1] + b"\x02"]
    return found


INTERESTING = (0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 31, 32, 33, 63, 64, 65, 127, 128, 255)
LONG = (0, 1, 512, 513, 2**15, 2**16 - 1, 2**20, 2**20 + 1, 2**31, 2**32 - 2, 2**32 - 1)


class Mutator:
    """Change streams, some blindly and some at the places that frames have."""

    def __init__(self, dice: random.Random, *, checked: bool) -> None:
        self._dice, self._checked = dice, checked
        self._ways: list[Callable[[bytearray, bytes], None]] = [
            self._flip,
            self._byte,
            self._number,
            self._remove,
            self._repeat,
            self._splice,
            self._field,
            self._field,
            self._swap,
            self._text,
        ]

    def mutate(self, data: bytes, other: bytes) -> bytes:
        """Change a stream some times; splice in parts of another."""
        changed = bytearray(data)
        for _ in range(1 << self._dice.randrange(4)):
            self._dice.choice(self._ways)(changed, other)
        if self._dice.random() < 0.9:  # or few would get beyond it
            changed[: len(PREAMBLE)] = PREAMBLE
        if self._checked and self._dice.random() < 0.8:
            self._mend(changed)
        return bytes(changed[:MOST_INPUT])

    def _place(self, data: bytearray) -> int:
        """Choose a place, mostly one near the beginning, where the heads are."""
        most = len(data)
        if self._dice.random() < 0.7:
            most = min(most, 120)
        return self._dice.randrange(most) if most else 0

    def _flip(self, data: bytearray, other: bytes) -> None:
        if data:
            data[self._place(data)] ^= 1 << self._dice.randrange(8)

    def _byte(self, data: bytearray, other: bytes) -> None:
        if data:
            data[self._place(data)] = self._dice.choice(INTERESTING)

    def _number(self, data: bytearray, other: bytes) -> None:
        form = self._dice.choice(("<H", "<I", "<Q", "<d"))
        value: float = self._dice.choice((*LONG, *INTERESTING))
        if form == "<d":
            value = self._dice.choice((float("nan"), float("inf"), -0.0, 1e308))
        elif form == "<H":
            value = int(value) & 0xFFFF
        raw, start = struct.pack(form, value), self._place(data)
        data[start : start + len(raw)] = raw

    def _remove(self, data: bytearray, other: bytes) -> None:
        start = self._place(data)
        del data[start : start + self._dice.randrange(1, 40)]

    def _repeat(self, data: bytearray, other: bytes) -> None:
        start, length = self._place(data), self._dice.randrange(1, 80)
        data[start:start] = data[start : start + length]

    def _splice(self, data: bytearray, other: bytes) -> None:
        start, end = sorted(self._dice.randrange(len(other) + 1) for _ in range(2))
        place = self._place(data)
        data[place:place] = other[start : min(end, start + 70_000)]

    def _frames(self, data: bytearray) -> list[int]:
        """Find where frames begin, as long as the lengths lead on."""
        at, found = len(PREAMBLE), []
        while at + PREFIX.size <= len(data) and len(found) < 40:
            found.append(at)
            _, _, head, body, _ = PREFIX.unpack_from(data, at)
            at += PREFIX.size + head + body
        return found

    def _field(self, data: bytearray, other: bytes) -> None:
        """Set one field of a frame's prefix, or a length in a message's head."""
        starts = self._frames(data)
        if not starts:
            return
        at, field_ = self._dice.choice(starts), self._dice.randrange(7)
        if field_ == 0:
            data[at] = self._dice.randrange(10)
        elif field_ == 1:
            data[at + 1] = self._dice.choice(INTERESTING)
        elif field_ == 2:
            length = struct.unpack_from("<H", data, at + 2)[0] + self._dice.randrange(-2, 3)
            struct.pack_into("<H", data, at + 2, length & 0xFFFF)
        elif field_ == 3:
            length = struct.unpack_from("<I", data, at + 4)[0] + self._dice.randrange(-4, 5)
            struct.pack_into("<I", data, at + 4, length & 0xFFFFFFFF)
        elif field_ == 4:
            struct.pack_into("<I", data, at + 8, self._dice.choice(LONG))
        elif at + PREFIX.size + 12 <= len(data):
            place = at + PREFIX.size + 8
            length = struct.unpack_from("<I", data, place)[0] + self._dice.randrange(-4, 5)
            value = length if self._dice.random() < 0.6 else self._dice.choice(LONG)
            struct.pack_into("<I", data, place, value & 0xFFFFFFFF)

    def _swap(self, data: bytearray, other: bytes) -> None:
        """Repeat, remove or move a whole frame."""
        starts = self._frames(data)
        if len(starts) < 2:
            return
        number = self._dice.randrange(len(starts) - 1)
        frame = bytes(data[starts[number] : starts[number + 1]])
        if self._dice.random() < 0.5:
            del data[starts[number] : starts[number + 1]]
        if self._dice.random() < 0.7 and len(data) < MOST_INPUT:
            place = self._dice.choice(self._frames(data) or [len(data)])
            data[place:place] = frame

    def _text(self, data: bytearray, other: bytes) -> None:
        """Write what is no text, or too long a one."""
        length = self._dice.choice((0, 1, 31, 32, 33, 40, 63, 64, 65, 240, 255))
        letter = self._dice.choice((b"a", b"\n", b"\xff", b"\xc3", "ä".encode(), b"\0"))
        raw, start = bytes([length]) + (letter * length)[:length], self._place(data)
        if self._dice.random() < 0.5:
            data[start : start + len(raw)] = raw
        else:
            data[start:start] = raw

    def _mend(self, data: bytearray) -> None:
        """Write the right checksums, or nothing would get beyond them."""
        for at in self._frames(data):
            kind, zero, head, body, _ = PREFIX.unpack_from(data, at)
            check = zlib.crc32(frames.CHECKED.pack(kind, zero, head, body))
            end = at + PREFIX.size + head + body
            check = zlib.crc32(data[at + PREFIX.size : end], check)
            struct.pack_into("<I", data, at + 8, check)


# --- what must hold -------------------------------------------------------------------------------


@dataclass
class Result:
    """What has come of an input."""

    items: list[Item] = field(default_factory=list)
    refusal: str = ""
    cut: int = 0

    def text(self) -> list[str]:
        """Write all of it down, to be compared."""
        return [*map(told, self.items), self.refusal, str(self.cut)]


def told(item: Item) -> str:
    """Write an item down to the last bit."""
    if not isinstance(item, Message):
        return repr(item)
    payload = item.payload
    raw = None if payload is None else (payload.dtype.str, payload.tobytes())
    numbers = [(key, type(value), repr(value)) for key, value in item.header.items()]
    return repr((item.kind, item.step, numbers, item.wire, raw))


class FoundError(AssertionError):
    """Something that must not be."""


def decode(data: bytes, cuts: Iterator[int], *, checked: bool) -> Result:
    """Feed a reader the way a socket does, and look at what it holds."""
    result, view = Result(), memoryview(data)
    feed = FrameReader(limit=LIMIT, checked=checked)
    at = 0
    try:
        while at < len(data):
            buffer = feed.buffer()
            if not len(buffer):
                raise FoundError("there is no room for what comes next, and never will be")
            taken = min(len(buffer), len(data) - at, next(cuts))
            buffer[:taken] = view[at : at + taken]
            at += taken
            for item in feed.advance(taken):
                check_item(item, checked=checked)
                result.items.append(item)
            check_memory(feed)
    except Refusal as refusal:
        if refusal.reason not in set(Reason) or not refusal.detail:
            raise FoundError(f"a refusal says {refusal.reason!r}, {refusal.detail!r}") from refusal
        result.refusal = str(refusal.reason)
    result.cut = feed.cut
    return result


def check_memory(feed: FrameReader) -> None:
    """Look at what a reader holds."""
    incoming = feed._incoming
    held = 0 if incoming is None else incoming.data.nbytes
    if len(feed._memory) != SCRATCH or held > LIMIT or len(feed._head) > frames.MOST_HEAD:
        raise FoundError(f"{held} bytes are held of one payload, where {LIMIT} are the most")
    if incoming is not None and incoming.head.memory > LIMIT:
        raise FoundError(f"{incoming.head.memory} bytes are promised to a payload")


def check_item(item: Item, *, checked: bool) -> None:
    """Look at what has been read, and write it again."""
    if isinstance(item, Message) and item.payload is not None:
        payload = item.payload
        if payload.nbytes > LIMIT or payload.dtype != np.float32 or payload.flags.writeable:
            raise FoundError(f"a payload is {payload.dtype}, {payload.nbytes} bytes")
        if wire_bytes(len(payload), item.wire) > LIMIT:
            raise FoundError("a payload came in more bytes than the longest one has")
        if item.wire == "int8" or not np.isfinite(payload).all():
            return  # another scale may stand for the same numbers, and NaN for others
    if isinstance(item, Abandoned):
        return  # it says how much has come, which only the reader knows
    stream = PREAMBLE + written(item, FrameWriter(checked=checked))
    again = FrameReader(limit=LIMIT, checked=checked)
    read: list[Item] = []
    while stream:
        buffer = again.buffer()
        taken = min(len(buffer), len(stream))
        buffer[:taken], stream = stream[:taken], stream[taken:]
        read += again.advance(taken)
    if list(map(told, read)) != [told(item)]:
        raise FoundError(f"what was read as {told(item)[:200]} is written as another")


def whole() -> Iterator[int]:
    """Do not cut."""
    while True:
        yield 1 << 30


def cuts(dice: random.Random, length: int) -> Iterator[int]:
    """Cut anywhere, finely at times."""
    fine = length < 600 and dice.random() < 0.2
    most = 1 if fine else dice.choice((3, 50, 5000, 70_000))
    floor = max(1, length // 200)
    while True:
        yield 1 if fine else max(floor, dice.randrange(1, most + 1))


# --- coverage -------------------------------------------------------------------------------------


class Coverage:
    """Follow which lines come after which in some files."""

    def __init__(self) -> None:
        self.seen: set[tuple[int, int, int]] = set()
        self._new: set[tuple[int, int, int]] = set()
        self._codes: dict[CodeType, int] = {}
        self._last: dict[int, int] = {}

    def run(self, work: Callable[[], Any]) -> bool:
        """Do something; tell whether it went where nothing has gone before."""
        self._new.clear()
        before = sys.gettrace()
        sys.settrace(self._call)
        try:
            work()
        finally:
            sys.settrace(before)
        return self._learn()

    def _learn(self) -> bool:
        fresh = self._new - self.seen
        self.seen |= fresh
        return bool(fresh)

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        if code.co_filename not in FILES:
            return None
        number = self._codes.setdefault(code, len(self._codes))
        last, new = 0, self._new

        def line(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal last
            if event == "line":
                new.add((number, last, frame.f_lineno))
                last = frame.f_lineno
            elif event == "exception":
                new.add((number, last, -1))
            return line

        return line


class Monitoring(Coverage):
    """The same by ``sys.monitoring``, which Python has from 3.12 on and which costs much less."""

    def run(self, work: Callable[[], Any]) -> bool:
        """Do something; tell whether it went where nothing has gone before."""
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
        tool, events = monitoring.COVERAGE_ID, monitoring.events
        self._new.clear()
        self._last.clear()
        monitoring.use_tool_id(tool, "fuzz")
        monitoring.register_callback(tool, events.LINE, self._line)
        monitoring.set_events(tool, events.LINE)
        monitoring.restart_events()
        try:
            work()
        finally:
            monitoring.set_events(tool, 0)
            monitoring.register_callback(tool, events.LINE, None)
            monitoring.free_tool_id(tool)
        return self._learn()

    def _line(self, code: CodeType, line: int) -> Any:
        if code.co_filename not in FILES:
            return sys.monitoring.DISABLE  # type: ignore[attr-defined]
        number = self._codes.setdefault(code, len(self._codes))
        self._new.add((number, self._last.get(number, 0), line))
        self._last[number] = line
        return None


def coverage() -> Coverage:
    return Monitoring() if hasattr(sys, "monitoring") else Coverage()


# --- the loop -------------------------------------------------------------------------------------


@dataclass
class Tally:
    """How a fuzzing run has gone."""

    inputs: int = 0
    traced: int = 0
    kept: int = 0
    branches: int = 0
    clean: int = 0
    items: int = 0
    refusals: dict[str, int] = field(default_factory=dict)

    def add(self, result: Result, *, traced: bool) -> None:
        """Count an input."""
        self.inputs += 1
        self.traced += traced
        self.items += len(result.items)
        self.clean += not result.refusal
        if result.refusal:
            self.refusals[result.refusal] = self.refusals.get(result.refusal, 0) + 1

    def __str__(self) -> str:
        refused = ", ".join(f"{name} {count}" for name, count in sorted(self.refusals.items()))
        return (
            f"{self.inputs:,} inputs, {self.traced:,} traced, {self.kept} kept, "
            f"{self.branches} branches; {self.clean:,} clean, {self.items:,} items; {refused}"
        )


def fuzz(
    inputs: int,
    *,
    seed: int = 0,
    trace_every: int = 20,
    report: Callable[[Tally], object] = lambda tally: None,
    failures: Path | None = None,
) -> Tally:
    """Make inputs, feed them, and raise a :class:`FoundError` for the first one that is a bug.

    The input is written to the folder ``failures``, if one is given.
    """
    for names in (heads._readable, heads._name):  # what was read before takes another way
        names.cache_clear()
    dice, tally, seen = random.Random(seed), Tally(), coverage()
    corpora = {checked: seeds(checked=checked) for checked in (True, False)}
    mutators = {checked: Mutator(dice, checked=checked) for checked in (True, False)}
    first = [(checked, data) for checked, corpus in corpora.items() for data in corpus]

    def make() -> tuple[bool, bytes]:
        checked = dice.random() < 0.3
        corpus = corpora[checked]
        # Short ones are quick.
        short = dice.random() < 0.9
        data = min(dice.choices(corpus, k=3), key=len) if short else dice.choice(corpus)
        return checked, mutators[checked].mutate(data, dice.choice(corpus))

    for number in range(inputs):
        checked, data = first[number] if number < len(first) else make()
        traced = number < len(first) or number % trace_every == 0
        try:
            if traced:
                new = seen.run(lambda d=data, c=checked: decode(d, whole(), checked=c))
                if new and number >= len(first) and len(corpora[checked]) < MOST_KEPT:
                    corpora[checked].append(data)
                    tally.kept += 1
            result = compare(data, dice, checked=checked)
        except Exception as error:
            where = ""
            if failures is not None:
                failures.mkdir(parents=True, exist_ok=True)
                path = failures / f"frames-{seed}-{number}{'-checked' * checked}.bin"
                path.write_bytes(data)
                where = f", written to {path}"
            raise FoundError(f"input {number} of seed {seed}{where}: {error!r}") from error
        tally.add(result, traced=traced)
        if tally.inputs % 50_000 == 0:
            tally.branches = len(seen.seen)
            report(tally)
    tally.branches = len(seen.seen)
    return tally


def compare(data: bytes, dice: random.Random, *, checked: bool) -> Result:
    """Decode an input whole, and in cuts; the same has to come of it."""
    result = decode(data, whole(), checked=checked)
    again = decode(data, cuts(dice, len(data)), checked=checked)
    if result.text() != again.text():
        raise FoundError(
            f"whole, {len(result.items)} items, {result.refusal!r} and {result.cut} bytes of one "
            f"more; cut, {len(again.items)}, {again.refusal!r} and {again.cut}"
        )
    return result


def main() -> None:
    """Fuzz, and say what was found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trace-every", type=int, default=20)
    parser.add_argument("--failures", type=Path, default=Path(".cache/fuzz"))
    parser.add_argument("--replay", type=Path, help="feed one file, and show what comes of it")
    options = parser.parse_args()
    if options.replay is not None:
        checked = options.replay.stem.endswith("-checked")
        data = options.replay.read_bytes()
        for way in (whole(), cuts(random.Random(0), len(data))):
            result = decode(data, way, checked=checked)
            sys.stdout.write(f"{result.refusal or 'clean'}: {result.items}, {result.cut}\n")
        return
    began = time.process_time()

    def report(tally: Tally) -> None:
        sys.stdout.write(f"{time.process_time() - began:.0f} s of CPU: {tally}\n")
        sys.stdout.flush()

    report(
        fuzz(
            options.inputs,
            seed=options.seed,
            trace_every=options.trace_every,
            report=report,
            failures=options.failures,
        )
    )


if __name__ == "__main__":
    main()
