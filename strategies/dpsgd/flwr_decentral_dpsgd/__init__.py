"""D-PSGD: every round, each node averages its model with those of all its neighbors.

Paper
-----
Lian, Zhang, Zhang, Hsieh, Zhang, Liu: *Can Decentralized Algorithms Outperform Centralized
Algorithms? A Case Study for Decentralized Parallel Stochastic Gradient Descent*, NeurIPS 2017,
arXiv:1705.09056, Algorithm 1. The weights are those of Metropolis and Hastings (Xiao, Boyd, Lall,
IPSN 2005); ``average="plain"`` takes the weights of Epidemic Learning (de Vos et al., NeurIPS 2023,
arXiv:2310.01972).

With u_i what training adds to the model x_i, and weights w_ij = 1 / (1 + max(d_i, d_j)) between
neighbors of degrees d_i and d_j, w_ii = 1 - sum_j w_ij, a round is

- adapt-then-combine: x_i <- sum_j w_ij (x_j + u_j): train, send, wait, average; or
- combine-then-adapt: x_i <- sum_j w_ij x_j + u_i: send, train meanwhile, wait, average, add u_i.

Lockstep
--------
A message belongs to the round its ``step`` names, whenever it arrives. After its own training of
round t, a node waits for one message of step t from each neighbor that can be reached, unless it
has heard of a later step from that neighbor: what belonged to t is lost then. A message lost in one
direction is noticed so; where both are, the two wait until ``patience`` ends.

A node that hears of a step of t + 2 or more has been away. It adopts that step: at once if its
model of round t is not out yet, else after this round. The others need not wait until it has caught
up, and the rounds between are not made up for; all nodes that can reach one another move to the
highest step among them. A neighbor that returns is sent the model of the current round again or,
where there is none yet, a message that only names the round.

What was received is summed with the node's own model in ascending order of node indices, its own in
its sorted place: on a complete graph all nodes add up the same numbers in the same order.

Differences from the paper
--------------------------
- The paper combines, then adapts; here the other order is the default, as in the code of RelaySGD
  and DecentralizePy that the method is mostly compared through.
- u is any number of local steps of any optimizer, not one step of SGD.
- The paper takes any symmetric, doubly stochastic W; here it follows from the degrees.
- The paper knows no loss, no failure and no late neighbor. ``missing`` says who gets the weight of
  a message that did not come; either way that round keeps a consensus but not the mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Final, Literal, TypeAlias

from flwr_decentral.core import (
    HEADER_BYTES,
    Algorithm,
    Capabilities,
    Command,
    ConfigurationError,
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
    Train,
    TrainDone,
    Vector,
    from_seconds,
    metropolis_weight,
    suggest,
)

__all__ = ["DPSGD", "DPSGDMachine"]

_MODEL: Final = "model"
_STEP: Final = "step"
_PATIENCE: Final = "patience"

_CHOICES: Final = {
    "order": ("adapt-then-combine", "combine-then-adapt"),
    "average": ("metropolis", "plain"),
    "missing": ("self", "renormalize"),
}

_Box: TypeAlias = dict[int, tuple[int, Vector] | None]
"""(degree, model) by sender; None where what came was of no use."""


@dataclass(frozen=True, kw_only=True)
class DPSGD(Algorithm):
    """Average with all neighbors, in lockstep.

    Parameters
    ----------
    order : {"adapt-then-combine", "combine-then-adapt"}
        Whether the trained models are averaged, or the models that training starts from. The latter
        sends while it trains.
    average : {"metropolis", "plain"}
        The weights: Metropolis-Hastings (a doubly stochastic W), or 1 / (1 + number of messages)
        for each, which does not keep the mean on graphs of unequal degrees.
    missing : {"self", "renormalize"}
        What becomes of the weight of a message that did not come: the node's own model gets it, or
        all others are scaled by the same factor. Without effect on plain averages.
    patience : float (default: 600.0)
        How long, in seconds, a node that has finished its own training waits for a neighbor.

    Examples
    --------
    >>> print(DPSGD(patience=30.0))
    dpsgd(order='adapt-then-combine', average='metropolis', missing='self', patience=30.0)
    """

    name: ClassVar[str] = "dpsgd"
    paper: ClassVar[str] = "Lian et al., NeurIPS 2017, arXiv:1705.09056"
    capabilities: ClassVar[Capabilities] = Capabilities(synchronous=True)
    default_topology: ClassVar[str] = "ring"

    order: Literal["adapt-then-combine", "combine-then-adapt"] = "adapt-then-combine"
    average: Literal["metropolis", "plain"] = "metropolis"
    missing: Literal["self", "renormalize"] = "self"
    patience: float = 600.0

    def __post_init__(self) -> None:
        for field, choices in _CHOICES.items():
            value = getattr(self, field)
            if value not in choices:
                raise ConfigurationError(
                    f"dpsgd has no {field} {value!r}; {suggest(str(value), choices)}"
                )
        if not 0 <= self.patience < math.inf:
            raise ConfigurationError(
                f"patience must be a finite number of seconds, zero or more, got {self.patience}"
            )

    def machine(self, site: Site) -> DPSGDMachine:
        """Make the machine of one node."""
        return DPSGDMachine(site, self)


class DPSGDMachine(Machine):
    """One node of :class:`DPSGD`.

    Attributes
    ----------
    round : int
        The step of the current exchange or, before it, of the training that leads to it.
    following : int
        The step of the next one: ``round + 1``, or the highest step heard of.
    training : bool
        The trainer is at work.
    trained : ndarray of float32, shape (layout.size,), optional
        What it returned, while the model it started from is still to be averaged.
    inbox, ahead : dict
        What came for ``round`` and for ``following``.
    heard : dict of int to int
        The highest step heard of from each neighbor.
    """

    STATE = ("model", "round", "following", "training", "trained", "inbox", "ahead", "heard")

    def __init__(self, site: Site, algorithm: DPSGD) -> None:
        super().__init__(site)
        self.algorithm = algorithm
        self.overlap = algorithm.order == "combine-then-adapt"
        self.round, self.following = 1, 2
        self.training = True
        self.trained: Vector | None = None
        self.inbox: _Box = {}
        self.ahead: _Box = {}
        self.heard: dict[int, int] = {}

    @property
    def waits_for(self) -> tuple[int, ...]:
        """The neighbors in reach whose message of this round is still to come."""
        if self.training:
            return ()
        return tuple(
            peer
            for peer in sorted(self.up)
            if peer not in self.inbox and self.heard.get(peer, 0) <= self.round
        )

    @property
    def sent(self) -> bool:
        """Whether this round's model is out."""
        return self.overlap or not self.training

    def on_started(self, event: Started) -> Iterable[Command]:
        """Begin round 1."""
        return self._begin()

    def on_train_done(self, event: TrainDone) -> Iterator[Command]:
        """Exchange, if that has not begun before training, and average once all is in."""
        self.training = False
        if self.overlap:
            self.trained = event.after
        else:
            self.model = event.after
            yield from self._share()
        if self.waits_for:
            yield SetTimer(name=_PATIENCE, at=event.at + from_seconds(self.algorithm.patience))
        else:
            yield from self._finish()

    def on_received(self, event: Received) -> Iterator[Command]:
        """Put a message where its step belongs."""
        content = self._read(event.message)
        if content is None and event.message.kind != _STEP:
            yield Report(name="bad-model", nbytes=event.message.nbytes)
        yield from self._take(event, content)

    def on_rejected(self, event: Received) -> Iterator[Command]:
        """Do not wait for what a neighbor has sent in vain."""
        return self._take(event, None)

    def on_timer(self, event: TimerFired) -> Iterator[Command]:
        """Lose patience."""
        if not self.training:
            yield from self._finish()

    def on_peer_up(self, event: PeerUp) -> Iterator[Command]:
        """Tell a returning neighbor, which may have started over, where this node is."""
        self.heard.pop(event.peer, None)
        message = self._message() if self.sent else Message(kind=_STEP, step=self.round)
        yield Send(to=event.peer, message=message)

    def on_peer_down(self, event: PeerDown) -> Iterator[Command]:
        """Go on without a neighbor; what it has sent still counts."""
        return self._go_on()

    def _begin(self) -> Iterator[Command]:
        self.training = True
        if self.overlap:
            yield from self._share()
        yield Train(round=self.round, model=self.model)

    def _share(self) -> Iterator[Command]:
        message = self._message()
        for peer in sorted(self.up):
            yield Send(to=peer, message=message)

    def _message(self) -> Message:
        header = {"degree": len(self.site.neighbors)}
        return Message(kind=_MODEL, step=self.round, payload=self.model, header=header)

    def _read(self, message: Message) -> tuple[int, Vector] | None:
        """Take (degree, model) out of a message; None if they are not there or do not fit."""
        degree, payload = message.header.get("degree"), message.payload
        if message.kind != _MODEL or not isinstance(degree, int) or degree < 1:
            return None
        if payload is None or len(payload) != self.site.layout.size:
            return None
        return degree, payload

    def _take(self, event: Received, content: tuple[int, Vector] | None) -> Iterator[Command]:
        source, step = event.source, event.message.step
        self.heard[source] = max(step, self.heard.get(source, 0))
        if step > self.following:
            yield from _wasted(self.ahead)
            self.following, self.ahead = step, {}
        if not self.sent and self.following > self.round + 1:
            yield from self._advance()
        if event.message.kind != _STEP:
            box = {self.round: self.inbox, self.following: self.ahead}.get(step)
            if box is not None and source not in box:
                box[source] = content
            elif content is not None:
                name = "stale-message" if box is None else "duplicate-message"
                yield Report(name=name, nbytes=event.message.nbytes)
        yield from self._go_on()

    def _advance(self) -> Iterator[Command]:
        yield from _wasted(self.inbox)
        first = self.round + 1 if self.sent else self.round
        if self.following > first:
            yield Report(name="skipped-round", count=self.following - first)
        self.round, self.following = self.following, self.following + 1
        self.inbox, self.ahead = self.ahead, {}

    def _go_on(self) -> Iterator[Command]:
        if not self.training and not self.waits_for:
            yield SetTimer(name=_PATIENCE, at=None)
            yield from self._finish()

    def _finish(self) -> Iterator[Command]:
        """Average what has come and begin the next round."""
        letters = {peer: letter for peer, letter in self.inbox.items() if letter is not None}
        self.inbox = {}
        missing = len(self.site.neighbors) - len(letters)
        if missing:
            yield Report(name="missing-neighbor", count=missing)
        mixed = self._mix(letters) if letters else self.model
        if self.trained is not None:
            mixed = self.site.ops.update(mixed, self.model, self.trained)
        self.model, self.trained = mixed, None
        yield from self._advance()
        yield from self._begin()

    def _mix(self, letters: dict[int, tuple[int, Vector]]) -> Vector:
        vectors = {self.site.node: self.model}
        vectors.update((peer, vector) for peer, (_, vector) in letters.items())
        weights = self._weights({peer: letters[peer][0] for peer in sorted(letters)})
        order = sorted(vectors)
        return self.site.ops.combine([vectors[j] for j in order], [weights[j] for j in order])

    def _weights(self, degrees: dict[int, int]) -> dict[int, float]:
        """Weigh the models of senders of these degrees, and the node's own."""
        node, own = self.site.node, len(self.site.neighbors)
        if self.algorithm.average == "plain":
            return dict.fromkeys([*degrees, node], 1 / (1 + len(degrees)))
        total = 1.0
        if self.algorithm.missing == "renormalize":
            degree_of = self.site.topology.degree
            silent = [peer for peer in self.site.neighbors if peer not in degrees]
            total -= sum(metropolis_weight(own, degree_of[peer]) for peer in silent)
        weights = {peer: metropolis_weight(own, d) / total for peer, d in degrees.items()}
        weights[node] = 1 - sum(weights.values())
        return weights


def _wasted(box: _Box) -> Iterator[Report]:
    """Count models that came for a round that does not take place."""
    models = [letter[1] for letter in box.values() if letter is not None]
    if models:
        nbytes = sum(HEADER_BYTES + model.nbytes for model in models)
        yield Report(name="stale-message", count=len(models), nbytes=nbytes)
