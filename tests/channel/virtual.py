"""Runs in virtual time, for the real-time runtime to agree with."""

import io
import typing
from dataclasses import dataclass

import networkx as nx
import numpy as np

from flwr_decentral import plugins
from flwr_decentral.core import (
    SECOND,
    Algorithm,
    Capabilities,
    ConfigurationError,
    DropQueued,
    Halt,
    Layout,
    Machine,
    Message,
    Seeds,
    Send,
    SetTimer,
    Site,
    Train,
)
from flwr_decentral.ops import choose
from flwr_decentral.sim.engine import Engine
from flwr_decentral.sim.journal import Journal
from flwr_decentral.sim.plan import Plan
from flwr_decentral.sim.scenario import Scenario
from flwr_decentral.sim.trainer import FunctionTrainer

SIZE = 40
GRAPHS = {
    "ring": nx.cycle_graph(6),
    "complete": nx.complete_graph(5),
    "star": nx.star_graph(4),
    "tree": nx.balanced_tree(2, 2),
}


@dataclass(frozen=True, kw_only=True)
class Filling(Algorithm):
    """Use every event and every command there is: send whenever the uplink has nothing to do."""

    name = "filling"
    capabilities = Capabilities(link_idle=True)

    def machine(self, site):
        return FillingMachine(site)


class FillingMachine(Machine):
    STATE = ("model", "sent")

    def __init__(self, site):
        super().__init__(site)
        self.sent = 0

    def on_started(self, event):
        yield Train(round=1, model=self.model)
        yield SetTimer(name="tick", at=event.at + 10**9)
        yield SetTimer(name="never", at=event.at + 5 * 10**8)
        yield SetTimer(name="never", at=None)

    def on_train_done(self, event):
        self.model = self.site.ops.update(self.model, event.before, event.after)
        yield DropQueued(to=min(self.site.neighbors) if event.round % 2 else None)
        yield from self._fill()
        if event.round == 7:
            yield Halt(reason="enough")
        else:
            yield Train(round=event.round + 1, model=self.model)

    def on_link_idle(self, event):
        return self._fill()

    def on_timer(self, event):
        yield SetTimer(name="tick", at=event.at + 7 * 10**8)
        yield SetTimer(name="tock", at=event.at if event.name == "tick" else None)

    def _fill(self):
        for peer in sorted(self.up):
            self.sent += 1
            message = Message(kind="model", step=self.sent, payload=self.model, header={"x": 0.5})
            yield Send(to=peer, message=message)


@dataclass(frozen=True, kw_only=True)
class Alarmed(Algorithm):
    """Set timers in another order than that in which they are due, and for the past as well."""

    name = "alarmed"

    def machine(self, site):
        return AlarmedMachine(site)


class AlarmedMachine(Machine):
    def on_started(self, event):
        yield Train(round=1, model=self.model)
        for seconds in (7, 5, 8, 6):
            yield SetTimer(name=f"due-{seconds}", at=seconds * SECOND)

    def on_train_done(self, event):
        self.model = self.site.ops.update(self.model, event.before, event.after)
        yield Train(round=event.round + 1, model=self.model)

    def on_peer_up(self, event):
        yield SetTimer(name=f"met-{event.peer}", at=event.at - SECOND)


def variants(cls) -> dict[str, Algorithm]:
    """Make an algorithm with its defaults, and with each other value of each choice it has.

    Of the forms on the wire one will do: it is the channel that knows them, and has its own tests.
    """
    found = {cls.name: cls()}
    hints = typing.get_type_hints(cls)
    for name, default in plugins.hyperparameters(cls).items():
        values = (False, True) if hints[name] is bool else ()
        if typing.get_origin(hints[name]) is typing.Literal:
            values = ("int8",) if name == "wire" else typing.get_args(hints[name])
        for value in values:
            if value != default:
                try:
                    found[f"{cls.name}-{name}-{value}"] = cls(**{name: value})
                except ConfigurationError:
                    continue  # a choice that takes another with it
    return found


def installed() -> dict[str, Algorithm]:
    """List every installed algorithm, in all variants that differ in a choice."""
    return {
        name: algorithm
        for plugin in plugins.installed().values()
        for name, algorithm in variants(plugin.algorithm).items()
    }


def cases(algorithms) -> dict[str, tuple[Algorithm, nx.Graph]]:
    """List (algorithm, graph), each algorithm on the topologies that suit it."""
    return {
        f"{name}-{shape}": (algorithm, graph)
        for name, algorithm in algorithms.items()
        for shape, graph in GRAPHS.items()
        if suits(algorithm, graph)
    }


def suits(algorithm, graph) -> bool:
    try:
        algorithm.check(nx.freeze(nx.Graph(graph)), sites(graph)[0].layout)
    except ConfigurationError:
        return False
    return True


def sites(graph, *, seed=0, size=SIZE) -> list[Site]:
    """Make the sites of all nodes."""
    initial = np.linspace(-1, 1, size, dtype=np.float32)
    initial.flags.writeable = False
    frozen = nx.freeze(nx.Graph(graph))
    return [
        Site(
            node=node,
            topology=frozen,
            layout=Layout.of({"model": initial}),
            initial=initial,
            seeds=Seeds(seed).of(node),
            ops=choose(),
        )
        for node in range(len(graph))
    ]


def learn(node, round, seed, vector):
    """Train on noise that follows from the seed alone, toward a point of the node's own."""
    noise = np.random.default_rng(seed).normal(size=len(vector)).astype(np.float32)
    return vector - np.float32(0.3) * (vector - np.float32(node)) + np.float32(0.01) * noise


def flaky(node, round, seed, vector):
    """Fail now and then, never three times in a row."""
    if node == 1 and round % 3 == 0:
        raise RuntimeError(f"no 'data' -> in round {round};\nsee above")
    return learn(node, round, seed, vector)


def run(algorithm, graph, *, rounds, train=learn, seed=0, size=SIZE, scenario=None):
    """Run in virtual time; return the engine and the lines of the transcript."""
    text = io.StringIO()
    all_sites = sites(graph, seed=seed, size=size)
    scenario = Scenario.from_mapping(scenario or {})
    plan = Plan(
        algorithm=algorithm,
        topology=all_sites[0].topology,
        layout=all_sites[0].layout,
        initial=all_sites[0].initial,
        conditions=scenario.resolve(len(graph), Seeds(seed)),
        seeds=Seeds(seed),
        ops=choose(),
        rounds=rounds,
    )
    trainer = FunctionTrainer(lambda task, x: train(task.node, task.round, task.seed, x))
    engine = Engine(plan, trainer, journal=Journal(text))
    engine.run()
    return engine, text.getvalue().splitlines()
