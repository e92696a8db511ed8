"""The emulated network: one uplink, one downlink and one outbox for each node.

The model of a link, all of it:

* A node's **uplink** carries one message at a time. A message of b bits takes ``b / uplink``
  seconds there; the next one starts when it is through. What has not been started can be dropped.
* A message then travels for the **latency** of its pair of nodes. Messages of one pair stay in
  order.
* A node's **downlink** receives from many at once, but no faster than its bandwidth: it is a queue
  that is served in order of first bytes, and a message has arrived when its last byte is there and
  the downlink has worked off everything up to it.
* A message is **lost** with a fixed probability, or when an end of its link goes down or a
  partition cuts it before it has arrived. It has used the sender's uplink all the same, and the
  receiver's downlink if its first byte had come.
* When a node goes down, its uplink and its downlink fall idle.

With unlimited bandwidth a message needs the latency alone, and an uplink that is never busy never
falls idle.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from flwr_decentral.core import Message, Seeds

from .conditions import Conditions

_BITS_PER_BYTE = 8
_NANOSECONDS = 1_000_000_000


@lru_cache(maxsize=1024)
def transfer_ns(nbytes: int, bps: float) -> int:
    """Compute how long a link of ``bps`` bits per second is busy with a message, rounded up.

    Examples
    --------
    >>> transfer_ns(1_250_000, 10e6)
    1000000000
    >>> transfer_ns(1_250_000, float("inf"))
    0
    """
    return 0 if math.isinf(bps) else math.ceil(nbytes * _BITS_PER_BYTE * _NANOSECONDS / bps)


class Transfer(NamedTuple):
    """A message on its way.

    Attributes
    ----------
    src, dst : int
        From whom, to whom.
    message : Message
        What.
    nbytes : int
        How much, header included.
    start, sent : int
        When the uplink starts and ends with it, in nanoseconds.
    lost : bool
        Whether it never comes near its receiver: lost by chance, or cut before its first byte.
    """

    src: int
    dst: int
    message: Message
    nbytes: int
    start: int
    sent: int
    lost: bool


class Links:
    """The state of all links.

    Parameters
    ----------
    conditions : Conditions
        Bandwidths, latencies, loss, outages and partitions.
    seeds : Seeds
        The run's seeds; each sender has its own stream of losses.
    """

    def __init__(self, conditions: Conditions, seeds: Seeds) -> None:
        self._conditions = conditions
        nodes = range(conditions.nodes)
        self._outboxes: list[deque[tuple[int, Message]]] = [deque() for _ in nodes]
        self._uplink_free = [0] * conditions.nodes
        self._downlink_free = [0] * conditions.nodes
        self._in_order = [
            isinstance(conditions.latency, int) or math.isinf(bps)
            for bps in conditions.downlink_bps
        ]
        self._breakable = bool(conditions.changes())
        self._dice: list[Callable[[], float]] = []
        if conditions.loss:
            self._dice = [seeds.generator(node, "loss").random for node in nodes]

    def queue(self, src: int, dst: int, message: Message) -> None:
        """Put a message at the end of a node's outbox."""
        self._outboxes[src].append((dst, message))

    def drop(self, src: int, dst: int | None = None) -> list[Message]:
        """Take out of an outbox what has not been started: to one node, or all of it."""
        outbox = self._outboxes[src]
        dropped = [message for to, message in outbox if dst is None or to == dst]
        kept = [item for item in outbox if dst is not None and item[0] != dst]
        outbox.clear()
        outbox.extend(kept)
        return dropped

    def start(self, src: int, now: int) -> Transfer | None:
        """Start the first message of an outbox, if the uplink is free and there is one."""
        outbox = self._outboxes[src]
        if not outbox or self._uplink_free[src] > now:
            return None
        dst, message = outbox.popleft()
        nbytes = message.nbytes
        sent = now + transfer_ns(nbytes, self._conditions.uplink_bps[src])
        self._uplink_free[src] = sent
        lost = bool(self._dice) and self._dice[src]() < self._conditions.loss
        if self._breakable and not lost:
            lost = self._breaks(src, dst, now, now + self._conditions.latency_ns(src, dst))
        return Transfer(src, dst, message, nbytes, now, sent, lost)

    def is_idle(self, src: int, now: int) -> bool:
        """Tell whether a message that is queued now would start at once."""
        return not self._outboxes[src] and self._uplink_free[src] <= now

    def reset(self, node: int, now: int) -> None:
        """Let both links of a node fall idle at once: whatever was on them is cut off."""
        for free in (self._uplink_free, self._downlink_free):
            free[node] = min(free[node], now)

    def first_byte(self, transfer: Transfer) -> int:
        """Tell when a transfer reaches its receiver's downlink."""
        return transfer.start + self._conditions.latency_ns(transfer.src, transfer.dst)

    def in_order(self, dst: int) -> bool:
        """Tell whether transfers start in the order in which they reach a node's downlink.

        Where they do, :meth:`arrival` can be told at their start. The order at an unlimited
        downlink does not matter.
        """
        return self._in_order[dst]

    def arrival(self, transfer: Transfer) -> int:
        """Tell when the receiver has all of it.

        To be asked once for each transfer, in the order of :meth:`first_byte`: the downlink takes
        up work in that order.
        """
        conditions = self._conditions
        latency = conditions.latency_ns(transfer.src, transfer.dst)
        last = transfer.sent + latency
        work = transfer_ns(transfer.nbytes, conditions.downlink_bps[transfer.dst])
        if not work:
            return last
        free = max(self._downlink_free[transfer.dst], transfer.start + latency) + work
        self._downlink_free[transfer.dst] = free
        return max(last, free)

    def broken(self, transfer: Transfer, until: int) -> bool:
        """Tell whether a transfer's link breaks while it is on its way, up to ``until``."""
        return self._breakable and self._breaks(transfer.src, transfer.dst, transfer.start, until)

    def _breaks(self, src: int, dst: int, start: int, until: int) -> bool:
        # An interval holds its start: what is sent in the moment of a break is cut as well.
        conditions = self._conditions
        ends = (*conditions.outages[src], *conditions.outages[dst])
        return any(start <= begin <= until for begin, _ in ends) or any(
            start <= begin <= until and group_of[src] != group_of[dst]
            for begin, _, group_of in conditions.partitions
        )
