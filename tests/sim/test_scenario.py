"""Scenarios: what can be written down, and what is said about what cannot."""

import json
import math
import re
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_decentral.core import ConfigurationError, Seeds
from flwr_decentral.sim.scenario import Compute, Network, Outage, Partition, Scenario

EXAMPLE = """
[network]
uplink = "60 Mbit/s"
downlink = ["100 Mbit/s", 2e6, inf, "125 kB/s"]
latency = "20 ms"
loss = 0.01

[compute]
seconds = "500 ms"
stragglers = 0.5
slowdown = 5

[[outages]]
node = 3
start = 10
end = "0.5 min"

[[outages]]
node = 2
start = 40

[[partitions]]
groups = [[0, 1], [2]]
start = 40.0
end = 60.0
"""


def test_toml_becomes_plain_numbers():
    assert Scenario.from_toml(EXAMPLE) == Scenario(
        network=Network(uplink=60e6, downlink=(100e6, 2e6, math.inf, 1e6), latency=0.02, loss=0.01),
        compute=Compute(seconds=0.5, stragglers=0.5, slowdown=5.0),
        outages=(Outage(node=3, start=10.0, end=30.0), Outage(node=2, start=40.0)),
        partitions=(Partition(groups=((0, 1), (2,)), start=40.0, end=60.0),),
    )


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("10 Mbit/s", 10e6),
        ("1.5 Gbit/s", 1.5e9),
        ("125 kB/s", 1e6),
        ("100Mbps", 100e6),
        ("  8 bit/s ", 8.0),
        (".5 TB/s", 4e12),
        (1234, 1234.0),
    ],
)
def test_bandwidths(text, bits):
    assert Network(uplink=text).uplink == bits


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("20 ms", 0.02), ("35us", 35e-6), ("35 µs", 35e-6), ("3 ns", 3e-9), ("2 min", 120.0), (0, 0)],
)
def test_latencies(text, seconds):
    assert Network(latency=text).latency == seconds


def test_unlimited_bandwidth_has_one_spelling():
    assert Network(uplink=math.inf) == Network(uplink=None) == Network()
    assert Network(uplink=[None, 1e6]).uplink == (math.inf, 1e6)


def test_arrays_count_as_lists():
    network = Network(latency=np.full((2, 2), 0.5), loss=np.float64(0.25))
    assert network == Network(latency=[[0.5, 0.5], [0.5, 0.5]], loss=0.25)
    outage = Outage(node=np.int64(1), start=0)
    assert Scenario.from_toml(Scenario(outages=[outage]).to_toml()).outages == (outage,)


# --- round trips ----------------------------------------------------------------------------------

seconds = st.floats(0, 1e6)
bandwidths = st.floats(1, 1e15)
rates = st.none() | bandwidths | st.lists(bandwidths | st.just(math.inf), min_size=1, max_size=4)
matrices = st.lists(st.lists(seconds, min_size=1, max_size=4), min_size=1, max_size=4)
factors = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=4)
starts_and_ends = st.tuples(seconds, st.none() | st.floats(2e6, 1e9))


@st.composite
def networks(draw: Callable) -> Network:
    latency = draw(seconds | matrices)
    loss = draw(st.floats(0, 1, exclude_max=True))
    return Network(uplink=draw(rates), downlink=draw(rates), latency=latency, loss=loss)


@st.composite
def computes(draw: Callable) -> Compute:
    slow: dict = {"factors": draw(factors)} if draw(st.booleans()) else {}
    slow = slow or {"stragglers": draw(st.floats(0, 1)), "slowdown": draw(st.floats(1, 99))}
    return Compute(seconds=draw(seconds), trace=draw(st.none() | matrices), **slow)


@st.composite
def outages(draw: Callable) -> Outage:
    start, end = draw(starts_and_ends)
    return Outage(node=draw(st.integers(0, 9)), start=start, end=end)


@st.composite
def partitions(draw: Callable) -> Partition:
    start, end = draw(starts_and_ends)
    nodes = draw(st.lists(st.integers(0, 9), min_size=2, unique=True))
    cut = draw(st.integers(1, len(nodes) - 1))
    return Partition(groups=[nodes[:cut], nodes[cut:]], start=start, end=end)


scenarios = st.builds(
    Scenario,
    network=networks(),
    compute=computes(),
    outages=st.lists(outages(), max_size=3),
    partitions=st.lists(partitions(), max_size=2),
)


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(scenarios)
def test_toml_round_trip(scenario):
    assert Scenario.from_toml(scenario.to_toml()) == scenario
    assert Scenario.from_mapping(scenario.to_mapping()) == scenario
    assert hash(Scenario.from_toml(scenario.to_toml())) == hash(scenario)


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=12))
def test_any_text_is_a_bandwidth_or_refused(text):
    try:
        bits = Network(uplink=text).uplink
    except ConfigurationError as error:
        assert "network.uplink" in str(error)
    else:
        assert isinstance(bits, float)
        assert bits >= 1


# --- files ----------------------------------------------------------------------------------------


def test_files_are_relative_to_the_scenario(tmp_path):
    (tmp_path / "trace.json").write_text("[[1, 2.5], ['x']]".replace("'x'", '"3 s"'))
    (tmp_path / "uplink.json").write_text(json.dumps([1e6, None]))
    path = tmp_path / "slow.toml"
    path.write_text('[network]\nuplink = "uplink.json"\n[compute]\ntrace = "trace.json"\n')
    scenario = Scenario.from_file(path)
    assert scenario.compute.trace == ((1.0, 2.5), (3.0,))
    assert scenario.network.uplink == (1e6, math.inf)
    assert Scenario.from_toml(scenario.to_toml()) == scenario
    assert Compute(trace=tmp_path / "trace.json") == scenario.compute
    assert Scenario.from_run_config({"compute.trace": "trace.json"}, tmp_path) == Scenario(
        compute=scenario.compute
    )


def test_a_missing_file_may_have_been_left_out_of_the_bundle(tmp_path):
    for make in (
        lambda: Scenario.from_file(tmp_path / "no.toml"),
        lambda: Scenario.from_run_config({"compute.trace": "no.json"}, tmp_path),
    ):
        with pytest.raises(ConfigurationError, match="fab-include") as caught:
            make()
        assert "*.py *.toml *.md *.yaml *.yml *.json *.jsonl" in str(caught.value)
        assert str(tmp_path / "no.") in str(caught.value)


def test_broken_files_are_named(tmp_path):
    path = tmp_path / "broken.toml"
    path.write_text("[network")
    with pytest.raises(ConfigurationError, match=r"broken\.toml: the scenario is not valid TOML"):
        Scenario.from_file(path)
    (tmp_path / "broken.json").write_text("[1,")
    with pytest.raises(ConfigurationError, match=r"compute\.trace: .*broken\.json is not valid"):
        Compute(trace=tmp_path / "broken.json")
    with pytest.raises(ConfigurationError, match="cannot read"):
        Scenario.from_file(tmp_path)


# --- run-config -----------------------------------------------------------------------------------


def test_run_config_takes_its_own_keys_only():
    config = {
        "algorithm": "divshare",
        "learning-rate": 0.1,
        "network.uplink": "10 Mbit/s",
        "network.downlink": "",
        "network.latency": 0,
        "compute.stragglers": 0.5,
        "compute.slowdown": 5,
        "compute.trace": "",
        "routers.uplink": "of another mind",
    }
    assert Scenario.from_run_config(config) == Scenario(
        network=Network(uplink=10e6, latency=0), compute=Compute(stragglers=0.5, slowdown=5)
    )
    assert Scenario.from_run_config({}) == Scenario()


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[netwrok]", "unknown key 'netwrok' in the scenario; did you mean 'network'?"),
        ("[network]\nupling = 1", "unknown key 'upling' in network; did you mean 'uplink'?"),
        ("[[outages]]\nnod = 1", "unknown key 'nod' in outages[0]; did you mean 'node'?"),
        ("[[outages]]\nnode = 1", "outages[0]: start is missing"),
        ("network = 3", "network: expected a table of uplink, downlink, latency, loss, got 3"),
        ("outages = 3", "outages: expected a list of tables ([[outages]]), got 3"),
        ("outages = [3]", "outages[0]: expected a table of node, start, end, got 3"),
        ("[network]\nuplink = 0", "network.uplink: expected at least 1 bit per second"),
        ("[network]\nuplink = -1", "network.uplink: expected at least 1 bit per second"),
        ("[network]\nuplink = nan", "network.uplink: expected at least 1 bit per second"),
        ("[network]\nuplink = true", "network.uplink: expected at least 1 bit per second"),
        ("[network]\nuplink = '10 Mb'", "(units: bit/s bps B/s kbit/s"),
        ("[network]\nuplink = '10'", "got '10'"),
        ("[network]\nuplink = []", "network.uplink: expected a list with one entry for each node"),
        ("[network]\nuplink = [1, 'x']", "network.uplink[1]: expected at least 1 bit per second"),
        ("[network]\ndownlink = {}", "network.downlink: expected at least 1 bit per second"),
        ("[network]\nlatency = -0.1", "network.latency: expected a time from 0"),
        ("[network]\nlatency = inf", "network.latency: expected a time from 0"),
        ("[network]\nlatency = '1 day'", "(units: ns us"),
        ("[network]\nlatency = [1]", "network.latency[0]: expected a list of one or more"),
        ("[network]\nlatency = [[]]", "network.latency[0]: expected a list of one or more"),
        ("[network]\nlatency = [[-1]]", "network.latency[0][0]: expected a time from 0"),
        ("[network]\nloss = 1", "network.loss: expected a probability in [0, 1), got 1"),
        ("[network]\nloss = '1%'", "network.loss: expected a number, got '1%'"),
        ("[compute]\nseconds = 1e13", "compute.seconds: expected a time from 0 to 1e+12 seconds"),
        ("[compute]\nstragglers = 2", "compute.stragglers: expected a share of the nodes"),
        ("[compute]\nstragglers = false", "compute.stragglers: expected a number, got False"),
        ("[compute]\nslowdown = 0.5", "compute.slowdown: expected a factor of 1 or more"),
        ("[compute]\nfactors = [1, 0]", "compute.factors[1]: expected a factor above 0"),
        ("[compute]\nfactors = 2", "compute.factors: expected a list with one entry for each"),
        ("[compute]\nfactors = [1]\nstragglers = 0.5", "compute.factors and compute.stragglers"),
        ("[compute]\ntrace = [[]]", "compute.trace[0]: expected a list of one or more entries"),
        ("[compute]\ntrace = 'x.csv'", "compute.trace: expected a list with one row for each"),
        ("[[outages]]\nnode = -1\nstart = 0", "outage.node: expected the index of a node"),
        ("[[outages]]\nnode = 1.0\nstart = 0", "outage.node: expected the index of a node"),
        ("[[outages]]\nnode = 1\nstart = 2\nend = 2", "its end, 2.0 s, does not come after"),
        ("[[partitions]]\ngroups = []\nstart = 0", "partition.groups: expected a list of groups"),
        ("[[partitions]]\ngroups = [[]]\nstart = 0", "partition.groups[0]: expected a list of"),
        ("[[partitions]]\ngroups = [['a']]\nstart = 0", "partition.groups[0]: expected the index"),
        ("[[partitions]]\ngroups = [[1], [1]]\nstart = 0", "node 1 is named 2 times"),
    ],
)
def test_what_is_wrong_is_said(toml, message):
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        Scenario.from_toml(toml)


def test_run_config_refuses_unknown_keys_of_its_sections():
    with pytest.raises(ConfigurationError, match="'straglers' in compute; did you mean 'stragg"):
        Scenario.from_run_config({"compute.straglers": 0.5})


def test_parts_of_the_wrong_kind_are_refused():
    with pytest.raises(ConfigurationError, match="network: expected a Network"):
        Scenario(network={"uplink": 1})
    with pytest.raises(ConfigurationError, match="outages: expected a list of Outages"):
        Scenario(outages=[3])
    with pytest.raises(ConfigurationError, match="outages: expected a list of Outages"):
        Scenario(outages=Outage(node=0, start=1))


def test_long_values_are_cut_short_in_messages():
    with pytest.raises(ConfigurationError) as caught:
        Network(uplink="x" * 1000)
    assert len(str(caught.value)) < 300


def test_quantities_that_overflow_are_refused():
    for value in (10**400, "9" * 400 + " s"):
        with pytest.raises(ConfigurationError, match=r"network\.latency"):
            Network(latency=value)


@pytest.mark.parametrize(
    ("scenario", "message"),
    [
        (Scenario(network=Network(uplink=[1e6] * 3)), "network.uplink has 3 entries, but the run"),
        (Scenario(network=Network(downlink=[1e6])), "network.downlink has 1 entries"),
        (Scenario(network=Network(latency=[[0]] * 4)), "network.latency[0] has 1 entries"),
        (Scenario(network=Network(latency=[[0] * 4])), "network.latency has 1 entries"),
        (Scenario(compute=Compute(factors=[1, 2])), "compute.factors has 2 entries"),
        (Scenario(compute=Compute(trace=[[1]] * 5)), "compute.trace has 5 entries"),
        (Scenario(outages=[Outage(node=4, start=0)]), "outages[0].node: there is no node 4; the"),
        (
            Scenario(partitions=[Partition(groups=[[0], [9]], start=0)]),
            "partitions[0].groups[1]: there is no node 9; the run's 4 nodes are 0 to 3",
        ),
        (
            Scenario(partitions=[Partition(groups=[[3, 1, 2, 0]], start=0)]),
            "partitions[0] puts all nodes into one group",
        ),
    ],
)
def test_what_does_not_fit_the_number_of_nodes_is_refused(scenario, message):
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        scenario.resolve(4, Seeds(0))


# --- what can hardly have been meant --------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("netwrk.uplink", "network.uplink"),
        ("Network.loss", "network.loss"),
        ("computer.seconds", "compute.seconds"),
    ],
)
def test_a_slip_in_the_name_of_a_section_is_refused(key, meant):
    with pytest.raises(ConfigurationError, match=f"'{key}'; did you mean '{meant}'"):
        Scenario.from_run_config({key: 1})


@pytest.mark.parametrize("key", ["networks.depth", "computation.seconds", "model.uplink", "uplink"])
def test_keys_of_the_app_are_its_own(key):
    assert Scenario.from_run_config({key: 1}) == Scenario()


def test_stragglers_who_take_no_longer_are_warned_of():
    assert Scenario(compute=Compute(stragglers=0.5, slowdown=2)).warnings() == []
    (warning,) = Scenario(compute=Compute(stragglers=0.5)).warnings()
    assert "compute.stragglers = 0.5 changes nothing while compute.slowdown is 1" in warning
