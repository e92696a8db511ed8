"""Conditions: times and reachability, against closed forms and by counting nanoseconds."""

import math
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_decentral.core import SECOND, Seeds
from flwr_decentral.sim.conditions import Conditions
from flwr_decentral.sim.scenario import Compute, Network, Outage, Partition, Scenario


def resolve(nodes: int = 4, seed: int = 1, **parts) -> Conditions:
    return Scenario(**parts).resolve(nodes, Seeds(seed))


def outages(*intervals: tuple[float, float | None], node: int = 0) -> list[Outage]:
    return [Outage(node=node, start=start, end=end) for start, end in intervals]


# --- network --------------------------------------------------------------------------------------


def test_defaults():
    conditions = resolve()
    assert conditions.nodes == 4
    assert conditions.uplink_bps == conditions.downlink_bps == (math.inf,) * 4
    assert conditions.loss == 0
    assert conditions.latency_ns(0, 3) == 1_000_000
    assert conditions.duration_ns(2, 7) == SECOND
    assert conditions.outages == ((),) * 4
    assert conditions.partitions == ()
    assert conditions.changes() == []


def test_bandwidth_of_all_or_of_each():
    conditions = resolve(network=Network(uplink="1 Mbit/s", downlink=[1e6, None, 2e6, 3e6]))
    assert conditions.uplink_bps == (1e6,) * 4
    assert conditions.downlink_bps == (1e6, math.inf, 2e6, 3e6)


def test_latency_matrix_need_not_be_symmetric():
    conditions = resolve(2, network=Network(latency=[[0, "1 ms"], ["2 ms", 0]]))
    assert conditions.latency_ns(0, 1) == 1_000_000
    assert conditions.latency_ns(1, 0) == 2_000_000


def test_memory_stays_linear_in_the_nodes():
    conditions = resolve(4096, compute=Compute(stragglers=0.5, slowdown=5))
    assert isinstance(conditions.latency, int)
    assert sys.getsizeof(conditions.uplink_bps) < 64 * 4096
    assert sum(map(sys.getsizeof, conditions.durations)) < 128 * 4096


# --- compute --------------------------------------------------------------------------------------


def test_factors():
    conditions = resolve(3, compute=Compute(seconds=2, factors=[1, 2.5, 0.5]))
    assert [conditions.duration_ns(node, 1) / SECOND for node in range(3)] == [2, 5, 1]


def test_a_trace_starts_again_and_is_scaled():
    compute = Compute(trace=[[1, 2, 3], [5]], factors=[1, 2], seconds=99)
    conditions = resolve(2, compute=compute)
    assert [conditions.duration_ns(0, r) // SECOND for r in range(1, 8)] == [1, 2, 3, 1, 2, 3, 1]
    assert [conditions.duration_ns(1, r) // SECOND for r in range(1, 3)] == [10, 10]


def test_a_round_may_take_no_time():
    assert resolve(compute=Compute(seconds=0)).duration_ns(0, 1) == 0


def slow_nodes(nodes: int, share: float, seed: int) -> set[int]:
    conditions = resolve(nodes, seed, compute=Compute(stragglers=share, slowdown=5))
    durations = [conditions.duration_ns(node, 1) for node in range(nodes)]
    assert set(durations) <= {SECOND, 5 * SECOND}
    return {node for node, duration in enumerate(durations) if duration > SECOND}


@pytest.mark.parametrize(
    ("nodes", "share", "expected"),
    [(8, 0.5, 4), (8, 0, 0), (8, 1, 8), (5, 0.5, 3), (3, 0.1, 0), (60, 0.3, 18)],
)
def test_the_share_of_stragglers(nodes, share, expected):
    assert len(slow_nodes(nodes, share, seed=3)) == expected


def test_the_run_seed_chooses_the_stragglers():
    assert slow_nodes(64, 0.5, seed=1) == slow_nodes(64, 0.5, seed=1)
    assert slow_nodes(64, 0.5, seed=1) != slow_nodes(64, 0.5, seed=2)
    assert slow_nodes(64, 0.25, seed=1) < slow_nodes(64, 0.5, seed=1)


# --- outages --------------------------------------------------------------------------------------


def test_outages_are_merged_and_ascending():
    conditions = resolve(
        outages=[*outages((8, 9), (1, 3), (2, 4), (4, 5), (2, 2.5)), *outages((7, None), node=2)]
    )
    merged = ((1 * SECOND, 5 * SECOND), (8 * SECOND, 9 * SECOND))
    assert conditions.outages == (merged, (), ((7 * SECOND, None),), ())
    forever = resolve(outages=outages((3, 9), (2, None), (5, 6)))
    assert forever.outages[0] == ((2 * SECOND, None),)


def test_an_outage_includes_its_start_and_not_its_end():
    conditions = resolve(outages=outages((1, 2), (4, None)))
    at = [0, SECOND - 1, SECOND, 2 * SECOND - 1, 2 * SECOND, 4 * SECOND - 1, 4 * SECOND]
    assert [conditions.is_up(0, t) for t in at] == [True, True, False, False, True, True, False]
    assert conditions.is_up(1, SECOND)


@pytest.mark.parametrize(
    ("start", "duration", "end"),
    [
        (0, 1, 1),  # done before the outage
        (0, 2, 2),  # done as it starts
        (0, 3, 6),  # one second is left for after it
        (2, 1, 6),  # given as it starts
        (3, 0, 5),  # even nothing waits for the end
        (2, 0, 5),
        (1, 0, 1),
        (4, 4, 9),
        (5, 4, 9),  # given as it ends
        (0, 6, 9),  # up to the second outage
        (0, 7, 11),  # and over both
        (8, 5, 14),
        (10, 10, 20),  # up to the last one
        (10, 11, None),
        (19, 2, None),
        (20, 0, None),
        (25, 1, None),
        (0, 99, None),
    ],
)
def test_work_is_suspended_during_outages(start, duration, end):
    conditions = resolve(outages=outages((2, 5), (9, 10), (20, None)))
    done = conditions.completion_ns(0, start * SECOND, duration * SECOND)
    assert done == (None if end is None else end * SECOND)
    assert conditions.completion_ns(1, start * SECOND, duration * SECOND) == (
        (start + duration) * SECOND
    )


NS = 1e-9
intervals = st.tuples(st.integers(0, 40), st.none() | st.integers(1, 12)).map(
    lambda pair: (pair[0] * NS, None if pair[1] is None else (pair[0] + pair[1]) * NS)
)


@settings(max_examples=60, deadline=None)
@given(st.lists(intervals, max_size=5), st.integers(0, 50), st.integers(0, 20))
def test_work_and_outages_agree_with_counting_nanoseconds(cuts, start, duration):
    conditions = resolve(outages=outages(*cuts))

    def up(at: int) -> bool:
        return not any(round(a / NS) <= at and (b is None or at < round(b / NS)) for a, b in cuts)

    assert [conditions.is_up(0, at) for at in range(80)] == [up(at) for at in range(80)]
    expected, left = None, duration
    for at in range(start, 200):
        if not left and (duration or up(at)):
            expected = at
            break
        left -= up(at) and left > 0
    assert conditions.completion_ns(0, start, duration) == expected


# --- partitions -----------------------------------------------------------------------------------


def test_partitions_separate_groups_while_they_last():
    conditions = resolve(
        5,
        partitions=[
            Partition(groups=[[0, 1]], start=10, end=20),
            Partition(groups=[[0], [1]], start=5, end=6),
        ],
    )
    assert conditions.partitions == (
        (5 * SECOND, 6 * SECOND, (0, 1, 2, 2, 2)),
        (10 * SECOND, 20 * SECOND, (0, 0, 1, 1, 1)),
    )
    assert conditions.reachable(0, 1, 10 * SECOND)
    assert not conditions.reachable(0, 2, 10 * SECOND)
    assert conditions.reachable(3, 2, 10 * SECOND)
    assert not conditions.reachable(0, 1, 5 * SECOND)
    assert conditions.reachable(0, 1, 6 * SECOND)
    assert conditions.reachable(0, 2, 20 * SECOND)
    assert conditions.reachable(0, 2, 10 * SECOND - 1)


def test_overlapping_partitions_all_hold():
    conditions = resolve(
        3,
        partitions=[Partition(groups=[[0]], start=1), Partition(groups=[[1]], start=2, end=3)],
    )
    assert conditions.reachable(1, 2, 1 * SECOND)
    assert not conditions.reachable(1, 2, 2 * SECOND)
    assert not conditions.reachable(0, 2, 99 * SECOND)


def test_a_node_that_is_down_reaches_nobody():
    conditions = resolve(outages=outages((1, 2)))
    assert not conditions.reachable(0, 1, SECOND)
    assert not conditions.reachable(1, 0, SECOND)
    assert conditions.reachable(1, 2, SECOND)
    assert conditions.reachable(0, 1, 2 * SECOND)


def test_changes_are_distinct_and_ascending():
    conditions = resolve(
        outages=[*outages((3, 9)), *outages((3, None), node=1), *outages((0, 4), node=2)],
        partitions=[Partition(groups=[[0]], start=4, end=7), Partition(groups=[[1]], start=8)],
    )
    assert [at // SECOND for at in conditions.changes()] == [0, 3, 4, 7, 8, 9]


@settings(max_examples=60, deadline=None)
@given(st.lists(intervals, max_size=4), st.lists(intervals, max_size=2))
def test_nothing_changes_but_at_a_change(cuts, splits):
    conditions = resolve(
        3,
        outages=outages(*cuts),
        partitions=[Partition(groups=[[0, 1]], start=start, end=end) for start, end in splits],
    )

    def state(at: int) -> list[bool]:
        return [conditions.reachable(a, b, at) for a in range(3) for b in range(a, 3)]

    moments = {at for at in range(1, 80) if state(at) != state(at - 1)}
    assert moments <= set(conditions.changes())
