"""Results of a run in virtual time, put together and written."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from flwr_decentral.core import Algorithm, ConfigurationError
from flwr_decentral.core.algorithm import Topology
from flwr_decentral.core.conduct import counters
from flwr_decentral.report.results import RunResult, Traffic
from flwr_decentral.sim.engine import Engine
from flwr_decentral.sim.plan import Plan
from flwr_decentral.sim.scenario import Scenario

from .dispatch import Dispatcher
from .evaluation import Watcher
from .grid import GridMeter
from .roster import Roster
from .settings import Settings


@dataclass(frozen=True)
class Prepared:
    """What a run needs besides its clients."""

    plan: Plan
    private: bytes
    topology: Topology


@dataclass(frozen=True)
class Account:
    """Where the numbers of a result come from."""

    algorithm: Algorithm
    settings: Settings
    scenario: Scenario
    folder: Path
    prepared: Prepared
    roster: Roster
    meter: GridMeter
    dispatcher: Dispatcher
    watcher: Watcher
    engine: Engine
    begin: float

    def write(
        self, digest: str, status: str, transcript: IO[str] | None
    ) -> tuple[RunResult, list[Path]]:
        """Put the result together and write its files."""
        run = self._result(digest, status)
        name = free_name(self.folder, run.name)
        files = run.write(self.folder, name)
        if transcript is not None:
            transcript.flush()
            path = self.folder / f"{name}.transcript"
            os.replace(transcript.name, path)
            files.append(path)
        return run, files

    def _result(self, digest: str, status: str) -> RunResult:
        engine, settings, plan = self.engine, self.settings, self.prepared.plan
        traffic, tallies = engine.traffic, engine.tallies
        staleness = tallies.get("staleness")
        return RunResult(
            algorithm=self.algorithm.name,
            parameters=self.algorithm.parameters,
            topology=topology_name(self.prepared.topology),
            scenario=self.scenario.to_mapping(),
            seed=settings.seed,
            nodes=len(engine.machines),
            rounds=plan.rounds or engine.rounds_done // len(engine.machines),
            virtual_time_s=engine.now / 1e9,
            wall_time_s=time.monotonic() - self.begin,
            digest=digest,
            evaluations=self.watcher.ledger.evaluations,
            bytes=Traffic(
                sent=traffic.sent,
                useful=max(0, traffic.sent - engine.wasted_bytes),
                wasted=engine.wasted_bytes,
                dropped=traffic.dropped,
            ),
            grid_array_bytes=self.meter.array_bytes,
            counters=counters(tallies),  # type: ignore[arg-type]
            staleness_mean=staleness.total / staleness.count if staleness else None,
            idle_share=engine.idle_share,
            train_failures=tallies["training-failed"].count,
            lost_tasks=self.dispatcher.lost.total,
            layout_hash=plan.layout.hash,
            dispatch=self.dispatcher.name,
            versions=self.roster.all_versions,
            threads=self.roster.threads,
            status=status,
        )


def topology_name(topology: Topology) -> str:
    """Tell how a result calls a topology."""
    return str(topology.graph.get("name") or "graph")


def check_folder(folder: Path) -> None:
    """Find out before the run, and not after it, that results cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigurationError(
            f"results cannot be written to {folder}: {error.strerror}; name another folder with "
            "results-dir"
        ) from error


def free_name(folder: Path, name: str) -> str:
    """Find a name that no result has: the same run may be done again, and looked at otherwise."""
    names = (name, *(f"{name}-{number}" for number in range(2, 10_000)))
    return next(free for free in names if not (folder / f"{free}.json").exists())
