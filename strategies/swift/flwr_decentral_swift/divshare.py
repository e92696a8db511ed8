"""The Swift that the DivShare paper compares with: models to random nodes, averaged once.

Paper
-----
Biswas, Kermarrec, Marouani, Pires, Sharma, de Vos: *Boosting Asynchronous Decentralized Learning
with Model Fragmentation*, WWW 2025, arXiv:2410.12918, whose baseline this is; after the code of
sacs-epfl/divshare.

A round of node i, after the local training that ends it:

1. *Send* the trained model to J other nodes, drawn anew each round.
2. *Aggregate*. The model becomes the plain average of itself and of what came since the last round:
   the newest of each sender. What was used is forgotten.
3. *Train* from the result.

There are no client weights, no stored models and no topology of its own: it is DivShare with one
fragment, without the flush. For what the paper of SWIFT describes take
:class:`flwr_decentral_swift.SWIFT`.

Differences from the code
-------------------------
- The newest model of a sender is the one of the higher round, not the one that arrived last.
- ``flush=True``, which drops a backlog before each round's models, does not exist there.
- A topology may be given; the paper's graph is complete.
"""

from __future__ import annotations

from collections.abc import Iterator
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
    Received,
    Report,
    Send,
    Site,
    Started,
    Train,
    TrainDone,
    Wire,
    check_degree,
    check_wire,
)

__all__ = ["SWIFTDivShare", "SWIFTDivShareMachine"]

_MODEL: Final = "model"


@dataclass(frozen=True, kw_only=True)
class SWIFTDivShare(Algorithm):
    """Send the model to a few random nodes, and average what has come.

    Parameters
    ----------
    degree : int (default: 6)
        J, the number of receivers; at most as many as can be reached.
    flush : bool (default: False)
        Drop what is still queued when a new round's model is ready.
    wire : {"float32", "bfloat16", "float16", "int8"}
        The form in which models travel.

    Examples
    --------
    >>> print(SWIFTDivShare())
    swift-divshare(degree=6, flush=False, wire='float32')
    """

    name: ClassVar[str] = "swift-divshare"
    paper: ClassVar[str] = "a baseline of Biswas et al., WWW 2025, arXiv:2410.12918"
    default_topology: ClassVar[str] = "complete"

    degree: int = 6
    flush: bool = False
    wire: Wire = "float32"

    def __post_init__(self) -> None:
        check_wire(self.wire)
        if self.degree < 1:
            raise ConfigurationError(f"degree must be at least 1, got {self.degree}")

    def check(self, topology: nx.Graph[int], layout: Layout) -> tuple[str, ...]:
        """Warn where there are fewer neighbors than receivers."""
        return check_degree(self.degree, topology, "its model")

    def machine(self, site: Site) -> SWIFTDivShareMachine:
        """Make the machine of one node."""
        return SWIFTDivShareMachine(site, self)


class SWIFTDivShareMachine(InboxMachine):
    """One node of :class:`SWIFTDivShare`.

    Attributes
    ----------
    peers : numpy.random.Generator
        Whom to send to.
    """

    STATE = (*InboxMachine.STATE, "peers")

    def __init__(self, site: Site, algorithm: SWIFTDivShare) -> None:
        super().__init__(site, algorithm.wire)
        self.algorithm = algorithm
        self.peers = site.seeds.generator("peers")

    def on_started(self, event: Started) -> Iterator[Command]:
        """Begin round 1."""
        yield Train(round=1, model=self.model)

    def on_train_done(self, event: TrainDone) -> Iterator[Command]:
        """Send the trained model, average it with the inbox, and train on."""
        if self.algorithm.flush:
            yield DropQueued()
        candidates = sorted(self.up)
        count = min(self.algorithm.degree, len(candidates))
        message = Message(
            kind=_MODEL, step=event.round, payload=self.on_wire(event.after), wire=self.wire
        )
        for place in self.peers.permutation(len(candidates))[:count].tolist():
            yield Send(to=candidates[place], message=message)
        yield from self.average_models(event)
        yield Train(round=event.round + 1, model=self.model)

    def on_received(self, event: Received) -> Iterator[Command]:
        """Keep a model until the next average, if none newer is there."""
        message, payload = event.message, event.message.payload
        if message.kind != _MODEL or payload is None or len(payload) != self.site.layout.size:
            yield Report(name="bad-model", nbytes=message.nbytes)
            return
        yield from self.keep(Letter(event.source, 0, message.step, payload, message.wire))
