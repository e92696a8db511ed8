"""Machines that follow a script, and engines made of them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import networkx as nx
import numpy as np

from flwr_decentral.core import (
    SECOND,
    Algorithm,
    Capabilities,
    Command,
    Event,
    Layout,
    Machine,
    Message,
    Seeds,
    SetTimer,
    Started,
    Train,
    TrainDone,
    TrainFailed,
)
from flwr_decentral.ops import choose
from flwr_decentral.sim.engine import Engine
from flwr_decentral.sim.plan import Plan
from flwr_decentral.sim.scenario import Compute, Network, Outage, Partition, Scenario
from flwr_decentral.sim.trainer import FunctionTrainer

SIZE = 3
SLOW = 512.0
"""Bits per second at which :func:`note` takes a second."""


@dataclass(frozen=True, kw_only=True)
class Scripted(Algorithm):
    """What ``script(machine, event)`` yields is what a machine answers.

    A timer in the far future keeps runs of a given duration from stalling, unless it ``stalls``.
    """

    name = "scripted"

    script: Callable[[Machine, Event], Iterable[Command] | None]
    stalls: bool = False

    def machine(self, site):
        return ScriptedMachine(site, self)


class Idle(Scripted):
    """The same, for machines that want to know when their uplink is idle."""

    capabilities = Capabilities(link_idle=True)


class ScriptedMachine(Machine):
    """Keep what it has seen; wait for whom the script says."""

    waits_for = ()

    def __init__(self, site, algorithm):
        super().__init__(site)
        self.algorithm = algorithm
        self.seen = []

    @property
    def node(self) -> int:
        return self.site.node

    def step(self, event):
        self.seen.append(event)
        super().step(event)
        commands = list(self.algorithm.script(self, event) or ())
        if isinstance(event, Started) and not self.algorithm.stalls:
            commands.append(SetTimer(name="far-future", at=10**9 * SECOND))
        return commands

    def on_train_done(self, event):
        self.model = event.after
        return ()

    def on_train_failed(self, event):
        return ()


def train_on(machine, event):
    """Train one round after the other."""
    if isinstance(event, Started):
        yield Train(round=1, model=machine.model)
    elif isinstance(event, TrainDone | TrainFailed):
        yield Train(round=event.round + 1, model=machine.model)


def note(step=0) -> Message:
    """Make a message of a header alone: 64 bytes, 512 bits."""
    return Message(kind="note", step=step)


def add_one(task, vector):
    del task
    return vector + np.float32(1)


def make(
    algorithm,
    nodes=2,
    *,
    graph=None,
    rounds=None,
    duration=None,
    barrier_every=0,
    seed=0,
    size=SIZE,
    function=add_one,
    trainer=None,
    observer=None,
    journal=None,
    outages=(),
    partitions=(),
    seconds=1.0,
    factors=None,
    **network,
) -> Engine:
    """Make an engine; by default a complete graph without latency, and rounds of a second.

    Outages are ``(node, start, end)``, partitions ``(groups, start, end)``.
    """
    if callable(algorithm):
        algorithm = Scripted(script=algorithm)
    scenario = Scenario(
        network=Network(**({"latency": 0} | network)),
        compute=Compute(seconds=seconds, factors=factors),
        outages=[Outage(node=node, start=start, end=end) for node, start, end in outages],
        partitions=[Partition(groups=g, start=start, end=end) for g, start, end in partitions],
    )
    initial = np.zeros(size, np.float32)
    initial.flags.writeable = False
    plan = Plan(
        algorithm=algorithm,
        topology=nx.freeze(graph or nx.complete_graph(nodes)),
        layout=Layout.of({"model": initial}),
        initial=initial,
        conditions=scenario.resolve(len(graph) if graph else nodes, Seeds(seed)),
        seeds=Seeds(seed),
        ops=choose(),
        rounds=rounds,
        duration=None if duration is None else round(duration * 1e9),
        barrier_every=barrier_every,
    )
    return Engine(plan, trainer or FunctionTrainer(function), observer, journal)


def seen(engine, node, *kinds) -> list[str]:
    """List what a machine has seen: seconds, event, and peer, round, name or source."""
    lines = []
    for event in engine.machines[node].seen:
        if kinds and not isinstance(event, kinds):
            continue
        detail = next(
            (
                getattr(event, key)
                for key in ("peer", "round", "name", "source")
                if hasattr(event, key)
            ),
            None,
        )
        line = f"{event.at / 1e9:g} {type(event).__name__}"
        lines.append(line if detail is None else f"{line} {detail}")
    return lines
