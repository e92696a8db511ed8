"""What fragments and the flush are for: half the nodes send too slowly for a model a round."""

from functools import cache

import networkx as nx
import numpy as np
import pytest

from flwr_decentral.core import Layout, Seeds
from flwr_decentral.ops import choose
from flwr_decentral.sim.engine import Engine
from flwr_decentral.sim.plan import Plan
from flwr_decentral.sim.scenario import Compute, Network, Scenario
from flwr_decentral.sim.trainer import FunctionTrainer
from flwr_decentral.testing.problems import Digits
from flwr_decentral_divshare import DivShare

NODES, SLOWDOWN, ROUNDS = 16, 10, 25
BITS = 4 * 2_410 * 8


@cache
def accuracy(fragments, flush):
    """Train with J = 4 where a model takes 0.05 rounds on a fast link, and 0.5 on a slow one."""
    problem, seeds = Digits(nodes=NODES), Seeds(0)
    fast = BITS / 0.05
    uplink = [fast / (SLOWDOWN if node % 2 else 1) for node in range(NODES)]
    scenario = Scenario(network=Network(uplink=uplink), compute=Compute(seconds=1.0))
    plan = Plan(
        algorithm=DivShare(fragments=fragments, degree=4, flush=flush),
        topology=nx.complete_graph(NODES),
        layout=Layout.of(problem.tensors),
        initial=problem.initial,
        conditions=scenario.resolve(NODES, seeds),
        seeds=seeds,
        ops=choose(),
        rounds=ROUNDS,
    )
    trainer = FunctionTrainer(lambda task, model: problem.train(task.node, task.round, model))
    engine = Engine(plan, trainer)
    engine.run()
    return float(np.mean([problem.accuracy(model) for model in engine.models()]))


@pytest.mark.slow
def test_fragments_beat_whole_models_and_fresh_models_beat_old_ones():
    pytest.importorskip("sklearn")
    assert accuracy(10, flush=True) > accuracy(1, flush=True) + 0.03
    assert accuracy(1, flush=True) > accuracy(1, flush=False) + 0.1
