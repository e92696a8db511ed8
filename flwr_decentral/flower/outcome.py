"""How a run in real time ended, and its result."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Final

from flwr.serverapp.strategy import Result

from flwr_decentral.core import DecentralError, RuntimeFault, Seeds
from flwr_decentral.report.results import Count, RunResult, Traffic

from .account import topology_name
from .grid import GridMeter
from .ledger import Ledger
from .mission import Mission
from .realtime import RealTime
from .roster import Roster

SIDECAR: Final = "sidecar"
"""How a result calls the dispatch of a run in real time."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes
    ----------
    result : RunResult
        What was found out.
    error : Exception or None
        What ended it before its time.
    """

    result: RunResult
    error: Exception | None


def lead(mission: Mission, meter: GridMeter, roster: Roster, result: Result) -> Outcome:
    """Lead a run to its end, and put its result together.

    An error that ends the run is in the outcome, beside what was found out until then.
    """
    ledger = Ledger(mission.options, Seeds(mission.settings.seed), len(roster.node_ids), result)
    run = RealTime(mission, meter, roster, ledger)
    status = "completed"
    error: Exception | None = None
    try:
        run.run()
        if mission.settings.fetch_average:
            result.arrays = run.fetch_average()
    except Exception as caught:  # noqa: BLE001 - what was found out until then is not lost
        why = caught if isinstance(caught, DecentralError) else repr(caught)
        status, error = f"failed: {why}", caught
    with contextlib.suppress(RuntimeFault):  # Flower may take no more messages: then leases end
        run.release()
    return Outcome(_summarize(run, roster, status), error)


def _summarize(run: RealTime, roster: Roster, status: str) -> RunResult:
    """Put the result together."""
    mission, reports = run.mission, [seat.report for seat in run.seats.all]

    def total(name: str) -> int:
        return int(sum(report.get(name, 0) for report in reports))

    def mean(name: str) -> float | None:
        known = [report[name] for report in reports if name in report]
        return sum(known) / len(known) if known else None

    wasted = total("bytes-wasted")
    return RunResult(
        algorithm=mission.algorithm.name,
        parameters=mission.algorithm.parameters,
        topology=topology_name(mission.topology),
        scenario={},
        seed=mission.settings.seed,
        nodes=len(run.seats.all),
        rounds=mission.rounds or min(seat.round for seat in run.seats.all),
        virtual_time_s=run.elapsed,
        wall_time_s=run.elapsed,
        digest=run.digest(),
        evaluations=run.ledger.evaluations,
        bytes=Traffic(
            sent=total("bytes-sent"),
            useful=max(0, total("bytes-received") - wasted),
            wasted=wasted,
            dropped=total("bytes-dropped"),
        ),
        grid_array_bytes=run.meter.array_bytes - run.initial_bytes,
        counters=_counters(reports),
        staleness_mean=mean("staleness-mean"),
        idle_share=mean("idle-share"),
        train_failures=total("failed-rounds"),
        lost_tasks=total("training-lost-count"),
        layout_hash=mission.layout.hash,
        dispatch=SIDECAR,
        versions=roster.all_versions,
        threads=roster.threads,
        status=status,
    )


def _counters(reports: list[dict[str, float]]) -> dict[str, Count]:
    """Add up what machines and pumps have reported."""
    counters: dict[str, Count] = {}
    for report in reports:
        for key, count in report.items():
            name = key.removesuffix("-count")
            if name != key:
                entry = counters.setdefault(name, Count(count=0, total=0.0, nbytes=0))
                entry["count"] += int(count)
                entry["total"] += count * report.get(f"{name}-mean", 0.0)
    return dict(sorted(counters.items()))
