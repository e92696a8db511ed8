"""A mailbox: received and not yet consumed, the newest of each (sender, slot) only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from .message import HEADER_BYTES, Vector


class Letter(NamedTuple):
    """One message in a mailbox."""

    sender: int
    slot: int
    step: int
    payload: Vector

    @property
    def nbytes(self) -> int:
        """Bytes that it took on the wire, header included."""
        return HEADER_BYTES + self.payload.nbytes


class Mailbox:
    """Keep the newest letter of each (sender, slot).

    Newer is decided by ``step``, never by the order of arrival: a letter that overtakes another on
    the way wins, and a duplicate changes nothing, also after what it repeats has been taken out.
    Iteration is in ascending (sender, slot), so that sums over a mailbox have one order everywhere.
    """

    def __init__(self) -> None:
        self._letters: dict[tuple[int, int], Letter] = {}
        self._newest: dict[tuple[int, int], int] = {}

    def put(self, letter: Letter) -> Letter | None:
        """Take in a letter.

        Returns
        -------
        Letter or None
            The letter that is of no use (any more): the one it replaced, or itself if there has
            been one at least as new. None if it replaced nothing.
        """
        key = (letter.sender, letter.slot)
        if self._newest.get(key, letter.step - 1) >= letter.step:
            return letter
        held = self._letters.get(key)
        self._letters[key] = letter
        self._newest[key] = letter.step
        return held

    def drain(self) -> list[Letter]:
        """Take everything out, in ascending (sender, slot)."""
        letters = list(self)
        self._letters.clear()
        return letters

    def discard(self, sender: int) -> list[Letter]:
        """Take out everything of one sender."""
        gone = [letter for letter in self if letter.sender == sender]
        for letter in gone:
            del self._letters[letter.sender, letter.slot]
        return gone

    def forget(self, sender: int) -> None:
        """Let one sender's steps start over, as those of a node that returns may."""
        for key in [key for key in self._newest if key[0] == sender]:
            del self._newest[key]

    def snapshot(self) -> dict[str, list[tuple[Any, ...]]]:
        """Write everything down as plain tuples with copied payloads."""
        return {
            "letters": [(*letter[:3], letter.payload.copy()) for letter in self],
            "newest": [(*key, self._newest[key]) for key in sorted(self._newest)],
        }

    def restore(self, snapshot: Mapping[str, Iterable[tuple[Any, ...]]]) -> None:
        """Become exactly what :meth:`snapshot` has written down."""
        held = [
            Letter(sender, slot, step, payload.copy())
            for sender, slot, step, payload in snapshot["letters"]
        ]
        self._letters = {(letter.sender, letter.slot): letter for letter in held}
        self._newest = {(sender, slot): step for sender, slot, step in snapshot["newest"]}

    def __iter__(self) -> Iterator[Letter]:
        return (self._letters[key] for key in sorted(self._letters))

    def __len__(self) -> int:
        return len(self._letters)
