"""What stands in the heads of frames: who speaks, and all of a message but its payload.

A text is its length in one byte, and that many bytes of printable UTF-8. A number of a message's
header is a text, one letter and a value: ``b``, ``h``, ``i`` or ``q`` for an integer of 8 to 64
bits, the shortest that it fits in, and ``d`` for a float64. A payload's length is the number of its
scalars, or all ones if there is none. Its form is a place in :data:`~flwr_decentral.core.WIRES`,
which stands in the upper half of the byte whose lower half counts the numbers.
"""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np

from flwr_decentral.core import (
    WIRES,
    AlgorithmError,
    ConfigurationError,
    Message,
    Wire,
    wire_bytes,
)

from .refusals import Reason, Refusal

MOST_NAME: Final = 64
MOST_KEY: Final = 32
MOST_NUMBERS: Final = 5

_LENGTH: Final = struct.Struct("<B")
_WHO: Final = struct.Struct("<QIQ")
_MESSAGE: Final = struct.Struct("<qIB")
"""Step, length of the payload, length of the kind."""
_SCALAR: Final = 4
_NO_PAYLOAD: Final = 2**32 - 1
MOST_PAYLOAD: Final = _SCALAR * (_NO_PAYLOAD - 1)
"""Bytes of the longest payload whose length can be written: nearly 16 GiB."""
_NUMBERS: Final = {ord(letter): struct.Struct(f"<{letter}") for letter in "bhiqd"}
_MOST_BITS: Final = 64
_SHORTEST: Final = [
    ord(next(letter for letter in "bhiq" if bits <= 8 * struct.calcsize(f"<{letter}")))
    for bits in range(_MOST_BITS + 1)
]
"""By the bits of an integer, its sign among them: the letter that it fits in."""


class Cursor:
    """Read a head from its beginning to its end; what does not fit is refused."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, nbytes: int) -> bytes:
        """Take so many bytes."""
        part = self._data[self._at : self._at + nbytes]
        if len(part) < nbytes:
            raise Refusal(Reason.FRAME, "the head of a frame is too short")
        self._at += nbytes
        return part

    def unpack(self, layout: struct.Struct) -> tuple[Any, ...]:
        """Take numbers."""
        return layout.unpack(self.take(layout.size))

    def text(self, most: int) -> str:
        """Take a text of at most so many bytes."""
        (length,) = self.unpack(_LENGTH)
        return _readable(self.take(length), most)

    def end(self) -> None:
        """Make sure that nothing is left."""
        if self._at != len(self._data):
            raise Refusal(Reason.FRAME, "the head of a frame is too long")


@lru_cache(1024)  # names come again and again
def _readable(raw: bytes, most: int) -> str:
    """Read a text of at most so many bytes."""
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        text = "\0"
    if len(raw) > most or not text.isprintable():
        raise Refusal(Reason.FRAME, f"{raw[:most]!r} is no text of at most {most} bytes")
    return text


def _text(text: str, most: int) -> bytes | None:
    raw = text.encode(errors="replace")
    fits = len(raw) <= most and text.isprintable()
    return _LENGTH.pack(len(raw)) + raw if fits else None


def sentence(text: str, most: int) -> bytes:
    """Write a text for people: cut where it is too long, with marks for what cannot be shown."""
    shown = "".join(letter if letter.isprintable() else "?" for letter in text)
    raw = shown.encode(errors="replace")[:most].decode(errors="ignore").encode()
    return _LENGTH.pack(len(raw)) + raw


@dataclass(frozen=True, kw_only=True)
class Hello:
    """Who speaks, and about what.

    Attributes
    ----------
    run : str
        The run's id.
    epoch : int
        How often roster or topology have changed in this run.
    index : int
        The speaker's node index.
    incarnation : int
        Higher for each new process that speaks for this node.
    algorithm, version : str
        What it runs.
    layout : str
        The hash of its model's layout.
    """

    run: str
    epoch: int
    index: int
    incarnation: int
    algorithm: str
    version: str
    layout: str

    def __post_init__(self) -> None:
        """Refuse what could not be sent."""
        for name in ("run", "algorithm", "version", "layout"):
            if _text(getattr(self, name), MOST_NAME) is None:
                raise ConfigurationError(
                    f"{name} {getattr(self, name)!r} is not printable, or longer than {MOST_NAME} "
                    "bytes: it cannot be said to a peer"
                )
        for name, bits in (("epoch", 64), ("index", 32), ("incarnation", 64)):
            if not 0 <= getattr(self, name) < 2**bits:
                raise ConfigurationError(f"{name} {getattr(self, name)} is not in [0, 2**{bits})")

    def encode(self) -> bytes:
        """Write it as the head of a frame."""
        texts = (_text(t, MOST_NAME) for t in (self.run, self.algorithm, self.version, self.layout))
        parts = [_WHO.pack(self.epoch, self.index, self.incarnation)]
        return b"".join((*parts, *(text or b"" for text in texts)))

    @classmethod
    def decode(cls, raw: bytes) -> Hello:
        """Read it."""
        cursor = Cursor(raw)
        epoch, index, incarnation = cursor.unpack(_WHO)
        run, algorithm, version, layout = (cursor.text(MOST_NAME) for _ in range(4))
        cursor.end()
        return cls(
            run=run,
            epoch=epoch,
            index=index,
            incarnation=incarnation,
            algorithm=algorithm,
            version=version,
            layout=layout,
        )

    def check(self, other: Hello) -> None:
        """Compare with what another node says.

        Raises
        ------
        Refusal
            If the two do not take part in the same thing. It names the first difference.
        """
        for reason, what, mine, its in (
            (Reason.RUN, "run", self.run, other.run),
            (Reason.EPOCH, "epoch", self.epoch, other.epoch),
            (Reason.ALGORITHM, "algorithm", self.algorithm, other.algorithm),
            (Reason.ALGORITHM_VERSION, "algorithm version", self.version, other.version),
            (Reason.LAYOUT, "model layout", self.layout, other.layout),
        ):
            if mine != its:
                raise Refusal(
                    reason,
                    f"node {other.index} has {what} {its!r}, node {self.index} has {mine!r}; "
                    "all nodes of a run must have the same",
                )


class MessageHead(NamedTuple):
    """All of a message but its payload.

    Attributes
    ----------
    kind, step, numbers, wire
        As in :class:`~flwr_decentral.core.Message`, where ``numbers`` is the header.
    length : int or None
        How many values the payload has; None if there is none.
    """

    kind: str
    step: int
    numbers: Mapping[str, int | float]
    length: int | None
    wire: Wire

    @property
    def nbytes(self) -> int:
        """Bytes of the payload on the wire."""
        return wire_bytes(self.length or 0, self.wire)

    @property
    def memory(self) -> int:
        """Bytes of the payload once it has been read."""
        return _SCALAR * (self.length or 0)

    @classmethod
    def of(cls, message: Message, limit: int) -> MessageHead:
        """Take a message's.

        Raises
        ------
        AlgorithmError
            If a peer would refuse it.
        """
        length = None if message.payload is None else len(message.payload)
        if message.wire not in WIRES:
            raise AlgorithmError(
                f"a {message.kind!r} message has the form {message.wire!r} on the wire; there are "
                f"{', '.join(WIRES)}"
            )
        if _SCALAR * (length or 0) > limit:
            raise AlgorithmError(
                f"a {message.kind!r} message has a payload of {length} values; in this run the "
                f"longest may have {limit // _SCALAR}"
            )
        if len(message.header) > MOST_NUMBERS:
            raise AlgorithmError(
                f"a {message.kind!r} message has {len(message.header)} numbers in its header, "
                f"which holds {MOST_NUMBERS}"
            )
        return cls(
            kind=message.kind,
            step=message.step,
            numbers=message.header,
            length=length,
            wire=message.wire,
        )

    def encode(self) -> bytes:
        """Write it as the head of a frame.

        Raises
        ------
        AlgorithmError
            If a name or a number cannot be written.
        """
        size = _NO_PAYLOAD if self.length is None else self.length
        kind = _name(self.kind)
        try:
            start = _MESSAGE.pack(self.step, size, len(kind))
        except struct.error:
            raise AlgorithmError(f"step {self.step!r} is no integer of 64 bits") from None
        form = WIRES.index(self.wire) << 4
        parts = [start, kind, _LENGTH.pack(form | len(self.numbers))]
        for key, value in self.numbers.items():
            name = _name(key)
            parts += [_LENGTH.pack(len(name)), name, _number(key, value)]
        return b"".join(parts)

    @classmethod
    def decode(cls, raw: bytes) -> MessageHead:
        """Read it."""
        try:
            step, size, length = _MESSAGE.unpack_from(raw)
            at = _MESSAGE.size + length
            kind = _readable(raw[_MESSAGE.size : at], MOST_KEY)
            form, count = raw[at] >> 4, raw[at] & 15
            at += 1
            numbers: dict[str, int | float] = {}
            for _ in range(count):
                end = at + 1 + raw[at]
                key = _readable(raw[at + 1 : end], MOST_KEY)
                layout = _NUMBERS.get(raw[end])
                if layout is None or key in numbers:
                    raise Refusal(Reason.FRAME, f"number {key!r} of a message cannot be read")
                (numbers[key],) = layout.unpack_from(raw, end + 1)
                at = end + 1 + layout.size
        except (struct.error, IndexError):
            raise Refusal(Reason.FRAME, "the head of a frame is too short") from None
        if at != len(raw):
            raise Refusal(Reason.FRAME, "the head of a frame is too long")
        if form >= len(WIRES):
            raise Refusal(Reason.FRAME, f"no form of payloads has the number {form}")
        if count > MOST_NUMBERS or not all(map(math.isfinite, numbers.values())):
            raise Refusal(Reason.FRAME, f"a message cannot have the header {numbers}")
        return cls(
            kind=kind,
            step=step,
            numbers=numbers,
            length=None if size == _NO_PAYLOAD else size,
            wire=WIRES[form],
        )


@lru_cache(1024)
def _name(name: str) -> bytes:
    raw = name.encode(errors="replace")
    if len(raw) > MOST_KEY or not name.isprintable():
        raise AlgorithmError(
            f"{name!r} cannot name a message or a number: it is not printable, or longer than "
            f"{MOST_KEY} bytes"
        )
    return raw


def _number(key: str, value: object) -> bytes:
    try:
        whole = operator.index(value)  # type: ignore[arg-type]  # asks whether it is one
    except TypeError:
        pass
    else:
        bits = (whole if whole >= 0 else ~whole).bit_length() + 1
        if bits > _MOST_BITS:
            raise AlgorithmError(f"{key}={value} of a message does not fit into 64 bits")
        letter = _SHORTEST[bits]
        return _LENGTH.pack(letter) + _NUMBERS[letter].pack(whole)
    if isinstance(value, float | np.floating) and math.isfinite(value):
        return b"d" + _NUMBERS[ord("d")].pack(value)
    raise AlgorithmError(f"{key}={value!r} of a message is no finite number")
