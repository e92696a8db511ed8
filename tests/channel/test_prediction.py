"""What virtual time predicts is what happens in real time, over links that are shaped the same."""

import pytest

from flwr_decentral.channel.keys import make_keys
from tests.bench.bench_prediction import ALGORITHMS, NODES, SCENARIOS, compare

pytestmark = [pytest.mark.net, pytest.mark.slow]

SECONDS = 10.5
"""Rounds, of 1 s and of 0.6 s, are half done then: being late costs none."""


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_rounds_and_bytes_are_those_of_virtual_time(name, scenario, tmp_path):
    make_keys(tmp_path / "keys", NODES, 1)
    for _ in range(3):
        predicted, real = compare(name, scenario, SECONDS, tmp_path / "keys")
        if real.held < 0.05:
            break
    else:
        pytest.skip("this machine has too much else to do to keep the time")
    assert real.rounds == pytest.approx(predicted.rounds, rel=0.1)
    assert real.nbytes == pytest.approx(predicted.nbytes, rel=0.1)
    assert real.rounds > 5 * NODES
    if name == "divshare":
        assert real.staleness == pytest.approx(predicted.staleness, rel=0.1)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_nodes_that_are_not_told_their_uplink_send_fragments_that_are_hardly_older(
    scenario, tmp_path
):
    make_keys(tmp_path / "keys", NODES, 1)
    for _ in range(3):
        predicted, real = compare("divshare", scenario, SECONDS, tmp_path / "keys", told=False)
        if real.held < 0.05:
            break
    else:
        pytest.skip("this machine has too much else to do to keep the time")
    assert real.nbytes == pytest.approx(predicted.nbytes, rel=0.15)
    assert real.staleness < 1.5 * predicted.staleness
