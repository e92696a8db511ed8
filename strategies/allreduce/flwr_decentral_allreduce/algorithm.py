"""The hyper-parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import networkx as nx

from flwr_decentral.core import (
    Algorithm,
    Capabilities,
    ConfigurationError,
    Contiguous,
    Layout,
    Site,
)

from .machine import AllReduceMachine


@dataclass(frozen=True, kw_only=True)
class AllReduce(Algorithm):
    """Give every node the exact average of all models, every round.

    Parameters
    ----------
    chunks : int (default: 0)
        Pieces that the model is cut into, which travel by themselves; 0 is one for each node. At
        most as many as there are parameters.
    retry : float (default: 1.0)
        How long, in seconds, a node that has finished its own training waits before it asks for
        what has not come; twice as long each time.
    patience : float (default: 600.0)
        How long, in seconds, it waits before it goes on without.

    Examples
    --------
    >>> print(AllReduce())
    allreduce(chunks=0, retry=1.0, patience=600.0)
    """

    name: ClassVar[str] = "allreduce"
    paper: ClassVar[str] = "none: the exact average, the ceiling of a comparison"
    capabilities: ClassVar[Capabilities] = Capabilities(synchronous=True, uses_fragments=True)
    default_topology: ClassVar[str] = "ring"

    chunks: int = 0
    retry: float = 1.0
    patience: float = 600.0

    def __post_init__(self) -> None:
        if self.chunks < 0:
            raise ConfigurationError(
                f"chunks must be at least 1, or 0 for one per node, got {self.chunks}"
            )
        if not 0 < self.retry < math.inf:
            raise ConfigurationError(
                f"retry must be a finite number of seconds above zero, got {self.retry}"
            )
        if not 0 <= self.patience < math.inf:
            raise ConfigurationError(
                f"patience must be a finite number of seconds, zero or more, got {self.patience}"
            )

    def check(self, topology: nx.Graph[int], layout: Layout) -> tuple[str, ...]:
        """Refuse more chunks than parameters; warn where one node has to relay for the others."""
        cut = self.cut(len(topology), layout)
        warnings = []
        if not self.chunks and cut.fragments < len(topology):
            warnings.append(
                f"a model of {layout.size} parameters makes {cut.fragments} chunks, so that "
                f"{len(topology) - cut.fragments} of {len(topology)} nodes own none"
            )
        hub = max((degree for _, degree in topology.degree), default=0)
        if nx.number_of_edges(topology) == len(topology) - 1 and hub > _MANY_NEIGHBORS:
            warnings.append(
                f"some node is the only way between {hub} others and sends {hub} models a round; "
                "all nodes share the work on a ring or a complete graph"
            )
        return tuple(warnings)

    def cut(self, nodes: int, layout: Layout) -> Contiguous:
        """Partition the flat vector of a layout into chunks."""
        chunks = self.chunks or min(nodes, max(layout.size, 1))
        return Contiguous(layout.size, chunks)

    def machine(self, site: Site) -> AllReduceMachine:
        """Make the machine of one node."""
        return AllReduceMachine(
            site,
            self.cut(site.size, site.layout),
            retry=self.retry,
            patience=self.patience,
        )


_MANY_NEIGHBORS = 8
