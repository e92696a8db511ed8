"""Looking at the models while virtual time stands still, and telling the user how the run goes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from logging import INFO, WARNING
from typing import Any, Final, TypeAlias

import numpy as np
from flwr.app import ArrayRecord, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp.strategy import FedAvg, Result
from numpy.typing import NDArray

from flwr_decentral.core import ConfigurationError, Seeds, to_seconds
from flwr_decentral.core.layout import Layout
from flwr_decentral.core.seeds import RUN
from flwr_decentral.report.results import Evaluation, Spread
from flwr_decentral.sim.engine import Engine, Observer
from flwr_decentral.sim.measures import average_model, consensus_distance
from flwr_decentral.sim.trainer import Outcome

from .dispatch import Dispatcher
from .records import to_record
from .settings import AggregateFn, FedAvgOptions

EvaluateFn: TypeAlias = Callable[[int, ArrayRecord], MetricRecord | None]

_TALK_EVERY: Final = 10.0
"""Wall seconds between progress lines where there is no evaluation to report."""


@dataclass
class Watcher(Observer):
    """Evaluate at barriers, gather metrics, and print progress.

    Attributes
    ----------
    dispatcher : Dispatcher
        Who evaluates.
    layout : Layout
        How the model lies in a vector.
    options : FedAvgOptions
        Who evaluates, and how metrics are averaged.
    evaluates : bool
        Whether clients have an evaluate function.
    evaluate_config : mapping
        What it gets in its config.
    evaluate_fn : callable, optional
        Evaluates the averaged model here.
    seeds : Seeds
        The run's seeds.
    rounds, duration : int or None
        What bounds the run: rounds, or virtual nanoseconds.
    result : Result
        Flower's result, filled as the run goes.
    evaluations : list of Evaluation
        Ours.
    """

    dispatcher: Dispatcher
    layout: Layout
    options: FedAvgOptions
    evaluates: bool
    evaluate_config: Mapping[str, Any]
    evaluate_fn: EvaluateFn | None
    seeds: Seeds
    rounds: int | None
    duration: int | None
    result: Result
    evaluations: list[Evaluation] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._begin = self._talked = time.monotonic()
        self._train_metrics: defaultdict[int, list[RecordDict]] = defaultdict(list)
        self._default = FedAvg().train_metrics_aggr_fn

    def trained(self, engine: Engine, node: int, round: int, outcome: Outcome) -> None:
        """Gather the metrics of a training, and say every now and then how far the run is."""
        del node
        content = outcome.extra
        if isinstance(content, RecordDict) and _metrics_of(content):
            bucket = self._train_metrics[round]
            bucket.append(content)
            if len(bucket) == len(engine.machines):
                self._aggregate_train(round)
        now = time.monotonic()
        if now - self._talked >= _TALK_EVERY:
            self._talked = now
            log(INFO, "%s", self._position(engine))

    def barrier(self, engine: Engine, round: int) -> None:
        """Evaluate."""
        self.dispatcher.settle()
        for past in sorted(self._train_metrics):
            if past < engine.lowest_round:
                self._aggregate_train(past)
        models = engine.models()
        metrics = self._evaluate_nodes(engine, round)
        averaged = self._evaluate_average(engine, round)
        evaluation = Evaluation(
            virtual_time_s=to_seconds(engine.now),
            round=round,
            metrics=metrics,
            averaged=averaged,
            consensus_distance=consensus_distance(models),
        )
        self.evaluations.append(evaluation)
        self._talked = time.monotonic()
        log(INFO, "%s | %s", self._position(engine), describe(evaluation))

    def finish(self) -> None:
        """Average the metrics of rounds that not every node has trained."""
        for round in sorted(self._train_metrics):
            self._aggregate_train(round)
        self.result.train_metrics_clientapp = dict(
            sorted(self.result.train_metrics_clientapp.items())
        )

    def averaged_arrays(self, engine: Engine) -> ArrayRecord:
        """Average all models; private floats are averaged too, other private bytes are node 0's."""
        privates = [self.dispatcher.private(node) for node in range(len(engine.machines))]
        vector = average_model(engine.models()).astype(np.float32)
        return to_record(self.layout.unflatten(vector, average_private(self.layout, privates)))

    def _aggregate_train(self, round: int) -> None:
        contents = self._train_metrics.pop(round)
        aggregate = self.options.train_metrics_aggr_fn or self._default
        record = self._aggregate(aggregate, contents, f"training round {round}")
        if record is not None:
            self.result.train_metrics_clientapp[round] = record

    def _aggregate(
        self, aggregate: AggregateFn, contents: list[RecordDict], what: str
    ) -> MetricRecord | None:
        key = self.options.weighted_by_key
        records = [record for content in contents for record in _metrics_of(content).values()]
        if any(key not in record for record in records):
            raise ConfigurationError(
                f"the metrics of {what} lack {key!r}, by which averages are weighted; return it, "
                "or name another metric with weighted_by_key"
            )
        if not any(record[key] for record in records):
            log(WARNING, "No node had any examples in %s: metrics are not averaged.", what)
            return None
        return aggregate(contents, key)

    def _evaluate_nodes(self, engine: Engine, round: int) -> dict[str, Spread]:
        nodes = self._choose(len(engine.machines), round) if self.evaluates else []
        if not nodes:
            return {}
        replies = self.dispatcher.evaluate(
            {node: engine.machines[node].model for node in nodes},
            self.evaluate_config,
            round,
            engine.now,
            self.seeds.number(RUN, "evaluate", round),
        )
        if len(replies) < len(nodes):
            engine.tallies["evaluation-failed"].count += len(nodes) - len(replies)
        contents = [replies[node] for node in sorted(replies)]
        if any(map(_metrics_of, contents)):
            aggregate = self.options.evaluate_metrics_aggr_fn or self._default
            record = self._aggregate(aggregate, contents, f"evaluation {round}")
            if record is not None:
                self.result.evaluate_metrics_clientapp[round] = record
        return self._spread(replies, len(engine.machines))

    def _choose(self, nodes: int, round: int) -> list[int]:
        fraction = self.options.fraction_evaluate
        if not fraction:
            return []
        count = min(nodes, max(int(nodes * fraction), self.options.min_evaluate_nodes))
        if count == nodes:
            return list(range(nodes))
        dice = self.seeds.generator(RUN, f"evaluate-{round}")
        return sorted(dice.permutation(nodes)[:count].tolist())

    def _spread(self, replies: Mapping[int, RecordDict], nodes: int) -> dict[str, Spread]:
        values: dict[str, list[float | None]] = {}
        for node, content in replies.items():
            for name, value in scalars(content).items():
                if name != self.options.weighted_by_key:
                    values.setdefault(name, [None] * nodes)[node] = value
        return {name: Spread.of(name, values[name]) for name in sorted(values)}

    def _evaluate_average(self, engine: Engine, round: int) -> dict[str, float]:
        if self.evaluate_fn is None:
            return {}
        record = self.evaluate_fn(round, self.averaged_arrays(engine))
        if record is None:
            return {}
        self.result.evaluate_metrics_serverapp[round] = record
        return scalars(RecordDict({"averaged": record}))

    def _position(self, engine: Engine) -> str:
        """Say how far the run is, and how long the rest may take."""
        trained = engine.trainings / len(engine.machines)
        if self.duration:
            done = engine.now / self.duration
            goal = f" of {to_seconds(self.duration):.6g} s"
        else:
            done = trained / self.rounds if self.rounds else 1.0
            goal = " s"
        spent = time.monotonic() - self._begin
        # Before the first round is through, start-up is most of what was spent.
        known = trained >= 1 and done < 1
        left = f", about {spent * (1 - done) / done:.0f} s left" if known else ""
        rounds = f"{trained:.3g}" + (f"/{self.rounds}" if self.rounds else "")
        return (
            f"[virtual {to_seconds(engine.now):.6g}{goal}] rounds {rounds}, "
            f"{engine.traffic.sent / 1e6:.3g} MB sent, wall {spent:.0f} s{left}"
        )


def _metrics_of(content: RecordDict) -> dict[str, MetricRecord]:
    """List the metric records of a reply; its own property makes a checked dictionary of them."""
    return {name: value for name, value in content.items() if isinstance(value, MetricRecord)}


def scalars(content: RecordDict) -> dict[str, float]:
    """List the single numbers in the metric records of a reply.

    Of a name that several records use, the later ones are told apart by their record's name.
    """
    found: dict[str, float] = {}
    for record_name, record in _metrics_of(content).items():
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
    parts.append(f"consensus distance {evaluation.consensus_distance:.3g}")
    return ", ".join(parts)


def average_private(layout: Layout, privates: list[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """Average the floating-point tensors among private bytes; take the others from the first node.

    Parameters
    ----------
    layout : Layout
        Where the private tensors lie.
    privates : list of ndarray of uint8, shape (layout.private_bytes,)
        Each node's private bytes.
    """
    result = privates[0].copy()
    for tensor in layout.tensors:
        if tensor.role != "private" or tensor.storage.kind != "f":
            continue
        part = slice(tensor.start, tensor.start + tensor.nbytes)
        values = [
            np.frombuffer(private[part].tobytes(), tensor.storage).astype(np.float64)
            for private in privates
        ]
        mean = np.mean(values, axis=0).astype(tensor.storage)
        result[part] = np.frombuffer(mean.tobytes(), np.uint8)
    return result
