"""The pump: what stands between one machine and the real world.

It turns what happens (messages, links that come and go, timers, ends of trainings) into events,
steps the machine with one event at a time, and carries out every command before it looks at the
next. What happens meanwhile waits in a queue. An event's ``at`` is read from the clock as its turn
comes, so it never goes back.

A run is cut into **segments**, since a client's process lives for one message. Within a segment the
node trains. A segment is over for a node when it asks for a round beyond the segment's last, or for
any round once the segment's time is up; that ``Train`` is held back and starts with the next
segment. Everything else goes on in between: messages are taken in and answered, timers fire, links
break and heal. So a machine lives through all segments, and a node that is done with one does not
hold up neighbors that are not.

Only between segments can the **site** change, and with it the epoch:

=====================  ============================================================================
the same graph         the machine lives on
another graph          a new machine begins at round 1, from the model that the old one ended with:
                       what it holds of its neighbors means nothing among others. The trainer goes
                       on counting rounds, and so do the seeds and the segments
another layout, node   refused: that is another run
=====================  ============================================================================

A machine that raises ends the pump, and so do trainings that fail three times in a row. The error
names node, event and algorithm.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from enum import Enum, auto
from functools import partial

from flwr_decentral.core import (
    Algorithm,
    AlgorithmError,
    Command,
    ConfigurationError,
    DecentralError,
    DropQueued,
    Event,
    Halt,
    LinkIdle,
    Message,
    PeerDown,
    PeerUp,
    Received,
    Report,
    RuntimeFault,
    Send,
    SetTimer,
    Site,
    Started,
    Stopped,
    Train,
)
from flwr_decentral.core.conduct import check_send
from flwr_decentral.core.transcript import format_event, format_step

from .accounts import Accounts
from .clock import Alarm, Clock
from .rounds import Rounds, Segment
from .timers import Occurrence, Timers
from .trainer import Outcome, Trainer
from .transport import Transport


class _Phase(Enum):
    """Where a pump is: made, waiting for neighbors, stepping its machine, or at its end."""

    NEW = auto()
    GATHERING = auto()
    RUNNING = auto()
    OVER = auto()


class Pump:
    """Run one machine in real time. See the head of :mod:`flwr_decentral.channel.pump`.

    A pump is the transport's listener. It is used from one thread, that of the event loop.

    Parameters
    ----------
    algorithm : Algorithm
        What the node runs.
    site : Site
        Where it runs.
    transport : Transport
        What carries its messages; the owner of the pump opens and closes it.
    trainer : Trainer
        Who trains.
    clock : Clock
        The run's time.
    note : callable, optional
        Called with each line of the transcript. It costs a hash of every vector that moves.

    Attributes
    ----------
    machine : Machine
        The machine.
    up : set of int
        The neighbors that messages can go to.
    error : DecentralError or None
        What ended the pump.
    accounts : Accounts
        What the node has done.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        site: Site,
        transport: Transport,
        trainer: Trainer,
        clock: Clock,
        note: Callable[[str], object] | None = None,
    ) -> None:
        self.algorithm, self.site = algorithm, site
        self.machine = algorithm.machine(site)
        self.up: set[int] = set()
        self.error: DecentralError | None = None
        self.accounts = Accounts()
        self._transport, self._trainer, self._clock, self._note = transport, trainer, clock, note
        self._at = 0
        self._queue: deque[Occurrence] = deque()
        self._stepping = False
        self._phase = _Phase.NEW
        self._early: list[tuple[int, Message]] = []
        self._timers = Timers(clock, self._post)
        self._patience: Alarm | None = None
        self._rounds = self._count_rounds(after=0)
        self._segment: Segment | None = None
        self._ended: Callable[[], object] = _ignore
        self._alarm: Alarm | None = None
        self._since = 0

    # ------------------------------------------------------------------------------ the run

    def start(self, *, patience: int = 0, after: int = 0) -> None:
        """Begin as soon as every neighbor is up, or when patience has ended.

        Parameters
        ----------
        patience : int (default: 0)
            Nanoseconds to wait for neighbors; 0 begins at once. What comes from those that have
            begun already waits.
        after : int (default: 0)
            Rounds of the run that are past, for a node that joins it later.
        """
        if self._phase is not _Phase.NEW:
            raise RuntimeFault(f"node {self.site.node} has been started already")
        self._rounds = self._count_rounds(after)
        self._gather(patience)

    async def run(self, segment: Segment) -> None:
        """Train for a segment, and return when it is over for this node.

        Raises
        ------
        DecentralError
            If the pump has ended.
        """
        over = asyncio.Event()
        self.resume(segment, over.set)
        try:
            await over.wait()
        finally:
            self.pause()
        self.check()

    def resume(self, segment: Segment, ended: Callable[[], object]) -> None:
        """Let training go on for a segment, and call back once when that is over.

        Raises
        ------
        DecentralError
            If the pump has ended.
        """
        self.check()
        if self._segment is not None:
            raise RuntimeFault(f"node {self.site.node} is in a segment already")
        self._segment, self._ended = segment, ended
        self._since = self._clock.now()
        if segment.until is not None:
            self._alarm = self._clock.call_at(segment.until, self._look)
        self._rounds.begin(segment, self._outcome)
        self._look()

    def pause(self) -> None:
        """End the segment now, if there is one: what is in training ends, and no more begins."""
        if self._segment is None:
            return
        self._segment, ended, self._ended = None, self._ended, _ignore
        self.accounts.active += self._clock.now() - self._since
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        ended()

    def stop(self, reason: str) -> None:
        """Let the machine end; nothing happens to it any more."""
        if self._phase is _Phase.RUNNING:
            self._post(lambda at: Stopped(at=at, reason=reason))
        self._post(self._end)

    def check(self) -> None:
        """Raise what ended the pump."""
        if self.error is not None:
            raise self.error

    def adopt(
        self,
        site: Site,
        transport: Transport | None = None,
        *,
        patience: int = 0,
        after: int | None = None,
    ) -> None:
        """Go on at another site, between segments.

        Parameters
        ----------
        site : Site
            The new one; of its ``initial`` model no use is made.
        transport : Transport, optional
            What carries messages from now on; the old one has been closed, the new one is not open.
        patience : int (default: 0)
            How long a new machine waits for its neighbors, as in :meth:`start`.
        after : int, optional
            Rounds of the run that are past, on which all nodes of a synchronous algorithm have to
            agree; by default those that this node has done.

        Raises
        ------
        ConfigurationError
            If it is another node, or the model another one.
        RuntimeFault
            If a segment or a training is under way.
        """
        self.check()
        mine, node = self.site, self.site.node
        if self._segment is not None or self._rounds.training:
            raise RuntimeFault(f"the topology of node {node} can change only between segments")
        if site.node != node or site.layout.hash != mine.layout.hash:
            raise ConfigurationError(
                f"node {node} with the layout {mine.layout.hash} cannot go on as node {site.node} "
                f"with the layout {site.layout.hash}: that is another run"
            )
        if transport is not None:
            self._transport = transport
            for peer in sorted(self.up):
                self.peer_down(peer)
        if _same_graph(site, mine):
            return
        begun = self._phase is _Phase.RUNNING
        if begun:
            self._post(lambda at: Stopped(at=at, reason="the topology changes"))
            self.check()
        model = site.ops.combine([self.machine.model], [1.0])
        model.flags.writeable = False
        self.site = replace(site, initial=model)
        self.machine = self.algorithm.machine(self.site)
        self._timers.cancel()
        self.up &= set(self.site.neighbors)
        self._rounds = self._count_rounds(self.accounts.rounds if after is None else after)
        if begun:
            self._gather(patience)

    def metrics(self) -> dict[str, int | float]:
        """List what this node has done since it was started. See :meth:`Accounts.metrics`."""
        now = self._clock.now()
        active = 0 if self._segment is None else now - self._since
        accounts, busy = self.accounts, self._rounds.busy()
        return replace(
            accounts, active=accounts.active + active, busy=accounts.busy + busy
        ).metrics()

    # ------------------------------------------------------------------------------ what happens

    def received(self, source: int, message: Message) -> None:
        """Take a message from a neighbor that is up."""
        self.accounts.received += message.nbytes
        if self._phase is _Phase.RUNNING:
            self._post(lambda at: Received(at=at, source=source, message=message))
        elif self._phase is not _Phase.OVER:
            self._early.append((source, message))

    def peer_up(self, peer: int) -> None:
        """Learn that messages can go to a neighbor now."""
        self.up.add(peer)
        if self._phase is _Phase.RUNNING:
            self._post(lambda at: PeerUp(at=at, peer=peer))
        else:
            self._meet()

    def peer_down(self, peer: int, dropped: Sequence[Message] = ()) -> None:
        """Learn that a link broke, and what was queued for it."""
        self.accounts.take_back(dropped)
        if peer not in self.up:
            return  # as adopt() has known before the transport that it is given
        self.up.discard(peer)
        if self._phase is _Phase.RUNNING:
            self._post(lambda at: PeerDown(at=at, peer=peer))
            return
        lost = [message for source, message in self._early if source == peer]
        self.accounts.lost += sum(message.nbytes for message in lost)
        self._early = [each for each in self._early if each[0] != peer]

    def link_idle(self) -> None:
        """Learn that the uplink has nothing to do."""
        if self._phase is _Phase.RUNNING and self.algorithm.capabilities.link_idle:
            self._post(lambda at: LinkIdle(at=at))

    def _gather(self, patience: int) -> None:
        self._phase = _Phase.GATHERING
        if patience:
            self._patience = self._clock.call_at(self._clock.now() + patience, self._begin)
            self._meet()
        else:
            self._begin()

    def _meet(self) -> None:
        if self._phase is _Phase.GATHERING and self.up.issuperset(self.site.neighbors):
            self._begin()

    def _begin(self) -> None:
        if self._phase is not _Phase.GATHERING:
            return
        if self._patience is not None:
            self._patience.cancel()
        self._phase = _Phase.RUNNING
        early, self._early = self._early, []
        up = tuple(sorted(self.up))
        for source, message in early:
            self._queue.append(partial(_letter, source, message))
        self._queue.appendleft(lambda at: Started(at=at, up=up))
        self._drain()

    # ------------------------------------------------------------------------------ the pump

    def _post(self, occurrence: Occurrence) -> None:
        self._queue.append(occurrence)
        self._drain()

    def _drain(self) -> None:
        if self._stepping:
            return
        self._stepping = True
        try:
            while self._queue and self._phase is not _Phase.OVER:
                self._take(self._queue.popleft())
        finally:
            self._stepping = False
        self._look()

    def _take(self, occurrence: Occurrence) -> None:
        """Let one thing happen, and obey."""
        self._at = max(self._at, self._clock.now())
        event: Event | None = None
        fault: type[DecentralError] = RuntimeFault
        try:
            event = occurrence(self._at)
            if event is None:
                return
            fault = AlgorithmError
            commands = self.machine.step(event)
            fault = RuntimeFault
            if self._note is not None:
                self._note(format_step(self.site.node, event, commands))
            self._obey(event, commands)
        except Exception as error:  # noqa: BLE001 - a machine may raise anything
            self._fail(event, error, fault)

    def _obey(self, event: Event, commands: Iterable[Command]) -> None:
        name, graph, node = self.algorithm.name, self.site.topology, self.site.node
        for command in commands:
            match command:
                case Report():
                    self.accounts.tallies[command.name].add(command)
                case _ if isinstance(event, Stopped):
                    continue
                case Send():
                    check_send(name, graph, node, command.to)
                    self._send(command)
                case Train():
                    self._rounds.ask(command)
                    self._rounds.begin(self._segment, self._outcome)
                case DropQueued():
                    self.accounts.take_back(self._transport.drop(command.to))
                case SetTimer():
                    at = command.at
                    self._timers.set(command.name, None if at is None else max(at, self._at))
                case Halt():
                    self._rounds.halted = True

    def _send(self, command: Send) -> None:
        nbytes = command.message.nbytes
        if self._transport.send(command.to, command.message):
            self.accounts.sent += nbytes
        else:
            self.accounts.dropped += nbytes

    def _fail(self, event: Event | None, error: Exception, fault: type[DecentralError]) -> None:
        told = repr(error)
        if isinstance(error, DecentralError):
            fault, told = type(error), error.args[0]
        if event is not None:
            what = format_event(self.site.node, event)
            told = f"{self.algorithm.name} failed on node {self.site.node} at {what!r}: {told}"
        self.error = fault(told)
        self.error.__cause__ = error
        self._close()

    def _close(self) -> None:
        self._phase = _Phase.OVER
        self._queue.clear()
        self._timers.cancel()
        if self._patience is not None:
            self._patience.cancel()
        self._rounds.cancel()
        self.pause()

    def _end(self, at: int) -> None:
        self._close()

    def _outcome(self, command: Train, outcome: Outcome) -> None:
        self._post(partial(self._rounds.complete, command, outcome))

    def _look(self) -> None:
        """End the segment if this node has nothing more to do in it."""
        if self._segment is not None and self._rounds.is_done_with(self._segment):
            self.pause()

    def _count_rounds(self, after: int) -> Rounds:
        self.accounts.rounds = after
        name, site = self.algorithm.name, self.site
        return Rounds(name, site, self._trainer, self._clock, self.accounts, after)


def _ignore() -> None:
    """Do nothing when a segment ends that nobody asked for."""


def _letter(source: int, message: Message, at: int) -> Event:
    return Received(at=at, source=source, message=message)


def _same_graph(a: Site, b: Site) -> bool:
    return set(a.topology) == set(b.topology) and {
        frozenset(edge) for edge in a.topology.edges
    } == {frozenset(edge) for edge in b.topology.edges}
