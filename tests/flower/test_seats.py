"""Who sits where, before a grid that answers what this file lets it answer."""

from __future__ import annotations

import re
import time

import pytest
from flwr.app import ConfigRecord, Error, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from flwr_decentral.core import ConfigurationError, RuntimeFault
from flwr_decentral.flower import seats as module
from flwr_decentral.flower.control import CONTROL, dump_facts
from flwr_decentral.flower.grid import GridMeter
from flwr_decentral.flower.seats import Seats

from .inprocess import task_identity

FIRST = 100
"""What Flower calls node 0."""


class Desk(Grid):
    """A grid that keeps messages until it is told what is answered."""

    def __init__(self) -> None:
        self.online = [FIRST, FIRST + 1]
        self.refused: set[int] = set()
        self.open: dict[str, Message] = {}
        self.replies: dict[str, Message] = {}

    def set_run(self, run) -> None: ...

    @property
    def run(self): ...

    def create_message(self, *arguments): ...

    def send_and_receive(self, messages, *, timeout=None): ...

    def get_node_ids(self):
        return self.online

    def push_messages(self, messages):
        (message,) = messages
        if message.metadata.dst_node_id in self.refused:
            return [""]
        message_id = f"message {len(self.open) + len(self.replies)}"
        message.metadata.__dict__["_message_id"] = message_id
        self.open[message_id] = message
        return [message_id]

    def pull_messages(self, message_ids):
        return [self.replies[each] for each in message_ids if each in self.replies]

    def asked(self, node_id: int) -> list[str]:
        """List the open questions to a node."""
        return [
            message_id
            for message_id, message in self.open.items()
            if message.metadata.dst_node_id == node_id and CONTROL in message.content
        ]

    def answer(self, message_id: str, facts: dict | None = None) -> None:
        content = RecordDict()
        if facts is not None:
            content[CONTROL] = ConfigRecord({"facts": dump_facts(facts)})
        self.replies[message_id] = Message(content, reply_to=self.open.pop(message_id))

    def fail(self, message_id: str) -> None:
        self.replies[message_id] = Message(Error(5, "gone"), reply_to=self.open.pop(message_id))


class World:
    def __init__(self) -> None:
        self.desk = Desk()
        self.welcomed: list[int] = []
        self.unwelcome = ""
        self.taken: list[str] = []
        self.seats = Seats(GridMeter(self.desk), [FIRST, FIRST + 1], self.welcome)

    def welcome(self, seat, peer) -> None:
        if self.unwelcome:
            raise ConfigurationError(self.unwelcome)
        self.welcomed.append(seat.index)

    def call(self, index: int, what: str, *, seconds: float = 60.0, allowed: float = 600.0) -> str:
        """Call a node; return the id of the message, or an empty one if it was refused."""
        seat, before = self.seats.all[index], set(self.desk.open)
        message = Message(RecordDict(), seat.node_id, MessageType.TRAIN)
        take = lambda reply: self.taken.append(what)  # noqa: E731
        self.seats.call(seat, message, what, take, seconds=seconds, allowed=allowed)
        return next(iter(self.desk.open.keys() - before), "")

    def listen(self, seconds: float = 0.05) -> bool:
        return self.seats.wait(lambda: True, time.monotonic() + seconds)

    def wait_for_question(self, node_id: int) -> str:
        deadline = time.monotonic() + 20
        while not self.desk.asked(node_id):
            assert time.monotonic() < deadline
            self.listen(0.01)
        return self.desk.asked(node_id)[-1]


@pytest.fixture
def world(monkeypatch):
    monkeypatch.setattr(module, "LATE", 0.02)
    monkeypatch.setattr(module, "_LOOK", 0.01)
    with task_identity():
        yield World()


def test_replies_are_taken_whoever_is_waited_for(world):
    first, second = world.call(0, "first"), world.call(1, "second")
    world.desk.answer(second)
    world.listen()
    assert world.taken == ["second"]
    world.desk.answer(first)
    assert world.seats.wait(lambda: any(seat.call for seat in world.seats.all))
    assert world.taken == ["second", "first"]
    assert world.seats.free == world.seats.all


def test_who_answers_a_question_has_lost_the_call_that_it_was_asked_about(world, caplog):
    world.call(0, "its work", seconds=0.0)
    question = world.wait_for_question(FIRST)
    world.desk.answer(question, {"node": 0, "peer": {"training": False}})
    assert not world.listen(), "it is back at once"
    assert "its SuperNode has started anew, and its work is lost" in caplog.text
    assert world.welcomed == [0]
    assert world.seats.all[0].node_id == FIRST
    assert world.seats.all[0].call is None


def test_who_still_trains_has_not_lost_its_call(world):
    call = world.call(0, "its work", seconds=0.0)
    question = world.wait_for_question(FIRST)
    world.desk.answer(question, {"node": 0, "peer": {"training": True}})
    world.listen()
    assert world.seats.all[0].call is not None
    world.desk.answer(call)
    world.listen()
    assert world.taken == ["its work"]


def test_an_answer_says_nothing_of_the_call_after_the_one_that_was_asked_about(world, caplog):
    slow = world.call(0, "slow", seconds=0.0)
    question = world.wait_for_question(FIRST)
    world.desk.answer(slow)
    world.listen()
    following = world.call(0, "following")
    world.desk.answer(question, {"node": 0, "peer": {"training": False}})
    world.listen()
    assert "away" not in caplog.text
    world.desk.answer(following)
    world.listen()
    assert world.taken == ["slow", "following"]


def test_a_node_that_is_late_is_asked_less_and_less_often(world):
    world.call(0, "its work", seconds=0.0)
    world.listen(1.0)  # 0.02 s and 0.02, 0.08, 0.32, 1.28 s after that
    assert 1 <= len(world.desk.asked(FIRST)) <= 4


def test_nodes_that_refuse_are_away_and_nobody_waits_for_them(world, caplog):
    world.desk.online = []
    world.desk.refused = {FIRST, FIRST + 1}
    assert world.call(0, "first") == world.call(1, "second") == ""
    assert [seat.node_id for seat in world.seats.all] == [None, None]
    assert [seat.call for seat in world.seats.all] == [None, None]
    assert re.search(r"Node 0 \(Flower node 100\) is away: .*Flower refused", caplog.text)
    assert re.search(r"Node 1 \(Flower node 101\) is away: .*Flower refused", caplog.text)


def test_a_call_has_a_deadline(world, caplog):
    world.desk.online = [FIRST + 1]
    world.call(0, "its work", allowed=0.05)
    assert world.seats.wait(lambda: world.seats.all[0].call is not None)
    assert "Node 0 (Flower node 100) is away: its work did not end in time" in caplog.text


def test_a_question_that_is_lost_is_asked_again(world, monkeypatch):
    monkeypatch.setattr(module, "_LOST", 0.05)
    world.desk.fail(world.call(0, "its work"))
    world.wait_for_question(FIRST)
    world.listen(0.2)
    _, second, *_ = world.desk.asked(FIRST)
    world.desk.answer(second, {"node": 0})
    assert not world.listen()
    assert world.welcomed == [0]
    assert world.listen(), "no more questions are open"
    assert world.seats._questions == {}


def test_a_node_that_does_not_answer_is_asked_less_and_less_often(world, monkeypatch):
    monkeypatch.setattr(module, "_LOST", 0.02)
    world.desk.fail(world.call(0, "its work"))
    world.listen(1.0)  # at once, and 0.02, 0.08, 0.32, 1.28 s after that
    assert 2 <= len(world.desk.asked(FIRST)) <= 4


def test_who_does_not_answer_is_waited_for_only_once(world, monkeypatch):
    monkeypatch.setattr(module, "_LOST", 0.0)
    world.desk.fail(world.call(0, "its work"))
    world.wait_for_question(FIRST)
    world.listen(0.1)
    assert len(world.desk.asked(FIRST)) > 1
    monkeypatch.setattr(module, "_ANSWER", 10**6)
    world.seats.hear_newcomers()


def test_an_error_does_not_say_that_a_call_is_lost(world, caplog):
    call = world.call(0, "its work", seconds=0.0)
    world.desk.fail(world.wait_for_question(FIRST))
    world.listen()
    assert "Flower node 100" not in caplog.text
    world.desk.answer(call)
    world.listen()
    assert world.taken == ["its work"]


def test_a_node_that_comes_back_under_another_id_takes_its_seat(world):
    world.desk.online = [FIRST + 1, 300]
    world.desk.fail(world.call(0, "its work"))
    world.desk.answer(world.wait_for_question(300), {"node": 0})
    assert not world.listen()
    assert world.seats.all[0].node_id == 300


@pytest.mark.parametrize("index", [-1, 1, 2])
def test_a_stranger_takes_no_seat(index, world, caplog):
    world.desk.online = [FIRST + 1, 300]
    world.desk.fail(world.call(0, "its work"))
    world.desk.answer(world.wait_for_question(300), {"node": index})
    world.listen()
    assert "Flower node 300 claims a seat that is taken; left out." in caplog.text
    assert world.seats.all[0].node_id is None
    assert world.desk.asked(300) == [], "not again at once"


def test_newcomers_are_heard_and_not_waited_for_too_long(world, monkeypatch):
    monkeypatch.setattr(module, "_ANSWER", 0.1)
    world.desk.fail(world.call(0, "its work"))
    begin = time.monotonic()
    world.listen(0.0)
    world.seats.hear_newcomers()
    assert time.monotonic() - begin < 10
    assert world.seats.all[0].node_id is None
    (question,) = world.desk.asked(FIRST)
    world.desk.answer(question, {"node": 0})
    world.seats.hear_newcomers()
    assert world.seats.all[0].node_id == FIRST


def test_when_all_are_away_the_first_to_come_back_is_waited_for(world):
    for index in range(2):
        world.desk.fail(world.call(index, "its work"))
    usual = world.desk.pull_messages

    def pull_messages(message_ids):
        for question in world.desk.asked(FIRST + 1):
            world.desk.answer(question, {"node": 1})
        return usual(message_ids)

    world.desk.pull_messages = pull_messages
    assert not world.seats.wait(lambda: False), "it does not leave while nobody is there"
    assert [seat.index for seat in world.seats.present] == [1]


def test_when_all_stay_away_the_run_fails(world, monkeypatch):
    monkeypatch.setattr(module, "_NOBODY", 0.1)
    world.desk.online = []
    for index in range(2):
        world.desk.fail(world.call(index, "its work"))
    with pytest.raises(RuntimeFault, match="none of the 2 nodes answers any more"):
        world.listen(60.0)


def test_in_the_end_nobody_is_asked_or_let_in_any_more(world, caplog):
    world.call(0, "its work", seconds=0.0)
    question = world.wait_for_question(FIRST)
    world.desk.fail(world.call(1, "its work"))
    newcomer = world.wait_for_question(FIRST + 1)
    world.seats.close()
    world.desk.answer(question, {"node": 0, "peer": {"training": False}})
    world.desk.answer(newcomer, {"node": 1})
    end = world.call(0, "the end")
    world.listen()
    assert "Node 0 (Flower node 100) is away" not in caplog.text
    assert world.welcomed == []
    world.desk.answer(end)
    assert world.seats.wait(lambda: world.seats.all[0].call is not None)
    assert world.taken == ["the end"]
