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
Messages are matched on their step, never on their arrival; who waits for whom, and when no longer,
is said in :mod:`flwr_decentral.core.lockstep`.

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Literal

from flwr_decentral.core import (
    Algorithm,
    Capabilities,
    Command,
    ConfigurationError,
    Message,
    Report,
    Site,
    TrainDone,
    Vector,
    Wire,
    check_wire,
    metropolis_weight,
    suggest,
)
from flwr_decentral.core.lockstep import Letter, LockstepMachine

__all__ = ["DPSGD", "DPSGDMachine"]

_MODEL: Final = "model"

_CHOICES: Final = {
    "order": ("adapt-then-combine", "combine-then-adapt"),
    "average": ("metropolis", "plain"),
    "missing": ("self", "renormalize"),
}


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
    wire : {"float32", "bfloat16", "float16", "int8"}
        The form in which models travel.

    Examples
    --------
    >>> print(DPSGD(patience=30.0))  # doctest: +ELLIPSIS
    dpsgd(order='adapt-then-combine', average='metropolis', missing='self', patience=30.0, ...)
    """

    name: ClassVar[str] = "dpsgd"
    paper: ClassVar[str] = "Lian et al., NeurIPS 2017, arXiv:1705.09056"
    capabilities: ClassVar[Capabilities] = Capabilities(synchronous=True)
    default_topology: ClassVar[str] = "ring"

    order: Literal["adapt-then-combine", "combine-then-adapt"] = "adapt-then-combine"
    average: Literal["metropolis", "plain"] = "metropolis"
    missing: Literal["self", "renormalize"] = "self"
    patience: float = 600.0
    wire: Wire = "float32"

    def __post_init__(self) -> None:
        check_wire(self.wire)
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


class DPSGDMachine(LockstepMachine):
    """One node of :class:`DPSGD`.

    Attributes
    ----------
    trained : ndarray of float32, shape (layout.size,), optional
        What the trainer returned, while the model it started from is still to be averaged.
    """

    BAD = "bad-model"
    STATE = (*LockstepMachine.STATE, "trained")

    def __init__(self, site: Site, algorithm: DPSGD) -> None:
        overlap = algorithm.order == "combine-then-adapt"
        super().__init__(site, overlap=overlap, patience=algorithm.patience, wire=algorithm.wire)
        self.algorithm = algorithm
        self.trained: Vector | None = None

    def take_in(self, event: TrainDone) -> None:
        """Keep the trained model: to send it, or to add what it adds to the average."""
        if self.overlap:
            self.trained = event.after
        else:
            self.model = event.after

    def messages(self, peers: Sequence[int]) -> Iterator[tuple[int, Message]]:
        """Write the model, the same for every neighbor."""
        message = Message(
            kind=_MODEL,
            step=self.round,
            payload=self.on_wire(self.model),
            header={"degree": len(self.site.neighbors)},
            wire=self.wire,
        )
        for peer in peers:
            yield peer, message

    def read(self, source: int, message: Message) -> tuple[int, tuple[int, Vector]] | None:
        """Take (degree, model) out of a message; None if they are not there or do not fit."""
        degree, payload = message.header.get("degree"), message.payload
        if message.kind != _MODEL or not isinstance(degree, int) or degree < 1:
            return None
        if payload is None or len(payload) != self.site.layout.size:
            return None
        return 0, (degree, payload)

    def settle(self, letters: dict[tuple[int, int], Letter]) -> Iterator[Command]:
        """Average what has come."""
        missing = len(self.site.neighbors) - len(letters)
        if missing:
            yield Report(name="missing-neighbor", count=missing)
        models = {peer: letter for (peer, _), letter in letters.items()}
        mixed = self._mix(models) if models else self.model
        if self.trained is not None:
            mixed = self.site.ops.update(mixed, self.model, self.trained)
        self.model, self.trained = mixed, None

    def _mix(self, letters: Mapping[int, Letter]) -> Vector:
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
