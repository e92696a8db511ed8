"""The parts of a scenario, each checked for everything but the number of nodes.

What a user gives as text, as a list or as a file is read when a part is made, and the part holds
seconds, bits per second and tuples from then on.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from flwr_decentral.core.clock import from_seconds
from flwr_decentral.core.errors import ConfigurationError

from . import quantities as read

Quantity: TypeAlias = float | str
"""A number, or text with a unit."""

Quantities: TypeAlias = Quantity | Sequence[Quantity | None] | Path | None
"""A quantity, or one for each node, or the path of a file that holds these."""

Matrix: TypeAlias = Sequence[Sequence[Quantity]] | str | Path
"""A row of quantities for each node, or the path of a file that holds these."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """What the links between the nodes can do.

    Parameters
    ----------
    uplink, downlink : float, str or sequence, optional
        Bandwidth of a node's link to the network and from it: bits per second, or text with a unit
        (``"10 Mbit/s"``, ``"125 kB/s"``), or one of these for each node. None is unlimited.
    latency : float, str or matrix (default: 0.001)
        Seconds, or text with a unit (``"20 ms"``), from any node to any other; or an n x n matrix
        of these, in which row i is what node i sends and the diagonal counts for nothing.
    loss : float (default: 0.0)
        The probability that a message is lost, in [0, 1).

    Raises
    ------
    ConfigurationError
        If a value has the wrong type or is out of range.
    """

    uplink: Quantities = None
    downlink: Quantities = None
    latency: Quantity | Matrix = 0.001
    loss: float = 0.0

    def __post_init__(self) -> None:
        for name in ("uplink", "downlink"):
            key = f"network.{name}"
            value = read.inline(getattr(self, name), key)
            if read.is_sequence(value):
                _assign(self, name, read.per_node(value, key, read.bandwidth))
            else:
                bits = read.bandwidth(value, key)
                _assign(self, name, None if bits == math.inf else bits)
        latency = read.inline(self.latency, "network.latency")
        if read.is_sequence(latency):
            _assign(self, "latency", read.rows(latency, "network.latency", read.duration))
        else:
            _assign(self, "latency", read.duration(latency, "network.latency"))
        loss = read.number(self.loss, "network.loss")
        if not 0 <= loss < 1:
            raise read.fail("network.loss", "a probability in [0, 1)", self.loss)
        _assign(self, "loss", loss)


@dataclass(frozen=True, kw_only=True)
class Compute:
    """How long a node computes for one local round, in virtual time.

    A round takes ``seconds`` (or what the trace says) times the node's factor. The factor is 1, or
    comes from ``factors``, or is ``slowdown`` for the stragglers.

    Parameters
    ----------
    seconds : float or str (default: 1.0)
        The time of a round: seconds, or text with a unit.
    factors : sequence of float, optional
        A factor for each node. Cannot be combined with ``stragglers``.
    stragglers : float (default: 0.0)
        The share of the nodes that is slower, in [0, 1]; of n nodes, the nearest whole number. The
        run seed decides which: more stragglers are the same ones and some more.
    slowdown : float (default: 1.0)
        How many times as long a straggler takes; 1 or more.
    trace : sequence of sequence of float or path, optional
        For each node the times of its rounds, which start again when they are used up. They take
        the place of ``seconds``.

    Raises
    ------
    ConfigurationError
        If a value has the wrong type or is out of range.
    """

    seconds: Quantity = 1.0
    factors: Sequence[float] | str | Path | None = None
    stragglers: float = 0.0
    slowdown: float = 1.0
    trace: Matrix | None = None

    def __post_init__(self) -> None:
        _assign(self, "seconds", read.duration(self.seconds, "compute.seconds"))
        factors = read.inline(self.factors, "compute.factors")
        if factors is not None:
            _assign(self, "factors", read.per_node(factors, "compute.factors", read.factor))
        trace = read.inline(self.trace, "compute.trace")
        if trace is not None:
            _assign(self, "trace", read.rows(trace, "compute.trace", read.duration))
        stragglers = read.number(self.stragglers, "compute.stragglers")
        if not 0 <= stragglers <= 1:
            raise read.fail("compute.stragglers", "a share of the nodes in [0, 1]", self.stragglers)
        slowdown = read.factor(self.slowdown, "compute.slowdown")
        if slowdown < 1:
            raise read.fail("compute.slowdown", "a factor of 1 or more", self.slowdown)
        if stragglers and factors is not None:
            raise ConfigurationError(
                "compute.factors and compute.stragglers both say which nodes are slow; "
                "leave one of them out"
            )
        _assign(self, "stragglers", stragglers)
        _assign(self, "slowdown", slowdown)


@dataclass(frozen=True, kw_only=True)
class Outage:
    """A time during which a node is down: it neither computes nor sends nor receives.

    Parameters
    ----------
    node : int
        The node's index.
    start : float or str
        When it goes down, in seconds since the start of the run.
    end : float or str, optional
        When it is up again; None if it never is.

    Raises
    ------
    ConfigurationError
        If a value has the wrong type, or the end does not come after the start.
    """

    node: int
    start: Quantity
    end: Quantity | None = None

    def __post_init__(self) -> None:
        _assign(self, "node", read.index(self.node, "outage.node"))
        _read_interval(self, "outage")


@dataclass(frozen=True, kw_only=True)
class Partition:
    """A time during which the network is split into groups that cannot reach each other.

    Parameters
    ----------
    groups : sequence of sequence of int
        The nodes of each group. Nodes that are not named form one more group.
    start : float or str
        When the network splits, in seconds since the start of the run.
    end : float or str, optional
        When it is whole again; None if it never is.

    Raises
    ------
    ConfigurationError
        If a value has the wrong type, a node is in two groups, or the end does not come after the
        start.
    """

    groups: Sequence[Sequence[int]]
    start: Quantity
    end: Quantity | None = None

    def __post_init__(self) -> None:
        if not read.is_sequence(self.groups) or not self.groups:
            raise read.fail("partition.groups", "a list of groups of nodes", self.groups)
        groups = tuple(_group(group, number) for number, group in enumerate(self.groups))
        times = Counter(node for group in groups for node in group)
        for node, count in times.items():
            if count > 1:
                raise ConfigurationError(f"partition.groups: node {node} is named {count} times")
        _assign(self, "groups", groups)
        _read_interval(self, "partition")


def _group(value: object, number: int) -> tuple[int, ...]:
    key = f"partition.groups[{number}]"
    if not read.is_sequence(value) or not value:
        raise read.fail(key, "a list of one or more nodes", value)
    return tuple(read.index(node, key) for node in value)


def _read_interval(part: Outage | Partition, key: str) -> None:
    start = read.duration(part.start, f"{key}.start")
    _assign(part, "start", start)
    if part.end is None:
        return
    end = read.duration(part.end, f"{key}.end")
    if from_seconds(end) <= from_seconds(start):
        raise ConfigurationError(
            f"{key}: its end, {end} s, does not come after its start, {start} s"
        )
    _assign(part, "end", end)


def _assign(part: object, name: str, value: object) -> None:
    """Set a field of a frozen value that is still being made."""
    object.__setattr__(part, name, value)
