"""An adversarial cluster: n machines in one process, and everything that can go wrong between them.

Time is virtual and costs nothing. Links drop, duplicate, delay, reorder and corrupt messages, fall
apart and heal; nodes leave, join, slow down and fail to train. All of it comes from one seed, so a
failing run replays. A :class:`~flwr_decentral.testing.referee.Referee` ends the run with
:class:`~flwr_decentral.core.AlgorithmError` at the first breach of the contract.

What a node sees of a fault:

=====================  ============================================================================
a link breaks          ``PeerDown`` at both ends that are up; what was on the way or queued is lost
a link heals           ``PeerUp`` at both ends
a node leaves          nothing until it returns; its training and its timers stand still
a node returns         ``PeerDown`` for each neighbor it had, then ``PeerUp`` for each it can reach
a node joins           ``Started``, with the neighbors it can reach
=====================  ============================================================================

A run ends when every node has asked for a round beyond the last, has halted or is gone for good,
and what was on its way by then has arrived. A run that cannot get there ends too:
:attr:`Cluster.stalled` says who waits for whom.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from flwr_decentral.core import (
    Algorithm,
    Command,
    ConfigurationError,
    DropQueued,
    Event,
    Halt,
    LinkIdle,
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
    Stopped,
    TimerFired,
    Train,
    TrainDone,
    TrainFailed,
    Vector,
)
from flwr_decentral.core.algorithm import Topology
from flwr_decentral.core.conduct import Tally
from flwr_decentral.core.transcript import format_step
from flwr_decentral.ops import Ops, choose

from .faults import Faults
from .network import Network, Sent
from .referee import Referee
from .sites import make_site

Trainer: TypeAlias = Callable[[int, int, Vector], Vector]
"""``train(node, round, vector)`` returns the trained vector, or raises."""

# The order of what happens at the same time: the same as in the virtual-time runtime.
_DONE, _CHANGE, _ARRIVAL, _UPLINK, _TIMER = range(5)
_OVERDUE: Final = 0
_NO_FAULTS: Final = Faults()
_MAX_IDLE_EVENTS: Final = 50_000
"""Events without any training done after which a run counts as stalled."""


@dataclass(slots=True)
class _Training:
    """A training under way: its outcome is known and comes out when it is due."""

    command: Train
    outcome: Vector | str
    due: int
    ticket: int


@dataclass(slots=True)
class _Node:
    """What the cluster keeps for a node beside its machine.

    ``peers`` holds the neighbors it was told of, and how often their link had broken by then;
    ``timers`` when each timer is due, and its ticket in the heap.
    """

    up: bool = False
    started: bool = False
    finished: bool = False
    halted: bool = False
    training: _Training | None = None
    peers: dict[int, int] = field(default_factory=dict)
    timers: dict[str, tuple[int, int]] = field(default_factory=dict)
    uplink: int | None = None


class Cluster:
    """Run an algorithm on all nodes of a graph, under faults.

    Parameters
    ----------
    algorithm : Algorithm
        What each node runs.
    topology : networkx.Graph
        Who may talk to whom; nodes are 0 to n-1.
    initial : ndarray of float32, or mapping of str to ndarray
        The initial model: one flat vector, or a model's tensors by name.
    train : callable
        ``train(node, round, vector)`` returns the trained vector; raising is a failed training.
    rounds : int
        Local rounds of each node.
    seed : int (default: 0)
        The run seed, for the machines and for the faults.
    faults : Faults, optional
        What goes wrong; by default nothing.
    ops : Ops, optional
        The vector arithmetic; by default what ``FLWR_DECENTRAL_OPS`` names.

    Attributes
    ----------
    now : int
        Virtual time in nanoseconds.
    machines : list of Machine
        One for each node.
    transcript : list of str
        What happened, one line an event: see :mod:`flwr_decentral.core.transcript`.
    warnings : tuple of str
        What the algorithm has to say about the topology and the model.
    counters : dict of str to Tally
        What the machines have reported, by name.
    sent : list of Sent
        Every message that was put on an uplink.
    injected : Counter of str
        What the faults did: ``"dropped"``, ``"duplicated"``, ``"corrupted"``, ``"cut"`` (lost with
        its link) and ``"unsent"`` (taken from an outbox, or meant for a node out of reach).
    trained : list of int
        How many trainings have ended on each node, failed ones included.
    stalled : dict of int to tuple of int
        For each node that does not go on, the neighbors that it waits for.

    Examples
    --------
    >>> import networkx as nx
    >>> from flwr_decentral.testing.toys import Gossip
    >>> cluster = Cluster(
    ...     Gossip(),
    ...     topology=nx.cycle_graph(4),
    ...     initial=np.zeros(3, np.float32),
    ...     train=lambda node, round, x: x + np.float32(node),
    ...     rounds=2,
    ...     faults=Faults(drop=0.3),
    ... ).run()
    >>> cluster.finished, cluster.stalled
    ([True, True, True, True], {})
    """

    def __init__(
        self,
        algorithm: Algorithm,
        *,
        topology: Topology,
        initial: Vector | Mapping[str, NDArray[Any]],
        train: Trainer,
        rounds: int,
        seed: int = 0,
        faults: Faults = _NO_FAULTS,
        ops: Ops | None = None,
    ) -> None:
        ops = ops or choose()
        sites = [
            make_site(topology=topology, initial=initial, node=node, seed=seed, ops=ops)
            for node in range(len(topology))
        ]
        self.topology, self.layout = sites[0].topology, sites[0].layout
        self.warnings = algorithm.check(self.topology, self.layout)
        self.algorithm, self.rounds, self.faults = algorithm, rounds, faults
        self.machines = [self.make(site) for site in sites]
        self.now = 0
        self.transcript: list[str] = []
        self.counters: defaultdict[str, Tally] = defaultdict(Tally)
        self.trained = [0] * len(sites)
        self.stalled: dict[int, tuple[int, ...]] = {}
        self._train = train
        self._network = Network(self.topology, faults, seed)
        self.sent, self.injected = self._network.sent, self._network.injected
        self._referee = Referee(algorithm, self.topology, self.layout)
        self._nodes = [_Node() for _ in sites]
        self._heap: list[tuple[int, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._tickets = _OVERDUE
        self._idle_events = 0
        self._stopped = False
        for at in (0, *faults.changes()):
            self._push(at, _CHANGE, self._change)

    @property
    def models(self) -> NDArray[np.float32]:
        """The current model of every node, shape (n, D)."""
        return np.stack([machine.model for machine in self.machines])

    @property
    def finished(self) -> list[bool]:
        """Which nodes have asked for a round beyond the last."""
        return [state.finished for state in self._nodes]

    @property
    def halted(self) -> list[bool]:
        """Which nodes have halted."""
        return [state.halted for state in self._nodes]

    @property
    def live(self) -> list[int]:
        """The nodes that are not gone for good, ascending."""
        return [node for node in self.topology if not self.faults.is_gone(node, self.now)]

    def run(self, until: int | None = None) -> Cluster:
        """Run on: to the end, or up to and including a time.

        Parameters
        ----------
        until : int, optional
            Virtual time to pause at, in nanoseconds; a further call goes on from there.

        Returns
        -------
        Cluster
            This cluster.

        Raises
        ------
        AlgorithmError
            If a machine breaks the contract.
        """
        while self._heap and not self._is_over():
            if until is not None and self._heap[0][0] > until:
                self.now = until
                return self
            self.now, _, _, handler, arguments = heapq.heappop(self._heap)
            self._idle_events += 1
            handler(*arguments)
        if not self._stopped:
            self._stop()
        return self

    def make(self, site: Site) -> Machine:
        """Make the machine of a node: a hook for clusters that watch their machines."""
        return self.algorithm.machine(site)

    def step(self, node: int, event: Event) -> list[Command]:
        """Step the machine of a node: a hook for clusters that watch their machines."""
        return self.machines[node].step(event)

    def _is_over(self) -> bool:
        if self._idle_events > _MAX_IDLE_EVENTS:
            return True
        return not self._network.under_way and self._is_done()

    def _is_done(self) -> bool:
        return all(
            state.finished or state.halted or self.faults.is_gone(node, self.now)
            for node, state in enumerate(self._nodes)
        )

    def _stop(self) -> None:
        self._stopped = True
        for node in self.live:
            if not (self._nodes[node].finished or self._nodes[node].halted):
                self.stalled[node] = self.machines[node].waits_for
        for node, state in enumerate(self._nodes):
            if state.started and state.up:
                commands = self._answer(node, Stopped(at=self.now, reason="the run has ended"))
                self._obey(node, [command for command in commands if isinstance(command, Report)])
        self._referee.check_sent()

    def _push(self, at: int, rank: int, handler: Callable[..., None], *arguments: Any) -> int:
        self._tickets += 1
        heapq.heappush(self._heap, (at, rank, self._tickets, handler, arguments))
        return self._tickets

    def _answer(self, node: int, event: Event) -> list[Command]:
        try:
            commands = self.step(node, event)
        except ValueError as error:
            if "read-only" not in str(error):
                raise
            raise self._referee.breach(
                node,
                f"wrote to a vector that others read while it answered {type(event).__name__}; "
                "what was sent, received or given to training is not its own: write to a copy",
            ) from error
        self.transcript.append(format_step(node, event, commands))
        return commands

    def _happen(self, node: int, event: Event) -> None:
        self._obey(node, self._answer(node, event))

    def _obey(self, node: int, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Send():
                    self._referee.send(node, command)
                    self._send(node, command.to, command.message)
                case Train():
                    self._begin_training(node, command)
                case SetTimer():
                    self._set_timer(node, command.name, command.at)
                case DropQueued():
                    self._network.drop(node, command.to)
                case Report():
                    self.counters[command.name].add(command)
                case Halt():
                    self._nodes[node].halted = True
                    self._referee.halt(node)
        self._pump(node)

    def _send(self, node: int, to: int, message: Message) -> None:
        # A link that the node has yet to be told of is none that it can send on.
        if self._nodes[node].peers.get(to) == self._network.breaks(node, to):
            self._network.queue(node, to, message)
        else:
            self.injected["unsent"] += 1

    def _begin_training(self, node: int, command: Train) -> None:
        self._referee.train(node, command)
        if command.round > self.rounds:
            self._nodes[node].finished = True
            return
        due = self.now + self.faults.duration(node)
        ticket = self._push(due, _DONE, self._end_training, node, self._tickets + 1)
        outcome = self._outcome(node, command)
        self._nodes[node].training = _Training(command, outcome, due, ticket)

    def _outcome(self, node: int, command: Train) -> Vector | str:
        """Train, on a copy; a text says why it failed."""
        if command.round in self.faults.fail_train.get(node, ()):
            return "injected"
        try:
            trained = self._train(node, command.round, command.model.copy())
        except Exception as error:  # noqa: BLE001  whatever it raises, this training has failed
            return f"{type(error).__name__}: {error}"
        after = np.array(trained, np.float32)
        if after.shape != command.model.shape:
            raise ConfigurationError(
                f"train returned shape {after.shape} for a model of {command.model.shape}"
            )
        return after

    def _end_training(self, node: int, ticket: int) -> None:
        training = self._nodes[node].training
        if training is None or training.ticket != ticket:
            return
        self._nodes[node].training = None
        self._referee.trained(node)
        self.trained[node] += 1
        self._idle_events = 0
        round, outcome = training.command.round, training.outcome
        if isinstance(outcome, str):
            self._happen(node, TrainFailed(at=self.now, round=round, reason=outcome))
        else:
            before = training.command.model
            self._happen(node, TrainDone(at=self.now, round=round, before=before, after=outcome))

    def _pump(self, node: int) -> None:
        """Start the next message, if the uplink is free."""
        state = self._nodes[node]
        if state.uplink is None and (sent := self._network.start(node, self.now)) is not None:
            arguments = (self._tickets + 1, sent, self._network.breaks(node, sent.dst))
            free = self.now + self.faults.uplink
            state.uplink = self._push(free, _UPLINK, self._leave_uplink, *arguments)

    def _leave_uplink(self, ticket: int, sent: Sent, breaks: int) -> None:
        for at, copy, _ in self._network.deliver(sent, self.now):
            self._push(at, _ARRIVAL, self._arrive, sent.src, sent.dst, copy, breaks)
        state = self._nodes[sent.src]
        if state.uplink == ticket:
            state.uplink = None
            self._pump(sent.src)
            wanted = self.algorithm.capabilities.link_idle and not self._is_done()
            if wanted and state.uplink is None:
                self._happen(sent.src, LinkIdle(at=self.now))

    def _arrive(self, src: int, dst: int, message: Message, breaks: int) -> None:
        if self._network.arrives(src, dst, breaks):
            self._happen(dst, Received(at=self.now, source=src, message=message))

    def _set_timer(self, node: int, name: str, at: int | None) -> None:
        timers = self._nodes[node].timers
        timers.pop(name, None)
        if at is not None:
            due, arguments = max(at, self.now), (node, name, self._tickets + 1)
            timers[name] = (due, self._push(due, _TIMER, self._fire, *arguments))

    def _fire(self, node: int, name: str, ticket: int) -> None:
        state = self._nodes[node]
        if not state.up or state.timers.get(name) != (self.now, ticket) or self._is_done():
            return
        del state.timers[name]
        self._happen(node, TimerFired(at=self.now, name=name))

    def _change(self) -> None:
        """Let nodes and links come and go, and tell those who are up."""
        self._network.change(self.now)
        returned = []
        for node, state in enumerate(self._nodes):
            was, state.up = state.up, self.faults.is_up(node, self.now)
            if was and not state.up:
                self._leave(node)
            elif state.up and not was:
                returned.append(node)
        for node in returned:
            self._return(node)
        present = [node for node, state in enumerate(self._nodes) if state.up]
        for node in present:
            self._miss_peers(node)
        for node in present:
            self._meet_peers(node)

    def _leave(self, node: int) -> None:
        state = self._nodes[node]
        self._network.drop(node)
        state.uplink = None
        if state.training is not None:
            state.training.ticket = _OVERDUE
            state.training.due -= self.now

    def _return(self, node: int) -> None:
        """Go on with the training and the timers that have waited."""
        state = self._nodes[node]
        training = state.training
        if training is not None and training.ticket == _OVERDUE:
            training.due += self.now
            arguments = (node, self._tickets + 1)
            training.ticket = self._push(training.due, _DONE, self._end_training, *arguments)
        # In the order in which they were due, and those of one time in which they were set.
        for (due, _), name in sorted((when, name) for name, when in state.timers.items()):
            if due <= self.now:
                self._set_timer(node, name, self.now)

    def _miss_peers(self, node: int) -> None:
        peers = self._nodes[node].peers
        for peer, breaks in sorted(peers.items()):
            if self._network.breaks(node, peer) != breaks:
                del peers[peer]
                self._network.drop(node, peer)
                self._happen(node, PeerDown(at=self.now, peer=peer))

    def _meet_peers(self, node: int) -> None:
        state, neighbors = self._nodes[node], self.machines[node].site.neighbors
        new = [j for j in neighbors if j not in state.peers and self._network.is_up(node, j)]
        state.peers.update({peer: self._network.breaks(node, peer) for peer in new})
        if not state.started:
            state.started = True
            self._happen(node, Started(at=self.now, up=tuple(new)))
            return
        for peer in new:
            self._happen(node, PeerUp(at=self.now, peer=peer))
