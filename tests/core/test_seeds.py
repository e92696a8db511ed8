import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_decentral.core import NodeSeeds, Seeds
from flwr_decentral.core.seeds import RUN


def first(generator, count=3):
    return generator.bit_generator.random_raw(count).tolist()


@pytest.mark.parametrize(
    ("run", "node", "purpose", "expected"),
    [
        (0, 0, "peers", [0x69A387AF30486330, 0xEA7F9BA31EFA0873, 0x8835021FB3DE747B]),
        (7, 3, "peers", [0xDF90EACF8B01F0BF, 0x191413A82FBB5B1A, 0x918A21FF63ABC8B7]),
        (7, RUN, "topology", [0x8E117CB2241B61C7, 0x6686430E882933D9, 0x5EDA4F9652ED6862]),
    ],
)
def test_golden_streams(run, node, purpose, expected):
    assert first(Seeds(run).generator(node, purpose)) == expected


def test_golden_numbers():
    numbers = [Seeds(7).number(3, "train", counter) for counter in range(4)]
    assert numbers == [858083182, 1684752369, 1250539286, 905349882]


def test_streams_start_anew_and_do_not_depend_on_the_order_of_asking():
    seeds = Seeds(5)
    forward = {node: first(seeds.generator(node, "peers")) for node in range(10)}
    seeds.generator(3, "queue").normal(size=1000)
    backward = {node: first(seeds.generator(node, "peers")) for node in reversed(range(10))}
    assert forward == backward


def test_nothing_global_is_touched_or_heard():
    before = np.random.get_state()[1].tolist()  # noqa: NPY002
    stream = first(Seeds(5).generator(0, "peers"))
    assert np.random.get_state()[1].tolist() == before  # noqa: NPY002
    np.random.seed(99)  # noqa: NPY002
    assert first(Seeds(5).generator(0, "peers")) == stream


def test_every_part_of_the_name_counts_and_parts_do_not_run_together():
    names = [
        (1, 2, "a"),
        (2, 1, "a"),
        (1, 2, "b"),
        (12, 3, "a"),
        (1, 23, "a"),
        (1, -1, "a"),
        (-1, 1, "a"),
    ]
    streams = {tuple(first(Seeds(run).generator(node, purpose))) for run, node, purpose in names}
    assert len(streams) == len(names)


@given(st.integers(), st.integers(-1, 10**6), st.text(max_size=20), st.integers(0, 2**70))
@settings(max_examples=80, deadline=None)
def test_numbers_are_seeds_of_31_bits(run, node, purpose, counter):
    number = Seeds(run).number(node, purpose, counter)
    assert 0 <= number < 2**31
    assert number == Seeds(run).number(node, purpose, counter)
    assert number == Seeds(run).of(node).number(purpose, counter)


def test_numbers_are_uniform_and_differ():
    numbers = np.array([Seeds(0).number(1, "train", counter) for counter in range(4000)])
    assert len(set(numbers.tolist())) == 4000
    counts = np.bincount(numbers >> 27, minlength=16)
    assert ((counts - 250) ** 2 / 250).sum() < 37.7  # 15 degrees of freedom, 0.1 %


def test_streams_of_neighboring_nodes_are_uncorrelated():
    draws = np.stack([Seeds(0).generator(node, "peers").normal(size=2000) for node in range(20)])
    correlation = np.corrcoef(draws) - np.eye(20)
    assert np.abs(correlation).max() < 5 / np.sqrt(2000)


def test_node_seeds_are_the_run_seeds_of_one_node():
    seeds = Seeds(3)
    assert seeds.of(4) == NodeSeeds(Seeds(3), 4)
    assert first(seeds.of(4).generator("queue")) == first(seeds.generator(4, "queue"))


@pytest.mark.slow
def test_streams_are_the_same_in_another_process():
    code = (
        "from flwr_decentral.core import Seeds\n"
        "print(Seeds(7).generator(3, 'peers').bit_generator.random_raw(3).tolist(),"
        " Seeds(7).number(3, 'train', 9))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "4321"}
    there = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    here = f"{first(Seeds(7).generator(3, 'peers'))} {Seeds(7).number(3, 'train', 9)}"
    assert there.stdout.strip() == here
