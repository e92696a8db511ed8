"""AD-PSGD: nodes train on and on, and average with one neighbor at a time meanwhile.

Paper
-----
Lian, Zhang, Zhang, Liu: *Asynchronous Decentralized Parallel Stochastic Gradient Descent*,
ICML 2018, arXiv:1710.06952, Algorithm 1.

Node i trains from a copy of its model x_i. While it does, x_i and the model of a random neighbor j
become their average, again and again,

    x_i, x_j <- (x_i + x_j) / 2,

and when training ends, its update u_i, of the copy, is added to whatever x_i has become.

The average is atomic in the paper. Here it takes messages, and training may end between them: both
ends add half the difference of the two models that were *sent*, as in
:mod:`flwr_decentral.core.pairing`. They move by exact opposites, so the mean of all models changes
by training alone and no update is lost. Writing the average of what was sent over the model
instead, as some implementations do, loses half of every update that comes between.

Schemes
-------
``free``
    Every node starts exchanges, and none waits. A node that is engaged says so at once, so that no
    cycle of nodes can wait for one another, on any graph.
``bipartite``
    The paper's remedy against deadlocks. The topology must have two colors. The active ones, those
    at an odd distance from node 0, start one exchange after each round and wait for it before they
    train on. The passive ones only accept, and never wait.

Differences from the paper
--------------------------
- The update is any number of local steps of any optimizer, not one step of SGD.
- Exchanges start at random times, ``rate / 2`` of them per local round on each node, not as fast as
  the links allow. The default rate of 2 is the paper's: each node starts one per round.
- A node that is busy says so, and another one is tried; an active node that finds no neighbor free
  trains on without an average.
- The paper knows no loss and no failure.

:mod:`flwr_decentral_adpsgd.divshare` has the variant that the DivShare paper compares with.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

import networkx as nx

from flwr_decentral.core import (
    Command,
    ConfigurationError,
    Layout,
    PeerDown,
    Received,
    Site,
    TimerFired,
    Train,
    TrainDone,
    suggest,
)
from flwr_decentral.core.pairing import INVITING, Exchange
from flwr_decentral.core.pairwise import PairwiseAlgorithm, PairwiseMachine

__all__ = ["ADPSGD", "ADPSGDMachine", "BlockingMachine"]

_SCHEMES = ("free", "bipartite")


@dataclass(frozen=True, kw_only=True)
class ADPSGD(PairwiseAlgorithm):
    """Average with one random neighbor at a time, next to training.

    Parameters
    ----------
    rate : float (default: 2.0)
        Exchanges that a node takes part in per local round, on average; it starts half of them. Not
        for ``scheme="bipartite"``, where active nodes start one per round.
    pacing : {"paced", "poisson"}
        The time between the exchanges that a node starts: about the same each time, or exponential.
    patience : float (default: 4.0)
        How long, in local rounds, a node waits for a message before it goes on without it or asks
        again.
    wire : {"float32", "bfloat16", "float16", "int8"}
        The form in which models travel.
    scheme : {"free", "bipartite"}
        Whether all nodes start exchanges and none waits, or the nodes of one color do, and wait.

    Examples
    --------
    >>> print(ADPSGD(rate=1.0))
    adpsgd(rate=1.0, pacing='paced', patience=4.0, wire='float32', scheme='free')
    """

    name: ClassVar[str] = "adpsgd"
    paper: ClassVar[str] = "Lian et al., ICML 2018, arXiv:1710.06952"
    default_topology: ClassVar[str] = "ring"

    rate: float = 2.0
    pacing: Literal["poisson", "paced"] = "paced"
    scheme: Literal["free", "bipartite"] = "free"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scheme not in _SCHEMES:
            raise ConfigurationError(
                f"adpsgd has no scheme {self.scheme!r}; {suggest(self.scheme, _SCHEMES)}"
            )

    def check(self, topology: nx.Graph[int], layout: Layout) -> tuple[str, ...]:
        """Refuse a topology that has no two colors, if the scheme needs them."""
        if self.scheme == "bipartite":
            _colors(topology)
        return ()

    def machine(self, site: Site) -> PairwiseMachine:
        """Make the machine of one node."""
        if self.scheme == "bipartite":
            return BlockingMachine(site, self)
        return ADPSGDMachine(site, self)


@lru_cache(maxsize=64)
def _colors(topology: nx.Graph[int]) -> dict[int, int]:
    """Give each node 0 (passive) or 1 (active), by its distance from the lowest node in reach."""
    color: dict[int, int] = {}
    for start in topology:
        if start not in color:
            distances = nx.single_source_shortest_path_length(topology, start)
            color.update({node: distance % 2 for node, distance in distances.items()})
    for a, b in topology.edges:
        if color[a] == color[b]:
            raise ConfigurationError(
                "scheme='bipartite' needs a topology without odd cycles, so that active nodes have "
                f"passive neighbors only; edge ({a}, {b}) closes one. Take an even ring, a chain, "
                "a star, a grid or a hypercube, or scheme='free', which runs on any graph"
            )
    return color


class ADPSGDMachine(PairwiseMachine):
    """One node of :class:`ADPSGD`."""

    def average(self, exchange: Exchange, at: int) -> None:
        """Move to the middle."""
        _, _, mine, theirs = exchange
        self.model = self.site.ops.pairwise(self.model, mine, theirs, 0.5)


class BlockingMachine(ADPSGDMachine):
    """One node of the scheme ``bipartite``.

    Attributes
    ----------
    waiting : bool
        This node is active, and does not train until its exchange has taken place.
    """

    STATE = (*ADPSGDMachine.STATE, "waiting")

    def __init__(self, site: Site, algorithm: ADPSGD) -> None:
        super().__init__(site, algorithm)
        self.active = _colors(site.topology)[site.node] == 1
        self.waiting = False

    @property
    def waits_for(self) -> tuple[int, ...]:
        """The neighbor whose model is to come."""
        return (self.pairing.peer,) if self.waiting and self.pairing.state == INVITING else ()

    def on_train_done(self, event: TrainDone) -> Iterator[Command]:
        """Take in the update; train on, or start an exchange before that."""
        self.end_round(event)
        self.waiting = True
        if self.active:
            yield from self.pairing.begin(self.up, at=event.at, step=self.round)
        yield from self._go_on()

    def on_received(self, event: Received) -> Iterator[Command]:
        """Go on with an exchange."""
        yield from super().on_received(event)
        yield from self._go_on()

    def on_timer(self, event: TimerFired) -> Iterator[Command]:
        """Stop waiting for a message."""
        yield from super().on_timer(event)
        yield from self._go_on()

    def on_peer_down(self, event: PeerDown) -> Iterator[Command]:
        """Go on without a neighbor."""
        yield from super().on_peer_down(event)
        yield from self._go_on()

    def _go_on(self) -> Iterator[Command]:
        """Train the next round, once the turn is over."""
        if self.waiting and not (self.active and self.pairing.state == INVITING):
            self.waiting = False
            yield Train(round=self.round, model=self.model)
