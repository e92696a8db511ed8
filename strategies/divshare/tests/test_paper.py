"""The invariants of DivShare, on machines stepped by hand and on small clusters."""

from collections import Counter, defaultdict
from functools import cache

import networkx as nx
import numpy as np
import pytest

from flwr_decentral.core import (
    MILLISECOND,
    SECOND,
    ConfigurationError,
    DropQueued,
    Message,
    Received,
    Report,
    Send,
    Started,
    Train,
    TrainDone,
)
from flwr_decentral.testing import Cluster, Faults, make_site
from flwr_decentral_divshare import DivShare, _draw

TENSORS = {
    "conv": np.zeros((7, 3, 3), np.float32),
    "bias": np.zeros(7, np.float32),
    "head": np.zeros((10, 40), np.float32),
}
SIZE = 63 + 7 + 400
PARTITIONS = ("rotation", "layerwise")


def of(kind, commands):
    return [command for command in commands if isinstance(command, kind)]


def vectors(n, size=SIZE, seed=0):
    return np.random.default_rng(seed).normal(size=(n, size)).astype(np.float32)


def started(algorithm, n=16, node=0, initial=None, graph=None, seed=0):
    graph = graph or nx.complete_graph(n)
    initial = TENSORS if initial is None else initial
    site = make_site(topology=graph, initial=initial, node=node, seed=seed)
    machine = algorithm.machine(site)
    machine.step(Started(at=0, up=site.neighbors))
    return machine


def train(machine, after, number=1):
    return machine.step(TrainDone(at=0, round=number, before=machine.model, after=after))


def give(machine, source, fragment, payload, step=1, **header):
    header = {"fragment": fragment, "fragments": machine.algorithm.fragments, **header}
    message = Message(kind="fragment", step=step, payload=payload, header=header)
    return machine.step(Received(at=0, source=source, message=message))


def naive(partition, x, pieces):
    """Average one coordinate after the other; the order of pieces is that of the sums."""
    where = [partition.indices(fragment).tolist() for fragment in range(partition.fragments)]
    result = x.copy()
    for p in range(len(x)):
        values = [payload[where[f].index(p)] for f, payload in pieces if p in where[f]]
        total = x[p]
        for value in values:
            total = np.float32(total + value)
        if values:
            result[p] = total * (np.float32(1) / np.float32(1 + len(values)))
    return result


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("fragments", [1, 3, 10, 64, SIZE])
def test_v1_fragments_are_a_balanced_partition(partition, fragments):
    algorithm = DivShare(fragments=fragments, partition=partition)
    cut = algorithm.cut(started(algorithm).site.layout)
    parts = [cut.indices(fragment) for fragment in range(fragments)]
    assert sorted(np.concatenate(parts)) == list(range(SIZE))
    lengths = [len(part) for part in parts]
    assert lengths == [cut.length(fragment) for fragment in range(fragments)]
    assert max(lengths) - min(lengths) <= (1 if partition == "layerwise" else cut.granularity)


@pytest.mark.parametrize("partition", PARTITIONS)
def test_v2_all_nodes_cut_alike(partition):
    algorithm = DivShare(partition=partition, partition_seed=5)
    one, other = (started(algorithm, node=node, seed=node).partition for node in (0, 7))
    different = DivShare(partition=partition, partition_seed=6).cut(started(algorithm).site.layout)
    for fragment in range(10):
        np.testing.assert_array_equal(one.indices(fragment), other.indices(fragment))
    assert any((one.indices(f) != different.indices(f)).any() for f in (0, 1))


@pytest.mark.parametrize("partition", PARTITIONS)
def test_v3_one_fragment_is_the_plain_average_of_models(partition):
    machine = started(DivShare(fragments=1, degree=3, partition=partition))
    x, a, b = vectors(3)
    sends = of(Send, train(machine, x))
    where = machine.partition.indices(0)
    np.testing.assert_array_equal(sends[0].message.payload, x[where])
    give(machine, 9, 0, b[where])
    give(machine, 4, 0, a[where])
    train(machine, x, 2)
    expected = (x + a + b) * (np.float32(1) / np.float32(3))
    np.testing.assert_array_equal(machine.model, expected)


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("count", [1, 7, 60])
def test_v4_v5_v6_aggregation_is_the_average_of_each_coordinate(partition, count):
    machine = started(DivShare(fragments=10, partition=partition))
    cut, x = machine.partition, vectors(1)[0]
    dice = np.random.default_rng(count)
    pieces = {}
    for _ in range(count):
        source, fragment = int(dice.integers(1, 16)), int(dice.integers(10))
        payload = dice.normal(size=cut.length(fragment)).astype(np.float32)
        if (source, fragment) not in pieces:
            give(machine, source, fragment, payload)
            pieces[source, fragment] = payload
    train(machine, x)
    used = [(fragment, pieces[source, fragment]) for source, fragment in sorted(pieces)]
    np.testing.assert_array_equal(machine.model, naive(cut, x, used))

    heard = np.zeros(SIZE, bool)
    least, most = x.copy(), x.copy()
    for fragment, payload in used:
        where = cut.indices(fragment)
        heard[where] = True
        least[where] = np.minimum(least[where], payload)
        most[where] = np.maximum(most[where], payload)
    np.testing.assert_array_equal(machine.model[~heard], x[~heard])
    slack = 16 * np.spacing(np.maximum(np.abs(least), np.abs(most)))
    assert (machine.model >= least - slack).all()
    assert (machine.model <= most + slack).all()


def test_golden_aggregation():
    machine = started(DivShare(fragments=4), initial=np.zeros(4, np.float32), n=3)
    where = [machine.partition.fragment_of(np.array([p]))[0] for p in range(4)]
    for source, values in ((1, {0: 2, 1: 4}), (2, {1: 1, 2: 3})):
        for p, value in values.items():
            give(machine, source, int(where[p]), np.array([value], np.float32))
    train(machine, np.zeros(4, np.float32))
    np.testing.assert_allclose(machine.model, [1, 5 / 3, 1.5, 0], rtol=2**-23)


@pytest.mark.parametrize(
    ("n", "fragments", "degree"), [(16, 10, 6), (5, 3, 4), (3, 7, 6), (2, 5, 1)]
)
def test_v7_each_fragment_goes_to_its_number_of_different_peers(n, fragments, degree):
    node = 1
    machine = started(DivShare(fragments=fragments, degree=degree), n=n, node=node)
    for number in range(1, 20):
        sends = of(Send, train(machine, vectors(1, seed=number)[0], number))
        receivers = defaultdict(list)
        for send in sends:
            receivers[send.message.header["fragment"]].append(send.to)
        copies = min(degree, n - 1)
        assert len(sends) == fragments * copies
        assert sorted(receivers) == list(range(fragments))
        for peers in receivers.values():
            assert len(set(peers)) == copies
            assert node not in peers
        assert sum(len(send.message.payload) for send in sends) == copies * SIZE


def test_receivers_of_a_fragment_share_one_message():
    machine = started(DivShare(fragments=4, degree=6))
    sends = of(Send, train(machine, vectors(1)[0]))
    assert len({id(send.message) for send in sends}) == 4
    assert len({id(send.message.payload) for send in sends}) == 4


def test_trained_model_is_sent_before_it_is_averaged():
    machine = started(DivShare(fragments=4, degree=2))
    x, y = vectors(2)
    for fragment in range(4):
        give(machine, 3, fragment, y[machine.partition.indices(fragment)])
    commands = train(machine, x)
    assert isinstance(commands[0], DropQueued)
    assert isinstance(commands[-1], Train)
    for send in of(Send, commands):
        where = machine.partition.indices(send.message.header["fragment"])
        np.testing.assert_array_equal(send.message.payload, x[where])
    np.testing.assert_array_equal(commands[-1].model, (x + y) * np.float32(0.5))


SLOW_LINKS = Faults(uplink=180 * MILLISECOND, delay=(MILLISECOND, 300 * MILLISECOND), reorder=True)


@cache
def congested(flush):
    """Send 15 messages a round through uplinks that manage 5."""
    return Cluster(
        DivShare(fragments=5, degree=3, flush=flush),
        topology=nx.complete_graph(6),
        initial=TENSORS,
        train=lambda _node, _round, x: x + np.float32(0.1),
        rounds=12,
        faults=SLOW_LINKS,
    ).run()


def test_v8_nothing_of_an_older_round_is_started():
    cluster = congested(flush=True)
    assert len(cluster.sent) > 6 * 12 * 5
    for sent in cluster.sent:
        # The queue of the last round is worked off undisturbed.
        assert sent.message.step == min(sent.at // SECOND, 12)


@pytest.mark.slow
def test_without_flush_the_age_of_what_is_used_grows():
    ages = {}
    for flush in (True, False):
        staleness = congested(flush).counters["staleness"]
        ages[flush] = staleness.total / staleness.count
    assert ages[True] < 2.5
    assert ages[False] > ages[True] + 1.5


@pytest.mark.parametrize("fragments", [1, 10])
def test_v9_equal_models_stay_equal(fragments):
    common = vectors(1)[0]
    cluster = Cluster(
        DivShare(fragments=fragments, degree=4),
        topology=nx.complete_graph(8),
        initial=common,
        train=lambda _node, _round, x: x.copy(),
        rounds=2,
        faults=Faults(uplink=MILLISECOND),
    ).run()
    # One rounding for each term of the sum, of at most half an ulp of up to 8 times the result, and
    # one for the factor: 4 ulp a term.
    np.testing.assert_array_max_ulp(cluster.models, np.tile(common, (8, 1)), maxulp=32)


def gossip(start, seed):
    """Only average, from given models, until all agree."""
    algorithm, initial = DivShare(fragments=2, degree=4), np.zeros(start.shape[1], np.float32)
    nodes = [
        started(algorithm, n=len(start), node=node, initial=initial, seed=seed)
        for node in range(len(start))
    ]
    for number in range(1, 21):
        models = start if number == 1 else [machine.model for machine in nodes]
        answers = [train(machine, models[node], number) for node, machine in enumerate(nodes)]
        for node, commands in enumerate(answers):
            for send in of(Send, commands):
                event = Received(at=0, source=node, message=send.message)
                nodes[send.to].step(event)
    return np.stack([machine.model for machine in nodes])


@pytest.mark.slow
def test_v10_mean_is_kept_on_average_only():
    shifts, spread = [], []
    for seed in range(4):
        start = vectors(16, size=64, seed=seed)
        end = gossip(start, seed)
        shifts.append(end.mean(axis=0) - start.mean(axis=0))
        spread.append(end.std(axis=0))
    shifts = np.concatenate(shifts)
    assert np.max(spread) < 1e-3  # consensus: all nodes agree on the shifted mean
    # Signs of the starting values are independent, so these are 256 uncorrelated numbers of mean 0;
    # 4 standard errors are exceeded once in 16,000 times.
    assert abs(shifts.mean()) < 4 * shifts.std() / np.sqrt(shifts.size)
    assert 0.02 < shifts.std() < 0.1


@pytest.mark.slow
def test_v11_share_of_fragments_that_reach_nobody():
    n, degree, fragments, rounds = 20, 3, 10, 40
    x = vectors(1)[0]
    missed = 0
    nodes = [started(DivShare(degree=degree), n=n, node=node) for node in range(n)]
    for number in range(1, rounds + 1):
        reached = {
            (send.to, send.message.header["fragment"])
            for machine in nodes
            for send in of(Send, train(machine, x, number))
        }
        missed += n * fragments - len(reached)
    p = (1 - degree / (n - 1)) ** (n - 1)
    trials = n * fragments * rounds
    # Misses of one fragment exclude one another a little, so the binomial deviation is a bound.
    assert abs(missed / trials - p) < 4 * np.sqrt(p * (1 - p) / trials)


def chi_square(counts, expected):
    return float(((np.asarray(counts) - expected) ** 2 / expected).sum())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("population", "count", "bound"), [(5, 3, 33.7), (6, 1, 25.7), (6, 5, 25.7)]
)
def test_receivers_are_a_uniform_subset(population, count, bound):
    rows = 20_000
    drawn = _draw(np.random.default_rng(8), population, rows, count)
    subsets = Counter(frozenset(row) for row in drawn.tolist())
    assert all(len(subset) == count for subset in subsets)
    possible = {3: 10, 1: 6, 5: 6}[count]
    assert len(subsets) == possible
    # The bounds are the quantiles of chi-square at 1 - 1e-4 with 9 and 5 degrees of freedom.
    assert chi_square(list(subsets.values()), rows / possible) < bound


def test_all_of_a_population_can_be_drawn():
    drawn = _draw(np.random.default_rng(8), 4, 3, 4)
    assert np.sort(drawn, axis=1).tolist() == [[0, 1, 2, 3]] * 3


def test_queue_is_in_random_order_and_fragments_choose_independently():
    machine = started(DivShare(fragments=5, degree=2), n=4)
    x = vectors(1)[0]
    first, pairs = Counter(), Counter()
    for number in range(1, 1001):
        sends = of(Send, train(machine, x, number))
        first[sends[0].message.header["fragment"], sends[0].to] += 1
        to = defaultdict(set)
        for send in sends:
            to[send.message.header["fragment"]].add(send.to)
        pairs[frozenset(to[0]), frozenset(to[1])] += 1
    assert len(first) == 15
    assert chi_square(list(first.values()), 1000 / 15) < 42.6  # 14 degrees of freedom, 1e-4
    assert len(pairs) == 9
    assert chi_square(list(pairs.values()), 1000 / 9) < 31.8  # 8 degrees of freedom, 1e-4


def test_more_fragments_than_parameters_are_refused_before_training():
    graph, small = nx.complete_graph(3), np.zeros(4, np.float32)
    site = make_site(topology=graph, initial=small)
    for partition in PARTITIONS:
        algorithm = DivShare(fragments=5, partition=partition)
        with pytest.raises(ConfigurationError, match="5 fragments"):
            algorithm.check(graph, site.layout)
        with pytest.raises(ConfigurationError, match="5 fragments"):
            algorithm.machine(site)
        assert not DivShare(fragments=4, degree=2, partition=partition).check(graph, site.layout)


def test_check_warns_of_what_cannot_have_its_effect():
    layout = make_site(topology=nx.path_graph(3), initial=TENSORS).layout
    (warning,) = DivShare(degree=3).check(nx.complete_graph(3), layout)
    assert "degree 3 is more than some node has neighbors, 2:" in warning
    (warning,) = DivShare(degree=1, granularity=64).check(nx.complete_graph(3), layout)
    assert "2 of 10 fragments are empty" in warning
    assert not DivShare(degree=2).check(nx.complete_graph(3), layout)


@pytest.mark.parametrize(
    "parameters",
    [
        {"fragments": 0},
        {"degree": 0},
        {"granularity": -1},
        {"granularity": 48},
        {"partition": "layers"},
        {"partition_seed": -1},
        {"partition_seed": 2**64},
        {"max_age": -1},
    ],
)
def test_impossible_parameters_are_refused(parameters):
    with pytest.raises(ConfigurationError):
        DivShare(**parameters)


def test_reports_say_what_was_used_and_how_old_it_was():
    machine = started(DivShare(fragments=4, degree=1))
    cut, x = machine.partition, vectors(1)[0]
    give(machine, 1, 0, np.zeros(cut.length(0), np.float32), step=3)
    give(machine, 2, 0, np.zeros(cut.length(0), np.float32), step=9)
    (report,) = of(Report, train(machine, x, 8))
    assert report == Report(name="staleness", count=2, total=4.0)
    assert not of(Report, train(machine, x, 9))
