"""A mailbox: received and not yet consumed, the newest of each (sender, slot) only."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from .message import Vector, message_bytes
from .state import Part
from .wire import Wire

_NEVER: Final = -(2**63)


class Letter(NamedTuple):
    """One message in a mailbox. Its slot is 0 or more."""

    sender: int
    slot: int
    step: int
    payload: Vector
    wire: Wire = "float32"

    @property
    def nbytes(self) -> int:
        """Bytes that it took on the wire, header included."""
        return message_bytes(len(self.payload), self.wire)


class Mailbox(Part):
    """Keep the newest letter of each (sender, slot).

    Newer is decided by ``step``, never by the order of arrival: a letter that overtakes another on
    the way wins, and a duplicate changes nothing, also after what it repeats has been taken out.
    Iteration is in ascending (sender, slot), so that sums over a mailbox have one order everywhere.
    """

    def __init__(self) -> None:
        self._letters: dict[tuple[int, int], Letter] = {}
        # By sender, then slot. Packed: a node of a large complete graph hears of every slot of all.
        self._newest: defaultdict[int, array[int]] = defaultdict(lambda: array("q"))

    def put(self, letter: Letter) -> Letter | None:
        """Take in a letter.

        Returns
        -------
        Letter or None
            The letter that is of no use (any more): the one it replaced, or itself if there has
            been one at least as new. None if it replaced nothing.
        """
        newest = self._newest[letter.sender]
        newest.extend([_NEVER] * (letter.slot + 1 - len(newest)))
        if newest[letter.slot] >= letter.step:
            return letter
        newest[letter.slot] = letter.step
        key = (letter.sender, letter.slot)
        held = self._letters.get(key)
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

    def forget(self, sender: int) -> None:
        """Let one sender's steps start over, as those of a node that returns may."""
        self._newest.pop(sender, None)

    def snapshot(self) -> dict[str, list[tuple[Any, ...]]]:
        """Write everything down as plain tuples with copied payloads."""
        return {
            "letters": [letter._replace(payload=letter.payload.copy())[:] for letter in self],
            "newest": [(sender, *self._newest[sender]) for sender in sorted(self._newest)],
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Become exactly what :meth:`snapshot` has written down."""
        held = [
            Letter(*letter)._replace(payload=letter[3].copy()) for letter in snapshot["letters"]
        ]
        self._letters = {(letter.sender, letter.slot): letter for letter in held}
        self._newest.clear()
        for sender, *steps in snapshot["newest"]:
            self._newest[sender].extend(steps)

    def __iter__(self) -> Iterator[Letter]:
        return (self._letters[key] for key in sorted(self._letters))

    def __len__(self) -> int:
        return len(self._letters)
