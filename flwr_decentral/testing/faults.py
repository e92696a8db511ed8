"""What can go wrong in a cluster."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import networkx as nx

from flwr_decentral.core import MILLISECOND, SECOND, ConfigurationError
from flwr_decentral.core.algorithm import Topology


class Outage(NamedTuple):
    """A node is away from ``start`` until ``end``; for good when ``end`` is None.

    A node whose outage starts at 0 joins the run at its end.
    """

    node: int
    start: int
    end: int | None = None


class Split(NamedTuple):
    """Between ``start`` and ``end``, no link leads from ``nodes`` to the others."""

    start: int
    end: int
    nodes: frozenset[int]


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What goes wrong, and how long things take; times are in nanoseconds.

    Attributes
    ----------
    drop, duplicate, corrupt : float (default: 0.0)
        Probabilities that a message is lost, arrives twice, or arrives with a NaN or an infinity
        in its payload.
    echo : int (default: 0)
        How much later than the original a duplicate may arrive; 0 is right behind it.
    reorder : bool (default: False)
        Messages of a link may overtake each other: each takes up to two steps longer.
    delay : tuple of int (default: (0, 0))
        The least and the most that a message is on its way, drawn uniformly.
    partitions : tuple of Split
        When the cluster falls apart.
    outages : tuple of Outage
        When nodes are away.
    slow : mapping of int to float
        How many times longer a node trains.
    fail_train : mapping of int to container of int
        The rounds in which a node's training fails: ``{0: {3}, 1: range(1, 100)}``.
    step : int (default: one second)
        How long one training takes.
    uplink : int (default: 10 ms)
        How long a node's uplink is busy with a message; the next one waits in the outbox.
    """

    drop: float = 0.0
    duplicate: float = 0.0
    corrupt: float = 0.0
    echo: int = 0
    reorder: bool = False
    delay: tuple[int, int] = (0, 0)
    partitions: tuple[Split, ...] = ()
    outages: tuple[Outage, ...] = ()
    slow: Mapping[int, float] = field(default_factory=dict)
    fail_train: Mapping[int, Container[int]] = field(default_factory=dict)
    step: int = SECOND
    uplink: int = 10 * MILLISECOND

    def __post_init__(self) -> None:
        for name in ("drop", "duplicate", "corrupt"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigurationError(
                    f"{name} is a probability, got {getattr(self, name)}; it lies in [0, 1]"
                )
        if not 0 <= self.delay[0] <= self.delay[1]:
            raise ConfigurationError(f"delay must be (least, most), got {self.delay}")
        if min(self.step, self.uplink, self.echo + 1) < 1:
            raise ConfigurationError(
                f"step and uplink must be at least 1 ns, echo at least 0; got step={self.step}, "
                f"uplink={self.uplink}, echo={self.echo}"
            )
        spans: list[Outage | Split] = [*self.outages, *self.partitions]
        for span in spans:
            if span.start < 0 or (span.end is not None and span.end <= span.start):
                raise ConfigurationError(f"{span} contains no time")

    def __str__(self) -> str:
        calm = Faults()
        names = [each.name for each in fields(self)]
        changed = [name for name in names if getattr(self, name) != getattr(calm, name)]
        return f"Faults({', '.join(f'{name}={getattr(self, name)!r}' for name in changed)})"

    def is_up(self, node: int, at: int) -> bool:
        """Tell whether a node takes part at a time."""
        return not any(
            o.node == node and o.start <= at and (o.end is None or at < o.end) for o in self.outages
        )

    def is_gone(self, node: int, at: int) -> bool:
        """Tell whether a node is away at a time and never returns."""
        return any(o.node == node and o.end is None and o.start <= at for o in self.outages)

    def links_up(self, topology: Topology, at: int) -> set[tuple[int, int]]:
        """List the links that work at a time, each as (lower, higher)."""
        splits = [s.nodes for s in self.partitions if s.start <= at < s.end]
        return {
            (min(a, b), max(a, b))
            for a, b in nx.edges(topology)
            if self.is_up(a, at)
            and self.is_up(b, at)
            and all((a in nodes) == (b in nodes) for nodes in splits)
        }

    def changes(self) -> list[int]:
        """List the times after 0 at which a node or a link comes or goes, ascending."""
        times = {t for o in self.outages for t in (o.start, o.end) if t}
        return sorted(times | {t for s in self.partitions for t in (s.start, s.end) if t})

    def duration(self, node: int) -> int:
        """Compute how long a node trains."""
        return round(self.step * self.slow.get(node, 1.0))


def fault_matrix(nodes: int, step: int = SECOND) -> dict[str, Faults]:
    """List what every algorithm has to survive, by name.

    Parameters
    ----------
    nodes : int
        How many nodes there are, at least 2.
    step : int (default: one second)
        How long one training takes, in nanoseconds; the matrix fits runs of about 30 rounds.

    Returns
    -------
    dict of str to Faults
        Single faults, some of them at several strengths, and ``"storm"``: many of them together.
    """
    half, odd = frozenset(range(nodes // 2)), 1

    def at(steps: float) -> int:
        return round(steps * step)

    every: dict[str, dict[str, Any]] = {
        "nothing": {},
        "drop-0.01": {"drop": 0.01},
        "drop-0.1": {"drop": 0.1},
        "drop-0.3": {"drop": 0.3},
        "empty-inbox": {"drop": 1.0},
        "duplicate": {"duplicate": 0.5},
        "duplicate-late": {"duplicate": 0.5, "echo": at(4)},
        "reorder": {"reorder": True},
        "delay-0.2": {"delay": (at(0.1), at(0.3))},
        "delay-1": {"delay": (at(0.5), at(1.5))},
        "delay-4": {"delay": (at(2), at(6))},
        "congestion": {"uplink": at(0.4)},
        "partition": {"partitions": (Split(at(3.5), at(23.5), half),)},
        "leave": {"outages": (Outage(odd, at(5.3)),)},
        "leave-while-awaited": {"outages": (Outage(odd, at(8.85)),), "slow": {odd: 1.5}},
        "join": {"outages": (Outage(odd, 0, at(10.3)),)},
        "return": {"outages": (Outage(odd, at(5.3), at(12.7)), Outage(0, at(8.1), at(9)))},
        "slow": {"slow": {odd: 5.0}},
        "not-finite": {"corrupt": 0.2},
        "training-fails-once": {"fail_train": {odd: {3}}},
        "training-fails-always": {"fail_train": {odd: range(1, 1000)}},
        "storm": {
            "drop": 0.1,
            "duplicate": 0.2,
            "corrupt": 0.05,
            "echo": at(2),
            "reorder": True,
            "delay": (0, at(1)),
            "partitions": (Split(at(4), at(9), half),),
            "outages": (Outage(0, at(6), at(11)), Outage(odd, 0, at(2.5))),
            "slow": {nodes - 1: 3.0},
            "fail_train": {odd: {5, 6}},
        },
    }
    return {
        name: Faults(step=step, uplink=f.pop("uplink", at(0.01)), **f) for name, f in every.items()
    }
