"""The roll call: who is there, and what is said when it is not as it should be."""

import os
import sys

import pytest
from flwr.app import Context, Error, Message, RecordDict
from flwr.common.constant import ErrorCode

from flwr_decentral.core import ConfigurationError, RuntimeFault
from flwr_decentral.flower import decentral_mod, mod
from flwr_decentral.flower import roster as module
from flwr_decentral.flower.grid import GridMeter
from flwr_decentral.flower.roster import call_roll

from .toys import answer, federate, make_client

NODES = {12: 0, 10: 1, 11: 2}
"""Flower's node ids, in no order, and the partition-ids that they have."""


class FakeGrid:
    """A grid whose nodes answer at once, with the real mod or as ``behave`` says.

    Each time it is asked for its nodes, ``arrivals`` more of them have registered.
    """

    def __init__(self, nodes=NODES, arrivals=3, **behave):
        self.nodes = nodes
        self.arrivals = arrivals
        self.behave = behave
        self.registered = 0
        self.replies = {}
        self.asked = []

    def get_node_ids(self):
        self.registered = min(self.registered + self.arrivals, len(self.nodes))
        return list(self.nodes)[: self.registered]

    def push_messages(self, messages):
        for message in messages:
            metadata = message.metadata
            metadata.__dict__["_message_id"] = f"message-{len(self.asked)}"
            self.asked.append((metadata.message_type, metadata.dst_node_id))
            reply = self.behave.get(metadata.message_type, with_mod)(self, message)
            if reply is not None:
                self.replies[metadata.message_id] = reply
            yield metadata.message_id

    def pull_messages(self, ids):
        return [self.replies.pop(message_id) for message_id in ids if message_id in self.replies]


def with_mod(grid: FakeGrid, message: Message) -> Message:
    node_id = message.metadata.dst_node_id
    config = {"partition-id": grid.nodes[node_id], "num-partitions": len(grid.nodes)}
    context = Context(7, node_id, config, RecordDict(), {})
    return decentral_mod(message, context, without_mod)


def without_mod(message: Message, context: Context) -> Message:
    del context
    return answer(message)


def raising(grid: FakeGrid, message: Message) -> Message:
    del grid
    return Message(Error(code=3, reason="KeyError: 'arrays'"), reply_to=message)


def silent(grid: FakeGrid, message: Message) -> Message | None:
    return None if message.metadata.dst_node_id == 10 else with_mod(grid, message)


def roll(grid: FakeGrid, at_least: int = 1, patience: float = 5.0):
    return call_roll(GridMeter(grid), at_least=at_least, patience=patience)


pytestmark = pytest.mark.usefixtures("identity")


def test_nodes_are_put_in_the_order_of_their_partition_ids():
    roster = roll(FakeGrid())
    assert roster.node_ids == (12, 10, 11)
    assert roster.evaluates
    assert {"flwr", "flwr-decentral", "numpy", "python"} <= set(roster.versions)


@pytest.mark.parametrize("arrivals", [1, 2])
def test_nodes_that_register_late_are_waited_for(arrivals):
    grid = FakeGrid(arrivals=arrivals)
    assert roll(grid).node_ids == (12, 10, 11)
    trains = [node_id for kind, node_id in grid.asked if kind == "train"]
    assert sorted(trains) == [10, 11, 12]


def test_nodes_that_never_register_are_counted():
    grid = FakeGrid(nodes={**NODES, 13: 3}, arrivals=0)
    with pytest.raises(RuntimeFault, match="only 0 of 1 nodes have registered.*setup_timeout"):
        roll(grid, patience=0.0)
    grid.registered = 2
    with pytest.raises(RuntimeFault, match="only 2 of 4 nodes have registered"):
        roll(grid, patience=0.1)


def test_nodes_that_do_not_answer_are_named():
    with pytest.raises(RuntimeFault, match=r"1 Flower nodes did not answer in time, among them 10"):
        roll(FakeGrid(train=silent), patience=0.1)


class Dying:
    """Fail what comes first, as a message does whose client process dies."""

    def __init__(self, times: int, code: int) -> None:
        self.times, self.code = times, code

    def __call__(self, grid: FakeGrid, message: Message) -> Message:
        self.times -= 1
        if self.times < 0:
            return with_mod(grid, message)
        return Message(Error(code=self.code, reason="the actor died"), reply_to=message)


@pytest.mark.parametrize("code", [ErrorCode.UNKNOWN, ErrorCode.CLIENT_APP_CRASHED])
@pytest.mark.parametrize("question", ["train", "evaluate"])
def test_a_process_that_dies_when_it_is_asked_is_replaced_by_another(question, code):
    grid = FakeGrid(**{question: Dying(4, code)})
    roster = roll(grid)
    assert roster.node_ids == (12, 10, 11)
    assert roster.evaluates
    asked = [node_id for kind, node_id in grid.asked if kind == question]
    assert len(asked) == 4 + (3 if question == "train" else 1)  # and nobody twice without need


def test_if_only_dead_processes_answer_the_run_ends(monkeypatch):
    monkeypatch.setattr(module, "NOBODY", 0.1)
    grid = FakeGrid(train=Dying(10**9, ErrorCode.UNKNOWN))
    with pytest.raises(
        RuntimeFault, match="left that says who Flower node 1[0-2] is: the actor died"
    ):
        roll(grid)


def test_a_grid_that_takes_no_message_ends_the_run():
    class Stopped(FakeGrid):
        def push_messages(self, messages):
            return []

    with pytest.raises(RuntimeFault, match="Flower refused a message to node 10"):
        roll(Stopped())


def test_a_reply_that_is_handed_out_twice_counts_once():
    class Stammering(FakeGrid):
        def pull_messages(self, ids):
            return [reply for reply in super().pull_messages(ids) for _ in range(2)]

    assert roll(Stammering()).node_ids == roll(FakeGrid()).node_ids


def test_a_partition_id_that_is_claimed_twice_is_refused_naming_both():
    with pytest.raises(
        ConfigurationError, match="partition-id 0 is claimed by Flower nodes 10 and"
    ):
        roll(FakeGrid(nodes={10: 0, 11: 1, 12: 0}))


def test_a_gap_in_the_partition_ids_is_named():
    with pytest.raises(ConfigurationError, match=r"0 to 2; missing: \[1\], beyond: \[3\]"):
        roll(FakeGrid(nodes={10: 0, 11: 3, 12: 2}))


def test_nodes_without_a_partition_id_are_refused(monkeypatch):
    facts = mod.facts_of
    monkeypatch.setattr(
        mod, "facts_of", lambda context: {**facts(context), "node": -1, "nodes": -1}
    )
    with pytest.raises(ConfigurationError, match="no partition-id and num-partitions"):
        roll(FakeGrid())


def test_fewer_nodes_than_asked_for_are_refused():
    assert roll(FakeGrid(), at_least=3).node_ids
    with pytest.raises(ConfigurationError, match="there are 3 nodes, but min_available_nodes"):
        roll(FakeGrid(), at_least=4)


def test_a_node_on_another_host_is_refused_by_name(monkeypatch):
    facts = mod.facts_of

    def elsewhere(context):
        moved = {"host": "elsewhere"} if context.node_id == 10 else {}
        return {**facts(context), **moved}

    monkeypatch.setattr(mod, "facts_of", elsewhere)
    complaint = r"node 1 \(Flower node 10\) runs on host 'elsewhere'.*one host"
    with pytest.raises(RuntimeFault, match=complaint):
        roll(FakeGrid())


# --- virtual nodes in real time -------------------------------------------------------------------


class FakeRay:
    """What an actor sees of Ray: two hosts that are there, and one that has gone."""

    def __init__(self, **needs):
        self.needs = needs

    def is_initialized(self):
        return True

    def get_runtime_context(self):
        return self

    def get_assigned_resources(self):
        return self.needs

    def nodes(self):
        alive = [{"CPU": 3.0, "GPU": 1.0, "memory": 1.0}, {"CPU": 2.0}]
        hosts = [{"Alive": True, "Resources": resources} for resources in alive]
        return [*hosts, {"Alive": False, "Resources": {}}]


@pytest.mark.parametrize(
    ("needs", "cores", "at_once"),
    [
        ({"CPU": 1.0}, 8, 5),
        ({"CPU": 2.0}, 8, 2),
        ({"CPU": 1.0, "GPU": 0.5}, 8, 2),
        ({"CPU": 0.1}, 8, 12),
        ({"CPU": 0.01}, 64, 32),
        ({}, 8, 0),
    ],
)
def test_how_many_clients_run_at_once(needs, cores, at_once, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", FakeRay(**needs))
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(os, "process_cpu_count", lambda: cores, raising=False)
    assert mod.clients_at_once() == at_once


def test_outside_of_the_engine_that_is_not_known(monkeypatch):
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    assert mod.clients_at_once() == 0


def test_more_virtual_nodes_than_run_at_once_are_refused_before_anything_starts(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", FakeRay(CPU=2.0))
    grid = FakeGrid()
    complaint = "3 virtual nodes cannot gossip in real time.*the engine runs 2 at once"
    with pytest.raises(ConfigurationError, match=complaint):
        call_roll(GridMeter(grid), at_least=1, patience=5.0, real_time=True)
    assert len(grid.asked) == 3, "each has been asked once, and told nothing"


# --- a forgotten mod ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_an_answer_without_the_mod_is_refused(kind):
    grid = FakeGrid(**{kind: lambda _, message: without_mod(message, None)})
    with pytest.raises(ConfigurationError, match=rf"@app\.{kind}\(mods=\[decentral_mod\]\)"):
        roll(grid)


@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_a_client_that_raises_when_asked_is_shown_with_its_reason(kind):
    with pytest.raises(ConfigurationError, match=r"KeyError: 'arrays'.*the mod is missing"):
        roll(FakeGrid(**{kind: raising}))


def test_clients_need_not_evaluate():
    def unregistered(grid, message):
        reason = "ValueError: No evaluate function registered with name 'default'"
        return Message(Error(code=3, reason=reason), reply_to=message)

    assert not roll(FakeGrid(evaluate=unregistered)).evaluates


# --- the same through Flower ----------------------------------------------------------------------


def test_a_mod_that_is_missing_on_train_is_said():
    with pytest.raises(ConfigurationError, match=r"@app\.train\(mods=\[decentral_mod\]\)"):
        federate(make_client(mods=[]))


def test_a_mod_that_is_missing_on_evaluate_is_said():
    client = make_client(evaluate=None)
    client.evaluate()(lambda message, context: without_mod(message, context))
    with pytest.raises(ConfigurationError, match=r"@app\.evaluate\(mods=\[decentral_mod\]\)"):
        federate(client)


def test_a_client_without_an_evaluate_function_works(caplog):
    result = federate(make_client(evaluate=None))
    assert "has no evaluate function" in caplog.text
    assert result.run is not None
    assert [entry.metrics for entry in result.run.evaluations] == [{}, {}, {}]
    assert result.evaluate_metrics_clientapp == {}
    assert result.run.status == "completed"


def test_fewer_nodes_than_fedavg_was_to_have_are_refused():
    with pytest.raises(ConfigurationError, match="there are 2 nodes, .* asks for 3"):
        federate(make_client(), nodes=2, min_train_nodes=3)
    with pytest.raises(ConfigurationError, match="there are 2 nodes, .* asks for 4"):
        federate(make_client(), nodes=2, min_available_nodes=4)
