"""A mailbox: received and not yet consumed, the newest of each (sender, slot) only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

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
    the way wins, and a duplicate changes nothing. Iteration is in ascending (sender, slot), so that
    sums over a mailbox have one order everywhere.
    """

    def __init__(self) -> None:
        self._letters: dict[tuple[int, int], Letter] = {}

    def put(self, letter: Letter) -> Letter | None:
        """Take in a letter.

        Returns
        -------
        Letter or None
            The letter that is of no use (any more): the one it replaced, or itself if the mailbox
            holds one at least as new. None if there was none before.
        """
        key = (letter.sender, letter.slot)
        held = self._letters.get(key)
        if held is not None and held.step >= letter.step:
            return letter
        self._letters[key] = letter
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

    def snapshot(self) -> list[tuple[int, int, int, Vector]]:
        """List the letters as plain tuples with copied payloads."""
        return [(*letter[:3], letter.payload.copy()) for letter in self]

    def restore(self, letters: Iterable[tuple[int, int, int, Vector]]) -> None:
        """Hold exactly what :meth:`snapshot` has listed."""
        held = (Letter(*letter[:3], letter[3].copy()) for letter in letters)
        self._letters = {(letter.sender, letter.slot): letter for letter in held}

    def __iter__(self) -> Iterator[Letter]:
        return (self._letters[key] for key in sorted(self._letters))

    def __len__(self) -> int:
        return len(self._letters)
