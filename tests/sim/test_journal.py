"""The journal: what tells one run from another, and what people read."""

import io

import numpy as np
import pytest

from flwr_decentral.core import Message, Send, SetTimer, Started, TrainDone
from flwr_decentral.core.transcript import vector_digest
from flwr_decentral.sim.journal import Journal

from .scripted import Idle, make, note, train_on


def model(*values):
    return np.array(values, np.float32)


def digest(*lines, models=()):
    journal = Journal()
    for line in lines:
        journal.note(line)
    for node, vector in enumerate(models):
        journal.model(node, vector)
    return journal.digest


def test_a_digest_is_32_hexadecimal_digits():
    assert len(digest()) == 32
    assert int(digest(), 16) >= 0


@pytest.mark.parametrize(
    "other",
    [
        digest("a"),
        digest("b", "a"),
        digest("ab"),
        digest("a", "b", ""),
        digest("a", "b", models=[model(1)]),
    ],
)
def test_lines_and_their_order_count(other):
    assert digest("a", "b") == digest("a", "b")
    assert digest("a", "b") != other


def test_final_models_count_to_the_bit():
    zero = digest(models=[model(1, 0), model(2)])
    assert zero == digest(models=[model(1, 0), model(2)])
    assert zero != digest(models=[model(1, -0.0), model(2)])
    assert zero != digest(models=[model(2), model(1, 0)])
    assert digest(models=[model(1)]) != digest(models=[model(1), model()])


def test_a_model_may_be_empty_or_read_only():
    vector = model(1, 2)
    vector.flags.writeable = False
    assert digest(models=[vector, model()]) == digest(models=[model(1, 2), model()])


def test_a_digest_can_be_read_on_the_way():
    journal = Journal()
    journal.note("a")
    assert journal.digest == digest("a")
    journal.note("b")
    assert journal.digest == digest("a", "b")


def test_a_transcript_is_for_reading_and_changes_no_digest():
    def talk(machine, event):
        yield from train_on(machine, event)
        if isinstance(event, TrainDone) and machine.node == 0:
            yield Send(to=1, message=note(event.round))

    def train(task, vector):
        if task.node:
            raise ValueError("no data")
        return vector + np.float32(1)

    transcript = io.StringIO()
    engine = make(talk, rounds=1, latency=0, function=train, journal=Journal(transcript), size=1)
    silent = make(talk, rounds=1, latency=0, function=train, size=1)
    assert engine.run() == engine.journal.digest == silent.run()
    lines = transcript.getvalue().splitlines()
    assert lines[0].startswith("0 n0 Started up=1 -> Train(round=1 model=1:")
    assert lines[2].startswith("1000000000 n0 TrainDone round=1 before=1:")
    assert "; Send(to=1 kind=note step=1)" in lines[2]
    assert lines[3].startswith("1000000000 n1 TrainFailed round=1 reason='ValueError: no data'")
    assert lines[4:] == [
        "1000000000 n0 Stopped reason='the run has ended'",
        "1000000000 n1 Stopped reason='the run has ended'",
    ]


class Lines(Journal):
    """Keep what goes into the digest."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def note(self, line):
        super().note(line)
        self.lines.append(line)


def test_a_line_for_each_event_says_what_it_was():
    def script(machine, event):
        yield from train_on(machine, event)
        if isinstance(event, Started) and machine.node == 0:
            yield SetTimer(name="alarm", at=3)
            message = Message(kind="model", step=7, header={"fragment": 4, "degree": 2})
            yield Send(to=1, message=message)

    def train(task, vector):
        if task.node:
            raise ValueError("no data")
        return vector + np.float32(1)

    journal = Lines()
    make(
        Idle(script=script),
        rounds=2,
        seconds="8 ns",
        function=train,
        uplink=64e9,
        latency="4 ns",
        partitions=[([[0]], "13 ns", "14 ns")],
        journal=journal,
        size=1,
    ).run()
    assert journal.lines == [
        "0 0 S",
        "0 1 S",
        "3 0 W alarm",
        f"8 0 T 1 {vector_digest(model(1))}",
        "8 1 F 1",
        "8 0 I",
        "12 1 R 0 model 7 4,2",
        "13 0 D 1",
        "13 1 D 0",
        "14 0 U 1",
        "14 1 U 0",
        f"16 0 T 2 {vector_digest(model(2))}",
        "16 1 F 2",
        "model 0",
        "model 1",
    ]
