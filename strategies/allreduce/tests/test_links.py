"""Time on emulated links: that of a bandwidth-optimal all-reduce, as long as nothing is lost."""

import numpy as np
import pytest

from flwr_decentral.core import HEADER_BYTES, Layout, Seeds
from flwr_decentral.core.topology import build
from flwr_decentral.ops import choose
from flwr_decentral.sim.engine import Engine
from flwr_decentral.sim.plan import Plan
from flwr_decentral.sim.scenario import Compute, Network, Scenario
from flwr_decentral.sim.trainer import FunctionTrainer
from flwr_decentral_allreduce import AllReduce

SIZE, BPS, ROUNDS = 64_000, 10e6, 3
MODEL = 8 * 4 * SIZE / BPS
"""Seconds that an uplink is busy with a whole model."""


def run(spec, n, latency=0.0, loss=0.0, chunks=0):
    initial = np.zeros(SIZE, np.float32)
    initial.flags.writeable = False
    network = Network(uplink=BPS, downlink=BPS, latency=latency, loss=loss)
    seeds = Seeds(4)
    plan = Plan(
        algorithm=AllReduce(chunks=chunks),
        topology=build(spec, n),
        layout=Layout.of({"w": initial}),
        initial=initial,
        conditions=Scenario(network=network, compute=Compute(seconds=1.0)).resolve(n, seeds),
        seeds=seeds,
        ops=choose(),
        rounds=ROUNDS,
    )
    engine = Engine(plan, FunctionTrainer(lambda task, x: x + np.float32(1 + task.node)))
    engine.run()
    return engine


def exchange(engine):
    """Compute the seconds that a round takes beside training."""
    return engine.now / 1e9 / ROUNDS - 1


@pytest.mark.parametrize("n", [2, 5, 8, 16])
@pytest.mark.parametrize("spec", ["ring", "complete", "exponential"])
def test_a_round_takes_what_an_optimal_all_reduce_takes(spec, n):
    # All uplinks are busy all the time, and no two messages meet at a downlink.
    header = HEADER_BYTES / (4 * SIZE / n)
    expected = 2 * (n - 1) / n * MODEL * (1 + header)
    assert exchange(run(spec, n)) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("n", [6, 9])
def test_latency_counts_once_for_each_hop_to_the_owner_and_back(n):
    for spec, hops in (("ring", 2 * (n // 2)), ("complete", 2)):
        more = exchange(run(spec, n, latency=0.05)) - exchange(run(spec, n))
        assert 0.5 * hops * 0.05 <= more <= hops * 0.05 + 1e-9


def test_a_star_costs_what_its_hub_has_to_relay():
    n = 6
    took = exchange(run("star", n))
    # What its leaves send it all at once stands in a queue before it can be passed on.
    assert (n - 1) * MODEL <= took <= 2 * (n - 1) * MODEL


def test_one_piece_is_reduced_first_and_spread_then():
    # Up and down a chain of 5 from one end, hop by hop, without any overlap.
    assert exchange(run("chain", 5, chunks=1)) == pytest.approx(8 * MODEL, rel=1e-3)


@pytest.mark.parametrize("spec", ["ring", "complete"])
def test_bytes_are_those_of_an_optimal_all_reduce(spec):
    calm = run(spec, 6)
    payload, messages = 2 * 5 * 4 * SIZE * ROUNDS, 2 * 5 * 6 * ROUNDS
    # The engine stops as the last node ends its rounds, when these are in.
    assert calm.traffic.sent == payload + messages * HEADER_BYTES
    assert not calm.wasted_bytes


@pytest.mark.parametrize("spec", ["ring", "complete", "star"])
def test_loss_changes_no_bit(spec):
    calm, lossy = run(spec, 6), run(spec, 6, loss=0.1)
    np.testing.assert_array_equal(lossy.models(), calm.models())
    assert lossy.now > calm.now
    # What was lost was sent again, and little else.
    assert lossy.traffic.sent <= 1.4 * calm.traffic.sent
