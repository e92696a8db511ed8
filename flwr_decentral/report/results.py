"""The result of a run, as a value and as files.

A :class:`RunResult` says what was run (algorithm, topology, scenario, seed, versions), what came
of it (evaluations over virtual time, traffic, failures), and the digest by which a run can be
checked to be the same one again. It is written as JSON, from which it can be read back, and as CSV.

A number that does not exist, or is not finite, is ``null`` in JSON and an empty cell in CSV.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final, TypedDict

import numpy as np

from flwr_decentral.core.errors import ConfigurationError

from .tables import table

__all__ = [
    "Count",
    "Evaluation",
    "RunResult",
    "Spread",
    "Traffic",
    "lower_is_better",
    "table",
]

SCHEMA_VERSION: Final = 1

_LOWER_IS_BETTER: Final = (
    "loss",
    "error",
    "rmse",
    "mse",
    "mae",
    "perplexity",
    "entropy",
    "nll",
)

CSV_COLUMNS: Final = (
    "algorithm",
    "seed",
    "virtual_time_s",
    "round",
    "metric",
    "node",
    "value",
    "worst",
    "std",
    "averaged",
    "consensus_distance",
)


class Count(TypedDict):
    """How often something was reported, the sum of what was observed, and bytes lost to it."""

    count: int
    total: float
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How a metric is spread over the nodes.

    Attributes
    ----------
    mean, worst, std : float
        Over the nodes that have a value; NaN if none has, or if one of the values is NaN. The
        standard deviation is that of the population.
    nodes : list of float or None
        Each node's value; None if it reported none.
    """

    mean: float
    worst: float
    std: float
    nodes: list[float | None]

    @classmethod
    def of(cls, metric: str, values: Iterable[float | None]) -> Spread:
        """Summarize each node's value of a metric.

        Examples
        --------
        >>> Spread.of("accuracy", [0.5, None, 1.0])
        Spread(mean=0.75, worst=0.5, std=0.25, nodes=[0.5, None, 1.0])
        >>> Spread.of("loss", [0.5, None, 1.0]).worst
        1.0
        """
        nodes = [None if value is None else float(value) for value in values]
        known = np.array([value for value in nodes if value is not None], np.float64)
        if not known.size:
            return cls(mean=math.nan, worst=math.nan, std=math.nan, nodes=nodes)
        # A model that diverged makes the mean infinite or NaN, which is the answer.
        with np.errstate(over="ignore", invalid="ignore"):
            return cls(
                mean=float(known.mean()),
                worst=float(known.max() if lower_is_better(metric) else known.min()),
                std=float(known.std()),
                nodes=nodes,
            )


def lower_is_better(metric: str) -> bool:
    """Tell from a metric's name whether its worst value is its largest.

    It is for names that contain loss, error, rmse, mse, mae, perplexity, entropy or nll. For all
    others, accuracy, auc, f1, precision, recall and scores among them, it is the smallest.

    Examples
    --------
    >>> [name for name in ("eval_loss", "top5-accuracy", "F1", "RMSE") if lower_is_better(name)]
    ['eval_loss', 'RMSE']
    """
    return any(word in metric.lower() for word in _LOWER_IS_BETTER)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What the models were worth at one point in virtual time.

    Attributes
    ----------
    virtual_time_s : float
        When.
    round : int
        How many rounds the nodes had done by then on average, rounded down.
    metrics : dict of str to Spread
        Of each node's own model, by name.
    averaged : dict of str to float
        Of the average of all models, by name; empty if it was not evaluated.
    consensus_distance : float
        Mean squared distance of the models to their average.
    """

    virtual_time_s: float
    round: int
    metrics: dict[str, Spread]
    averaged: dict[str, float]
    consensus_distance: float


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that were asked to be sent, headers included, by what became of them.

    Attributes
    ----------
    sent : int
        Put on a link.
    useful : int
        Received and used.
    wasted : int
        Sent in vain: lost, refused, or replaced before it was used.
    dropped : int
        Removed from a queue, never on a link.
    """

    sent: int
    useful: int
    wasted: int
    dropped: int


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """A run, and what came of it.

    Attributes
    ----------
    algorithm : str
        Its name.
    parameters : dict
        Its hyper-parameters.
    topology : str
        The topology as it was asked for.
    scenario : dict
        The scenario, as :meth:`flwr_decentral.sim.scenario.Scenario.to_mapping` writes it.
    seed, nodes, rounds : int
        The run seed, the number of nodes, and the rounds that each was to train.
    virtual_time_s, wall_time_s : float
        How long the run took, in virtual time and on this machine.
    digest : str
        The hash of everything that happened in virtual time.
    evaluations : list of Evaluation
        In ascending time.
    bytes : Traffic
        What was sent between the nodes.
    grid_array_bytes : int
        Bytes of arrays that passed through Flower's Grid.
    counters : dict of str to Count
        What machines and runtime reported, by name.
    staleness_mean : float or None
        Mean age in rounds of the models that were used, if the algorithm reports it.
    idle_share : float or None
        The share of virtual time in which the nodes did not compute.
    train_failures, lost_tasks : int
        How often the user's function raised, and how often a process died under it.
    layout_hash : str
        Identifies the model's tensors.
    dispatch : str
        How tasks went to the ClientApp.
    versions : dict of str to str
        Python and the packages that a result depends on.
    threads : int or None
        Threads of each process that trained.
    status : str
        ``"completed"``, or what ended the run.
    """

    algorithm: str
    parameters: dict[str, bool | int | float | str | None]
    topology: str
    scenario: dict[str, Any]
    seed: int
    nodes: int
    rounds: int
    virtual_time_s: float
    wall_time_s: float
    digest: str
    evaluations: list[Evaluation]
    bytes: Traffic
    grid_array_bytes: int
    counters: dict[str, Count]
    staleness_mean: float | None
    idle_share: float | None
    train_failures: int
    lost_tasks: int
    layout_hash: str
    dispatch: str
    versions: dict[str, str]
    threads: int | None
    status: str

    @property
    def name(self) -> str:
        """What to call the run's files: equal for equal runs."""
        words = (self.algorithm, self.topology, f"n{self.nodes}", f"seed{self.seed}")
        return _slug("-".join((*words, self.digest[:8])))

    def to_json(self) -> str:
        """Write the result down as JSON text."""
        document = {"schema_version": SCHEMA_VERSION, **asdict(self)}
        return json.dumps(_finite(document), indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> RunResult:
        """Read what :meth:`to_json` has written.

        Raises
        ------
        ConfigurationError
            If the text is something else, or was written in another version of the format.
        """
        try:
            document = json.loads(text)
        except ValueError as error:
            raise ConfigurationError(f"a result must be JSON: {error}") from None
        version = document.pop("schema_version", None) if isinstance(document, dict) else None
        if version != SCHEMA_VERSION:
            raise ConfigurationError(
                f"a result of schema_version {SCHEMA_VERSION} is needed, this one has {version}; "
                "read it with the version of flwr-decentral that wrote it, or run again"
            )
        _check_keys(document, cls)
        document["evaluations"] = [_evaluation(entry) for entry in document["evaluations"]]
        document["bytes"] = Traffic(**document["bytes"])
        for key in ("virtual_time_s", "wall_time_s"):
            document[key] = _number(document[key])
        return cls(**document)

    def to_csv(self) -> str:
        """Write the evaluations down as CSV text.

        There is one row for each evaluation and metric, whose ``node`` is ``all`` and whose value
        is the mean, and after it one row for each node that reported one. The columns are
        :data:`CSV_COLUMNS`.
        """
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(CSV_COLUMNS)
        for evaluation in self.evaluations:
            for metric in dict.fromkeys((*evaluation.metrics, *evaluation.averaged)):
                for row in _csv_rows(evaluation, metric):
                    writer.writerow((self.algorithm, self.seed, *map(_cell, row)))
        return text.getvalue()

    def write(self, folder: str | Path, name: str | None = None) -> list[Path]:
        """Write ``<name>.json`` and ``<name>.csv``, each whole or not at all.

        Parameters
        ----------
        folder : path
            Where to; made if it is not there.
        name : str, optional
            Another name for the files than :attr:`name`.

        Returns
        -------
        list of Path
            The files: JSON, then CSV.
        """
        stem = Path(folder) / (self.name if name is None else name)
        stem.parent.mkdir(parents=True, exist_ok=True)
        files = {f"{stem}.json": self.to_json() + "\n", f"{stem}.csv": self.to_csv()}
        return [_replace(Path(path), text) for path, text in files.items()]


def _csv_rows(evaluation: Evaluation, metric: str) -> Iterator[tuple[object, ...]]:
    head = (evaluation.virtual_time_s, evaluation.round, metric)
    tail = (evaluation.averaged.get(metric), evaluation.consensus_distance)
    spread = evaluation.metrics.get(metric)
    if spread is None:
        yield (*head, "all", None, None, None, *tail)
        return
    yield (*head, "all", spread.mean, spread.worst, spread.std, *tail)
    for node, value in enumerate(spread.nodes):
        if value is not None:
            yield (*head, node, value, None, None, None, None)


def _cell(value: object) -> object:
    known = _finite(value)
    return "" if known is None else known


def _finite(value: Any) -> Any:
    """Copy plain values; what JSON has no word for becomes None."""
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, np.generic | np.ndarray):
        return _finite(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _evaluation(entry: dict[str, Any]) -> Evaluation:
    _check_keys(entry, Evaluation)
    metrics = {
        name: Spread(
            nodes=spread["nodes"],
            **{key: _number(spread[key]) for key in ("mean", "worst", "std")},
        )
        for name, spread in entry["metrics"].items()
    }
    return Evaluation(
        virtual_time_s=_number(entry["virtual_time_s"]),
        round=entry["round"],
        metrics=metrics,
        averaged={name: _number(value) for name, value in entry["averaged"].items()},
        consensus_distance=_number(entry["consensus_distance"]),
    )


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _check_keys(document: Mapping[str, Any], kind: type) -> None:
    known = {field.name for field in fields(kind)}
    missing, extra = sorted(known - set(document)), sorted(set(document) - known)
    if missing or extra:
        raise ConfigurationError(
            f"this is not a result of flwr-decentral: missing {', '.join(missing) or 'nothing'}, "
            f"unknown {', '.join(extra) or 'nothing'}"
        )


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.")


def _replace(path: Path, text: str) -> Path:
    """Write a file so that nobody ever sees a part of it."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    return path
