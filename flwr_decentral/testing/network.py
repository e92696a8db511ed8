"""The links of a cluster: outboxes, uplinks, and the dice that decide what becomes of a message.

Every decision comes from a stream of its own for each (link, kind of fault), all derived from one
seed: a failing run replays, and turning one fault on leaves the draws of the others as they were.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from flwr_decentral.core import Message, Seeds
from flwr_decentral.core.algorithm import Topology

from .faults import Faults


class Sent(NamedTuple):
    """A message that a node's uplink has started on."""

    at: int
    src: int
    dst: int
    message: Message


class Delivery(NamedTuple):
    """A copy of a message that arrives."""

    at: int
    message: Message
    fault: str = ""


class Dice:
    """Decide what becomes of each message.

    Parameters
    ----------
    faults : Faults
        What can happen to it.
    seed : int
        What decides whether it does.
    """

    def __init__(self, faults: Faults, seed: int) -> None:
        self._faults = faults
        self._seeds = Seeds(seed)
        self._streams: dict[tuple[int, int, str], np.random.Generator] = {}
        self._latest: dict[tuple[int, int], int] = {}

    def deliveries(self, src: int, dst: int, message: Message, now: int) -> Iterator[Delivery]:
        """Yield what arrives of a message that leaves ``src`` now: nothing, one copy or two."""
        faults, link = self._faults, (src, dst)
        at = now + self._uniform(link, "delay", *faults.delay)
        if faults.reorder:
            at += self._uniform(link, "reorder", 0, 2 * faults.step)
        else:
            at = self._latest[link] = max(at, self._latest.get(link, 0))
        if self._happens(link, "drop", faults.drop):
            return
        if message.payload is not None and self._happens(link, "corrupt", faults.corrupt):
            yield Delivery(at, self._corrupt(link, message), "corrupted")
        else:
            yield Delivery(at, message)
        if self._happens(link, "duplicate", faults.duplicate):
            yield Delivery(at + self._uniform(link, "echo", 0, faults.echo), message, "duplicated")

    def _corrupt(self, link: tuple[int, int], message: Message) -> Message:
        assert message.payload is not None
        payload = message.payload.copy()
        spoilt = self._uniform(link, "where", 0, len(payload) - 1)
        payload[spoilt] = (np.nan, np.inf, -np.inf)[self._uniform(link, "how", 0, 2)]
        payload.flags.writeable = False
        return replace(message, payload=payload)

    def _happens(self, link: tuple[int, int], fault: str, probability: float) -> bool:
        return probability > 0 and bool(self._stream(link, fault).random() < probability)

    def _uniform(self, link: tuple[int, int], purpose: str, least: int, most: int) -> int:
        if least == most:
            return least
        return int(self._stream(link, purpose).integers(least, most, endpoint=True))

    def _stream(self, link: tuple[int, int], purpose: str) -> np.random.Generator:
        key = (*link, purpose)
        if key not in self._streams:
            self._streams[key] = self._seeds.generator(link[0], f"fault-{purpose}-{link[1]}")
        return self._streams[key]


class Network:
    """Keep what is between the nodes.

    Parameters
    ----------
    topology : networkx.Graph
        Who may talk to whom.
    faults : Faults
        What goes wrong.
    seed : int
        What decides when.

    Attributes
    ----------
    sent : list of Sent
        Every message that was put on an uplink.
    injected : Counter of str
        What has become of messages: see :class:`~flwr_decentral.testing.cluster.Cluster`.
    under_way : int
        How many messages are queued, on an uplink or on a link.
    """

    def __init__(self, topology: Topology, faults: Faults, seed: int) -> None:
        self.sent: list[Sent] = []
        self.injected: Counter[str] = Counter()
        self.under_way = 0
        self._topology, self._faults = topology, faults
        self._dice = Dice(faults, seed)
        self._up: set[tuple[int, int]] = set()
        self._breaks: Counter[tuple[int, int]] = Counter()
        self._outboxes: list[deque[tuple[int, Message]]] = [deque() for _ in topology]

    def change(self, now: int) -> None:
        """Let links come and go."""
        up = self._faults.links_up(self._topology, now)
        self._breaks.update(self._up - up)
        self._up = up

    def is_up(self, a: int, b: int) -> bool:
        """Tell whether the link of two nodes works."""
        return (min(a, b), max(a, b)) in self._up

    def breaks(self, a: int, b: int) -> int:
        """Count how often the link of two nodes has broken: another number is another link."""
        return self._breaks[min(a, b), max(a, b)]

    def queue(self, src: int, dst: int, message: Message) -> None:
        """Put a message at the end of a node's outbox, if its link works."""
        if self.is_up(src, dst):
            self._outboxes[src].append((dst, message))
            self.under_way += 1
        else:
            self.injected["unsent"] += 1

    def drop(self, src: int, dst: int | None = None) -> None:
        """Take out of a node's outbox what is for one node, or everything."""
        outbox = self._outboxes[src]
        kept = [item for item in outbox if dst is not None and item[0] != dst]
        dropped = len(outbox) - len(kept)
        if dropped:
            self.injected["unsent"] += dropped
            self.under_way -= dropped
        outbox.clear()
        outbox.extend(kept)

    def start(self, src: int, now: int) -> Sent | None:
        """Put the first message of a node's outbox on its uplink."""
        if not self._outboxes[src]:
            return None
        self.sent.append(Sent(now, src, *self._outboxes[src].popleft()))
        return self.sent[-1]

    def deliver(self, sent: Sent, now: int) -> list[Delivery]:
        """Decide what arrives of a message that has left the uplink, and when."""
        deliveries = list(self._dice.deliveries(sent.src, sent.dst, sent.message, now))
        self.under_way += len(deliveries) - 1
        self.injected.update(each.fault for each in deliveries if each.fault)
        if not deliveries:
            self.injected["dropped"] += 1
        return deliveries

    def arrives(self, src: int, dst: int, breaks: int) -> bool:
        """Tell whether the link of a message is still the one it was sent on."""
        self.under_way -= 1
        if self.breaks(src, dst) == breaks:
            return True
        self.injected["cut"] += 1
        return False
