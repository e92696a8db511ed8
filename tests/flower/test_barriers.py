"""Evaluations look at models between rounds, not in the middle of one."""

import json

import numpy as np
import pytest

from flwr_decentral.sim.scenario import Compute, Network, Outage, Scenario

from .toys import federate, make_client


@pytest.mark.parametrize("algorithm", ["dpsgd", "divshare"])
def test_models_are_evaluated_after_their_exchange(algorithm):
    scenario = Scenario(network=Network(latency=0.005), compute=Compute(seconds=1.0))
    result = federate(
        make_client(),
        algorithm=algorithm,
        nodes=4,
        topology="complete",
        evaluate_every=1,
        initial={"w": np.zeros(40, np.float32)},
        scenario=scenario,
    )
    evaluations = result.run.evaluations
    assert [entry.round for entry in evaluations] == [1, 2, 3]
    assert len({entry.virtual_time_s for entry in evaluations}) == 3
    if algorithm == "dpsgd":  # on a complete graph all nodes agree after every round
        assert max(entry.consensus_distance for entry in evaluations) < 1e-10


def test_the_same_run_again_leaves_both_results(tmp_path):
    digests = {federate(make_client(), results_dir=tmp_path).run.digest for _ in range(2)}
    assert len(digests) == 1
    first, second = sorted(tmp_path.glob("*.json"), key=lambda path: len(path.name))
    assert second.stem == f"{first.stem}-2"
    assert len(list(tmp_path.glob("*.csv"))) == 2


def test_what_was_found_out_before_an_error_of_the_user_is_kept(tmp_path):
    def evaluate(round, arrays):
        if round == 2:
            raise KeyError("told to fail")

    start = {"evaluate_fn": evaluate}
    with pytest.raises(KeyError, match="told to fail"):
        federate(make_client(), results_dir=tmp_path, evaluate_every=1, start=start)
    (path,) = tmp_path.glob("*.json")
    document = json.loads(path.read_text())
    assert document["status"] == "failed: KeyError('told to fail')"
    assert [entry["round"] for entry in document["evaluations"]] == [1]


def test_metrics_of_rounds_that_are_past_do_not_pile_up(tmp_path):
    scenario = Scenario(compute=Compute(seconds=1.0), outages=(Outage(node=2, start=2.5),))
    result = federate(
        make_client(), rounds=12, scenario=scenario, evaluate_every=2, results_dir=tmp_path
    )
    assert sorted(result.train_metrics_clientapp) == list(range(1, 13))
