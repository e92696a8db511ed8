"""Results side by side, for a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from .results import RunResult


def table(results: Sequence[RunResult], metric: str | None = None) -> Table:
    """Compare the ends of several runs.

    Parameters
    ----------
    results : sequence of RunResult
        The runs, one row each.
    metric : str, optional
        What to show; by default the first metric that is an accuracy, or else the first.

    Returns
    -------
    rich.table.Table
        To be printed on a rich console.
    """
    metric = metric or _headline(results)
    shown = Table(title="All runs at their end")
    for heading in ("algorithm", "topology"):
        shown.add_column(heading)
    numbers = ("virtual time", f"mean {metric}", f"worst {metric}", "MB sent", "consensus distance")
    for heading in numbers:
        shown.add_column(heading, justify="right")
    for result in results:
        last = result.evaluations[-1] if result.evaluations else None
        spread = last.metrics.get(metric) if last else None
        failed = "" if result.status == "completed" else f" ({result.status})"
        shown.add_row(
            f"{result.algorithm}{failed}",
            result.topology,
            _text(result.virtual_time_s, ".1f", " s"),
            _text(spread.mean if spread else None, ".3f"),
            _text(spread.worst if spread else None, ".3f"),
            _text(result.bytes.sent / 1e6, ",.1f"),
            _text(last.consensus_distance if last else None, ".2e"),
        )
    return shown


def _headline(results: Sequence[RunResult]) -> str:
    names = [name for run in results for at in run.evaluations[-1:] for name in at.metrics]
    return next((name for name in names if "acc" in name.lower()), (*names, "accuracy")[0])


def _text(value: float | None, style: str, unit: str = "") -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:{style}}{unit}"
