"""What every runtime holds a machine to, and how it counts what a machine reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from .commands import Report
from .errors import AlgorithmError

if TYPE_CHECKING:
    from .algorithm import Algorithm, Topology
    from .layout import Layout

MAX_FAILURES: Final = 3
"""How many trainings in a row may fail on one node before the run fails."""


def check_fit(algorithm: Algorithm, topology: Topology, layout: Layout) -> tuple[str, ...]:
    """Refuse what an algorithm cannot run on, and warn of what is probably not meant.

    Returns
    -------
    tuple of str
        Warnings: the algorithm's own, and of links that are missing or not used.

    Raises
    ------
    ConfigurationError
        If the algorithm cannot run on the topology or the model.
    """
    warnings = algorithm.check(topology, layout)
    name, links = algorithm.name, topology.number_of_edges()
    if algorithm.capabilities.communicates and not links:
        alone = (
            f"there is one node only, so {name} has nobody to exchange with; run more nodes"
            if len(topology) == 1
            else f"the topology has no links, so {name} exchanges nothing and every node trains "
            "alone; choose another topology, or algorithm 'local' to say that it is meant"
        )
        return (*warnings, alone)
    if links and not algorithm.capabilities.communicates:
        return (*warnings, f"{name} exchanges nothing, so the links of the topology have no effect")
    return warnings


def check_train(
    name: str, node: int, round: int, *, in_flight: int | None, last: int, halted: bool
) -> None:
    """Refuse a ``Train`` command that is not due.

    Parameters
    ----------
    name : str
        The algorithm, for the error.
    node, round : int
        Who asks for which round.
    in_flight : int, optional
        The round that it has asked for and not been answered yet.
    last : int
        The last round that it has asked for; 0 if none.
    halted : bool
        Whether it has halted.

    Raises
    ------
    AlgorithmError
        If one is in flight, the rounds do not ascend, or the machine has halted.

    Examples
    --------
    >>> check_train("dpsgd", 3, 4, in_flight=None, last=7, halted=False)
    Traceback (most recent call last):
    ...
    flwr_decentral.core.errors.AlgorithmError: [algorithm] dpsgd asks node 3 to train round 4 after\
 round 7
    """
    if in_flight is not None:
        breach = f"while round {in_flight} is in flight"
    elif round <= last:
        breach = f"after round {last}"
    elif halted:
        breach = "after it has halted"
    else:
        return
    raise AlgorithmError(f"{name} asks node {node} to train round {round} {breach}")


def check_send(name: str, topology: Topology, node: int, to: int) -> None:
    """Refuse a ``Send`` command to a node that is no neighbor.

    Raises
    ------
    AlgorithmError
        If it is none.
    """
    if not topology.has_edge(node, to):
        raise AlgorithmError(f"{name} on node {node} sends to {to}, which is no neighbor")


@dataclass
class Tally:
    """Sums of one :class:`~flwr_decentral.core.commands.Report` name."""

    count: int = 0
    total: float = 0.0
    nbytes: int = 0

    def add(self, report: Report) -> None:
        """Count one report."""
        self.count += report.count
        self.total += report.total
        self.nbytes += report.nbytes


def counters(tallies: Mapping[str, Tally]) -> dict[str, dict[str, float]]:
    """List tallies by name, for reports."""
    return {name: dict(vars(tally)) for name, tally in sorted(tallies.items())}
