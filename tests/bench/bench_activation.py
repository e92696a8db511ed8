"""What an activation costs: wall time and driver CPU of one local round of one node.

The trainer does nothing, so all that is measured is the machinery: D-PSGD on a ring in virtual
time, through packed and through single messages, against *bare* Flower messages that carry no
arrays at all. Everything that is compared runs side by side in one simulation, in turn, several
times; what is printed are medians, ratios to bare, the memory of all processes together (shared
memory once) at the end of a run, and the machine's load before and after.

    python tests/bench/bench_activation.py --nodes 16 64 --sizes 2410 250000
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation
from rich.console import Console
from rich.table import Table

from flwr_decentral.flower import decentral, decentral_mod
from flwr_decentral.testing.processes import family, memory

MOST_BYTES = 6 * 2**30
"""Combinations whose arena would be larger are left out, and said to be."""


@dataclass(frozen=True)
class Cost:
    """Milliseconds of one activation, and the bytes of all processes while they still serve."""

    wall: float
    cpu: float
    memory: int


@dataclass(frozen=True)
class Row:
    """One way of doing it, at one size."""

    nodes: int
    size: int
    way: str
    wall: float
    cpu: float
    wall_ratio: float
    cpu_ratio: float
    memory_mb: float


def make_client() -> ClientApp:
    app = ClientApp()

    @app.train(mods=[decentral_mod])
    def train(msg: Message, context: Context) -> Message:
        metrics = MetricRecord({"num-examples": 1})
        content = RecordDict({"metrics": metrics})
        if "arrays" in msg.content:
            content["arrays"] = msg.content["arrays"]
        return Message(content, reply_to=msg)

    return app


class Stopwatch:
    """Measure wall time and this process's CPU time from one lap to the next."""

    def __init__(self) -> None:
        self.lap()

    def lap(self) -> tuple[float, float]:
        """Return the milliseconds since the last lap: wall, CPU."""
        now = time.perf_counter(), time.process_time()
        before, self._last = getattr(self, "_last", now), now
        return 1e3 * (now[0] - before[0]), 1e3 * (now[1] - before[1])


def all_memory() -> int:
    return sum(map(memory, family()))


def bare(grid: Grid, ids: list[int], rounds: int) -> Callable[[], Cost]:
    """Send one message without arrays to every node, and wait for all replies, again and again."""

    def work() -> Cost:
        watch = Stopwatch()
        for _ in range(rounds):
            config = ConfigRecord({"server-round": 1})
            messages = [Message(RecordDict({"config": config}), node, "train") for node in ids]
            replies = list(grid.send_and_receive(messages))
            assert len(replies) == len(ids)
        wall, cpu = watch.lap()
        return Cost(wall / (rounds * len(ids)), cpu / (rounds * len(ids)), all_memory())

    return work


def decentralized(
    grid: Grid, size: int, nodes: int, rounds: int, dispatch: str, folder: str
) -> Callable[[], Cost]:
    """Run D-PSGD on a ring; calling the roll is not part of what is measured."""

    def work() -> Cost:
        watch, costs, used = Stopwatch(), {}, []

        def evaluate(round: int, arrays: ArrayRecord) -> None:
            # Called before the first training starts, and after the last has ended.
            costs[round] = watch.lap()
            used.append(all_memory())
            watch.lap()

        strategy = decentral(
            "dpsgd",
            topology="ring",
            dispatch=dispatch,
            fraction_evaluate=0.0,
            results_dir=folder,
            evaluate_every=10 * rounds,
        )
        arrays = ArrayRecord({"x": Array(np.zeros(size, np.float32))})
        strategy.start(grid=grid, initial_arrays=arrays, num_rounds=rounds, evaluate_fn=evaluate)
        wall, cpu = costs[rounds]
        return Cost(wall / (rounds * nodes), cpu / (rounds * nodes), used[-1])

    return work


def make_server(options: argparse.Namespace, nodes: int, rows: list[Row]) -> ServerApp:
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        while len(ids := list(grid.get_node_ids())) < nodes:
            time.sleep(0.1)
        rounds = max(2, options.activations // nodes)
        with tempfile.TemporaryDirectory() as folder:
            bare(grid, ids, 1)()  # start the actors
            for size in options.sizes:
                if 8 * size * nodes > MOST_BYTES:
                    print(f"left out: {nodes} nodes of {size} parameters need too much memory")
                    continue
                ways = {"bare": bare(grid, ids, rounds)}
                for way in options.ways:
                    ways[way] = decentralized(grid, size, nodes, rounds, way, folder)
                costs: dict[str, list[Cost]] = {way: [] for way in ways}
                for _ in range(options.repeats):
                    for way, work in ways.items():
                        gc.collect()  # of a run that has ended
                        costs[way].append(work())
                rows.extend(summarize(nodes, size, costs))

    return app


def summarize(nodes: int, size: int, costs: dict[str, list[Cost]]) -> list[Row]:
    """Take medians, and medians of the ratios within each repeat."""
    rows = []
    for way, measured in costs.items():
        pairs = list(zip(measured, costs["bare"], strict=True))
        rows.append(
            Row(
                nodes=nodes,
                size=size,
                way=way,
                wall=statistics.median(cost.wall for cost in measured),
                cpu=statistics.median(cost.cpu for cost in measured),
                wall_ratio=statistics.median(cost.wall / base.wall for cost, base in pairs),
                cpu_ratio=statistics.median(cost.cpu / base.cpu for cost, base in pairs),
                memory_mb=max(cost.memory for cost in measured) / 2**20,
            )
        )
    return rows


def show(rows: list[Row]) -> Table:
    table = Table(title="One activation, no-op trainer; medians")
    for column in ("nodes", "parameters", "way"):
        table.add_column(column, justify="right")
    for column in ("wall ms", "x bare", "driver CPU ms", "x bare", "all processes MB"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            str(row.nodes),
            str(row.size),
            row.way,
            f"{row.wall:.2f}",
            f"{row.wall_ratio:.2f}",
            f"{row.cpu:.2f}",
            f"{row.cpu_ratio:.2f}",
            f"{row.memory_mb:.0f}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[16, 64, 256, 1024])
    parser.add_argument("--sizes", type=int, nargs="+", default=[2_410, 89_834, 250_000, 2_500_000])
    parser.add_argument("--ways", nargs="+", default=["packed", "message"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--activations", type=int, default=512, help="for each measurement")
    parser.add_argument("--json", help="also write the rows to this file")
    options = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    print(f"load before: {os.getloadavg()}, cores: {os.cpu_count()}")
    rows: list[Row] = []
    for nodes in options.nodes:
        run_simulation(
            server_app=make_server(options, nodes, rows),
            client_app=make_client(),
            num_supernodes=nodes,
            backend_config={"client_resources": {"num_cpus": 1}},
        )
    Console(width=120).print(show(rows))
    print(f"load after: {os.getloadavg()}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump([vars(row) for row in rows], file, indent=1)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
