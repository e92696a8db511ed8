"""The metrics of a run: averaged as FedAvg would, and spread over the nodes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from logging import WARNING

from flwr.app import MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp.strategy import FedAvg, Result

from flwr_decentral.core import ConfigurationError, Seeds
from flwr_decentral.core.seeds import RUN
from flwr_decentral.report.results import Evaluation, Spread

from .settings import AggregateFn, FedAvgOptions


@dataclass
class Ledger:
    """Gather metrics.

    Attributes
    ----------
    options : FedAvgOptions
        Who evaluates, and how metrics are averaged.
    seeds : Seeds
        The run's seeds.
    nodes : int
        Number of nodes, n.
    result : Result
        Flower's result, filled as the run goes.
    evaluations : list of Evaluation
        Ours.
    """

    options: FedAvgOptions
    seeds: Seeds
    nodes: int
    result: Result
    evaluations: list[Evaluation] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._trained: defaultdict[int, list[RecordDict]] = defaultdict(list)
        self._default = FedAvg().train_metrics_aggr_fn

    def trained(self, round: int, content: RecordDict) -> None:
        """Note what a node returned beside its model; average a round that all have trained."""
        if not metrics_of(content):
            return
        bucket = self._trained[round]
        bucket.append(content)
        if len(bucket) == self.nodes:
            self._aggregate_train(round)

    def close_rounds(self, before: int | None = None) -> None:
        """Average the metrics of rounds that are past for all nodes; of all rounds by default."""
        for round in sorted(self._trained):
            if before is None or round < before:
                self._aggregate_train(round)

    def finish(self) -> None:
        """Close every round."""
        self.close_rounds()
        self.result.train_metrics_clientapp = dict(
            sorted(self.result.train_metrics_clientapp.items())
        )

    def choose(self, round: int) -> list[int]:
        """Choose the nodes that evaluate."""
        nodes, fraction = self.nodes, self.options.fraction_evaluate
        if not fraction:
            return []
        count = min(nodes, max(int(nodes * fraction), self.options.min_evaluate_nodes))
        if count == nodes:
            return list(range(nodes))
        dice = self.seeds.generator(RUN, f"evaluate-{round}")
        return sorted(dice.permutation(nodes)[:count].tolist())

    def evaluated(self, round: int, replies: Mapping[int, RecordDict]) -> dict[str, Spread]:
        """Average what nodes replied, and spread it over the nodes."""
        contents = [replies[node] for node in sorted(replies)]
        if any(map(metrics_of, contents)):
            aggregate = self.options.evaluate_metrics_aggr_fn or self._default
            record = self._aggregate(aggregate, contents, f"evaluation {round}")
            if record is not None:
                self.result.evaluate_metrics_clientapp[round] = record
        values: dict[str, list[float | None]] = {}
        for node, content in replies.items():
            for name, value in scalars(content).items():
                if name != self.options.weighted_by_key:
                    values.setdefault(name, [None] * self.nodes)[node] = value
        return {name: Spread.of(name, values[name]) for name in sorted(values)}

    def evaluated_average(self, round: int, record: MetricRecord | None) -> dict[str, float]:
        """Note what the average of all models is worth, if it was evaluated."""
        if record is None:
            return {}
        self.result.evaluate_metrics_serverapp[round] = record
        return scalars(RecordDict({"averaged": record}))

    def _aggregate_train(self, round: int) -> None:
        contents = self._trained.pop(round)
        aggregate = self.options.train_metrics_aggr_fn or self._default
        record = self._aggregate(aggregate, contents, f"training round {round}")
        if record is not None:
            self.result.train_metrics_clientapp[round] = record

    def _aggregate(
        self, aggregate: AggregateFn, contents: list[RecordDict], what: str
    ) -> MetricRecord | None:
        key = self.options.weighted_by_key
        records = [record for content in contents for record in metrics_of(content).values()]
        if any(key not in record for record in records):
            raise ConfigurationError(
                f"the metrics of {what} lack {key!r}, by which averages are weighted; return it, "
                "or name another metric with weighted_by_key"
            )
        if not any(record[key] for record in records):
            log(WARNING, "No node had any examples in %s: metrics are not averaged.", what)
            return None
        return aggregate(contents, key)


def metrics_of(content: RecordDict) -> dict[str, MetricRecord]:
    """List the metric records of a reply; its own property makes a checked dictionary of them."""
    return {name: value for name, value in content.items() if isinstance(value, MetricRecord)}


def scalars(content: RecordDict) -> dict[str, float]:
    """List the single numbers in the metric records of a reply.

    Of a name that several records use, the later ones are told apart by their record's name.
    """
    found: dict[str, float] = {}
    for record_name, record in metrics_of(content).items():
        for name, value in record.items():
            if isinstance(value, int | float):
                found[name if name not in found else f"{record_name}.{name}"] = float(value)
    return found


def describe(evaluation: Evaluation) -> str:
    """Describe an evaluation in one line."""
    parts = [
        f"{name} {spread.mean:.4g} (worst {spread.worst:.4g})"
        for name, spread in evaluation.metrics.items()
    ]
    parts += [f"averaged model: {name} {value:.4g}" for name, value in evaluation.averaged.items()]
    if evaluation.consensus_distance == evaluation.consensus_distance:  # else it is not known
        parts.append(f"consensus distance {evaluation.consensus_distance:.3g}")
    return ", ".join(parts)
