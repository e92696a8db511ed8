"""What is to be run in virtual time."""

from __future__ import annotations

from dataclasses import dataclass

from flwr_decentral.core import Algorithm, ConfigurationError, Seeds, Vector
from flwr_decentral.core.algorithm import Topology
from flwr_decentral.core.layout import Layout
from flwr_decentral.ops import Ops

from .conditions import Conditions


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that decides the course of a run, the trainer aside.

    Attributes
    ----------
    algorithm : Algorithm
        What each node runs.
    topology : networkx.Graph
        Who may talk to whom.
    layout : Layout
        How the model lies in a vector.
    initial : ndarray of float32, shape (layout.size,)
        The common initial model.
    conditions : Conditions
        Network, compute times, outages.
    seeds : Seeds
        The run's random streams.
    ops : Ops
        Vector arithmetic.
    rounds : int, optional
        Local rounds of each node.
    duration : int, optional
        Virtual nanoseconds after which the run ends; at least one of the two is given.
    barrier_every : int (default: 0)
        Call the barrier each time the nodes have done this many rounds on average; 0 is never.

    Raises
    ------
    ConfigurationError
        If nothing would end the run.
    """

    algorithm: Algorithm
    topology: Topology
    layout: Layout
    initial: Vector
    conditions: Conditions
    seeds: Seeds
    ops: Ops
    rounds: int | None = None
    duration: int | None = None
    barrier_every: int = 0

    def __post_init__(self) -> None:
        if self.rounds is not None:
            return
        if self.duration is None:
            raise ConfigurationError("nothing would end the run: give it rounds or a duration")
        for node, times in enumerate(self.conditions.durations):
            if not any(times):
                raise ConfigurationError(
                    f"a run of a given duration would never end: the rounds of node {node} take "
                    "no time; set compute.seconds, or give rounds instead"
                )
