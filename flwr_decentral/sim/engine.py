"""Virtual time: one heap of what is going to happen.

The engine steps the machines of all nodes, moves their messages over the emulated links and turns
each ``Train`` command into a task for a :class:`~flwr_decentral.sim.trainer.Trainer`. It never
looks at a clock: how long training takes comes from the scenario, and only the trained vector comes
from the trainer. A task starts for real the moment it starts in virtual time and is awaited only
when its completion is due, so as many trainings run at once as the trainer has room for, and the
course of events is the same for any number of them.

Entries of the heap are ordered by time, then by priority, then by the order they were made in:

========  ==================  ====================================================================
priority  entry               what it leads to
========  ==================  ====================================================================
0         training done       ``TrainDone`` or ``TrainFailed``
1         change              nodes go down or up, partitions start or end: ``PeerDown``, ``PeerUp``
2         first byte          a message enters a limited downlink (if latencies differ)
3         arrival             ``Received``, or the message was lost
4         uplink free         the next message starts; ``LinkIdle``
5         timer               ``TimerFired``
========  ==================  ====================================================================

A run ends when every node has done its rounds, has halted or is gone for good, or at the end of its
duration. If nothing is left to happen before that, the run has stalled and fails, naming who waits
for whom.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from flwr_decentral.core import (
    Command,
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
    RuntimeFault,
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
    to_seconds,
)
from flwr_decentral.core.conduct import MAX_FAILURES, Tally, check_send, check_train

from .conditions import Conditions
from .journal import Journal
from .links import Links, Transfer
from .measures import Traffic
from .plan import Plan
from .trainer import Outcome, Task, Trainer

_DONE, _CHANGE, _FIRST_BYTE, _ARRIVAL, _UPLINK, _TIMER = range(6)


@dataclass
class _Node:
    """What the engine keeps for a node beside its machine.

    ``timers`` holds when each timer is due, and the number of its entry in the heap.
    """

    up: bool = False
    started: bool = False
    ended: bool = False
    halted: bool = False
    training: tuple[int, Vector, int] | None = None
    uplink_event: int = -1
    last_round: int = 0
    trained: int = 0
    failures: int = 0
    busy_ns: int = 0
    timers: dict[str, tuple[int, int]] = field(default_factory=dict)
    cut: set[int] = field(default_factory=set)


class Observer:
    """Be told how a run goes. Every method may be left as it is."""

    def trained(self, engine: Engine, node: int, round: int, outcome: Outcome) -> None:
        """Learn that a training has ended, in virtual time."""

    def barrier(self, engine: Engine, round: int) -> None:
        """Look around: the nodes have done ``round`` rounds on average, and time stands still."""


class Engine:
    """Run an algorithm on all nodes in virtual time.

    Parameters
    ----------
    plan : Plan
        What to run.
    trainer : Trainer
        Who trains.
    observer : Observer, optional
        Who is told.
    journal : Journal, optional
        What records the run.

    Attributes
    ----------
    now : int
        Virtual time in nanoseconds.
    machines : list of Machine
        One for each node.
    traffic : Traffic
        Bytes by their fate.
    tallies : dict of str to Tally
        What the machines and the engine have counted.
    trainings : int
        How many trainings have ended, on all nodes together.
    rounds_done : int
        How many rounds the nodes have gone on from, all together: trained and exchanged.
    """

    def __init__(
        self,
        plan: Plan,
        trainer: Trainer,
        observer: Observer | None = None,
        journal: Journal | None = None,
    ) -> None:
        self.plan = plan
        self.now = 0
        self.traffic = Traffic()
        self.tallies: defaultdict[str, Tally] = defaultdict(Tally)
        self.trainings = 0
        self.rounds_done = 0
        self.machines: list[Machine] = [
            plan.algorithm.machine(
                Site(
                    node=node,
                    topology=plan.topology,
                    layout=plan.layout,
                    initial=plan.initial,
                    seeds=plan.seeds.of(node),
                    ops=plan.ops,
                )
            )
            for node in range(plan.conditions.nodes)
        ]
        self._trainer = trainer
        self._observer = observer or Observer()
        self.journal = journal or Journal()
        self._links = Links(plan.conditions, plan.seeds)
        self._nodes = [_Node() for _ in self.machines]
        self._heap: list[tuple[int, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._sequence = 0
        self._under_way = 0
        self._unended = len(self._nodes)
        self._first_errors: dict[int, str] = {}
        self._next_barrier = len(self._nodes) * plan.barrier_every
        self._changes = _changes(plan.conditions)
        self._wants_idle = plan.algorithm.capabilities.link_idle

    # ------------------------------------------------------------------------------ the run

    def run(self) -> str:
        """Run to the end.

        Returns
        -------
        str
            The digest of the run.

        Raises
        ------
        RuntimeFault
            If nothing is left to happen while nodes still have rounds to do, or training fails too
            often.
        AlgorithmError
            If a machine broke the contract.
        """
        for at, nodes in self._changes.items():
            if at:  # what holds from the start on is in the first events
                self._push(at, _CHANGE, self._change, (nodes,))
        for node, state in enumerate(self._nodes):
            state.up = self.plan.conditions.is_up(node, 0)
            self._check_gone(node)
        for node, state in enumerate(self._nodes):
            if state.up:
                self._start(node)
        limit = self.plan.duration
        while self._heap and self._unended:
            if limit is not None and self._heap[0][0] > limit:
                break
            self.now, _, _, handler, arguments = heapq.heappop(self._heap)
            handler(*arguments)
        if self._unended:
            if not self._heap:
                raise self._stalled()
            self.now = self.now if limit is None else limit
        return self._finish()

    def models(self) -> list[Vector]:
        """List the current model of every node."""
        return [machine.model for machine in self.machines]

    @property
    def lowest_round(self) -> int:
        """The lowest round that a node may still end: the rounds below are past for all."""
        rounds = (state.last_round for state in self._nodes if not state.ended)
        return min(rounds, default=max(state.last_round for state in self._nodes) + 1)

    @property
    def idle_share(self) -> float:
        """The share of all nodes' virtual time in which they did not train."""
        if not self.now:
            return 0.0
        busy = sum(state.busy_ns for state in self._nodes)
        return max(0.0, 1 - busy / (self.now * len(self._nodes)))

    @property
    def wasted_bytes(self) -> int:
        """Bytes that were sent in vain: lost, or of no use to the machine that got them."""
        return self.traffic.lost + sum(tally.nbytes for tally in self.tallies.values())

    def _finish(self) -> str:
        for node, state in enumerate(self._nodes):
            if state.started:
                event = Stopped(at=self.now, reason="the run has ended")
                commands = self.machines[node].step(event)
                self.journal.event(node, event, commands)
                for command in commands:
                    if isinstance(command, Report):
                        self.tallies[command.name].add(command)
            self._drop(node)
        self.traffic.lost += self._under_way
        for node, model in enumerate(self.models()):
            self.journal.model(node, model)
        return self.journal.digest

    def _stalled(self) -> RuntimeFault:
        present = [node for node, state in enumerate(self._nodes) if not state.ended]
        lines = []
        for node in present[:8]:
            waits = ", ".join(map(str, self.machines[node].waits_for)) or "nobody it can name"
            lines.append(f"node {node} (round {self._nodes[node].last_round}) waits for {waits}")
        more = f" and {len(present) - 8} more" if len(present) > 8 else ""
        return RuntimeFault(
            f"the run has stalled at {to_seconds(self.now):.3f} s of virtual time: nothing is left "
            f"to happen, but {'; '.join(lines)}{more}. An algorithm that waits needs a time-out "
            "where messages can be lost"
        )

    # ------------------------------------------------------------------------------ the heap

    def _push(
        self, at: int, priority: int, handler: Callable[..., None], arguments: tuple[Any, ...]
    ) -> int:
        self._sequence += 1
        heapq.heappush(self._heap, (at, priority, self._sequence, handler, arguments))
        return self._sequence

    def _step(self, node: int, event: Event, line: str) -> None:
        """Note an event, let the machine answer it, and obey."""
        self.journal.note(f"{self.now} {node} {line}")
        commands = self.machines[node].step(event)
        self.journal.event(node, event, commands)
        if commands:
            self._obey(node, commands)
        self._meet_barrier()

    def _obey(self, node: int, commands: Iterable[Command]) -> None:
        sends = False
        for command in commands:
            match command:
                case Send():
                    self._send(node, command.to, command.message)
                    sends = True
                case Report():
                    self.tallies[command.name].add(command)
                case Train():
                    self._train(node, command)
                case DropQueued():
                    self._drop(node, command.to)
                case SetTimer():
                    self._set_timer(node, command.name, command.at)
                case Halt():
                    self._nodes[node].halted = True
                    self._end(node)
        if sends:
            self._pump(node)

    def _end(self, node: int) -> None:
        state = self._nodes[node]
        if not state.ended:
            state.ended = True
            self._unended -= 1

    def _check_gone(self, node: int) -> None:
        if self.plan.conditions.completion_ns(node, self.now, 0) is None:
            self._end(node)

    def _start(self, node: int) -> None:
        self._nodes[node].started = True
        neighbors = self.machines[node].site.neighbors
        up = tuple(peer for peer in neighbors if self._reachable(node, peer))
        self._step(node, Started(at=self.now, up=up), "S")

    # ------------------------------------------------------------------------------ training

    def _train(self, node: int, command: Train) -> None:
        plan, state = self.plan, self._nodes[node]
        in_flight = None if state.training is None else state.training[0]
        check_train(
            plan.algorithm.name,
            node,
            command.round,
            in_flight=in_flight,
            last=state.last_round,
            halted=state.halted,
        )
        duration = plan.conditions.duration_ns(node, command.round)
        state.training = (command.round, command.model, duration)
        if state.last_round:
            self.rounds_done += 1
        state.last_round = command.round
        if plan.rounds is not None and command.round > plan.rounds:
            self._end(node)
            return
        due = plan.conditions.completion_ns(node, self.now, duration)
        if due is None:
            return  # the node is gone for good before it is done
        self._push(due, _DONE, self._trained, (node,))
        if plan.duration is None or due <= plan.duration:
            seed = plan.seeds.number(node, "train", command.round)
            task = Task(node=node, round=command.round, seed=seed, at=self.now, due=due)
            self._trainer.dispatch(task, command.model)

    def _trained(self, node: int) -> None:
        state = self._nodes[node]
        assert state.training is not None
        round, before, duration = state.training
        outcome = self._trainer.wait(node)
        state.training = None
        state.trained += 1
        self.trainings += 1
        state.busy_ns += duration
        self._observer.trained(self, node, round, outcome)
        if outcome.model is None:
            self._count_failure(node, round, outcome.error)
            event: Event = TrainFailed(at=self.now, round=round, reason=outcome.error)
            self._step(node, event, f"F {round}")
        else:
            state.failures = 0
            event = TrainDone(at=self.now, round=round, before=before, after=outcome.model)
            self._step(node, event, f"T {round} {outcome.digest}")

    def _count_failure(self, node: int, round: int, error: str) -> None:
        state = self._nodes[node]
        state.failures += 1
        self.tallies["training-failed"].count += 1
        if state.trained == 1:
            self._first_errors[node] = error
        if state.failures >= MAX_FAILURES:
            raise RuntimeFault(
                f"training failed {MAX_FAILURES} times in a row on node {node}, last in round "
                f"{round}:\n{error}"
            )
        if len(self._first_errors) == len(self._nodes):
            raise RuntimeFault(
                f"training failed on all {len(self._nodes)} nodes in their first round, on node "
                f"{node}:\n{error}"
            )

    def _meet_barrier(self) -> None:
        """Let the observer look around each time the nodes have done so many rounds on average.

        A round is done when the node asks for the next one: its exchange is part of it.
        """
        every = self.plan.barrier_every
        if every and self.rounds_done >= self._next_barrier:
            reached = self.rounds_done // (len(self._nodes) * every)
            self._next_barrier = (reached + 1) * len(self._nodes) * every
            self._observer.barrier(self, reached * every)

    # ------------------------------------------------------------------------------ messages

    def _reachable(self, a: int, b: int) -> bool:
        return not self._changes or self.plan.conditions.reachable(a, b, self.now)

    def _drop(self, node: int, to: int | None = None) -> None:
        dropped = self._links.drop(node, to)
        self.traffic.dropped += sum(message.nbytes for message in dropped)

    def _send(self, node: int, to: int, message: Message) -> None:
        check_send(self.plan.algorithm.name, self.plan.topology, node, to)
        if self._reachable(node, to) and to not in self._nodes[node].cut:
            self._links.queue(node, to, message)
        else:
            self.traffic.dropped += message.nbytes

    def _pump(self, node: int) -> None:
        """Start what the uplink has room for."""
        links, traffic = self._links, self.traffic
        while (transfer := links.start(node, self.now)) is not None:
            traffic.sent += transfer.nbytes
            if transfer.lost:
                traffic.lost += transfer.nbytes
            else:
                self._under_way += transfer.nbytes
                if links.in_order(transfer.dst):
                    self._expect(transfer)
                else:
                    at = links.first_byte(transfer)
                    self._push(at, _FIRST_BYTE, self._expect, (transfer,))
            if transfer.sent > self.now:
                self._nodes[node].uplink_event = self._push(
                    transfer.sent, _UPLINK, self._uplink_free, (node, self._sequence + 1)
                )
                return

    def _uplink_free(self, node: int, number: int) -> None:
        if self._nodes[node].uplink_event != number:
            return  # the node has been down since
        self._pump(node)
        if self._wants_idle and self._links.is_idle(node, self.now):
            self._step(node, LinkIdle(at=self.now), "I")

    def _expect(self, transfer: Transfer) -> None:
        self._push(self._links.arrival(transfer), _ARRIVAL, self._arrive, (transfer,))

    def _arrive(self, transfer: Transfer) -> None:
        source, node, message, nbytes, *_ = transfer
        self._under_way -= nbytes
        if self._links.broken(transfer, self.now):
            self.traffic.lost += nbytes
            return
        self.traffic.arrived += nbytes
        event = Received(at=self.now, source=source, message=message)
        header = ",".join(map(str, message.header.values()))
        self._step(node, event, f"R {source} {message.kind} {message.step} {header}")

    # ------------------------------------------------------------------------------ timers

    def _set_timer(self, node: int, name: str, at: int | None) -> None:
        timers = self._nodes[node].timers
        timers.pop(name, None)
        if at is not None:
            due, arguments = max(at, self.now), (node, name, self._sequence + 1)
            timers[name] = (due, self._push(due, _TIMER, self._fire, arguments))

    def _fire(self, node: int, name: str, number: int) -> None:
        state = self._nodes[node]
        if not state.up or state.timers.get(name) != (self.now, number):
            return  # overdue until the node comes back; or moved or cancelled
        del state.timers[name]
        self._step(node, TimerFired(at=self.now, name=name), f"W {name}")

    def _set_overdue_timers(self, node: int) -> None:
        """Let what was due while a node was down ring now, in the order in which it was due."""
        timers = self._nodes[node].timers
        for (due, _), name in sorted((when, name) for name, when in timers.items()):
            if due <= self.now:
                self._set_timer(node, name, self.now)

    # ------------------------------------------------------------------------------ churn

    def _change(self, nodes: Sequence[int]) -> None:
        """Let nodes go down and come up, and tell those who are up what has changed."""
        conditions, before = self.plan.conditions, self.now - 1
        returned = []
        for node in nodes:
            if conditions.is_up(node, self.now):
                returned.append(node)
            else:
                self._go_down(node)
        split = any(self.now in (start, end) for start, end, _ in conditions.partitions)
        ends = range(len(self._nodes)) if split else nodes
        adjacent = self.plan.topology
        for node, peer in sorted((other, end) for end in ends for other in adjacent[end]):
            if not self._nodes[node].up:
                continue
            was, is_now = conditions.reachable(node, peer, before), self._reachable(node, peer)
            if was and not is_now:
                self._lose(node, peer)
            elif is_now and not was:
                self._step(node, PeerUp(at=self.now, peer=peer), f"U {peer}")
        for node in returned:
            self._come_back(node)

    def _go_down(self, node: int) -> None:
        state = self._nodes[node]
        state.up = False
        state.uplink_event = -1
        self._drop(node)
        self._links.reset(node, self.now)
        self._check_gone(node)

    def _lose(self, node: int, peer: int) -> None:
        self._drop(node, peer)
        self._step(node, PeerDown(at=self.now, peer=peer), f"D {peer}")

    def _come_back(self, node: int) -> None:
        """Let a node that was down see its links break and be made again."""
        state, machine = self._nodes[node], self.machines[node]
        state.up = True
        if not state.started:
            self._start(node)
            return
        self._set_overdue_timers(node)
        # No link is what it was before, also those that the machine has yet to hear of.
        state.cut = set(machine.site.neighbors)
        for peer in sorted(machine.up):
            self._lose(node, peer)
        for peer in machine.site.neighbors:
            state.cut.discard(peer)
            if self._reachable(node, peer):
                self._step(node, PeerUp(at=self.now, peer=peer), f"U {peer}")


def _changes(conditions: Conditions) -> dict[int, list[int]]:
    """List the nodes that go down or come up at each time of a change, both ascending."""
    changes: dict[int, list[int]] = {at: [] for at in conditions.changes()}
    for node, outages in enumerate(conditions.outages):
        for at in chain.from_iterable(outages):
            if at is not None:
                changes[at].append(node)
    return changes
