"""What decentralized training costs beside the training itself: node-rounds per second.

D-PSGD on a ring of 16 nodes, batch 8, 8 local steps, under Flower's Simulation Engine with two
actors, against a bare PyTorch loop that does the same local steps and the same averages: in one
process, and in two that share the models and meet after every round. Two tasks:

* W1: digits, 2 label shards per node, an MLP 64-32-10 with 2,410 parameters;
* W2: random tensors of CIFAR's shape, 625 per node, GN-LeNet with 89,834 parameters.

Every process keeps one network, in all ways. The ways take turns, several times; medians are
printed. Start-up is measured apart.

    python tests/bench/bench_training.py --tasks W1
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import statistics
import tempfile
import time
import warnings
from multiprocessing.shared_memory import SharedMemory

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation
from rich.console import Console
from rich.table import Table
from torch import nn
from training_tasks import BATCH, NODES, STEPS, TASKS, Task, local_steps, network

from flwr_decentral.flower import decentral, decentral_mod

# --- the bare loop --------------------------------------------------------------------------------


def bare(task: Task, rounds: int, processes: int) -> float:
    """Run the bare loop; return node-rounds per second, start-up left out."""
    torch.manual_seed(0)
    initial = nn.utils.parameters_to_vector(task.make().parameters()).detach().numpy()
    memory = SharedMemory(create=True, size=2 * NODES * initial.nbytes)
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(processes)
    times = context.Queue()
    try:
        models = np.ndarray((2, NODES, len(initial)), np.float32, memory.buf)
        models[:] = initial
        workers = [
            context.Process(
                target=bare_worker, args=(task, rounds, models, mine, processes, barrier, times)
            )
            for mine in range(processes)
        ]
        for worker in workers:
            worker.start()
        seconds = max(times.get(timeout=600) for _ in workers)
        for worker in workers:
            worker.join()
        del models
    finally:
        memory.close()
        memory.unlink()
    return rounds * NODES / seconds


def bare_worker(task, rounds, models, mine, processes, barrier, times) -> None:
    """Train every ``processes``-th node, then average it, with all others, round after round."""
    torch.set_num_threads(1)
    trained, averaged = models
    net = task.make()
    nodes = range(mine, NODES, processes)
    for node in nodes:
        task.data(node)
    local_steps(task, net, mine)  # what torch loads with its first step is start-up
    barrier.wait()
    begin = time.perf_counter()
    for _ in range(rounds):
        for node in nodes:
            start = torch.from_numpy(averaged[node])
            nn.utils.vector_to_parameters(start.clone(), net.parameters())
            local_steps(task, net, node)
            trained[node] = nn.utils.parameters_to_vector(net.parameters()).detach().numpy()
        barrier.wait()
        for node in nodes:
            left, right = trained[(node - 1) % NODES], trained[(node + 1) % NODES]
            averaged[node] = (left + trained[node] + right) * np.float32(1 / 3)
        barrier.wait()
    times.put(time.perf_counter() - begin)


# --- under Flower ---------------------------------------------------------------------------------


def make_client(task: Task) -> ClientApp:
    app = ClientApp()

    @app.train(mods=[decentral_mod])
    def train(msg: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        net = network(task)
        net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        local_steps(task, net, context.node_config["partition-id"])
        metrics = MetricRecord({"num-examples": STEPS * BATCH})
        content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
        return Message(content, reply_to=msg)

    return app


def make_server(task: Task, options, rates: dict[str, list[float]]) -> ServerApp:
    app = ServerApp()
    length = options.rounds or task.rounds

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        torch.manual_seed(0)
        arrays = ArrayRecord(task.make().state_dict())
        with tempfile.TemporaryDirectory() as folder:

            def flower(dispatch: str, rounds: int) -> float:
                begun = []

                def evaluate(round: int, arrays: ArrayRecord) -> None:
                    # Called before the first training starts, and after the last has ended.
                    begun.append(time.perf_counter())

                strategy = decentral(
                    "dpsgd",
                    topology="ring",
                    dispatch=dispatch,
                    fraction_evaluate=0.0,
                    evaluate_every=10 * rounds,
                    results_dir=folder,
                )
                strategy.start(
                    grid=grid, initial_arrays=arrays, num_rounds=rounds, evaluate_fn=evaluate
                )
                return rounds * NODES / (begun[-1] - begun[0])

            begin = time.perf_counter()
            flower("packed", 1)
            print(f"{task.name}: start-up {time.perf_counter() - begin:.1f} s")
            for _ in range(options.repeats):
                rates["bare, 1 process"].append(bare(task, length, 1))
                rates["bare, 2 processes"].append(bare(task, length, 2))
                for dispatch in ("packed", "message"):
                    rates[dispatch].append(flower(dispatch, length))

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", default=["W1", "W2"], choices=TASKS)
    parser.add_argument("--rounds", type=int, help="of each measurement; by default the task's")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    # The actors import the tasks as they would an app's module: once, data included.
    os.environ["PYTHONPATH"] = os.path.dirname(os.path.abspath(__file__))
    logging.getLogger("flwr").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    print(f"load before: {os.getloadavg()}, cores: {os.cpu_count()}")
    table = Table(title=f"Node-rounds per second, {NODES} nodes; medians of {options.repeats}")
    for column in ("task", "way", "per second", "x bare, 2 processes"):
        table.add_column(column, justify="right")
    for name in options.tasks:
        ways = ("bare, 1 process", "bare, 2 processes", "packed", "message")
        rates: dict[str, list[float]] = {way: [] for way in ways}
        run_simulation(
            server_app=make_server(TASKS[name], options, rates),
            client_app=make_client(TASKS[name]),
            num_supernodes=NODES,
            backend_config={"client_resources": {"num_cpus": 1}},
        )
        for way, measured in rates.items():
            pairs = zip(measured, rates["bare, 2 processes"], strict=True)
            ratio = statistics.median(rate / base for rate, base in pairs)
            table.add_row(name, way, f"{statistics.median(measured):.1f}", f"{ratio:.2f}")
        print(f"{name} measured", flush=True)
    Console(width=100).print(table)
    print(f"load after: {os.getloadavg()}")


if __name__ == "__main__":
    main()
