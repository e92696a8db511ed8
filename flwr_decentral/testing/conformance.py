"""Checks that every algorithm must pass: subclass, name yours, run pytest.

A whole test file of an algorithm:

    from flwr_decentral.testing.conformance import AlgorithmConformance
    from my_package import Mine

    class TestMine(AlgorithmConformance):
        algorithm = Mine()
        variants = (Mine(recipients=2), Mine(overlap=True))

Each check is one test, run for the algorithm and for each of its variants. What may be set:

==============  =================================================================================
algorithm       an instance: the one to check (required)
variants        further instances, for hyper-parameters that change the course of events
single          the instance for models of one parameter; ``algorithm`` by default
topologies      graphs by name; the first, of at least four nodes, also serves most of the checks.
                By default ring, complete, star and path, or trees where the algorithm needs one
faults()        what to survive, by name; by default
                :func:`~flwr_decentral.testing.faults.fault_matrix`
registered      False for an algorithm that no package registers
==============  =================================================================================

A failure names the algorithm, the node, and the time or the line of the transcript at which it went
wrong. It replays: nothing here depends on the machine or on the order of the tests.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, ClassVar

import networkx as nx
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from flwr_decentral.channel.rounds import Segment
from flwr_decentral.core import (
    HEADER_BYTES,
    SECOND,
    Algorithm,
    Capabilities,
    ConfigurationError,
    Layout,
    Machine,
    Vector,
    wire_bytes,
)
from flwr_decentral.core.algorithm import Topology

from .cluster import Cluster
from .faults import Faults, Outage, Split, fault_matrix
from .fresh import transcript_here, transcript_in_fresh_process
from .inspection import (
    CautiousCluster,
    DiceCluster,
    ProvenanceCluster,
    RestoringCluster,
    TwinCluster,
    fingerprint,
)
from .problems import Targets
from .replay import Replay
from .transcripts import digest, first_difference

# The group of flwr_decentral.plugins, which this kit does without.
_GROUP = "flwr_decentral.algorithms"
_ROUNDS = 30
_FEW_ROUNDS = 12
_CALM = Faults()
_ROUGH = Faults(
    drop=0.1,
    delay=(0, SECOND),
    reorder=True,
    outages=(
        Outage(1, round(3.3 * SECOND), round(6.7 * SECOND)),
        Outage(0, 5 * SECOND, 6 * SECOND),
    ),
    slow={1: 2.0},
)


def default_topologies(needs_tree: bool) -> dict[str, Topology]:
    """Make the graphs that algorithms are checked on, by name."""
    if needs_tree:
        return {
            "binary-tree": nx.balanced_tree(2, 2),
            "star": nx.star_graph(4),
            "path": nx.path_graph(5),
        }
    return {
        "ring": nx.cycle_graph(6),
        "complete": nx.complete_graph(5),
        "star": nx.star_graph(4),
        "path": nx.path_graph(5),
    }


class AlgorithmConformance:
    """The checks. See the head of :mod:`flwr_decentral.testing.conformance`."""

    algorithm: ClassVar[Algorithm]
    variants: ClassVar[Sequence[Algorithm]] = ()
    single: ClassVar[Algorithm | None] = None
    topologies: ClassVar[Mapping[str, Topology] | None] = None
    registered: ClassVar[bool] = True

    def faults(self) -> dict[str, Faults]:
        """List the faults to survive, by name, for runs of 30 rounds."""
        return fault_matrix(len(self.graph()))

    def storm(self) -> Faults:
        """Return many faults at once, for checks that have no faults of their own."""
        return fault_matrix(len(self.graph()))["storm"]

    def graphs(self) -> dict[str, Topology]:
        """List the topologies to run on, by name."""
        return dict(self.topologies or default_topologies(self.algorithm.capabilities.needs_tree))

    def graph(self) -> Topology:
        """Return the topology of the checks that need only one."""
        return next(iter(self.graphs().values()))

    def densest_graph(self) -> Topology:
        """Return the topology with the most links, where there is most to choose and to order."""
        return max(self.graphs().values(), key=lambda graph: len(graph.edges))

    def cases(self) -> dict[str, dict[str, Any]]:
        """List the values of each parameter of a check, by their names in test reports."""
        small = {f"{n}-nodes": nx.path_graph(n) for n in (1, 2, 3)}
        return {
            "subject": {_short(each): each for each in (self.algorithm, *self.variants)},
            "graph": small | self.graphs(),
            "faults": self.faults(),
        }

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Make one test of each combination."""
        for name, values in self.cases().items():
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, list(values.values()), ids=list(values))

    def run(
        self,
        subject: Algorithm,
        *,
        graph: Topology | None = None,
        faults: Faults = _CALM,
        rounds: int = _FEW_ROUNDS,
        kind: type[Cluster] = Cluster,
        **changes: Any,
    ) -> Cluster:
        """Run an algorithm, and check that every live node gets to the end with a sound model."""
        graph = self.graph() if graph is None else graph
        problem = Targets(nodes=len(graph))
        options = {"initial": problem.tensors, "train": problem.train, **changes}
        cluster = kind(subject, topology=graph, faults=faults, rounds=rounds, **options)
        with np.errstate(all="ignore"):  # what a machine makes of a NaN is for the checks to say
            cluster.run()
        _check_finished(cluster)
        return cluster

    # What an algorithm is.

    def test_is_a_frozen_keyword_only_dataclass(self, subject: Algorithm) -> None:
        """Hyper-parameters are plain values, frozen and compared by value."""
        cls = type(subject)
        options = cls.__dict__.get("__dataclass_params__")
        assert options is not None, f"{cls.__name__} is not decorated with @dataclass"
        assert options.frozen, f"{cls.__name__} must be @dataclass(frozen=True, kw_only=True)"
        assert options.eq, f"instances of {cls.__name__} must be comparable"
        for field in dataclasses.fields(subject):
            assert field.kw_only, f"{cls.__name__}.{field.name} must be keyword-only"
            value = getattr(subject, field.name)
            assert value is None or type(value) in (bool, int, float, str), (
                f"{field.name}={value!r} must be a bool, int, float, str or None, so that a "
                "configuration can hold it"
            )

    def test_can_be_printed_and_made_again(self, subject: Algorithm) -> None:
        """What is printed and what a configuration holds make the same algorithm."""
        cls: Any = type(subject)
        again = cls(**subject.parameters)
        assert again == subject, f"{subject!r} made again from its parameters is {again!r}"
        assert hash(again) == hash(subject), f"equal instances of {cls.__name__} hash differently"
        assert str(subject).startswith(f"{subject.name}("), f"unlike its name: {subject}"
        with pytest.raises(TypeError):
            cls(**subject.parameters, no_such_parameter=1)

    def test_says_what_it_is(self, subject: Algorithm) -> None:
        """Listings and the command line have something to show."""
        assert re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", subject.name), (
            f"a name is in kebab case, for the command line: {subject.name!r}"
        )
        assert isinstance(subject.capabilities, Capabilities), f"not: {subject.capabilities!r}"
        assert type(subject).__doc__, "the class docstring is what users read first"

    def test_is_registered_under_its_name(self) -> None:
        """The installed package offers this class under this name."""
        if not self.registered:
            pytest.skip("declared with registered = False")
        found = list(entry_points(group=_GROUP, name=self.algorithm.name))
        assert len(found) == 1, (
            f"{len(found)} installed packages register {self.algorithm.name!r} in {_GROUP}; "
            "is yours installed (pip install -e .)?"
        )
        loaded = found[0].load()
        assert loaded is type(self.algorithm), f"{found[0].value} is {loaded}"

    def test_accepts_its_topologies(self, subject: Algorithm, graph: Topology) -> None:
        """No graph that it is checked on is refused, not even a single node."""
        layout = Layout.of(Targets(nodes=1).tensors)
        warnings = subject.check(nx.freeze(nx.Graph(graph)), layout)
        assert all(isinstance(each, str) for each in warnings), f"not texts: {warnings!r}"

    def test_refuses_a_ring_if_it_needs_a_tree(self, subject: Algorithm) -> None:
        """A graph that cannot work is refused before any training."""
        if not subject.capabilities.needs_tree:
            pytest.skip("needs no tree")
        with pytest.raises(ConfigurationError):
            subject.check(nx.freeze(nx.cycle_graph(4)), Layout.of(Targets(nodes=1).tensors))

    def test_does_what_it_declares(self, subject: Algorithm) -> None:
        """Runtimes trust the declared capabilities."""
        capabilities, cluster = subject.capabilities, self.run(subject)
        assert bool(cluster.sent) == capabilities.communicates, (
            f"it declares communicates={capabilities.communicates} and sent {len(cluster.sent)} "
            "messages"
        )
        machine = type(cluster.machines[0])
        listens = machine.on_link_idle is not Machine.on_link_idle
        assert listens == capabilities.link_idle, (
            f"it declares link_idle={capabilities.link_idle}, but on_link_idle is "
            f"{'' if listens else 'not '}implemented"
        )

    # What a machine may do.

    def test_runs_to_the_end(self, subject: Algorithm, graph: Topology) -> None:
        """One, two and three nodes, and each topology, get through their rounds."""
        self.run(subject, graph=graph)

    def test_trains_models_of_one_parameter(self) -> None:
        """A model may be smaller than any number of fragments or nodes."""
        self.run(self.single or self.algorithm, initial=np.ones(1, np.float32))

    def test_answers_the_same_event_with_the_same_commands(self, subject: Algorithm) -> None:
        """A machine is a function of what happened to it."""
        self.run(subject, kind=TwinCluster)
        self.run(subject, kind=TwinCluster, faults=self.storm())

    def test_goes_on_from_any_snapshot(self, subject: Algorithm) -> None:
        """STATE names the whole state, in values that can be saved."""
        self.run(subject, kind=RestoringCluster)
        self.run(subject, kind=RestoringCluster, faults=self.storm())

    def test_leaves_events_and_shared_vectors_alone(self, subject: Algorithm) -> None:
        """Receivers, the trainer and the sender share vectors."""
        self.run(subject, kind=CautiousCluster)
        self.run(subject, kind=CautiousCluster, faults=self.storm())

    def test_leaves_its_snapshot_alone(self, subject: Algorithm) -> None:
        """A snapshot is a copy."""
        problem, graph = Targets(nodes=len(self.graph())), self.graph()
        options: dict[str, Any] = {"topology": graph, "initial": problem.tensors}
        cluster = Cluster(subject, train=problem.train, rounds=_FEW_ROUNDS, **options)
        cluster.run(until=4 * SECOND)
        held = [machine.snapshot() for machine in cluster.machines]
        before = fingerprint(held)
        cluster.run()
        assert fingerprint(held) == before, "a snapshot changes with the machine it was taken of"

    def test_does_its_arithmetic_through_ops(self, subject: Algorithm) -> None:
        """The native kernel, and handles, take the place of numpy."""
        self.run(subject, kind=ProvenanceCluster)
        self.run(subject, kind=ProvenanceCluster, faults=self.storm())

    def test_counts_the_steps_of_its_messages_up(self, subject: Algorithm) -> None:
        """Receivers can tell newer from older, and bytes are declared."""
        newest: dict[Any, int] = {}
        for _, src, dst, message in self.run(subject).sent:
            length = 0 if message.payload is None else len(message.payload)
            size = HEADER_BYTES + wire_bytes(length, message.wire)
            assert message.nbytes == size, f"{message.nbytes} bytes are declared, not {size}"
            content = (src, dst, message.kind, *sorted(message.header.items()))
            assert message.step > newest.get(content, -1), (
                f"node {src} sends {message.kind!r} of step {message.step} to {dst} after step "
                f"{newest[content]}: receivers tell newer from older by the step"
            )
            newest[content] = message.step

    # What a run is.

    def test_repeats(self, subject: Algorithm) -> None:
        """One seed is one run, bit for bit."""
        first, second = (self.run(subject, faults=self.storm()).transcript for _ in range(2))
        difference = first_difference(first, second)
        assert difference is None, f"two runs of one seed differ: {difference}"

    def test_follows_the_seed_if_it_draws(self, subject: Algorithm) -> None:
        """Randomness comes from the seeds of the site, and from nowhere else."""
        graph = self.densest_graph()
        runs = [self.run(subject, graph=graph, seed=seed, kind=DiceCluster) for seed in (0, 1)]
        digests = {digest(run.transcript) for run in runs}
        if any(isinstance(run, DiceCluster) and run.draws for run in runs):
            assert len(digests) == 2, "it draws random numbers, and yet the seed changes nothing"
        else:
            assert len(digests) == 1, "it draws nothing from site.seeds, and yet the seed matters"

    def test_does_the_same_in_real_time(self, subject: Algorithm) -> None:
        """The sidecar's pump makes of what happens what virtual time makes of it."""
        problem = Targets(nodes=len(self.graph()))
        cluster = self.run(subject, faults=_ROUGH)
        sites = [machine.site for machine in cluster.machines]

        def train(node: int, round: int, seed: int, x: Vector) -> Vector:
            del seed
            return problem.train(node, round, x)

        segment = Segment(last_round=_FEW_ROUNDS)
        Replay(subject, sites, train, segment).run(cluster.transcript)

    def test_repeats_in_a_fresh_process(self) -> None:
        """Nothing depends on hash seeds, addresses or the environment."""
        here = transcript_here(self.algorithm, self.densest_graph())
        there = transcript_in_fresh_process(self.algorithm, self.densest_graph())
        difference = first_difference(here, there)
        assert difference is None, (
            "another process with another PYTHONHASHSEED runs differently: look for the order of "
            f"a set, for id() and hash(), for the clock and the environment. {difference}"
        )

    # What gossip must not do to models.

    def test_leaves_equal_models_equal(self, subject: Algorithm) -> None:
        """Consensus is a fixed point: within one rounding for each term of an average."""
        graph = self.graph()
        for faults in (_CALM, self.storm()):
            cluster = self.run(subject, faults=faults, train=_rest)
            initial = cluster.machines[0].site.initial
            terms = 1 + max(degree for _, degree in graph.degree)
            allowed = _FEW_ROUNDS * terms * np.spacing(np.abs(initial))
            moved = np.abs(cluster.models - initial) / allowed
            assert moved.max() <= 1, (
                f"models that are equal and are not trained moved by {moved.max():.3g} times what "
                "rounding explains: do the weights of each average add up to one?"
            )

    def test_never_takes_in_what_is_not_finite(self, subject: Algorithm) -> None:
        """A NaN of a peer is refused and counted."""
        cluster = self.run(subject, faults=Faults(corrupt=0.3), rounds=_ROUNDS)
        counted = cluster.counters["payload-not-finite"].count
        assert counted == cluster.injected["corrupted"], (
            f"{cluster.injected['corrupted']} payloads were not finite, {counted} were counted"
        )

    def test_counts_duplicates_once(self, subject: Algorithm) -> None:
        """A message that arrives twice is used once."""
        once = self.run(subject)
        echoes = (0, 2 * SECOND) if subject.capabilities.synchronous else (0,)
        for echo in echoes:
            twice = self.run(subject, faults=Faults(duplicate=0.5, echo=echo))
            assert np.array_equal(once.models, twice.models), (
                f"the models differ by {np.abs(once.models - twice.models).max():.3g} because "
                f"messages arrived twice, {echo} ns later at most"
            )

    # What a run has to survive.

    def test_survives(self, subject: Algorithm, faults: Faults) -> None:
        """Every live node does its rounds, whatever one fault does to it."""
        # Where a node is missed, and by how many, depends on the graph.
        everywhere = faults.outages or faults.partitions
        for graph in self.graphs().values() if everywhere else [self.graph()]:
            self.run(subject, graph=graph, faults=faults, rounds=_ROUNDS)

    def test_survives_a_storm_among_few_nodes(self, subject: Algorithm) -> None:
        """Where one node is all the neighbors that another has."""
        for nodes in (2, 3):
            storm = fault_matrix(nodes)["storm"]
            self.run(subject, graph=nx.path_graph(nodes), faults=storm)

    def test_survives_any_mix_of_faults(self, subject: Algorithm) -> None:
        """And whatever several faults do."""

        # Without shrinking, which takes minutes where runs stall: the matrix has the simple cases.
        @settings(
            max_examples=8,
            phases=[Phase.generate],
            derandomize=True,
            database=None,
            deadline=None,
        )
        @given(faults=_mixtures(len(self.graph())), seed=st.integers(0, 99))
        def check(faults: Faults, seed: int) -> None:
            self.run(subject, faults=faults, seed=seed)

        check()


def _short(algorithm: Algorithm) -> str:
    """Name an algorithm by what is unusual about it."""
    unusual = [
        f"{field.name}={getattr(algorithm, field.name)}"
        for field in dataclasses.fields(algorithm)
        if getattr(algorithm, field.name) != field.default
    ]
    return "-".join([algorithm.name, *unusual])


def _check_finished(cluster: Cluster) -> None:
    """Check that every live node has done its rounds, and that every model is finite."""
    spoilt = np.flatnonzero(~np.isfinite(cluster.models).all(axis=1)).tolist()
    assert not spoilt, (
        f"a NaN or an infinity is in the models of nodes {spoilt} under {cluster.faults}: did it "
        "come from a peer?"
    )
    if cluster.stalled:
        waits = "; ".join(
            f"node {node} after {cluster.trained[node]} trainings for "
            f"{', '.join(map(str, peers)) or 'nobody it can name'}"
            for node, peers in cluster.stalled.items()
        )
        told = [line for line in cluster.transcript if " Stopped " not in line]
        tail = "\n    ".join(told[-5:])
        raise AssertionError(
            f"{cluster.algorithm} waits for ever on {sorted(cluster.topology.edges)} ({waits}) "
            f"under {cluster.faults}; a machine that waits needs a timer wherever messages can be "
            f"lost, and must heed PeerDown. The last events:\n    {tail}"
        )


def _rest(node: int, round: int, vector: Vector) -> Vector:
    """Train without effect."""
    del node, round
    return vector


def _mixtures(nodes: int) -> st.SearchStrategy[Faults]:
    """Draw faults that a run of 12 rounds can get through."""
    times = st.integers(0, 8 * SECOND)
    lengths = st.integers(1, 6 * SECOND)
    node = st.integers(0, nodes - 1)
    split = st.builds(
        lambda start, length, group: Split(start, start + length, group),
        times,
        lengths,
        st.frozensets(node),
    )
    outage = st.builds(
        lambda node, start, length: Outage(node, start, length and start + length),
        node,
        times,
        st.none() | lengths,
    )
    share = st.sampled_from((0.0, 0.05, 0.3))
    return st.builds(
        Faults,
        drop=share,
        duplicate=share,
        corrupt=share,
        echo=st.sampled_from((0, 3 * SECOND)),
        reorder=st.booleans(),
        delay=st.sampled_from(((0, 0), (0, SECOND), (SECOND, 3 * SECOND))),
        partitions=st.lists(split, max_size=2).map(tuple),
        outages=st.lists(outage, max_size=3).map(tuple),
        slow=st.dictionaries(node, st.sampled_from((0.5, 2.0, 5.0)), max_size=2),
        fail_train=st.dictionaries(node, st.sets(st.integers(1, 12)), max_size=2),
    )
