"""What a node's sidecar is told to do: one order for each segment of a run.

The ServerApp writes orders, the mod in the ClientApp hands them on, and the sidecar carries them
out. An order holds names and numbers; no parameter of the model is in it. It travels as JSON, and
is checked whole before anything is done: an order is believed because it came through the
SuperNode, but one that was written by another version must not be half understood.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

import networkx as nx

from flwr_decentral.core import ConfigurationError

from .roster import Roster

ORDERS: Final = 1
"""Version of what is written here."""

Scalar: TypeAlias = bool | int | float | str | None


@dataclass(frozen=True, kw_only=True)
class Order:
    """One segment.

    Attributes
    ----------
    run : str
        Which run this is. A sidecar serves one at a time.
    resume : str
        The key under which the nodes keep their state beyond the run; empty to keep none.
    epoch : int
        Counts the changes of membership and topology in the run.
    index : int
        Which node this is.
    roster : Roster
        All nodes of the run, and who may talk to whom.
    algorithm, version : str
        Name of the algorithm, and version of the package that brings it.
    parameters : mapping
        Its hyper-parameters.
    layout : str
        Hash of the model's layout.
    seed : int
        The run seed.
    after : int
        The rounds of the run that are past, for a node that begins with this order.
    until : int
        The last round to train in this segment, counted over the whole run.
    seconds : float
        How long the segment lasts at most; ``inf`` for no limit.
    lease : float
        For how many seconds from now the sidecar may go on without another order.
    uplink : float
        The most bits per second that the node may send; ``inf`` for no cap.
    """

    run: str
    resume: str = ""
    epoch: int
    index: int
    roster: Roster
    algorithm: str
    version: str
    parameters: Mapping[str, Scalar]
    layout: str
    seed: int
    after: int = 0
    until: int
    seconds: float = math.inf
    lease: float
    uplink: float = math.inf

    def __post_init__(self) -> None:
        checks = {
            "run must be named": bool(self.run),
            f"index {self.index} is no member": 0 <= self.index < len(self.roster.members),
            "epoch, after and until are 0 or more": min(self.epoch, self.after, self.until) >= 0,
            "seconds, lease and uplink are positive": self.seconds > 0
            and 0 < self.lease < math.inf
            and self.uplink > 0,
        }
        for what, holds in checks.items():
            if not holds:
                raise ConfigurationError(f"an order of run {self.run!r} is not valid: {what}")

    @property
    def topology(self) -> nx.Graph[int]:
        """The graph of the edges, frozen, with every member in it."""
        graph: nx.Graph[int] = nx.Graph()
        graph.add_nodes_from(range(len(self.roster.members)))
        graph.add_edges_from(sorted(self.roster.edges))
        return nx.freeze(graph)

    def to_json(self) -> str:
        """Write the order down."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        roster = values.pop("roster")
        values |= {"members": roster.records(), "edges": sorted(roster.edges)}
        for name in _MAYBE_INFINITE:
            values[name] = None if values[name] == math.inf else values[name]
        return json.dumps({"orders": ORDERS, **values}, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Order:
        """Read what :meth:`to_json` wrote.

        Raises
        ------
        ConfigurationError
            If it was written by another version, or is not an order.
        """
        try:
            values = json.loads(text)
            version = values.pop("orders")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigurationError(f"this is no order: {error!r}") from None
        if version != ORDERS:
            raise ConfigurationError(
                f"the ServerApp writes version {version!r} of our orders, this node reads version "
                f"{ORDERS}: install one version of flwr-decentral everywhere"
            )
        _check(values, _FIELDS, "order")
        for name in _MAYBE_INFINITE:
            values[name] = math.inf if values[name] is None else float(values[name])
        members, edges = values.pop("members"), values.pop("edges")
        if not all(isinstance(member, dict) for member in members):
            raise ConfigurationError("an order is not valid: a member is a table")
        if not all(
            isinstance(edge, list) and len(edge) == 2 and all(type(end) is int for end in edge)
            for edge in edges
        ):
            raise ConfigurationError("an order is not valid: an edge is a pair of indices")
        roster = Roster.from_records(members, ((a, b) for a, b in edges))
        return cls(roster=roster, **values)


_MAYBE_INFINITE: Final = ("seconds", "uplink")
_FIELDS: Final[Mapping[str, tuple[type, ...]]] = {
    "run": (str,),
    "resume": (str,),
    "epoch": (int,),
    "index": (int,),
    "members": (list,),
    "edges": (list,),
    "algorithm": (str,),
    "version": (str,),
    "parameters": (dict,),
    "layout": (str,),
    "seed": (int,),
    "after": (int,),
    "until": (int,),
    "seconds": (int, float, type(None)),
    "lease": (int, float),
    "uplink": (int, float, type(None)),
}


def _check(values: object, fields: Mapping[str, tuple[type, ...]], what: str) -> None:
    if not isinstance(values, dict) or set(values) != set(fields):
        found = sorted(values) if isinstance(values, dict) else type(values).__name__
        raise ConfigurationError(f"an {what} has the fields {sorted(fields)}, not {found}")
    for name, kinds in fields.items():
        if type(values[name]) not in kinds:
            raise ConfigurationError(f"{name} of an {what} cannot be {values[name]!r}")
