"""The ServerApp side of real time, before nodes whose sidecars are played by this file."""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict

from flwr_decentral.channel.orders import Order
from flwr_decentral.core import ConfigurationError, RuntimeFault
from flwr_decentral.core.layout import Layout
from flwr_decentral.core.transcript import vector_digest
from flwr_decentral.flower import grid, mod, realtime, seats
from flwr_decentral.flower.control import CONTROL, dump_facts, load_facts
from flwr_decentral.flower.records import encode, to_numpy, to_record

from .toys import ZEROS, federate, make_client
from .watching import CountingGrid

NODES = 4


@dataclass
class Play:
    """All sidecars: each adds 1 to its model in a round, and gossips with nobody."""

    failures: dict[tuple[int, int], str] = field(default_factory=dict)
    peer: dict[int, dict | None] = field(default_factory=dict)
    models: dict[int, np.ndarray] = field(default_factory=dict)
    rounds: dict[int, int] = field(default_factory=dict)
    orders: defaultdict[int, list[Order]] = field(default_factory=lambda: defaultdict(list))
    given: Counter = field(default_factory=Counter)
    released: Counter = field(default_factory=Counter)
    deaf: tuple[int, ...] = ()

    def __call__(self, msg, context, call_next):
        node = int(context.node_config["partition-id"])
        control = msg.content.config_records[CONTROL]
        content = getattr(self, str(control["do"]).replace("-", "_"))(node, msg, control)
        return Message(content, reply_to=msg)

    def hello(self, node, msg, control):
        default = {"address": f"127.0.0.1:{7000 + node}", "fingerprint": f"{node + 1:064x}"}
        facts = {
            "node": node,
            "nodes": NODES,
            "host": mod.host_identity() if node == 0 else f"host {node}",
            "versions": {"python": "3"},
            "threads": 1,
            "peer": self.peer.get(node, default),
        }
        return RecordDict({CONTROL: ConfigRecord({"facts": dump_facts(facts)})})

    def segment(self, node, msg, control):
        order = Order.from_json(control["order"])
        self.orders[node].append(order)
        assert order.index == node
        failure = self.failures.pop((node, len(self.orders[node])), "")
        if failure == "dies":
            raise SystemError("killed")
        if failure == "forgets":
            self.models.pop(node, None)
        elif failure:
            return RecordDict({CONTROL: ConfigRecord({"error": failure})})
        if "arrays" in msg.content:
            self.given[node] += 1
            self.models[node] = to_numpy(msg.content["arrays"])["w"].copy()
            self.rounds[node] = order.after
        if node not in self.models:
            return RecordDict({CONTROL: ConfigRecord({"unprimed": True})})
        trained = list(range(self.rounds[node] + 1, min(order.until, 1000) + 1))
        self.models[node] += len(trained)
        self.rounds[node] += len(trained)
        report = {
            "round": self.rounds[node],
            "digest": vector_digest(self.models[node]),
            "resumed": node != 2,
            "counted": {
                "bytes-sent": 100.0 * self.rounds[node],
                "bytes-received": 90.0 * self.rounds[node],
                "bytes-wasted": 10.0,
                "idle-share": 0.25,
                "stale-message-count": 2,
                "stale-message-mean": 1.5,
            },
        }
        metrics = RecordDict({"m": MetricRecord({"num-examples": node + 1, "loss": float(node)})})
        values = {
            "report": json.dumps(report),
            "rounds": trained,
            "contents": [encode(metrics) for _ in trained],
        }
        return RecordDict({CONTROL: ConfigRecord(values)})

    def evaluate_own(self, node, msg, control):
        if self.failures.pop((node, -1), ""):
            return RecordDict({CONTROL: ConfigRecord({"error": "cannot"})})
        metrics = MetricRecord({"num-examples": 1, "mean": float(self.models[node].mean())})
        content = RecordDict({"m": metrics})
        if control["release"] and node not in self.deaf:
            content.update(self.release(node, msg, control))
        return content

    def release(self, node, msg, control):
        self.released[node] += 1
        self.models.pop(node, None)
        return RecordDict({CONTROL: ConfigRecord({"released": True})})

    def fetch(self, node, msg, control):
        return RecordDict({"model": to_record({"w": self.models[node]})})


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(grid, "_LONGEST", 0.005)


def lead(play, rounds=4, **arguments):
    return federate(
        make_client(mods=(play,)),
        NODES,
        rounds,
        **{"algorithm": "dpsgd", "topology": "ring", **arguments},
    )


def test_a_run_of_a_lockstep_algorithm(tmp_path):
    play, grids = Play(), []

    def wrap(grid):
        grids.append(CountingGrid(grid))
        return grids[-1]

    result = lead(play, wrap=wrap, evaluate_every=2, results_dir=tmp_path)
    assert all(play.rounds[node] == 4 for node in range(NODES))
    assert {order.until for order in play.orders[0]} >= {2, 4}
    assert all(order.seconds == 120.0 for order in play.orders[0])
    assert [entry.round for entry in result.run.evaluations] == [2, 4]
    assert result.run.evaluations[-1].metrics["mean"].nodes == [4.0] * NODES
    assert sorted(result.train_metrics_clientapp) == [1, 2, 3, 4]
    assert result.train_metrics_clientapp[1]["loss"] == pytest.approx((0 + 2 + 6 + 12) / 10)
    assert result.run.bytes.sent == NODES * 400
    assert result.run.counters["stale-message"] == {"count": 8, "total": 12.0, "nbytes": 0}
    assert result.run.idle_share == 0.25
    assert result.run.dispatch == "sidecar"
    # The initial model goes to each node once, and nothing else.
    assert play.given == play.released == dict.fromkeys(range(NODES), 1)
    assert result.run.grid_array_bytes == 0
    assert grids[0].array_bytes == NODES * len(to_record(ZEROS)["w"].data)
    assert len(result.arrays) == 0
    (path,) = tmp_path.glob("*.json")
    assert json.loads(path.read_text())["status"] == "completed"


def test_a_sidecar_that_was_not_released_with_the_last_evaluation_is_told_again():
    play = Play(deaf=(1,))
    result = lead(play, evaluate_every=4)
    assert play.released == dict.fromkeys(range(NODES), 1)
    assert None not in result.run.evaluations[-1].metrics["mean"].nodes


def test_lockstep_goes_on_where_the_time_has_cut_it_off():
    play = Play()

    def segment(node, msg, control, usual=play.segment):
        order = Order.from_json(control["order"])
        if len(play.orders[node]) == 0 and node:  # all but node 0 get through one round
            control["order"] = replace(order, until=1).to_json()
        return usual(node, msg, control)

    play.segment = segment
    result = lead(play, evaluate_every=4, segment=7.0)
    assert [order.until for order in play.orders[0]] == [4, 4]
    assert {order.seconds for order in play.orders[0]} == {7.0}
    assert [entry.round for entry in result.run.evaluations] == [4]


@pytest.mark.slow
def test_a_run_of_some_seconds_is_not_cut_into_rounds():
    play = Play()
    result = lead(play, duration=0.05, segment=7.0)
    first = play.orders[0][0]
    assert first.until > 10**6
    assert first.seconds == 1.0, "the least that is asked for"
    assert result.run.rounds == 1000


def test_others_are_bound_by_time_and_stop_for_nobody():
    play = Play()
    lead(play, algorithm="divshare", fragments=2, segment=33.0, evaluate_every=1)
    assert {order.seconds for order in play.orders[0]} == {33.0}
    assert {order.until for order in play.orders[0]} == {4}


@pytest.mark.slow
def test_the_same_models_have_the_same_digest():
    first, second, third = (lead(Play(), rounds).run.digest for rounds in (2, 2, 3))
    assert first == second != third


def test_orders_say_all_that_a_sidecar_has_to_know(caplog):
    caplog.set_level("INFO")
    play = Play()
    lead(play, patience=5.0, seed=9, resume="mine", run_config={"network.uplink": "1 Mbit/s"})
    order = play.orders[2][0]
    assert (order.algorithm, order.seed, order.resume, order.uplink) == ("dpsgd", 9, "mine", 1e6)
    assert order.parameters["patience"] == 5.0
    play = Play()
    lead(play, run_config={"network.uplink": ["1 Mbit/s", "2 Mbit/s", "3 Mbit/s", "4 Mbit/s"]})
    assert [play.orders[node][0].uplink for node in range(4)] == [1e6, 2e6, 3e6, 4e6]
    assert order.roster.neighbors(2) == (1, 3)
    assert str(order.roster.members[3].address) == "127.0.0.1:7003"
    assert order.layout == Layout.of(ZEROS).hash
    assert len({each.run for orders in play.orders.values() for each in orders}) == 1
    assert "Node 1 has gone on from the model kept as 'mine'" in caplog.text
    assert "Node 2 has gone on from the initial model" in caplog.text


@pytest.mark.slow
def test_models_are_fetched_only_if_that_is_asked_for(caplog):
    evaluated = []

    def evaluate(round, arrays):
        evaluated.append((round, to_numpy(arrays)["w"].mean()))
        return MetricRecord({"mean": float(evaluated[-1][1])})

    start = {"evaluate_fn": evaluate}
    result = lead(Play(), start=start)
    assert [round for round, _ in evaluated] == [0]
    assert "Set fetch_average" in caplog.text
    result = lead(Play(), start=start, fetch_average=True, evaluate_every=2)
    assert evaluated[1:] == [(0, 0.0), (2, 2.0), (4, 4.0)]
    assert to_numpy(result.arrays)["w"].tolist() == [4.0] * 4
    assert result.run.evaluations[-1].averaged == {"mean": 4.0}
    assert result.run.grid_array_bytes > 0


def test_a_model_that_cannot_be_fetched_is_left_out_of_the_average(caplog):
    play = Play()

    def fetch(node, msg, control, usual=play.fetch):
        if node == 0:
            return RecordDict({CONTROL: ConfigRecord({"error": "this node holds no model"})})
        play.models[node] += node
        return usual(node, msg, control)

    play.fetch = fetch
    result = lead(play, fetch_average=True)
    assert to_numpy(result.arrays)["w"].tolist() == [4.0 + 2.0] * 4
    assert "Node 0 cannot send its model:\nthis node holds no model" in caplog.text
    assert "Averaged 3 of 4 models." in caplog.text


# --- trouble --------------------------------------------------------------------------------------


def test_a_sidecar_that_holds_no_model_is_given_one_again(caplog):
    play = Play(failures={(1, 2): "forgets"})
    result = lead(play, evaluate_every=1)
    assert play.given[1] == 2
    assert "The sidecar of node 1 holds no model of this run" in caplog.text
    # In lockstep it hears from its neighbors where they are.
    assert {order.after for order in play.orders[1]} == {0}
    assert play.rounds[1] == 4
    assert result.run.grid_array_bytes == 0


def test_a_client_process_that_dies_is_away_for_a_segment(caplog):
    play = Play(failures={(2, 2): "dies"})
    result = lead(play, evaluate_every=1)
    assert "is away: its segment ended with" in caplog.text
    assert "Node 2 is back" in caplog.text
    assert play.rounds == dict.fromkeys(range(NODES), 4)
    assert play.given[2] == 1, "its sidecar held the model all the time"
    assert {order.epoch for order in play.orders[0]} == {0}
    assert result.run.status == "completed"


def test_a_sidecar_that_moves_is_told_to_all(caplog):
    play = Play(failures={(2, 1): "dies"})

    def segment(node, msg, control, usual=play.segment):
        if node == 2:
            play.peer[2] = {"address": "127.0.0.1:9002", "fingerprint": f"{3:064x}"}
        return usual(node, msg, control)

    play.segment = segment
    lead(play, evaluate_every=1)
    first, *later = [order.epoch for order in play.orders[0]]
    assert (first, {*later}) == (0, {1})
    assert str(play.orders[0][-1].roster.members[2].address) == "127.0.0.1:9002"


@pytest.fixture
def hang(monkeypatch):
    """Return a function that lets node 1 hang in its first segment, and be late soon."""
    monkeypatch.setattr(realtime, "LATE", 0.1)
    monkeypatch.setattr(seats, "LATE", 0.1)
    monkeypatch.setattr(seats, "_ANSWER", 0.1)
    released = threading.Event()

    def hang(play, *, answers: dict | None, seconds: float = 60.0):
        """``answers`` is what it says of its sidecar in the meantime; None if it says nothing."""

        def segment(node, msg, control, usual=play.segment):
            if node == 1 and not play.orders[1]:
                play.orders[1].append(Order.from_json(control["order"]))
                released.wait(seconds)
                released.set()
                play.orders[1].clear()
            return usual(node, msg, control)

        def hello(node, msg, control, usual=play.hello):
            if node == 1 and play.orders[1] and answers is None:
                assert released.wait(60.0)
            content = usual(node, msg, control)
            if node == 1 and answers:
                facts = load_facts(content[CONTROL]["facts"])
                facts["peer"].update(answers)
                content[CONTROL] = ConfigRecord({"facts": dump_facts(facts)})
            return content

        play.segment, play.hello = segment, hello
        return released.set

    yield hang
    released.set()


@pytest.mark.slow
def test_a_node_that_does_not_answer_is_away(hang, caplog, monkeypatch):
    monkeypatch.setattr(realtime, "_MARGIN", 0.5)
    play = Play()
    after = hang(play, answers=None)
    options = {"start": {"timeout": 0.5}, "segment": 0.5, "after": after}
    result = lead(play, evaluate_every=1, workers=5, **options)
    assert "Node 1" in caplog.text
    assert "its segment did not end in time" in caplog.text
    assert [play.rounds[node] for node in (0, 2, 3)] == [4, 4, 4]
    assert result.run.status == "completed"
    assert result.run.evaluations[-1].metrics["mean"].nodes[1] is None


@pytest.mark.slow
@pytest.mark.parametrize("answers", [None, {"training": True}], ids=["busy", "training"])
def test_a_node_that_is_late_is_waited_for_in_the_end_only(answers, hang, caplog):
    play = Play()
    hang(play, answers=answers, seconds=3.0)
    result = lead(play, evaluate_every=1, workers=5, segment=1.0)
    assert "away" not in caplog.text
    first, *_ = result.run.evaluations
    assert [value is None for value in first.metrics["mean"].nodes] == [False, True, False, False]
    assert result.run.evaluations[-1].metrics["mean"].nodes == [4.0] * NODES
    assert play.given[1] == 1


def test_a_supernode_that_was_killed_and_started_again_has_lost_its_call(hang, caplog):
    play = Play()
    play.models[1], play.rounds[1] = np.zeros(4, np.float32), 0  # its sidecar was given it
    after = hang(play, answers={"training": False})
    result = lead(play, evaluate_every=1, workers=5, segment=1.0, after=after)
    assert "away: its SuperNode has started anew, and its segment is lost" in caplog.text
    assert "Node 1 is back" in caplog.text
    assert result.run.evaluations[-1].metrics["mean"].nodes == [4.0] * NODES


@pytest.mark.slow
def test_a_node_that_is_late_is_heard_when_it_is_the_only_one_left(hang, caplog, monkeypatch):
    monkeypatch.setattr(realtime, "_MARGIN", 5.0)
    play = Play(failures={(node, 2): "dies" for node in (0, 2, 3)})
    hang(play, answers=None, seconds=3.0)

    def hello(node, msg, control, usual=play.hello):
        if len(play.orders[node]) == 2 and node != 1:
            raise SystemError("killed")
        return usual(node, msg, control)

    play.hello = hello
    # Before it was heard, the run would have given up after the time that is allowed.
    result = lead(play, evaluate_every=1, workers=5, segment=1.0, start={"timeout": 5.0})
    assert result.run.status == "completed"
    assert result.run.evaluations[-1].metrics["mean"].nodes == [None, 4.0, None, None]


@pytest.mark.slow
def test_who_has_finished_keeps_its_lease_while_it_waits_for_one_that_is_late(hang, monkeypatch):
    monkeypatch.setattr(realtime, "_RENEW", 0.5)
    play = Play()
    hang(play, answers=None, seconds=4.0)
    lead(play, algorithm="divshare", fragments=2, workers=5, segment=0.5)
    assert play.rounds == dict.fromkeys(range(NODES), 4)
    # Once in each 1.1 s, and not again and again.
    assert 3 <= len(play.orders[0]) <= 6
    assert {order.until for order in play.orders[0]} == {4}


@pytest.mark.slow
def test_leases_are_kept_while_a_node_evaluates(hang, monkeypatch):
    monkeypatch.setattr(realtime, "_RENEW", 0.5)
    play = Play()

    def evaluate_own(node, msg, control, usual=play.evaluate_own):
        if node == 1:
            time.sleep(2.0)
        return usual(node, msg, control)

    play.evaluate_own = evaluate_own
    result = lead(play, evaluate_every=2, workers=5, segment=0.1)
    assert [entry.round for entry in result.run.evaluations] == [2, 4]
    assert None not in result.run.evaluations[-1].metrics["mean"].nodes
    untils = [order.until for order in play.orders[0]]
    assert untils.count(2) > 1
    # With the last evaluation they are released, and left alone from then on.
    assert untils.count(4) == 1
    assert play.released == dict.fromkeys(range(NODES), 1)


@pytest.mark.slow
def test_a_node_that_comes_back_in_the_end_is_trained_to_the_end_before_the_last_evaluation(hang):
    play = Play(failures={(2, 1): "dies"})
    play.models[1], play.rounds[1] = np.zeros(4, np.float32), 0
    hang(play, answers=None, seconds=3.0)
    usual = play.hello

    def hello(node, msg, control):
        if node == 2 and play.orders[2]:
            time.sleep(1.5)  # all others have finished by then, but for one that is late
        return usual(node, msg, control)

    play.hello = hello
    result = lead(play, rounds=2, evaluate_every=2, workers=5, segment=0.5)
    assert [entry.round for entry in result.run.evaluations] == [2]
    assert result.run.evaluations[-1].metrics["mean"].nodes == [2.0] * NODES
    assert play.released == dict.fromkeys(range(NODES), 1)


@pytest.mark.slow
def test_who_comes_back_after_the_last_evaluation_starts_nothing(monkeypatch, caplog):
    monkeypatch.setattr(seats, "_ANSWER", 0.1)
    play = Play(failures={(2, 1): "dies"})
    evaluated = threading.Event()

    def hello(node, msg, control, usual=play.hello):
        if node == 2 and play.orders[2]:
            assert evaluated.wait(60.0)
        return usual(node, msg, control)

    def evaluate_own(node, msg, control, usual=play.evaluate_own):
        content = usual(node, msg, control)
        evaluated.set()
        time.sleep(1.0 if node == 1 else 0.0)
        return content

    play.hello, play.evaluate_own = hello, evaluate_own
    result = lead(play, rounds=2, evaluate_every=2, workers=5)
    assert "Node 2 is back" in caplog.text
    assert result.run.evaluations[-1].metrics["mean"].nodes == [2.0, 2.0, None, 2.0]
    assert [order.until for order in play.orders[0]] == [2]
    assert play.released == dict.fromkeys(range(NODES), 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answers", "complaint"),
    [
        ({"error": "no certificate"}, "Node 2 stays away for now: .*not ready: no certificate"),
        (None, "Flower node .* is left out: .* failed when it was asked who it is: "),
    ],
)
def test_a_node_that_cannot_come_back_is_left_out_and_asked_again(
    answers, complaint, caplog, monkeypatch
):
    monkeypatch.setattr(seats, "_AGAIN", 0.1)
    play = Play(failures={(2, 1): "dies"})

    def hello(node, msg, control, usual=play.hello):
        if node == 2 and play.orders[2] and complaint not in seen:
            seen.append(complaint)
            if answers is None:
                raise SystemError("killed")
            play.peer[2] = answers
        elif node == 2:
            play.peer.pop(2, None)
        return usual(node, msg, control)

    def segment(node, msg, control, usual=play.segment):
        time.sleep(0.2)
        return usual(node, msg, control)

    seen = []
    play.hello, play.segment = hello, segment
    result = lead(play, rounds=6, evaluate_every=1)
    assert re.search(complaint, caplog.text)
    assert "Node 2 is back" in caplog.text
    assert result.run.evaluations[-1].metrics["mean"].nodes == [6.0] * NODES


def test_an_error_of_the_user_fails_the_run_and_names_the_node(tmp_path):
    play = Play(failures={(3, 2): "ValueError: told to fail"})
    with pytest.raises(RuntimeFault, match=r"node 3 has failed:\nValueError: told to fail"):
        lead(play, evaluate_every=1, results_dir=tmp_path)
    (path,) = tmp_path.glob("*.json")
    assert play.released == dict.fromkeys(range(NODES), 1)
    document = json.loads(path.read_text())
    assert document["status"].startswith("failed: [runtime] node 3 has failed")
    assert [entry["round"] for entry in document["evaluations"]] == [1]


def test_a_failed_evaluation_leaves_the_node_out(caplog):
    result = lead(Play(failures={(0, -1): "cannot"}), evaluate_every=4)
    assert result.run.evaluations[0].metrics["mean"].nodes[0] is None
    assert "Evaluation failed on node 0" in caplog.text


@pytest.mark.parametrize(
    ("peer", "complaint"),
    [
        ({2: None}, "node 2 has no peer-address"),
        ({1: {"error": "no certificate"}}, "sidecar of node 1 is not ready: no certificate"),
        (
            {0: {"address": "127.0.0.1:7001", "fingerprint": "e" * 64}},
            "nodes 0 and 1 both claim address",
        ),
        (
            {0: {"address": "127.0.0.1:9", "fingerprint": f"{2:064x}"}},
            "nodes 0 and 1 both claim fingerprint",
        ),
        (
            {
                0: {"address": "", "fingerprint": "a" * 64},
                1: {"address": "", "fingerprint": "b" * 64},
            },
            "nodes 0 and 1 are neighbors, but neither can be dialed",
        ),
    ],
)
def test_what_cannot_be_connected_is_refused(peer, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        lead(Play(peer=peer))


def test_an_algorithm_of_the_app_is_refused():
    with pytest.raises(ConfigurationError, match="is not installed as a package"):
        lead(Play(), algorithm="flwr_decentral.testing.toys:Gossip")
