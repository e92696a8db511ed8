"""One node's part in a run: its machine, its links and its trainers, put together."""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from flwr_decentral.core import (
    Algorithm,
    ConfigurationError,
    DecentralError,
    Seeds,
    Site,
    Vector,
    from_seconds,
)
from flwr_decentral.core.layout import Layout
from flwr_decentral.core.transcript import vector_digest
from flwr_decentral.localsocket import Listener as LocalListener
from flwr_decentral.ops import choose
from flwr_decentral.plugins import installed, make

from .clock import LoopClock
from .connections import Settings
from .handoff import Facts, Handoff, Slots
from .heads import Hello
from .network import Network
from .orders import Order
from .pump import Pump
from .roster import Address
from .rounds import Segment
from .tls import Security

_LOGGER: Final = logging.getLogger(__name__)
_GATHER: Final = from_seconds(30.0)
"""How long a node waits for all its neighbors before it begins without some of them."""


@dataclass(frozen=True)
class Start:
    """What a node begins with.

    Attributes
    ----------
    layout : Layout
        How its model lies in a vector.
    model : ndarray of float32, shape (layout.size,)
        The model.
    private : bytes
        What is not averaged.
    rounds : int (default: 0)
        The rounds of the run that have led to it.
    resumed : bool (default: False)
        Whether another run has left it behind.
    """

    layout: Layout
    model: Vector
    private: bytes
    rounds: int = 0
    resumed: bool = False


class Node:
    """Take part in a run. Made by :meth:`begin`.

    Attributes
    ----------
    order : Order
        The last one.
    handoff : str
        Where trainers attach.
    """

    def __init__(
        self,
        order: Order,
        start: Start,
        *,
        security: Security,
        listen: Address | None,
        incarnation: int,
        patience: float,
        local: str | None = None,
    ) -> None:
        self.order = order
        self._layout, self._resumed = start.layout, start.resumed
        self._security, self._listen, self._incarnation = security, listen, incarnation
        # What may be refused comes first: from here on there is something to close.
        algorithm, self._network = _algorithm(order, start.layout), self._network_of(order)
        self._clock = LoopClock(asyncio.get_running_loop())
        model = start.model.copy()
        model.flags.writeable = False
        listener = LocalListener(local)
        self.handoff = listener.address
        self._trainer = Handoff(
            Slots(
                size=start.layout.size,
                private_bytes=start.layout.private_bytes,
                blob=start.layout.pack(),
            ),
            listener,
            self._clock,
            from_seconds(patience),
            lambda: self._pump.machine.model,
            self._admit,
        )
        self._verdict: Facts | None = None
        self._trainer.private = start.private
        site = self._site(order, model)
        self._pump = Pump(algorithm, site, self._network, self._trainer, self._clock)
        self._segment: asyncio.Task[None] | None = None

    @classmethod
    async def begin(cls, order: Order, start: Start, **options: Any) -> Node:
        """Connect to the neighbors, and begin.

        Raises
        ------
        ConfigurationError
            If the order cannot be carried out here. It says why.
        """
        node = cls(order, start, **options)
        try:
            await node._network.open(node._pump)
            node._trainer.open()
        except BaseException:
            await node.close()
            raise
        node._pump.start(patience=_GATHER, after=max(order.after, start.rounds))
        return node

    @property
    def error(self) -> DecentralError | None:
        """What has ended this node's part, if anything has."""
        return self._pump.error

    @property
    def is_idle(self) -> bool:
        """Whether no segment is under way."""
        return self._segment is None or self._segment.done()

    @property
    def is_attended(self) -> bool:
        """Whether a process is there to train."""
        return self._trainer.trainer is not None

    @property
    def is_training(self) -> bool:
        """Whether a segment is under way, and a process there to train."""
        return self.is_attended and not self.is_idle

    def status(self) -> dict[str, Any]:
        """Say how it goes, as plain values."""
        return {
            "run": self.order.run,
            "index": self.order.index,
            "epoch": self.order.epoch,
            "algorithm": str(self._pump.algorithm),
            "idle": self.is_idle,
            "trainer": self._trainer.trainer,
            "counted": self._pump.metrics(),
            "network": self._network.counters(),
            "error": "" if self.error is None else str(self.error),
        }

    async def move(self, order: Order) -> None:
        """Adopt what another order says of roster and topology.

        Raises
        ------
        ConfigurationError
            If it is not for the same node, algorithm and layout.
        """
        mine, its = self.order, order
        for name in ("index", "algorithm", "version", "parameters", "layout", "seed"):
            if getattr(mine, name) != getattr(its, name):
                raise ConfigurationError(
                    f"an order of run {its.run} changes {name} from {getattr(mine, name)!r} to "
                    f"{getattr(its, name)!r} in the middle of the run"
                )
        self._finish_segment()
        if its.epoch != mine.epoch:
            network, old = self._network_of(order), self._network
            for peer in old.up:
                self._pump.peer_down(peer, old.drop(peer))
            await old.close()
            self._network = network
            site = self._site(order, self._pump.machine.model)
            self._pump.adopt(site, network, patience=_GATHER, after=order.after or None)
            await network.open(self._pump)
        self.order = order

    def train(self, order: Order) -> None:
        """Begin a segment; the trainer gets the report as it is sent away."""
        end = None
        if order.seconds < math.inf:
            end = self._clock.now() + from_seconds(order.seconds)
        self._verdict = None
        self._segment = asyncio.create_task(self._run(Segment(last_round=order.until, until=end)))

    def leave_behind(self) -> Start:
        """Copy the model for another run to begin with."""
        model, rounds = self._pump.machine.model.copy(), int(self._pump.metrics()["rounds"])
        return Start(self._layout, model, self._trainer.private, rounds)

    async def close(self) -> None:
        """End."""
        self._pump.stop("the run has ended on this node")
        if self._segment is not None:
            self._segment.cancel()
            await asyncio.gather(self._segment, return_exceptions=True)
        await self._trainer.close()
        await self._network.close()

    # ------------------------------------------------------------------------------ inside

    async def _run(self, segment: Segment) -> None:
        try:
            await self._pump.run(segment)
            report = self._report()
        except Exception as error:
            # Whatever it is, it is logged and reported, and the trainer does not wait for ever.
            _LOGGER.exception("node %d has failed", self.order.index)
            self._dismiss({"error": str(error)})
        else:
            self._dismiss({"report": report})

    def _dismiss(self, verdict: Facts | None) -> None:
        """Send the trainer away, or whoever will come to be it in this segment."""
        self._verdict = verdict
        if verdict is not None:
            self._trainer.dismiss(verdict)

    def _admit(self, facts: Facts) -> Facts:
        """Let anybody attach; where the segment is over already, it leaves as soon as it can."""
        del facts
        asyncio.get_running_loop().call_soon(lambda: self._dismiss(self._verdict))
        return {}

    def _report(self) -> dict[str, Any]:
        counted = self._pump.metrics()
        return {
            "round": int(counted["rounds"]),
            "digest": vector_digest(self._pump.machine.model),
            "resumed": self._resumed,
            "counted": counted,
        }

    def _finish_segment(self) -> None:
        """End the segment that is under way; its trainer has gone, or there would be no order."""
        if self._segment is not None and not self._segment.done():
            self._segment.cancel()
            self._pump.pause()

    def _site(self, order: Order, model: Vector) -> Site:
        return Site(
            node=order.index,
            topology=order.topology,
            layout=self._layout,
            initial=model,
            seeds=Seeds(order.seed).of(order.index),
            ops=choose(),
        )

    def _network_of(self, order: Order) -> Network:
        hello = Hello(
            run=order.run,
            epoch=order.epoch,
            index=order.index,
            incarnation=self._incarnation,
            algorithm=order.algorithm,
            version=order.version,
            layout=order.layout,
        )
        settings = Settings(
            limit=4 * self._layout.size,
            listen=self._listen,
            uplink_bps=None if order.uplink == math.inf else order.uplink,
        )
        # Jitter is there to differ from node to node and from start to start.
        dice = np.random.Generator(np.random.PCG64(self._incarnation + order.index))
        return Network(order.roster, hello, self._security, settings, dice)


def _algorithm(order: Order, layout: Layout) -> Algorithm:
    """Make the algorithm that an order asks for."""
    plugin = installed().get(order.algorithm)
    if plugin is not None and plugin.version != order.version:
        raise ConfigurationError(
            f"the run uses version {order.version} of {order.algorithm}, this node has version "
            f"{plugin.version}: install one version everywhere"
        )
    algorithm = make(order.algorithm, **dict(order.parameters))
    algorithm.check(order.topology, layout)  # what it warns of, the ServerApp has said
    return algorithm
