from dataclasses import dataclass

import networkx as nx
import numpy as np
import pytest

from flwr_decentral.core import Letter, Mailbox, Seeds
from flwr_decentral.testing.inspection import find_exotic, fingerprint


@dataclass
class Point:
    x: float
    y: object = None


class Plain:
    def __init__(self, value):
        self.value = value


def mailbox(value):
    box = Mailbox()
    box.put(Letter(1, 0, 3, np.full(2, value, np.float32)))
    return box


def generator(draws):
    stream = Seeds(0).generator(0, "peers")
    stream.random(draws)
    return stream


MAKERS = [
    lambda: None,
    lambda: 1,
    lambda: True,
    lambda: 1.0,
    lambda: 0.0,
    lambda: -0.0,
    lambda: np.float32(1),
    lambda: "1",
    lambda: np.ones(1, np.float32),
    lambda: np.ones(1),
    lambda: np.ones((1, 1)),
    lambda: np.full(1, np.nan),
    lambda: [1, 2],
    lambda: (1, 2),
    lambda: [2, 1],
    lambda: {1, 2},
    lambda: {1: 2},
    lambda: {1: [2]},
    lambda: Point(1.0),
    lambda: Point(2.0),
    lambda: Point(2.0, y=[np.zeros(2)]),
    lambda: Plain(1),
    lambda: Plain([np.zeros(2)]),
    lambda: mailbox(1),
    lambda: mailbox(2),
    lambda: generator(1),
    lambda: generator(2),
    lambda: nx.path_graph(3),
    lambda: nx.path_graph(4),
    lambda: Plain,
    lambda: Plain(1).__init__,
]


def test_fingerprints_are_equal_exactly_for_equal_values():
    prints = [fingerprint(make()) for make in MAKERS]
    assert prints == [fingerprint(make()) for make in MAKERS]
    assert len({repr(each) for each in prints}) == len(MAKERS)


def test_fingerprints_of_what_contains_itself():
    loop = [1]
    loop.append(loop)
    assert fingerprint(loop) == fingerprint(loop)


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"log": [1, {"x": Point(1.0)}]}, "['log'][1]['x']: Point"),
        ({"f": len}, "['f']: builtin_function_or_method"),
        ({"a": np.array([None])}, "['a']: dtype object"),
        ({"box": mailbox(1)}, "['box']: Mailbox"),
        ({(1, Plain): 2}, "a key of [1]: type"),
    ],
)
def test_what_cannot_be_saved_is_found(value, where):
    assert find_exotic(value) == where


def test_what_can_be_saved_is_not_exotic():
    value = {"a": (1, 2.5, "x", b"y", None, True), "b": {1: [np.zeros(3)], (2, 3): {4}}}
    assert find_exotic(value) is None
    assert find_exotic(mailbox(1).snapshot()) is None
    assert find_exotic(generator(3).bit_generator.state) is None
