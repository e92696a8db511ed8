"""What shorter forms on the wire save, and what they cost in accuracy.

16 nodes with two of the ten digits each learn from each other in virtual time, in this process:
every algorithm that sends models, in every form. Printed are the bytes that were sent, in the
headers too, against those of float32, and the nodes' mean test accuracy at the end: the mean over
several seeds, and between its least and its greatest.

    python tests/bench/bench_wire.py --rounds 60
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from flwr_decentral import plugins
from flwr_decentral.core import WIRES, Layout, Seeds, topology
from flwr_decentral.ops import choose
from flwr_decentral.sim.engine import Engine
from flwr_decentral.sim.plan import Plan
from flwr_decentral.sim.scenario import Scenario
from flwr_decentral.sim.trainer import FunctionTrainer
from flwr_decentral.testing.problems import Digits

NODES = 16
NAMES = ("dpsgd", "divshare", "relaysgd", "a2cid2", "adpsgd", "swift")


@dataclass(frozen=True)
class Ended:
    """How a run ended."""

    accuracy: float
    nbytes: int


def run(name: str, wire: str, rounds: int, seed: int) -> Ended:
    digits, seeds = Digits(nodes=NODES, seed=seed), Seeds(seed)
    initial = digits.initial
    initial.flags.writeable = False
    algorithm = plugins.make(name, wire=wire)
    plan = Plan(
        algorithm=algorithm,
        topology=topology.build(algorithm.default_topology, NODES),
        layout=Layout.of(digits.tensors),
        initial=initial,
        conditions=Scenario().resolve(NODES, seeds),
        seeds=seeds,
        ops=choose(),
        rounds=rounds,
    )
    trainer = FunctionTrainer(lambda task, x: digits.train(task.node, task.round, x))
    engine = Engine(plan, trainer)
    engine.run()
    accuracies = [digits.accuracy(model) for model in engine.models()]
    return Ended(float(np.mean(accuracies)), engine.traffic.sent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    options = parser.parse_args()
    table = Table(title=f"{NODES} nodes, {options.rounds} rounds, seeds {options.seeds}")
    for column in ("algorithm", "wire", "bytes", "accuracy", "from", "to"):
        table.add_column(column, justify="left" if column in ("algorithm", "wire") else "right")
    for name in NAMES:
        full = 0
        for wire in WIRES:
            ended = [run(name, wire, options.rounds, seed) for seed in options.seeds]
            sent = sum(each.nbytes for each in ended)
            full = full or sent
            accuracies = [each.accuracy for each in ended]
            table.add_row(
                name,
                wire,
                f"{sent / full:.3f}",
                f"{np.mean(accuracies):.4f}",
                f"{min(accuracies):.4f}",
                f"{max(accuracies):.4f}",
            )
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
