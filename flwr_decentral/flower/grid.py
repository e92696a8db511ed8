"""Flower's grid, metered: what crosses it is counted."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from flwr.app import Message
from flwr.serverapp import Grid

from flwr_decentral.core import RuntimeFault

from .records import array_bytes

_SHORTEST: Final = 0.02
_LONGEST: Final = 0.5
"""Seconds from one look to the next: in a deployment each look is a request to the SuperLink."""


def pauses() -> Iterator[float]:
    """Yield how many seconds to wait before each look: little at first, then longer."""
    pause = _SHORTEST
    while True:
        yield pause
        pause = min(1.5 * pause, _LONGEST)


@dataclass
class GridMeter:
    """Pass messages to the grid and count the bytes of arrays in them, in both directions."""

    grid: Grid
    array_bytes: int = 0

    def node_ids(self) -> list[int]:
        """List the nodes that have registered, ascending."""
        return sorted(self.grid.get_node_ids())

    def push(self, message: Message) -> str:
        """Send one message; return its id.

        Raises
        ------
        RuntimeFault
            If Flower does not take it.
        """
        self.array_bytes += array_bytes([message])
        ids = list(self.grid.push_messages([message]))
        if not ids or not ids[0]:  # with a SuperLink it is one empty id
            raise RuntimeFault(
                f"Flower refused a message to node {message.metadata.dst_node_id}: the run has "
                "been stopped or the node is gone"
            )
        return ids[0]

    def pull(self, ids: Iterable[str]) -> list[Message]:
        """Take the replies that have come."""
        replies = list(self.grid.pull_messages(list(ids)))
        self.array_bytes += array_bytes(replies)
        return replies

    def replies(self, ids: Collection[str], deadline: float) -> Iterator[Message]:
        """Yield replies as they come, until all have come or the time has passed.

        Parameters
        ----------
        ids : collection of str
            What they reply to.
        deadline : float
            Seconds on the monotonic clock.
        """
        waiting, waits = dict.fromkeys(ids), pauses()
        while waiting:
            if replies := self.pull(waiting):
                waits = pauses()
            for reply in replies:
                # Each once, should the SuperLink hand one out twice.
                if (message_id := reply.metadata.reply_to_message_id) in waiting:
                    del waiting[message_id]
                    yield reply
            if waiting:
                if time.monotonic() > deadline:
                    return
                time.sleep(next(waits))
