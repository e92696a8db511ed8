"""Run 64 nodes for 200 rounds on the Simulation Engine, and print how much memory was in use.

A process of its own, so that the driver's memory is that of the run. Prints one JSON list: the
bytes of the driver and of all actors together, at each evaluation.

    python tests/flower/memory_run.py packed FOLDER
"""

import json
import logging
import os
import sys

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from flwr_decentral.flower import decentral, decentral_mod
from flwr_decentral.testing.processes import family, memory

NODES, ROUNDS, EVERY, SIZE = 64, 200, 20, 20_000
ACTOR = "ray::ClientAppActor"

client = ClientApp()


@client.train(mods=[decentral_mod])
def train(msg: Message, context: Context) -> Message:
    # State that changes in every round, as an optimizer's does.
    context.state["momentum"] = ArrayRecord({"w": Array(np.random.rand(SIZE))})  # noqa: NPY002
    values = msg.content["arrays"]["w"].numpy()
    arrays = ArrayRecord({"w": Array(values + np.float32(1))})
    content = {"arrays": arrays, "metrics": MetricRecord({"num-examples": 1, "loss": 0.5})}
    return Message(RecordDict(content), reply_to=msg)


@client.evaluate(mods=[decentral_mod])
def evaluate(msg: Message, context: Context) -> Message:
    metrics = MetricRecord(
        {"num-examples": 1, "mean": float(msg.content["arrays"]["w"].numpy()[0])}
    )
    return Message(RecordDict({"metrics": metrics}), reply_to=msg)


def main(dispatch: str, folder: str) -> None:
    used: list[dict[str, int]] = []
    server = ServerApp()

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        def look(round: int, arrays: ArrayRecord) -> None:
            actors = [pid for pid, command in family().items() if command.startswith(ACTOR)]
            workers = sum(map(memory, actors))
            used.append({"round": round, "driver": memory(os.getpid()), "actors": workers})

        strategy = decentral(
            "dpsgd", topology="ring", dispatch=dispatch, evaluate_every=EVERY, results_dir=folder
        )
        arrays = ArrayRecord({"w": Array(np.zeros(SIZE, np.float32))})
        strategy.start(grid=grid, initial_arrays=arrays, num_rounds=ROUNDS, evaluate_fn=look)

    logging.getLogger("flwr").setLevel(logging.ERROR)
    run_simulation(
        server_app=server,
        client_app=client,
        num_supernodes=NODES,
        backend_config={"client_resources": {"num_cpus": 1}},
    )
    sys.stdout.write(f"{json.dumps(used)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
