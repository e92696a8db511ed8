"""Flower's grid, metered: what crosses it is counted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from flwr.app import Message
from flwr.serverapp import Grid

from flwr_decentral.core import RuntimeFault

from .records import array_bytes


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
        if not ids:
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
