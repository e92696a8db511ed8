"""The federation that the tests of this folder train.

Node i draws every number of its model halfway towards i + 1. So what a training does is known
exactly, it differs from node to node, and no dice are involved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from flwr_decentral.flower import DecentralResult, decentral, decentral_mod, mod

from .inprocess import run_in_process

Arrays = dict[str, np.ndarray]

ZEROS: Arrays = {"w": np.zeros(4, np.float32)}


def to_arrays(record: ArrayRecord) -> Arrays:
    return {name: array.numpy() for name, array in record.items()}


def to_record(arrays: Mapping[str, np.ndarray]) -> ArrayRecord:
    return ArrayRecord({name: Array(np.asarray(value)) for name, value in arrays.items()})


def arrays_of(msg: Message) -> Arrays:
    return to_arrays(msg.content["arrays"])


def node_of(context: Context) -> int:
    return int(context.node_config["partition-id"])


def round_of(msg: Message) -> int:
    return int(next(iter(msg.content.config_records.values()))["server-round"])


def answer(msg: Message, arrays: Mapping[str, np.ndarray] | None = None, **metrics: Any) -> Message:
    """Reply with a model, if it is given, and metrics; ``num-examples`` is 1 if not given."""
    content = RecordDict({"metrics": MetricRecord({"num-examples": 1, **metrics})})
    if arrays is not None:
        content["arrays"] = to_record(arrays)
    return Message(content, reply_to=msg)


def pulled(arrays: Mapping[str, np.ndarray], node: int) -> Arrays:
    return {name: (value + np.float32(node + 1)) / np.float32(2) for name, value in arrays.items()}


def train(msg: Message, context: Context) -> Message:
    return answer(msg, pulled(arrays_of(msg), node_of(context)))


def evaluate(msg: Message, context: Context) -> Message:
    del context
    return answer(msg, mean=float(arrays_of(msg)["w"].mean()))


def make_client(
    train: Callable[..., Message] = train,
    evaluate: Callable[..., Message] | None = evaluate,
    mods: Sequence[Callable[..., Message]] = (decentral_mod,),
) -> ClientApp:
    app = ClientApp()
    app.train(mods=list(mods))(train)
    if evaluate is not None:
        app.evaluate(mods=list(mods))(evaluate)
    return app


def federate(
    client: ClientApp,
    nodes: int = 3,
    rounds: int = 3,
    *,
    algorithm: str = "local",
    initial: Mapping[str, np.ndarray] = ZEROS,
    workers: int = 2,
    run_config: Mapping[str, Any] | None = None,
    start: Mapping[str, Any] | None = None,
    wrap: Callable[[Grid], Grid] = lambda grid: grid,
    after: Callable[[], object] = lambda: None,
    **arguments: Any,
) -> DecentralResult:
    """Run ``decentral(algorithm, **arguments)``.

    ``start`` holds more arguments of its ``start``, ``wrap`` comes between it and the grid, and
    ``after`` is called at its end, while clients may still be at work.
    """

    def main(grid: Grid) -> DecentralResult:
        strategy = decentral(algorithm, run_config=run_config, **arguments)
        try:
            return strategy.start(
                grid=wrap(grid),
                initial_arrays=to_record(initial),
                num_rounds=rounds,
                **(start or {}),
            )
        finally:
            after()

    try:
        return run_in_process(main, client, nodes, workers=workers, run_config=run_config)
    finally:
        mod._attached.clear()  # what ends with the actors
