"""A2CiD2: pairwise gossip with a momentum that makes poorly connected topologies fast.

Paper
-----
Nabli, Belilovsky, Oyallon: *A2CiD2: Accelerating Asynchronous Communication in Decentralized Deep
Learning*, NeurIPS 2023, arXiv:2306.08289. Compared with the released code, AdelNabli/ACiD.

Node i keeps its model x_i and a momentum y_i (the paper's x tilde), equal at the start. Time is
counted in local rounds.

- *Flow.* Between events, dx = eta (y - x) dt and dy = eta (x - y) dt. Over a time t that is exactly
  x <- x + c (y - x), y <- y - c (y - x) with c = (1 - exp(-2 eta t)) / 2. It is evaluated when
  something happens to a node, and at no other time.
- *Training* moves both by the same update u.
- *An exchange* of i and j, with m = x_i - x_j: x_i <- x_i - m / 2, y_i <- y_i - alpha m, and the
  opposite at j. Only x is sent. Exchanges take place while the trainer is at work.

With chi_1 and chi_2 of the topology (:mod:`flwr_decentral.core.spectra`), eta is
1 / (2 sqrt(chi_1 chi_2)) and alpha is sqrt(chi_1 / chi_2) / 2. The distance to consensus then
shrinks at about the rate 1 / sqrt(chi_1 chi_2) instead of 1 / chi_1.

The sum of all x and y changes by training alone, at any latency: the two ends of an exchange move
by exact opposites. A node has at most one offer out, because alpha amplifies what is stale.

Differences from the paper and its code
---------------------------------------
- There is no coordinator: nodes invite each other (:mod:`flwr_decentral.core.pairing`).
- What is averaged is what was sent, after the flow. The code sends x before its flow and subtracts
  it from x after, so that the two ends do not move by opposites, and the mean drifts.
- eta follows the rate of exchanges that a node achieves, which is lower than the nominal one where
  links are slow; ``calibrate=False`` takes the nominal one. alpha does not depend on the rate.
- Training never waits for communication. In the code each gradient waits for its quota.
- u is what any number of local steps of any optimizer have done, and the unit of time is a local
  round. The code takes one step of SGD with momentum, and its time leaves out what it waited.
- Any connected topology will do; the code knows three. Where it is not connected, alpha would be
  infinite, and nodes fall back to gossip without a momentum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Final

import networkx as nx

from flwr_decentral.core import Layout, Site, TrainDone, Vector
from flwr_decentral.core.pairing import Exchange
from flwr_decentral.core.pairwise import PairwiseAlgorithm, PairwiseMachine
from flwr_decentral.core.spectra import Spectrum, exchange_rates, spectrum

__all__ = ["A2CiD2", "A2CiD2Machine"]

_MEMORY: Final = 0.98
"""What is left of a round's weight in the achieved rate one round later: about 50 rounds count."""

_PRIOR: Final = 5.0
"""Rounds at the nominal rate that the achieved rate starts from."""

_LITTLE_GAIN: Final = 1.1
_PLAIN: Final = Spectrum(math.inf, math.inf)


@dataclass(frozen=True, kw_only=True)
class A2CiD2(PairwiseAlgorithm):
    """Average with one neighbor at a time, with a continuous momentum.

    Parameters
    ----------
    rate : float (default: 1.0)
        Exchanges that a node takes part in per local round, on average.
    pacing : {"poisson", "paced"}
        The time between the turns of a node: exponential, or about the same each time.
    patience : float (default: 4.0)
        How long, in local rounds, a node waits for a message before it goes on without it or asks
        again.
    wire : {"float32", "bfloat16", "float16", "int8"}
        The form in which models travel.
    momentum : bool (default: True)
        False is plain asynchronous gossip, the paper's baseline: eta = 0, and no y.
    calibrate : bool (default: True)
        Let eta follow the rate of exchanges that a node achieves.

    Examples
    --------
    >>> A2CiD2(momentum=False).parameters["rate"]
    1.0
    """

    name: ClassVar[str] = "a2cid2"
    paper: ClassVar[str] = "Nabli et al., NeurIPS 2023, arXiv:2306.08289"
    default_topology: ClassVar[str] = "ring"

    momentum: bool = True
    calibrate: bool = True

    def check(self, topology: nx.Graph[int], layout: Layout) -> tuple[str, ...]:
        """Warn where a momentum gains nothing."""
        if not self.momentum or len(topology) < 2:
            return ()
        chi = _spectrum(topology)
        if not chi.connected:
            return (
                "the topology is not connected: a2cid2 falls back to gossip without a momentum",
            )
        if chi.gain < _LITTLE_GAIN:
            return (
                f"on this topology a2cid2 gains nothing over gossip: sqrt(chi_1 / chi_2) is "
                f"{chi.gain:.2f}. Take a sparser one, such as a ring, or momentum=False, which "
                "needs less memory",
            )
        return ()

    def machine(self, site: Site) -> A2CiD2Machine:
        """Make the machine of one node."""
        return A2CiD2Machine(site, self)


@lru_cache(maxsize=64)
def _spectrum(topology: nx.Graph[int]) -> Spectrum:
    # Cached by identity: the nodes of a run share one frozen graph.
    return spectrum(exchange_rates(topology))


class A2CiD2Machine(PairwiseMachine):
    """One node of :class:`A2CiD2`.

    Attributes
    ----------
    momentum : ndarray of float32, shape (layout.size,), optional
        y; None where there is no momentum.
    clock : int
        The time up to which x and y have flowed.
    exchanges : int
        How many this node has taken part in since its round began.
    achieved : tuple of float
        Exchanges and rounds that count, older ones less: their quotient is the achieved rate.
    """

    STATE = (*PairwiseMachine.STATE, "momentum", "clock", "exchanges", "achieved")

    def __init__(self, site: Site, algorithm: A2CiD2) -> None:
        super().__init__(site, algorithm)
        # Without a momentum, large topologies need no eigenvalues.
        chi = _spectrum(site.topology) if algorithm.momentum else _PLAIN
        self.calibrate = algorithm.calibrate
        self.eta = chi.eta * algorithm.rate
        self.alpha = chi.alpha_tilde
        degrees = [site.topology.degree[peer] for peer in site.neighbors]
        self.nominal = algorithm.rate / 2 * (bool(degrees) + sum(1 / each for each in degrees))
        self.momentum: Vector | None = site.initial if chi.connected else None
        self.clock = 0
        self.exchanges = 0
        self.achieved = (_PRIOR * self.nominal, _PRIOR)

    @property
    def speed(self) -> float:
        """What eta is multiplied with: the achieved rate in units of the nominal one."""
        exchanges, rounds = self.achieved
        return exchanges / (rounds * self.nominal) if self.calibrate and self.nominal else 1.0

    def advance(self, at: int) -> None:
        """Let x and y flow."""
        share = self._flow(at)
        if self.momentum is not None and share is not None:
            self.model, self.momentum = self.site.ops.mix(self.model, self.momentum, share)

    def learn(self, event: TrainDone) -> None:
        """Let x and y flow, move them by the same update, and count the exchanges of a round."""
        share = self._flow(event.at)
        if self.momentum is None:
            super().learn(event)
        else:
            self.model, self.momentum = self.site.ops.mix_update(
                self.model, self.momentum, event.before, event.after, share=share
            )
        exchanges, rounds = self.achieved
        self.achieved = (_MEMORY * exchanges + self.exchanges, _MEMORY * rounds + 1)
        self.exchanges = 0

    def average(self, exchange: Exchange, at: int) -> None:
        """Let x and y flow, and move x to the middle, and y by alpha."""
        ops, (_, _, mine, theirs) = self.site.ops, exchange
        share = self._flow(at)
        if self.momentum is None:
            self.model = ops.pairwise(self.model, mine, theirs, 0.5)
        else:
            self.model, self.momentum = ops.mix_pairwise(
                self.model, self.momentum, mine, theirs, share=share, weights=(0.5, self.alpha)
            )
        self.exchanges += 1

    def _flow(self, at: int) -> float | None:
        """Take the time up to now; return c for it, or None where nothing flows."""
        elapsed, self.clock = at - self.clock, at
        # Before the first round has ended x and y are equal.
        if self.momentum is None or not self.interval or not elapsed:
            return None
        time = elapsed / self.interval
        return -math.expm1(-2 * self.eta * self.speed * time) / 2
