"""The claims of both papers in small.

What is asserted leaves some slack to what was measured; the card lists the figures.
"""

from functools import cache

import numpy as np
import pytest

from flwr_decentral.core import HEADER_BYTES, Layout, Seeds
from flwr_decentral.core.topology import build
from flwr_decentral.ops import choose
from flwr_decentral.sim.engine import Engine, Observer
from flwr_decentral.sim.plan import Plan
from flwr_decentral.sim.scenario import Compute, Network, Scenario
from flwr_decentral.sim.trainer import FunctionTrainer
from flwr_decentral.testing.problems import Digits
from flwr_decentral_swift import SWIFT
from flwr_decentral_swift.divshare import SWIFTDivShare

NODES = 16


class Course(Observer):
    """The time, the mean accuracy of all nodes, and that of their average, each second round."""

    def __init__(self, digits):
        self.digits, self.times, self.accuracies, self.averages = digits, [], [], []

    def barrier(self, engine, round):
        models = engine.models()
        self.times.append(engine.now / 1e9)
        self.accuracies.append(float(np.mean([*map(self.digits.accuracy, models)])))
        self.averages.append(self.digits.accuracy(np.mean(models, axis=0)))

    def time_to(self, accuracy, of):
        pairs = zip(self.times, of, strict=True)
        return next((at for at, now in pairs if now >= accuracy), float("inf"))


@cache
def run(algorithm, spec, *, rounds, share=0.05, factor=1, slow=1.0, seed=1):
    """Train 16 nodes of two label shards each.

    A whole model is on an uplink for a part of a round, and ``factor`` times as long on those of
    half the nodes. One node trains ``slow`` times as long as the others.
    """
    digits, seeds = Digits(nodes=NODES, seed=seed), Seeds(seed)
    initial = digits.initial
    initial.flags.writeable = False
    fast = 8 * (HEADER_BYTES + initial.nbytes) / share
    uplink = [fast if node < NODES // 2 else fast / factor for node in range(NODES)]
    compute = Compute(seconds=1.0, factors=[slow, *[1.0] * (NODES - 1)])
    plan = Plan(
        algorithm=algorithm,
        topology=build(spec, NODES),
        layout=Layout.of(digits.tensors),
        initial=initial,
        conditions=Scenario(network=Network(uplink=uplink), compute=compute).resolve(NODES, seeds),
        seeds=seeds,
        ops=choose(),
        rounds=rounds,
        barrier_every=2,
    )
    course = Course(digits)
    trainer = FunctionTrainer(lambda task, x: digits.train(task.node, task.round, x))
    engine = Engine(plan, trainer, course)
    engine.run()
    return course


@pytest.mark.slow
def test_a_slow_node_and_slow_links_cost_others_no_time():
    """The paper's claim: to the same accuracy, sooner than in lockstep."""
    dpsgd = pytest.importorskip("flwr_decentral_dpsgd")
    lockstep = run(dpsgd.DPSGD(), "ring", rounds=20, slow=4.0, share=0.3)
    swift = run(SWIFT(), "ring", rounds=20, slow=4.0, share=0.3)
    # Nodes differ too much to be compared right after their own training, so this is of averages.
    needed = lockstep.time_to(0.5, lockstep.averages)
    assert needed < float("inf")
    assert swift.time_to(0.5, swift.averages) <= 0.5 * needed


@pytest.mark.slow
def test_e7_without_a_flush_slow_uplinks_make_all_models_old():
    kept = run(SWIFTDivShare(degree=4), "complete", rounds=50, factor=10)
    flushed = run(SWIFTDivShare(degree=4, flush=True), "complete", rounds=50, factor=10)
    assert flushed.accuracies[-1] > kept.accuracies[-1] + 0.15


@pytest.mark.slow
def test_e7_fragments_are_sooner():
    divshare = pytest.importorskip("flwr_decentral_divshare")
    fragments = run(divshare.DivShare(fragments=10, degree=4), "complete", rounds=50, factor=5)
    whole = run(SWIFTDivShare(degree=4), "complete", rounds=50, factor=5)
    late = whole.time_to(0.5, whole.accuracies)
    assert late >= 1.2 * fragments.time_to(0.5, fragments.accuracies)
    assert whole.accuracies[-1] < fragments.accuracies[-1] - 0.02
