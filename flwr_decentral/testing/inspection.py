"""Clusters that watch their machines, for what cannot be seen from outside.

Each raises ``AssertionError`` at the first step that shows the flaw it looks for.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property
from types import FunctionType, MethodType, ModuleType
from typing import Any, cast

import networkx as nx
import numpy as np

from flwr_decentral.core import (
    Command,
    Event,
    Machine,
    Mailbox,
    NodeSeeds,
    Received,
    Send,
    Site,
    Train,
    TrainDone,
    Vector,
)
from flwr_decentral.core.transcript import format_step, vector_digest
from flwr_decentral.ops import Ops, choose

from .cluster import Cluster


def fingerprint(value: Any) -> Any:
    """Describe a value so that two descriptions are equal exactly if the values are, bit for bit.

    Arrays, generators and mailboxes are described by their contents, and so are objects of other
    classes; functions and modules by their names.
    """
    return _fingerprint(value, ())


def _fingerprint(value: Any, inside: tuple[int, ...]) -> Any:
    if value is None or isinstance(value, bool | int | float | str | bytes | np.generic):
        return type(value).__name__, repr(value)
    if isinstance(value, np.ndarray):
        return "array", value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, type | FunctionType | ModuleType):
        return getattr(value, "__qualname__", value.__name__)
    if id(value) in inside:
        return "itself"
    inside = (*inside, id(value))
    if isinstance(value, np.random.Generator):
        parts: Any = value.bit_generator.state
    elif isinstance(value, Mailbox):
        parts = value.snapshot()
    elif isinstance(value, nx.Graph):
        parts = sorted(value.edges)
    elif isinstance(value, MethodType):
        parts = value.__self__, value.__func__
    elif isinstance(value, dict | list | tuple):
        parts = value
    elif isinstance(value, set | frozenset):
        return type(value).__name__, frozenset(_fingerprint(item, inside) for item in value)
    elif dataclasses.is_dataclass(value):
        parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    else:
        parts = getattr(value, "__dict__", None) or repr(type(value))
    items = parts.items() if isinstance(parts, dict) else parts
    name = type(value).__name__
    if isinstance(items, str):
        return name, items
    return name, tuple(_fingerprint(item, inside) for item in items)


def find_exotic(value: Any, where: str = "") -> str | None:
    """Find what could not be saved without pickle: a path to it, or None."""
    if value is None or type(value) in (bool, int, float, str, bytes):
        return None
    if isinstance(value, np.generic | np.ndarray):
        return None if value.dtype.kind in "biufc" else f"{where}: dtype {value.dtype}"
    if isinstance(value, dict):
        items = [(f"{where}[{key!r}]", part) for key, part in value.items()]
        items += [(f"a key of {where}", key) for key in value]
    elif isinstance(value, list | tuple | set | frozenset):
        items = [(f"{where}[{i}]", part) for i, part in enumerate(value)]
    else:
        return f"{where}: {type(value).__name__}"
    return next((found for at, part in items if (found := find_exotic(part, at))), None)


class TwinCluster(Cluster):
    """Give each event to a second machine too, which was made the same way and lived as long.

    Whatever is not a function of what happened to a node (global dice, a clock, state shared with
    other machines) makes the two differ.
    """

    twins: list[Machine]

    def make(self, site: Site) -> Machine:
        """Make the machine of a node, and its twin."""
        self.twins = getattr(self, "twins", [])
        self.twins.append(self.algorithm.machine(site))
        return self.algorithm.machine(site)

    def step(self, node: int, event: Event) -> list[Command]:
        """Step both machines, and compare what they answer and what they have become."""
        machine, twin = self.machines[node], self.twin(node)
        copy = _copy_for(twin, event, machine)
        commands, again = machine.step(event), twin.step(copy)
        line, other = format_step(node, event, commands), format_step(node, event, again)
        if line != other:
            raise AssertionError(
                f"{self.suspicion}: the same event led to\n    {line}\nand to\n    {other}"
            )
        self._compare(node, machine.snapshot(), twin.snapshot())
        return commands

    def twin(self, node: int) -> Machine:
        """Return the machine to compare with."""
        return self.twins[node]

    def _compare(self, node: int, mine: dict[str, Any], its: dict[str, Any]) -> None:
        for name in mine:
            if fingerprint(mine[name]) != fingerprint(its[name]):
                raise AssertionError(
                    f"{self.suspicion}: {name!r} of node {node} became {mine[name]!r} and, from "
                    f"the same state by the same event, {its[name]!r}"
                )

    suspicion = (
        "a machine draws from global dice, reads a clock, or shares state with other machines"
    )


class RestoringCluster(TwinCluster):
    """Compare each step with that of a machine restored from a snapshot just before it."""

    suspicion = "the state that STATE names is not the whole state"

    def make(self, site: Site) -> Machine:
        """Make the machine of a node."""
        return self.algorithm.machine(site)

    def twin(self, node: int) -> Machine:
        """Restore a machine from a snapshot of the node's."""
        machine = self.machines[node]
        snapshot = machine.snapshot()
        if exotic := find_exotic(snapshot):
            raise AssertionError(f"a snapshot holds what cannot be saved without pickle: {exotic}")
        twin = self.algorithm.machine(machine.site)
        twin.restore(snapshot)
        return twin

    def step(self, node: int, event: Event) -> list[Command]:
        """Step both machines, and look for attributes that change but are not in ``STATE``."""
        machine = self.machines[node]
        before = _hidden(machine)
        commands = super().step(node, event)
        after = _hidden(machine)
        changed = sorted(name for name in after if before.get(name) != after[name])
        if changed:
            raise AssertionError(
                f"{type(machine).__name__} changes {', '.join(changed)} on {type(event).__name__}, "
                "but STATE does not name it: a restored machine would not have it"
            )
        return commands


class CautiousCluster(Cluster):
    """Notice machines that change an event, and names of strangers in ``waits_for``."""

    def step(self, node: int, event: Event) -> list[Command]:
        """Step the machine, and look at the event again."""
        machine = self.machines[node]
        before = _event_fingerprint(event)
        commands = machine.step(event)
        if _event_fingerprint(event) != before:
            raise AssertionError(
                f"a machine changed the {type(event).__name__} event that it was given"
            )
        waits = machine.waits_for
        if list(waits) != sorted(set(waits) & set(machine.site.neighbors)):
            raise AssertionError(
                f"waits_for must name neighbors of node {node}, ascending; got {waits}"
            )
        return commands


class DiceCluster(Cluster):
    """Notice whether machines draw random numbers."""

    draws = False

    def make(self, site: Site) -> Machine:
        """Make a machine whose seeds tell when they are used."""
        cluster = self

        class Watched(NodeSeeds):
            def generator(self, purpose: str) -> np.random.Generator:
                cluster.draws = True
                return super().generator(purpose)

        seeds = Watched(site.seeds.seeds, site.node)
        return self.algorithm.machine(dataclasses.replace(site, seeds=seeds))


class SpyOps:
    """Pass everything on to other ops, and remember the digests of what they made."""

    def __init__(self, ops: Ops) -> None:
        self.made: set[str] = set()
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._ops, name)
        if not callable(attribute):
            return attribute

        def call(*arguments: Any, **keywords: Any) -> Any:
            result = attribute(*arguments, **keywords)
            self.note(result)
            return result

        return call

    def note(self, result: Any) -> None:
        """Remember a vector, or each of several."""
        if isinstance(result, np.ndarray) and result.dtype == np.float32:
            self.made.add(vector_digest(result))
        elif isinstance(result, list | tuple):
            for part in result:
                self.note(part)


class ProvenanceCluster(Cluster):
    """Demand that models and payloads are what ops made, training returned or a peer sent."""

    def make(self, site: Site) -> Machine:
        """Make a machine whose ops remember what they made."""
        spy = SpyOps(choose())
        spy.note(site.initial)
        return self.algorithm.machine(dataclasses.replace(site, ops=cast(Ops, spy)))

    def step(self, node: int, event: Event) -> list[Command]:
        """Step the machine, and ask where its vectors come from."""
        machine = self.machines[node]
        spy = cast(SpyOps, machine.site.ops)
        if isinstance(event, TrainDone):
            spy.note(event.after)
        elif isinstance(event, Received):
            spy.note(event.message.payload)
        commands = machine.step(event)
        vectors: list[tuple[str, Vector | None]] = [("its model", machine.model)]
        vectors += [("a payload", c.message.payload) for c in commands if isinstance(c, Send)]
        vectors += [("what it trains", c.model) for c in commands if isinstance(c, Train)]
        for what, vector in vectors:
            if vector is not None and vector_digest(vector) not in spy.made:
                raise AssertionError(
                    f"{what} after {type(event).__name__} is no result of site.ops: arithmetic "
                    "that goes around it runs neither on the native kernel nor on handles"
                )
        return commands


def _hidden(machine: Machine) -> dict[str, Any]:
    """Describe the attributes that a snapshot does not hold; what is cached is no state."""
    known = {"site", "up", "_rounded", *machine.STATE}
    return {
        name: fingerprint(value)
        for name, value in vars(machine).items()
        if name not in known and not isinstance(getattr(type(machine), name, None), cached_property)
    }


def _event_fingerprint(event: Event) -> Any:
    """Describe an event, but for the trained vector, which is the machine's to write to."""
    names = [field.name for field in dataclasses.fields(event)]
    return fingerprint({name: getattr(event, name) for name in names if name != "after"})


def _copy_for(twin: Machine, event: Event, machine: Machine) -> Event:
    """Make the event that the twin gets: what *is* a vector of the machine is one of the twin."""
    if not isinstance(event, TrainDone):
        return event
    same = [name for name, value in vars(machine).items() if value is event.before]
    before = getattr(twin, same[0]) if same else event.before
    return dataclasses.replace(event, before=before, after=event.after.copy())
