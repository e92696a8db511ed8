"""Looking at the models while virtual time stands still, and telling the user how the run goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from logging import INFO
from typing import Any, Final, TypeAlias

import numpy as np
from flwr.app import ArrayRecord, MetricRecord, RecordDict
from flwr.common.logger import log
from numpy.typing import NDArray

from flwr_decentral.core import to_seconds
from flwr_decentral.core.layout import Layout
from flwr_decentral.core.seeds import RUN
from flwr_decentral.report.results import Evaluation, Spread
from flwr_decentral.sim.engine import Engine, Observer
from flwr_decentral.sim.measures import average_model, consensus_distance
from flwr_decentral.sim.trainer import Outcome

from .dispatch import Dispatcher
from .ledger import Ledger, describe
from .records import to_record

EvaluateFn: TypeAlias = Callable[[int, ArrayRecord], MetricRecord | None]

_TALK_EVERY: Final = 10.0
"""Wall seconds between progress lines where there is no evaluation to report."""


@dataclass
class Watcher(Observer):
    """Evaluate at barriers, gather metrics, and print progress.

    Attributes
    ----------
    ledger : Ledger
        Where metrics are gathered.
    dispatcher : Dispatcher
        Who evaluates.
    layout : Layout
        How the model lies in a vector.
    evaluates : bool
        Whether clients have an evaluate function.
    evaluate_config : mapping
        What it gets in its config.
    evaluate_fn : callable, optional
        Evaluates the averaged model here.
    rounds, duration : int or None
        What bounds the run: rounds, or virtual nanoseconds.
    """

    ledger: Ledger
    dispatcher: Dispatcher
    layout: Layout
    evaluates: bool
    evaluate_config: Mapping[str, Any]
    evaluate_fn: EvaluateFn | None
    rounds: int | None
    duration: int | None

    def __post_init__(self) -> None:
        self._begin = self._talked = time.monotonic()

    def trained(self, engine: Engine, node: int, round: int, outcome: Outcome) -> None:
        """Gather the metrics of a training, and say every now and then how far the run is."""
        del node
        if isinstance(outcome.extra, RecordDict):
            self.ledger.trained(round, outcome.extra)
        now = time.monotonic()
        if now - self._talked >= _TALK_EVERY:
            self._talked = now
            log(INFO, "%s", self._position(engine))

    def barrier(self, engine: Engine, round: int) -> None:
        """Evaluate."""
        self.dispatcher.settle()
        self.ledger.close_rounds(before=engine.lowest_round)
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
        self.ledger.evaluations.append(evaluation)
        self._talked = time.monotonic()
        log(INFO, "%s | %s", self._position(engine), describe(evaluation))

    def averaged_arrays(self, engine: Engine) -> ArrayRecord:
        """Average all models; private floats are averaged too, other private bytes are node 0's."""
        privates = [self.dispatcher.private(node) for node in range(len(engine.machines))]
        vector = average_model(engine.models()).astype(np.float32)
        return to_record(self.layout.unflatten(vector, average_private(self.layout, privates)))

    def _evaluate_nodes(self, engine: Engine, round: int) -> dict[str, Spread]:
        nodes = self.ledger.choose(round) if self.evaluates else []
        if not nodes:
            return {}
        replies = self.dispatcher.evaluate(
            {node: engine.machines[node].model for node in nodes},
            self.evaluate_config,
            round,
            engine.now,
            self.ledger.seeds.number(RUN, "evaluate", round),
        )
        if len(replies) < len(nodes):
            engine.tallies["evaluation-failed"].count += len(nodes) - len(replies)
        return self.ledger.evaluated(round, replies)

    def _evaluate_average(self, engine: Engine, round: int) -> dict[str, float]:
        if self.evaluate_fn is None:
            return {}
        record = self.evaluate_fn(round, self.averaged_arrays(engine))
        return self.ledger.evaluated_average(round, record)

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
