"""Runs in real time: this process is Flower, and each node has a sidecar process with TLS."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest

from flwr_decentral.channel.attachment import Attachment
from flwr_decentral.channel.client import ask
from flwr_decentral.channel.keys import make_keys
from flwr_decentral.channel.orders import Order
from flwr_decentral.channel.roster import Member, Roster
from flwr_decentral.core import ConfigurationError, DecentralError, RuntimeFault
from flwr_decentral.core.layout import Layout
from flwr_decentral.flower import decentral_mod, grid
from flwr_decentral.flower.peer import has_peer, local_peer
from flwr_decentral.flower.start import own_socket, sidecar_arguments
from flwr_decentral.plugins import installed

from . import toys
from .sidecars import Sidecars, configured
from .toys import federate, make_client, node_of, round_of, to_arrays

pytestmark = [pytest.mark.net, pytest.mark.slow]

NODES = 4
MODEL = {"w": np.linspace(-1, 1, 40, dtype=np.float32)}
CHANGED = {"divshare": {"fragments": 4, "degree": 2}, "adpsgd-divshare": {"degree": 2}}
TOPOLOGY = {"relaysgd": "chain", "local": "empty"}


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys") / "keys"
    make_keys(folder, NODES, 30)
    return folder


@pytest.fixture(scope="module")
def sidecars(keys):
    with Sidecars(keys, NODES) as sidecars:
        yield sidecars


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(grid, "_LONGEST", 0.01)


def run(mod, algorithm="dpsgd", rounds=6, train=toys.train, **arguments):
    mods = (decentral_mod,) if mod is None else (mod, decentral_mod)
    options = {
        "topology": TOPOLOGY.get(algorithm, "ring"),
        "evaluate_every": 3,
        "initial": MODEL,
        "start": {"timeout": 60.0},
        **CHANGED.get(algorithm, {}),
    }
    return federate(
        make_client(train, mods=mods),
        NODES,
        rounds,
        algorithm=algorithm,
        workers=5,
        **{**options, **arguments},
    )


def train_slowly(msg, context):
    time.sleep(0.05)  # or nodes that wait for nobody would be through before a message has come
    return toys.train(msg, context)


@pytest.mark.parametrize("algorithm", sorted(installed()))
def test_every_algorithm_learns_in_real_time(algorithm, sidecars):
    result = run(sidecars.mod, algorithm, rounds=12, segment=20.0, train=train_slowly)
    assert result.run.status == "completed"
    assert result.run.grid_array_bytes == 0
    mean = result.run.evaluations[-1].metrics["mean"]
    assert None not in mean.nodes
    # Node i draws its model towards i + 1, so all are drawn towards 2.5 on average.
    assert mean.mean == pytest.approx(2.5, abs=0.8)
    if algorithm != "local":
        assert result.run.bytes.sent > 0
        assert mean.std < 1.0, "alone they end at 1, 2, 3 and 4, which is a spread of 1.12"
    # Nobody is bound to the run that has ended.
    assert {sidecars.ask(node, "who")["run"] for node in range(NODES)} == {""}


@pytest.mark.parametrize("algorithm", ["dpsgd", "relaysgd"])
def test_lockstep_ends_with_the_models_of_virtual_time(algorithm, sidecars):
    real, virtual = run(sidecars.mod, algorithm), run(None, algorithm)
    assert virtual.run.dispatch == "packed"
    last = [result.run.evaluations[-1].metrics["mean"].nodes for result in (real, virtual)]
    assert last[0] == last[1]
    assert real.run.bytes.sent == pytest.approx(virtual.run.bytes.sent, rel=0.2)


def test_models_are_fetched_if_that_is_asked_for(sidecars):
    result = run(sidecars.mod, fetch_average=True)
    averaged = to_arrays(result.arrays)["w"]
    assert averaged.shape == MODEL["w"].shape
    assert averaged.mean() == pytest.approx(result.run.evaluations[-1].metrics["mean"].mean)


def test_a_run_goes_on_where_another_one_ended(sidecars):
    first = run(sidecars.mod, rounds=4, resume="mine", evaluate_every=4)
    second = run(sidecars.mod, rounds=4, resume="mine", evaluate_every=4)
    whole = run(sidecars.mod, rounds=8, evaluate_every=8)
    means = [r.run.evaluations[-1].metrics["mean"].mean for r in (first, second, whole)]
    assert means[0] < means[1] == pytest.approx(means[2], abs=1e-5)
    assert "mine" in sidecars.ask(0, "status")["kept"]


def test_a_run_takes_over_from_one_that_kept_the_same_name(insecure):
    """As after a SuperLink's end, of which no sidecar learns before the lease is over."""

    def train(run, until, **changes):
        changes = {"run": run, "until": until, "lease": 600.0, **changes}
        told = ask(insecure, "order", BLOBS, order=order(**changes), allowed=5.0)
        with Attachment(told["handoff"], {}) as trainer:
            models = []
            while (task := trainer.next()) is not None:
                models.append(float(task.model[0]))
                task.output[:] = task.model + 1
                trainer.commit(task)
        return models

    begin = float(MODEL["w"][0])
    assert train("first", 2, resume="mine") == [begin, begin + 1]
    for name in ("", "other"):
        with pytest.raises(RuntimeFault, match="takes part in run first, whose lease lasts"):
            train("second", 1, resume=name)
    assert train("third", 1, resume="mine") == [begin + 2]
    with pytest.raises(RuntimeFault, match="takes part in run third"):
        ask(insecure, "order", order=order(run="fourth", resume=""), allowed=5.0)
    # Should the first ServerApp live after all, the two do not take the node from each other.
    with pytest.raises(RuntimeFault, match="another run with resume = 'mine' has taken this node"):
        train("first", 4, resume="mine")
    assert ask(insecure, "status")["run"] == "third"


def test_a_run_that_could_not_go_on_does_not_end_the_one_that_it_would_take_over(insecure):
    ask(insecure, "order", BLOBS, order=order(run="first", resume="mine", lease=600.0), allowed=5.0)
    other = order(run="second", resume="mine", layout="another")
    with pytest.raises(ConfigurationError, match="choose another name for resume"):
        ask(insecure, "order", BLOBS, order=other, allowed=5.0)
    assert ask(insecure, "status")["run"] == "first"


def test_a_run_is_not_taken_over_while_it_trains(insecure):
    told = ask(
        insecure, "order", BLOBS, order=order(run="first", resume="mine", lease=600.0), allowed=5.0
    )
    with Attachment(told["handoff"], {}) as trainer:
        assert trainer.next() is not None
        with pytest.raises(RuntimeFault, match="takes part in run first"):
            ask(insecure, "order", BLOBS, order=order(run="second", resume="mine"), allowed=5.0)


def test_a_model_of_another_layout_is_not_gone_on_with(sidecars):
    run(sidecars.mod, rounds=1, resume="other")
    with pytest.raises(RuntimeFault, match="choose another name for resume"):
        run(sidecars.mod, rounds=1, resume="other", initial={"w": np.zeros(3, np.float32)})


def test_a_user_who_raises_three_times_fails_the_run_and_frees_the_node(sidecars):
    def train(msg, context):
        if node_of(context) == 2:
            raise ValueError("told to fail")
        return toys.train(msg, context)

    with pytest.raises(RuntimeFault, match=r"node 2 has failed(?s:.*)told to fail"):
        run(sidecars.mod, train=train)
    assert {sidecars.ask(node, "who")["run"] for node in range(NODES)} == {""}


def test_one_failure_counts_as_no_step(sidecars):
    def train(msg, context):
        if node_of(context) == 2 and round_of(msg) == 2:
            raise ValueError("told to fail")
        return toys.train(msg, context)

    result = run(sidecars.mod, train=train)
    assert result.run.train_failures == 1


def test_another_run_is_refused_while_one_is_under_way(sidecars, keys):
    refused = []

    def train(msg, context):
        if node_of(context) == 0 and round_of(msg) == 2 and not refused:
            refused.append(1)
            status = sidecars.ask(0, "status")
            with pytest.raises(
                RuntimeFault, match=f"takes part in run {status['run']}, whose lease"
            ):
                sidecars.ask(0, "order", order=order(run="another"), allowed=1.0)
        return toys.train(msg, context)

    run(sidecars.mod, train=train)
    assert refused


def order(**changes):
    values = {
        "run": "a run",
        "epoch": 0,
        "index": 0,
        "roster": Roster.of([Member(index=0)], []),
        "algorithm": "dpsgd",
        "version": installed()["dpsgd"].version,
        "parameters": {},
        "layout": LAYOUT.hash,
        "seed": 0,
        "until": 1,
        "lease": 1.0,
    }
    return Order(**{**values, **changes}).to_json()


LAYOUT = Layout.of(MODEL)
BLOBS = (LAYOUT.pack(), LAYOUT.flatten(MODEL)[0].tobytes(), b"")


@pytest.fixture
def insecure(tmp_path):
    """Start one sidecar whose socket is a file, as in containers."""
    address = str(tmp_path / "node.sock")
    command = ["-m", "flwr_decentral.cli", "sidecar", "--insecure", "--socket", address]
    process = subprocess.Popen([sys.executable, *command])
    try:
        ask(address, "who", patience=30.0)
        yield address
    finally:
        process.kill()
        process.wait(20)


@pytest.mark.parametrize(
    ("changes", "blobs", "complaint"),
    [
        ({"version": "0.0.1"}, BLOBS, "install one version everywhere"),
        ({"algorithm": "relay"}, BLOBS, "there is no algorithm 'relay'"),
        ({"parameters": {"patience": -1}}, BLOBS, "patience must be"),
        ({"layout": "0"}, BLOBS, "another version of the app"),
        ({}, (BLOBS[0], b"1234", b""), "1 scalars and 0 private bytes, not 40 and 0"),
        ({}, (b"no layout", b"", b""), "the sidecar failed as it answered"),
    ],
)
def test_an_order_that_cannot_be_carried_out_leaves_the_sidecar_free(
    changes, blobs, complaint, insecure
):
    for _ in range(2):  # the second one would find what the first one left behind
        with pytest.raises(DecentralError, match=complaint):
            ask(insecure, "order", blobs, order=order(**changes), allowed=5.0)
    answer = ask(insecure, "order", BLOBS, order=order(), allowed=5.0)
    assert answer == {"do": "accepted", "handoff": f"{insecure}.trainer"}
    assert ask(insecure, "status")["run"] == "a run"


# --- processes that die ---------------------------------------------------------------------------


def test_a_sidecar_that_is_killed_begins_anew_and_the_others_go_on(keys, caplog):
    with Sidecars(keys, NODES) as own:

        def train(msg, context):
            if node_of(context) == 1 and round_of(msg) == 2 and own.processes[1].poll() is None:
                own.kill(1)
                own.start(1)
                own.ask(1, "who")
            return toys.train(msg, context)

        result = run(own.mod, rounds=6, train=train, evaluate_every=1, patience=3.0)
    assert result.run.status == "completed"
    assert "node 1" in caplog.text.lower()
    assert None not in result.run.evaluations[-1].metrics["mean"].nodes


# --- sidecars that the mod starts -----------------------------------------------------------------


def test_the_mod_starts_sidecars_that_end_by_themselves(keys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    places = Sidecars(keys, NODES)
    config = {node: places.config(node) for node in range(NODES)}
    result = run(configured(config))
    assert result.run.status == "completed"
    sockets = [own_socket(sidecar_arguments(config[node])) for node in range(NODES)]
    assert len({ask(socket, "who")["process"] for socket in sockets}) == NODES
    deadline = time.monotonic() + 60
    while any(map(listens, sockets)):
        assert time.monotonic() < deadline, "they end soon after their run"
        time.sleep(0.5)


@pytest.mark.parametrize("algorithm", ["dpsgd", "divshare"])
def test_virtual_nodes_gossip_by_themselves_if_that_is_asked_for(algorithm, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    result = run(None, algorithm, rounds=12, real_time=True, train=train_slowly)
    assert result.run.dispatch == "sidecar"
    assert result.run.bytes.useful > 0
    assert result.run.grid_array_bytes == 0
    means = result.run.evaluations[-1].metrics["mean"]
    assert means.mean == pytest.approx(2.5, abs=0.8)
    # Alone, each node ends at a point of its own, 1 to 4.
    assert np.std(means.nodes) < 0.9


def test_the_sidecar_of_a_virtual_node_is_known_for_one_message_only():
    config = {"partition-id": 3, "num-partitions": 4}
    with local_peer(config, "run"):
        assert config["peer-address"].startswith("unix:")
    with local_peer(config, ""):
        assert not has_peer(config)
    assert config == {"partition-id": 3, "num-partitions": 4}


def listens(socket):
    try:
        return bool(ask(socket, "who", patience=0.0))
    except RuntimeFault:
        return False


def test_no_certificate_is_an_error_that_names_the_node():
    config = {node: {"peer-address": "127.0.0.1:9"} for node in range(NODES)}
    complaint = "sidecar of node 0 is not ready: the .* ended at once, .* peers need certificates"
    with pytest.raises(ConfigurationError, match=complaint):
        run(configured(config))
