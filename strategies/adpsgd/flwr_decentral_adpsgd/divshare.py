"""The AD-PSGD that the DivShare paper compares with: models that are asked for, and averaged later.

Paper
-----
Biswas, Kermarrec, Marouani, Pires, Sharma, de Vos: *Boosting Asynchronous Decentralized Learning
with Model Fragmentation*, WWW 2025, arXiv:2410.12918, whose baseline this is; after the code of
sacs-epfl/divshare.

A round of node i, after the local training that ends it:

1. *Send.* J // 2 times, a neighbor is drawn at random, the same one possibly twice, and is sent the
   trained model, in a ``ping``. Each ping is answered at once, in a ``pong``, by the model that the
   other one had after *its* last training.
2. *Aggregate.* The model becomes the plain average of itself and of what came since the last round,
   from pings and pongs alike: the newest of each sender. The inbox is empty then.
3. *Train* from the result.

No average is atomic, so the mean of all models is not kept: for what the paper of AD-PSGD describes
take :class:`flwr_decentral_adpsgd.ADPSGD`.

Differences from the code
-------------------------
- In the code, one message object is shared by all sends of a round, and a flag in it, which tells
  pings from pongs, is changed while they are queued: pings go unanswered, pongs are answered.
- The newest model of a sender is the one of the higher round, not the one that arrived last.
- ``flush=True``, which drops a backlog before each round's pings, does not exist there.
- A topology may be given; the paper's graph is complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Final

import networkx as nx

from flwr_decentral.core import (
    Algorithm,
    Command,
    ConfigurationError,
    DropQueued,
    InboxMachine,
    Layout,
    Letter,
    Message,
    PeerUp,
    Received,
    Report,
    Send,
    Site,
    Started,
    Train,
    TrainDone,
    Vector,
    Wire,
    check_wire,
)

__all__ = ["ADPSGDDivShare", "ADPSGDDivShareMachine"]

_PING: Final = "ping"
_PONG: Final = "pong"


@dataclass(frozen=True, kw_only=True)
class ADPSGDDivShare(Algorithm):
    """Send the model to a few random nodes, which answer with theirs, and average later.

    Parameters
    ----------
    degree : int (default: 6)
        J: half as many models are sent per round, and as many come back.
    flush : bool (default: False)
        Drop what is still queued when a new round's model is ready.
    wire : {"float32", "bfloat16", "float16", "int8"}
        The form in which models travel.

    Examples
    --------
    >>> print(ADPSGDDivShare())
    adpsgd-divshare(degree=6, flush=False, wire='float32')
    """

    name: ClassVar[str] = "adpsgd-divshare"
    paper: ClassVar[str] = "a baseline of Biswas et al., WWW 2025, arXiv:2410.12918"
    default_topology: ClassVar[str] = "complete"

    degree: int = 6
    flush: bool = False
    wire: Wire = "float32"

    def __post_init__(self) -> None:
        check_wire(self.wire)
        if self.degree < 2:
            raise ConfigurationError(
                f"degree must be at least 2, since half as many models are sent, got {self.degree}"
            )

    def check(self, topology: nx.Graph[int], layout: Layout) -> tuple[str, ...]:
        """Warn of an odd degree."""
        if self.degree % 2:
            return (
                f"degree {self.degree} is odd: {self.degree // 2} models are sent per round, as "
                f"with degree {self.degree - 1}",
            )
        return ()

    def machine(self, site: Site) -> ADPSGDDivShareMachine:
        """Make the machine of one node."""
        return ADPSGDDivShareMachine(site, self)


class ADPSGDDivShareMachine(InboxMachine):
    """One node of :class:`ADPSGDDivShare`.

    Attributes
    ----------
    latest : ndarray of float32, shape (layout.size,)
        The model after the last training, before it was averaged: what pings are answered with.
    round : int
        The round that it is of; 0 for the initial model.
    pings, pongs : int
        How many this node has sent.
    heard : dict of int to int
        The number of the last ping of each neighbor.
    peers : numpy.random.Generator
        Whom to send to.
    """

    STATE = (*InboxMachine.STATE, "latest", "round", "pings", "pongs", "heard", "peers")

    def __init__(self, site: Site, algorithm: ADPSGDDivShare) -> None:
        super().__init__(site, algorithm.wire)
        self.algorithm = algorithm
        self.latest: Vector = site.initial
        self.round = 0
        self.pings, self.pongs = 0, 0
        self.heard: dict[int, int] = {}
        self.peers = site.seeds.generator("peers")

    def on_started(self, event: Started) -> Iterator[Command]:
        """Begin round 1."""
        yield Train(round=1, model=self.model)

    def on_train_done(self, event: TrainDone) -> Iterator[Command]:
        """Send the trained model, average it with the inbox, and train on."""
        self.latest, self.round = event.after, event.round
        if self.algorithm.flush:
            yield DropQueued()
        candidates = sorted(self.up)
        if candidates:
            for place in self.peers.integers(len(candidates), size=self.algorithm.degree // 2):
                self.pings += 1
                yield self._send(candidates[place], _PING, self.pings)
        yield from self.average_models(event)
        yield Train(round=event.round + 1, model=self.model)

    def on_received(self, event: Received) -> Iterator[Command]:
        """Keep a model until the next average, and answer if it is a ping."""
        message, source = event.message, event.source
        payload, number = message.payload, message.header.get("number")
        if (
            message.kind not in (_PING, _PONG)
            or payload is None
            or not isinstance(number, int)
            or len(payload) != self.site.layout.size
        ):
            yield Report(name="bad-message", nbytes=message.nbytes)
            return
        yield from self.keep(Letter(source, 0, message.step, payload, message.wire))
        if message.kind == _PING and number > self.heard.get(source, 0):
            self.heard[source] = number
            self.pongs += 1
            yield self._send(source, _PONG, self.pongs)

    def on_peer_up(self, event: PeerUp) -> Iterable[Command]:
        """Take from a returning peer, which may have started over, whatever it sends."""
        self.heard.pop(event.peer, None)
        return super().on_peer_up(event)

    def _send(self, to: int, kind: str, number: int) -> Send:
        header = {"number": number}
        message = Message(
            kind=kind,
            step=self.round,
            payload=self.on_wire(self.latest),
            header=header,
            wire=self.wire,
        )
        return Send(to=to, message=message)
