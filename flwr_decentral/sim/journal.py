"""What happened: the digest of a run, always, and its transcript, on demand.

The **digest** is a hash over one short line for each event, in the order in which the events
happened, and over the final models. A line holds the time, the node, the kind of event and the
numbers that identify it; for a finished training it holds the hash of the trained vector. Machines
are functions of these events, so two runs with one digest were the same run.

The **transcript** is for people and for replays: the events with all their fields and the commands
that answered them. It costs a hash of every vector that moves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import IO

from flwr_decentral.core import Command, Event, Vector
from flwr_decentral.core.transcript import format_step


class Journal:
    """Record a run.

    Parameters
    ----------
    transcript : text file, optional
        Where to write the transcript, one event a line.
    """

    def __init__(self, transcript: IO[str] | None = None) -> None:
        self._hash = hashlib.blake2b(digest_size=16, person=b"flwrd-digest")
        self._transcript = transcript

    def note(self, line: str) -> None:
        """Add one line to the digest."""
        self._hash.update(f"{line}\n".encode())

    def event(self, node: int, event: Event, commands: Sequence[Command]) -> None:
        """Add an event and what it led to to the transcript, if there is one."""
        if self._transcript is not None:
            self._transcript.write(f"{format_step(node, event, commands)}\n")

    def model(self, node: int, model: Vector) -> None:
        """Add a final model to the digest."""
        self.note(f"model {node}")
        self._hash.update(model.data)

    @property
    def digest(self) -> str:
        """The hash of everything so far: 32 hexadecimal digits."""
        return self._hash.hexdigest()
