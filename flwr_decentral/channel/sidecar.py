"""The sidecar: the process beside a SuperNode in which its node of the gossip lives.

Flower starts a new ClientApp process for each message. The sidecar outlives them: it holds the
node's machine, its model and its links, relays while the node does not train, and never competes
with training for an interpreter.

A client of the sidecar connects to its local socket, says one thing and gets one answer:

=========  =====================================  =============================================
``do``     asks                                   answer
=========  =====================================  =============================================
who        who is this node                       ``me``: address, fingerprint, run, training
status     how is it                              ``status``: peers, rates, refusals, lease
order      train a segment                        ``accepted``: where to attach as the trainer;
                                                  ``unprimed``: give me the model with the order
model      where the model can be fetched         ``accepted``: where to attach
release    let go of a run that has ended         ``released``
=========  =====================================  =============================================

An order may carry three byte strings: the layout, the model and the private bytes to begin with.
What a client cannot have is answered with ``refused``, the fault and the reason. Who trains learns
of the end of the segment, and gets the report, as it is sent away by the hand-off.

**Lease.** Each order says how long the sidecar may go on without another. After that, one that was
started by a client's process exits, and an operator's lets go of the run: gossip ends some time
after ``flwr stop`` even though nobody can tell the sidecar.

**Runs.** A sidecar serves one run; another is refused until the first is released or its lease is
over. A run with a ``resume`` key leaves its model behind under that name, and begins with what it
finds there; where nobody trains any more it takes the node over from a run that has the same key,
since that is what comes after a SuperLink's end. The model of a run whose lease ran out is kept
until another begins, should the ServerApp only have been slow.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any, Final

import numpy as np

from flwr_decentral.core import ConfigurationError, DecentralError, RuntimeFault
from flwr_decentral.core.layout import Layout
from flwr_decentral.localsocket import Frame, FrameBuffer, Listener, encode_frame, is_own

from .node import Node, Start
from .orders import Order
from .roster import Address
from .sockets import accept
from .tls import Security

_LOGGER: Final = logging.getLogger(__name__)
_PATIENCE_S: Final = 30.0
_RETRY_S: Final = 0.2
"""How long a client may take to say what it wants."""
_EXTENSION_S: Final = 30.0
"""How long a lease is prolonged at a time while somebody trains."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a sidecar is started.

    Attributes
    ----------
    socket : str
        Where clients find it: a path, or a name after ``@`` in Linux's abstract namespace.
    address : Address, optional
        Where peers reach it; None if they cannot, and it only dials.
    listen : Address, optional
        Where it listens; by default at ``address``.
    security : Security
        Its certificate, or ``insecure``.
    own : bool (default: False)
        Whether a client's process has started it: then it ends with its lease.
    """

    socket: str
    address: Address | None
    listen: Address | None = None
    security: Security
    own: bool = False


class Sidecar:
    """Serve one node.

    Parameters
    ----------
    options : Options
        How it was started.
    clock : callable (default: time.monotonic)
        Tells the seconds on a clock that never goes back.

    Raises
    ------
    ConfigurationError
        If a certificate cannot be used.
    RuntimeFault
        If another process listens at the socket.
    """

    def __init__(self, options: Options, clock: Callable[[], float] = time.monotonic) -> None:
        contexts = options.security.load()
        self.fingerprint = "" if contexts is None else contexts.fingerprint
        self._options, self._clock = options, clock
        # A clock of the host's, so that a new process comes after an old one.
        self._incarnation = time.time_ns()
        self._listener = Listener(options.socket)
        self._node: Node | None = None
        self._lease = 0.0
        self._alarm: asyncio.TimerHandle | None = None
        self._kept: dict[str, Start] = {}
        self._superseded: dict[str, str] = {}
        self._left: tuple[str, Start] | None = None
        self._jobs: set[asyncio.Task[None]] = set()
        self._over = asyncio.Event()
        self._busy = asyncio.Lock()

    async def serve(self) -> None:
        """Serve until :meth:`stop` is called or, if it is to end with its lease, until then."""
        _LOGGER.info("sidecar of process %d listens at %s", os.getpid(), self._listener.address)
        if self._options.own:
            self._renew(_PATIENCE_S)
        accepting = asyncio.create_task(self._accept())
        try:
            await self._over.wait()
        finally:
            accepting.cancel()
            jobs = list(self._jobs)
            for job in jobs:
                job.cancel()
            await asyncio.gather(accepting, *jobs, return_exceptions=True)
            if self._alarm is not None:
                self._alarm.cancel()
            await self._let_go()
            self._listener.close()

    def stop(self) -> None:
        """End soon."""
        self._over.set()

    # ------------------------------------------------------------------------------ clients

    async def _accept(self) -> None:
        while True:
            try:
                connection, _ = await accept(self._listener.socket)
            except OSError as error:
                # Out of descriptors, mostly: what is open may end, and must not stand still.
                _LOGGER.warning("a client could not be accepted: %s. Trying on", error)
                await asyncio.sleep(_RETRY_S)
                continue
            if not is_own(connection):
                connection.close()
                continue
            job = asyncio.create_task(self._attend(connection))
            self._jobs.add(job)
            job.add_done_callback(self._jobs.discard)

    async def _attend(self, connection: Any) -> None:
        """Answer one client."""
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        buffer = FrameBuffer()
        try:
            async with asyncio.timeout(_PATIENCE_S):
                frames: list[Frame] = []
                while not frames:
                    data = await loop.sock_recv(connection, 1 << 20)
                    if not data:
                        return
                    frames = buffer.feed(data)
            answer = await self._answer_or_refuse(frames[0])
            await loop.sock_sendall(connection, encode_frame(answer))
        except (OSError, TimeoutError):
            pass  # it has gone, or never said what it wants
        except DecentralError as error:  # what it said was no frame
            _LOGGER.warning("closed a connection: %s", error)
        finally:
            connection.close()

    async def _answer_or_refuse(self, frame: Frame) -> dict[str, Any]:
        try:
            return await self._answer(frame)
        except DecentralError as error:
            return {"do": "refused", "fault": error.fault, "reason": str(error.args[0])}
        except Exception as error:
            # A client that gets no answer would take the sidecar for dead, and begin anew.
            _LOGGER.exception("cannot answer %r", frame.header.get("do"))
            reason = f"the sidecar failed as it answered: {error!r}; see its log"
            return {"do": "refused", "fault": RuntimeFault.fault, "reason": reason}

    async def _answer(self, frame: Frame) -> dict[str, Any]:
        match frame.header.get("do"):
            case "who":
                return {"do": "me", **self._facts()}
            case "status":
                return {"do": "status", **self._status()}
            case "order":
                order = Order.from_json(str(frame.header.get("order")))
                patience = float(frame.header.get("allowed", 3600.0))
                async with self._busy:
                    return await self._carry_out(order, frame.blobs, patience)
            case "release":
                async with self._busy:
                    return await self._release(frame.header.get("run"))
            case "model":
                return {"do": "accepted", "handoff": self._handoff_of(frame.header.get("run"))}
            case other:
                raise RuntimeFault(f"the sidecar does not know {other!r}")

    async def _release(self, run: object) -> dict[str, Any]:
        """Let go of a run that has ended."""
        if self._node is not None and self._node.order.run == run:
            await self._let_go()
            if self._options.own and not self._kept:
                self._renew(_PATIENCE_S)
        return {"do": "released"}

    def _handoff_of(self, run: object) -> str:
        if self._node is None or self._node.order.run != run:
            raise RuntimeFault(f"this node holds no model of run {run}")
        return self._node.handoff

    def _facts(self) -> dict[str, Any]:
        return {
            "address": str(self._options.address or ""),
            "fingerprint": self.fingerprint,
            "run": "" if self._node is None else self._node.order.run,
            "training": self._node is not None and self._node.is_training,
            "version": version("flwr-decentral"),
            "process": os.getpid(),
        }

    def _status(self) -> dict[str, Any]:
        node = self._node
        return {
            **self._facts(),
            "lease": max(0.0, self._lease - self._clock()) if node is not None else 0.0,
            "kept": sorted(self._kept),
            **({} if node is None else node.status()),
        }

    # ------------------------------------------------------------------------------ orders

    async def _carry_out(
        self, order: Order, blobs: Sequence[bytes], patience: float
    ) -> dict[str, Any]:
        """Begin a segment."""
        node = self._node
        if (name := self._superseded.get(order.run)) is not None:
            raise RuntimeFault(
                f"another run with resume = {name!r} has taken this node over, so run {order.run} "
                "cannot go on"
            )
        if node is not None and node.order.run != order.run:
            left = self._lease - self._clock()
            heir = self._inherits(order, node)
            if left > 0 and node.error is None and not heir:
                raise RuntimeFault(
                    f"this node takes part in run {node.order.run}, whose lease lasts for another "
                    f"{left:.0f} s; run {order.run} is refused until then"
                )
            if heir:
                _check_kept(order, node.order.layout)
                self._superseded[node.order.run] = order.resume
            await self._let_go()
            node = None
        if node is not None and (node.error is not None or blobs):
            await self._let_go()
            node = None
        if node is None:
            start = self._start_of(order, blobs)
            if start is None:
                return {"do": "unprimed"}
            address = self._options.socket
            node = await Node.begin(
                order,
                start,
                security=self._options.security,
                listen=self._options.listen,
                incarnation=self._incarnation,
                patience=patience,
                # In reach of whoever reaches the socket: containers share files, not names.
                local=None if address.startswith("@") else f"{address}.trainer",
            )
            self._node = node
        else:
            await node.move(order)
        self._renew(order.lease)
        node.train(order)
        return {"do": "accepted", "handoff": node.handoff}

    def _inherits(self, order: Order, node: Node) -> bool:
        """Tell whether a run may take the node over from one that keeps the same name."""
        return bool(order.resume) and order.resume == node.order.resume and not node.is_attended

    def _start_of(self, order: Order, blobs: Sequence[bytes]) -> Start | None:
        """Find what the node begins with: what an earlier run has left, or what came along."""
        if not blobs and self._left is not None and self._left[0] == order.run:
            return self._left[1]
        kept = self._kept.get(order.resume) if order.resume else None
        if kept is not None:
            _check_kept(order, kept.layout.hash)
            return kept
        if len(blobs) != 3:
            return None
        layout = Layout.unpack(blobs[0])
        if layout.hash != order.layout:
            raise ConfigurationError(
                f"the order is for the layout {order.layout}, the model that came with it has "
                f"{layout.hash}: another version of the app runs on this node"
            )
        model = np.frombuffer(blobs[1], np.float32)
        if len(model) != layout.size or len(blobs[2]) != layout.private_bytes:
            raise RuntimeFault(
                f"the model that came with an order has {len(model)} scalars and {len(blobs[2])} "
                f"private bytes, not {layout.size} and {layout.private_bytes}"
            )
        return Start(layout, model, blobs[2])

    # ------------------------------------------------------------------------------ the lease

    def _renew(self, seconds: float) -> None:
        self._lease = self._clock() + seconds
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = asyncio.get_running_loop().call_later(seconds, self._expire)

    def _expire(self) -> None:
        if self._node is not None and self._node.is_training:
            self._renew(_EXTENSION_S)  # its trainer is still at it
            return
        run = "" if self._node is None else f" of run {self._node.order.run}"
        _LOGGER.info("the lease%s is over", run)
        if self._options.own:
            self.stop()
        else:
            job = asyncio.create_task(self._let_go())
            self._jobs.add(job)
            job.add_done_callback(self._jobs.discard)

    async def _let_go(self) -> None:
        """End the node's part in its run, and keep its model if that was asked for."""
        node, self._node = self._node, None
        if node is None:
            return
        start = node.leave_behind()
        self._left = node.order.run, start
        if node.order.resume:
            self._kept[node.order.resume] = replace(start, rounds=0, resumed=True)
        await node.close()


def _check_kept(order: Order, layout: str) -> None:
    """Refuse a run that would resume with a model of another layout."""
    if layout != order.layout:
        raise ConfigurationError(
            f"the model kept as {order.resume!r} has another layout ({layout}) than this run's "
            f"({order.layout}): choose another name for resume"
        )


def run_sidecar(options: Options) -> None:
    """Serve in this process until it is told to end by a signal, or by its lease."""
    asyncio.run(_serve(options))


async def _serve(options: Options) -> None:
    sidecar = Sidecar(options)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, sidecar.stop)
    await sidecar.serve()
