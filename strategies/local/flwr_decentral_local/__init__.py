"""Local training: every node trains on its own data and never sends anything.

It is no algorithm from a paper but the floor of every comparison: what a node reaches alone, and
so what an exchange has to beat.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from flwr_decentral.core import (
    Algorithm,
    Capabilities,
    Command,
    Machine,
    Site,
    Started,
    Train,
    TrainDone,
)

__all__ = ["LocalMachine", "LocalOnly"]


@dataclass(frozen=True, kw_only=True)
class LocalOnly(Algorithm):
    """Train without any exchange.

    Examples
    --------
    >>> print(LocalOnly())
    local()
    """

    name: ClassVar[str] = "local"
    capabilities: ClassVar[Capabilities] = Capabilities(communicates=False)
    default_topology: ClassVar[str] = "empty"

    def machine(self, site: Site) -> LocalMachine:
        """Make the machine of one node."""
        return LocalMachine(site)


class LocalMachine(Machine):
    """One node of :class:`LocalOnly`: its model is its state."""

    def on_started(self, event: Started) -> Iterable[Command]:
        """Begin round 1."""
        yield Train(round=1, model=self.model)

    def on_train_done(self, event: TrainDone) -> Iterator[Command]:
        """Begin the next round."""
        self.model = event.after
        yield Train(round=event.round + 1, model=self.model)
