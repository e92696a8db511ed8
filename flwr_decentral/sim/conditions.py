"""What the world does to a run of n nodes, as numbers.

A :class:`Conditions` is a :class:`~flwr_decentral.sim.scenario.Scenario` resolved for n nodes and a
run seed: integers of nanoseconds, bits per second, and nothing left to decide. An interval of time
is half-open: a node is down at the ``start`` of its outage and up again at its ``end``.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, TypeAlias, cast

from flwr_decentral.core.clock import from_seconds
from flwr_decentral.core.errors import ConfigurationError
from flwr_decentral.core.seeds import RUN, Seeds

if TYPE_CHECKING:
    from .parts import Compute, Outage, Partition
    from .scenario import Scenario

Interval: TypeAlias = tuple[int, int | None]
"""``(start, end)`` in nanoseconds; an end of None never comes."""

Split: TypeAlias = tuple[int, int | None, tuple[int, ...]]
"""``(start, end, group_of)``: meanwhile, nodes of different groups cannot reach each other."""

_start = itemgetter(0)


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """The network, the compute times and the outages of one run.

    Attributes
    ----------
    nodes : int
        The number of nodes, n.
    uplink_bps, downlink_bps : tuple of float, shape (n,)
        Bits per second of each node's link in either direction; ``math.inf`` is unlimited.
    loss : float
        The probability that a message is lost, in [0, 1).
    latency : int or tuple of tuple of int, shape (n, n)
        Nanoseconds from one node to another; one number where all pairs are alike.
    durations : tuple of tuple of int, shape (n, any)
        Nanoseconds of each node's rounds; a node that has used up its row starts it again.
    outages : tuple of tuple of (int, int or None), shape (n, any)
        When each node is down: ascending and disjoint.
    partitions : tuple of (int, int or None, tuple of int)
        When the network is split, and each node's group while it is: ascending by start.
    """

    nodes: int
    uplink_bps: tuple[float, ...]
    downlink_bps: tuple[float, ...]
    loss: float
    latency: int | tuple[tuple[int, ...], ...]
    durations: tuple[tuple[int, ...], ...]
    outages: tuple[tuple[Interval, ...], ...]
    partitions: tuple[Split, ...]

    def latency_ns(self, src: int, dst: int) -> int:
        """Look up how long a message travels from ``src`` to ``dst``, in nanoseconds."""
        latency = self.latency
        return latency if isinstance(latency, int) else latency[src][dst]

    def duration_ns(self, node: int, round: int) -> int:
        """Look up how long a node computes for a round, in nanoseconds.

        Parameters
        ----------
        node : int
            The node's index.
        round : int
            The round, counted from 1.
        """
        row = self.durations[node]
        return row[(round - 1) % len(row)]

    def completion_ns(self, node: int, start_ns: int, duration_ns: int) -> int | None:
        """Tell when work ends that is suspended while the node is down.

        Work that is just finished as an outage starts has made it. Work that would start in an
        outage waits for its end.

        Parameters
        ----------
        node : int
            The node that computes.
        start_ns, duration_ns : int
            When the work is given to the node, and how long it takes a node that stays up.

        Returns
        -------
        int or None
            Nanoseconds since the start of the run; None if the node does not return.
        """
        outages = self.outages[node]
        at = start_ns
        for start, end in outages[_before(outages, at) :]:
            if at < start and at + duration_ns <= start:
                break
            if end is None:
                return None
            duration_ns -= max(start - at, 0)
            at = max(at, end)
        return at + duration_ns

    def is_up(self, node: int, at: int) -> bool:
        """Tell whether a node is up."""
        outages = self.outages[node]
        if not outages:
            return True
        start, end = outages[_before(outages, at)]
        return at < start or (end is not None and end <= at)

    def reachable(self, a: int, b: int, at: int) -> bool:
        """Tell whether two nodes are up and no partition lies between them."""
        if not (self.is_up(a, at) and self.is_up(b, at)):
            return False
        return not any(
            start <= at and (end is None or at < end) and group_of[a] != group_of[b]
            for start, end, group_of in self.partitions
        )

    def changes(self) -> list[int]:
        """List when an outage or a partition starts or ends, ascending, each time once.

        What holds from the start is among them, at 0.
        """
        intervals = [interval for row in self.outages for interval in row]
        intervals += [(start, end) for start, end, _ in self.partitions]
        return sorted({at for interval in intervals for at in interval if at is not None})


def _before(intervals: Sequence[Interval], at: int) -> int:
    """Find the last interval that starts at ``at`` or before; the first one if none does."""
    return max(bisect_right(intervals, at, key=_start) - 1, 0)


def resolve(scenario: Scenario, nodes: int, seeds: Seeds) -> Conditions:
    """Work out what a scenario means for a number of nodes.

    Parameters
    ----------
    scenario : Scenario
        The scenario, whose values have been checked for everything but the number of nodes.
    nodes : int
        The number of nodes, n.
    seeds : Seeds
        The run's seeds; the purpose ``"stragglers"`` chooses the stragglers.

    Raises
    ------
    ConfigurationError
        If a list has not one entry for each node, or a node's index is not below n.
    """
    network = scenario.network
    return Conditions(
        nodes=nodes,
        uplink_bps=_bandwidths(network.uplink, "network.uplink", nodes),
        downlink_bps=_bandwidths(network.downlink, "network.downlink", nodes),
        loss=network.loss,
        latency=_latency(network.latency, nodes),
        durations=_durations(scenario.compute, nodes, seeds),
        outages=_outages(scenario.outages, nodes),
        partitions=tuple(
            sorted(
                (
                    _split(part, f"partitions[{number}]", nodes)
                    for number, part in enumerate(scenario.partitions)
                ),
                key=_start,
            )
        ),
    )


def _bandwidths(value: object, key: str, nodes: int) -> tuple[float, ...]:
    if isinstance(value, tuple):
        _check_length(value, key, nodes)
        return value
    return (math.inf if value is None else cast(float, value),) * nodes


def _latency(value: object, nodes: int) -> int | tuple[tuple[int, ...], ...]:
    if not isinstance(value, tuple):
        return from_seconds(cast(float, value))
    _check_length(value, "network.latency", nodes)
    for node, row in enumerate(value):
        _check_length(row, f"network.latency[{node}]", nodes)
    return tuple(tuple(map(from_seconds, row)) for row in value)


def _durations(compute: Compute, nodes: int, seeds: Seeds) -> tuple[tuple[int, ...], ...]:
    if compute.factors is not None:
        factors = list(cast(tuple[float, ...], compute.factors))
        _check_length(factors, "compute.factors", nodes)
    else:
        factors = [1.0] * nodes
        # All nodes in an order of the seed's, so that a larger share only adds stragglers.
        order = seeds.generator(RUN, "stragglers").permutation(nodes)
        for node in order[: math.floor(compute.stragglers * nodes + 0.5)]:
            factors[node] = compute.slowdown
    if compute.trace is None:
        seconds = cast(float, compute.seconds)
        return tuple((from_seconds(seconds * factor),) for factor in factors)
    trace = cast(tuple[tuple[float, ...], ...], compute.trace)
    _check_length(trace, "compute.trace", nodes)
    return tuple(
        tuple(from_seconds(seconds * factor) for seconds in row)
        for row, factor in zip(trace, factors, strict=True)
    )


def _outages(outages: Sequence[Outage], nodes: int) -> tuple[tuple[Interval, ...], ...]:
    found: list[list[Interval]] = [[] for _ in range(nodes)]
    for number, outage in enumerate(outages):
        _check_index(outage.node, f"outages[{number}].node", nodes)
        found[outage.node].append(_interval(outage))
    return tuple(_merged(intervals) for intervals in found)


def _merged(intervals: list[Interval]) -> tuple[Interval, ...]:
    """Make ascending, disjoint intervals of ones that may overlap or touch."""
    merged: list[Interval] = []
    for start, end in sorted(intervals, key=_start):
        last_start, last_end = merged[-1] if merged else (-1, -1)
        if last_end is None:
            break
        if start > last_end:
            merged.append((start, end))
        else:
            merged[-1] = (last_start, None if end is None else max(last_end, end))
    return tuple(merged)


def _split(partition: Partition, key: str, nodes: int) -> Split:
    rest = len(partition.groups)
    group_of = [rest] * nodes
    for group, members in enumerate(partition.groups):
        for node in members:
            _check_index(node, f"{key}.groups[{group}]", nodes)
            group_of[node] = group
    if len(set(group_of)) == 1:
        raise ConfigurationError(
            f"{key} puts all nodes into one group, which separates nobody; leave some out of it "
            "or add a group"
        )
    return (*_interval(partition), tuple(group_of))


def _interval(part: Outage | Partition) -> Interval:
    start, end = cast(float, part.start), cast("float | None", part.end)
    return from_seconds(start), None if end is None else from_seconds(end)


def _check_length(entries: Sequence[object], key: str, nodes: int) -> None:
    if len(entries) != nodes:
        raise ConfigurationError(
            f"{key} has {len(entries)} entries, but the run has {nodes} nodes; give one for each"
        )


def _check_index(node: int, key: str, nodes: int) -> None:
    if node >= nodes:
        raise ConfigurationError(
            f"{key}: there is no node {node}; the run's {nodes} nodes are 0 to {nodes - 1}"
        )
