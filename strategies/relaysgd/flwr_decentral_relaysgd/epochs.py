"""Tree epochs: another tree to relay along, where links come and go and the topology has more.

The rules:

* *All know which links work.* Each node claims what becomes of its own, and passes on what is news
  (:mod:`flwr_decentral.core.linkstate`), except to those whom the sender itself can reach. A
  neighbor that comes, or comes back, is told all claims.
* *An epoch is a tree*, the spanning tree of what a node can reach over the links that work. Its
  number is a hash of the tree, or 0 for that of the whole topology. Sums say their epoch, and a
  node uses those of its own alone: on one tree no model is counted twice, whoever may be late.
* *A node plans anew* a quarter of a second after the first news, in case there is more. Until then
  it sends no sums and, short of its patience, ends no round. If the tree is another one, it forgets
  all sums and tells its new neighbors again what it contributes to this round. Missing places are
  filled with its model.
* *Sums of another epoch are set aside*, the newest of each neighbor, in case that the epoch becomes
  this node's. The two ends compare what they know: who knows something else is told all claims. As
  long as there is such a neighbor, a node that waits asks it again, half as often each time.
* *A neighbor in reach whose link does not count as working* is compared with once a round.

So whatever is lost is made up for: neighbors on a tree talk each round, and either agree or tell
each other what they know. Nothing of all this is sent while nothing happens.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from functools import cached_property, lru_cache
from typing import Any, Final

import networkx as nx
import numpy as np

from flwr_decentral.core import (
    Command,
    Machine,
    Message,
    PeerDown,
    PeerUp,
    Received,
    Report,
    Send,
    SetTimer,
    Site,
    Started,
    TimerFired,
    Tree,
    from_seconds,
)
from flwr_decentral.core.linkstate import CLAIM, Claim, LinkState
from flwr_decentral.core.lockstep import NOTHING, NOTICE
from flwr_decentral.core.trees import spanning_forest

from .relay import SUM, Relay

KNOWN: Final = "known"
"""The kind of a message that says what its sender knows: its view of the links, and its epoch."""

SETTLE: Final = "settle"
"""The name of the timer that ends the wait for more news."""

RETRY: Final = "retry"
"""The name of the timer that asks neighbors in another epoch again."""

_QUIET: Final = from_seconds(0.25)
_MOST: Final = 64 * _QUIET


class EpochMachine(Machine):
    """A node that relays along a tree and, where it may, along another one when links come or go.

    Parameters
    ----------
    site : Site
        Where it runs.
    relay : Relay
        How it relays at first.
    replans : bool
        Whether the tree may change.
    **options
        For the next class in line.

    Attributes
    ----------
    links : LinkState, optional
        What this node knows of all links; None if its tree is fixed.
    epoch : int
        The number of its tree.
    parents : tuple of int
        Its tree, as in :class:`~flwr_decentral.core.Tree`; empty before the first change.
    changes : int
        How often the tree has changed.
    settling : bool
        There are news, and there may be more at once.
    owing : set of int
        Neighbors that would have been sent something meanwhile.
    afar : dict
        The neighbors whose last word was of another epoch, with the newest such message, in
        pieces: kind, step, payload and header.
    interval : int
        Nanoseconds from one question to such neighbors to the next; 0 if none is due.
    """

    STATE = (
        *Machine.STATE,
        "links",
        "epoch",
        "parents",
        "changes",
        "settling",
        "owing",
        "afar",
        "interval",
    )

    round: int

    def __init__(self, site: Site, relay: Relay, *, replans: bool, **options: Any) -> None:
        super().__init__(site, wire=relay.wire, **options)
        self.first = relay
        self.links = LinkState(site.node, site.topology) if replans else None
        self.epoch = self.changes = self.interval = 0
        self.parents: tuple[int, ...] = ()
        self.settling = False
        self.owing: set[int] = set()
        self.afar: dict[int, tuple[Any, ...] | None] = {}

    # What a subclass decides.

    @abstractmethod
    def take(self, event: Received) -> Iterable[Command]:
        """Take in a message that is of this epoch, or of none."""

    @abstractmethod
    def forget(self) -> Iterator[Command]:
        """Drop all sums."""

    @abstractmethod
    def tell(self, peers: list[int]) -> Iterator[Command]:
        """Send the messages of this round to some neighbors, if they are such on the tree."""

    @abstractmethod
    def proceed(self) -> Iterator[Command]:
        """Go on, if there is nothing more to wait for."""

    # The tree.

    @cached_property
    def _relays(self) -> dict[int, Relay]:
        # Derived, so no part of the state.
        return {}

    @property
    def relay(self) -> Relay:
        """How this node relays in its epoch."""
        if not self.epoch:
            return self.first
        if self.epoch not in self._relays:
            self._relays.clear()
            self._relays[self.epoch] = self.first.along(_tree(self.parents), self.epoch)
        return self._relays[self.epoch]

    def _plan(self, links: LinkState, at: int) -> Iterator[Command]:
        """Relay along the tree of the links that work, and make up for what was held back."""
        tree = _forest(self.site.topology, links.down)[self.site.node]
        epoch = 0 if _links(tree) == _links(self.first.trees[0]) else _number(tree)
        self.settling = False
        due: list[Received] = []
        if epoch != self.epoch:
            self.epoch, self.parents = epoch, tree.parents
            self.changes += 1
            yield Report(name="new-tree")
            yield Report(name="kappa", total=self.relay.kappa)
            yield from self.forget()
            self.owing = set(self.up)
            for source in sorted(self.afar):
                event = self._aside(source, at)
                if event is not None and _epoch_of(event.message) == epoch:
                    self.afar.pop(source)
                    due.append(event)
                yield from self._drop(source)
        owing, self.owing = sorted(self.owing & self.up), set()
        yield from self.tell(owing)
        for event in due:
            yield from self.take(event)
        yield from self.proceed()

    # What happens.

    def on_started(self, event: Started) -> Iterator[Command]:
        """Say how late models are, claim which links are down, and begin."""
        yield Report(name="kappa", total=self.relay.kappa)
        if self.links is not None:
            for peer in self.site.neighbors:
                if peer not in self.up:
                    yield from self._spread(self.links.see(peer, up=False), event.at)
        yield from super().on_started(event)

    def on_received(self, event: Received) -> Iterator[Command]:
        """Take in what is of this epoch; heed what is said of links."""
        links, source, message = self.links, event.source, event.message
        if links is None:
            yield from self.take(event)
            return
        if message.kind == CLAIM:
            claim = links.read(message)
            if claim is None:
                yield Report(name="bad-message", nbytes=message.nbytes)
            else:
                news = links.hear(claim)
                yield from self._spread(news, event.at, source if news == claim else None)
        elif message.kind == KNOWN:
            yield from self._answer(links, event)
            if _epoch_of(message) != self.epoch:
                self.afar.setdefault(source)
                yield from self._arm(event.at)
        elif message.kind in (SUM, NOTHING) and _epoch_of(message) != self.epoch:
            yield from self._set_aside(links, event)
            notice = Message(kind=NOTICE, step=message.step)
            yield from self.take(Received(at=event.at, source=source, message=notice))
        else:
            if message.kind in (SUM, NOTHING):
                yield from self._drop(source)
            yield from self.take(event)

    def on_timer(self, event: TimerFired) -> Iterator[Command]:
        """Plan anew after news, or ask again who is waited for and is in another epoch."""
        if event.name == SETTLE and self.links is not None:
            yield from self._plan(self.links, event.at)
        elif event.name == RETRY and self.links is not None:
            afar = sorted(self.afar.keys() & self.up)
            # Whoever is waited for: on a tree that is out of date it may be the wrong one.
            if self.waits_for and not self.settling:
                for peer in afar:
                    yield from self._compare(self.links, peer)
            self.interval = min(2 * self.interval, _MOST) if afar else 0
            if afar:
                yield SetTimer(name=RETRY, at=event.at + self.interval)
        else:
            yield from super().on_timer(event)

    def on_peer_up(self, event: PeerUp) -> Iterator[Command]:
        """Claim that a link is up, and tell the neighbor what there is to know."""
        links, peer = self.links, event.peer
        if links is not None:
            yield from self._spread(links.see(peer, up=True), event.at)
            yield from self._list(links, peer)
        yield from super().on_peer_up(event)

    def on_peer_down(self, event: PeerDown) -> Iterator[Command]:
        """Claim that a link is down."""
        if self.links is not None:
            yield from self._drop(event.peer)
            yield from self._spread(self.links.see(event.peer, up=False), event.at)
        yield from super().on_peer_down(event)

    # What is said of links.

    def _spread(self, claim: Claim | None, at: int, source: int | None = None) -> Iterator[Command]:
        """Pass on what is news, and wait for more."""
        if claim is not None:
            assert self.links is not None  # who else makes claims
            yield from self._hold(at)
            for peer in sorted(self.up):
                if source is None or not (peer == source or self.links.works(source, peer)):
                    yield Send(to=peer, message=claim.message(self.round))

    def _hold(self, at: int) -> Iterator[Command]:
        if not self.settling:
            self.settling = True
            yield SetTimer(name=SETTLE, at=at + _QUIET)

    def _arm(self, at: int) -> Iterator[Command]:
        if not self.interval:
            self.interval = _QUIET
            yield SetTimer(name=RETRY, at=at + self.interval)

    def _list(self, links: LinkState, peer: int) -> Iterator[Send]:
        """Tell a neighbor all claims."""
        for claim in links:
            yield Send(to=peer, message=claim.message(self.round))

    def _compare(self, links: LinkState, peer: int, *, ask: bool = True) -> Iterator[Send]:
        """Tell a neighbor what this node knows, so that it tells all claims if it knows others."""
        header = {"view": links.view, "epoch": self.epoch, "ask": int(ask)}
        yield Send(to=peer, message=Message(kind=KNOWN, step=self.round, header=header))

    def _answer(self, links: LinkState, event: Received) -> Iterator[Send]:
        source, header = event.source, event.message.header
        # While news travel, views differ without need.
        asked = bool(header.get("ask"))
        if header.get("view") != links.view and not (asked and self.settling):
            yield from self._list(links, source)
            if asked:
                yield from self._compare(links, source, ask=False)

    def _remind(self) -> Iterator[Send]:
        """Compare with those who are in reach, and do not count as such."""
        if self.links is not None and self.links.claims:
            for peer in sorted(self.up):
                if not self.links.works(self.site.node, peer):
                    yield from self._compare(self.links, peer)

    # What is of another epoch.

    def _set_aside(self, links: LinkState, event: Received) -> Iterator[Command]:
        source, message = event.source, event.message
        held = self.afar.get(source)
        if held is not None and held[1] > message.step:
            yield Report(name="stale-message", nbytes=message.nbytes)
        else:
            yield from self._drop(source)
            pieces = message.kind, message.step, message.payload, dict(message.header)
            self.afar[source] = pieces
        if not self.settling:
            yield from self._compare(links, source)
        yield from self._arm(event.at)

    def _aside(self, source: int, at: int) -> Received | None:
        """Look at what of a neighbor is set aside."""
        pieces = self.afar.get(source)
        if pieces is None:
            return None
        kind, step, payload, header = pieces
        message = Message(kind=kind, step=step, payload=payload, header=header, wire=self.wire)
        return Received(at=at, source=source, message=message)

    def _drop(self, source: int) -> Iterator[Command]:
        """Forget what of a neighbor is set aside, and that it is in another epoch."""
        event = self._aside(source, 0)
        if event is not None and event.message.payload is not None:
            yield Report(name="stale-message", nbytes=event.message.nbytes)
        self.afar.pop(source, None)


def _epoch_of(message: Message) -> int | float:
    return message.header.get("epoch", 0)


def _links(tree: Tree) -> list[int]:
    """List the nodes of a tree and its links, whatever it hangs at."""
    links = sorted((min(edge), max(edge)) for edge in tree.edges)
    return [*tree.present, *(node for link in links for node in link)]


def _number(tree: Tree) -> int:
    """Hash a tree to a number of 63 bits that is not 0."""
    content = np.array(_links(tree), "<i8").tobytes()
    digest = hashlib.blake2b(content, digest_size=8, person=b"flwr-trees").digest()
    return int.from_bytes(digest, "little") >> 1 or 1


@lru_cache(maxsize=64)
def _tree(parents: tuple[int, ...]) -> Tree:
    return Tree(parents)


@lru_cache(maxsize=64)
def _forest(topology: nx.Graph[int], down: frozenset[tuple[int, int]]) -> tuple[Tree, ...]:
    # Cached by the identity of the frozen graph: all nodes of a process share the trees.
    graph = nx.Graph(topology)
    graph.remove_edges_from(down)
    return spanning_forest(graph)
