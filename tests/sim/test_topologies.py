"""Every algorithm of the shelf on every topology: what is refused, what is warned of, and the rest.

The table of ``docs/topologies.md`` is what is expected here.
"""

import re
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from flwr_decentral import plugins
from flwr_decentral.core import ConfigurationError, Layout
from flwr_decentral.core import topology as topologies
from flwr_decentral.core.conduct import check_fit
from flwr_decentral.sim.engine import Observer

from .scripted import make

PAGE = Path(__file__).parents[2] / "docs" / "topologies.md"
FAMILIES = [usage.partition("(")[0] for usage in topologies.names()]
SIZES = {"davis-southern-women": 32}
"""Of what is not made of any number of nodes."""

MODEL = Layout.of({"model": np.zeros(2410, np.float32)})
ROUNDS = 4


@cache
def read_table():
    """Read what the page says: a cell for each (algorithm, topology), and the notes."""
    lines = PAGE.read_text().splitlines()
    rows = [
        [cell.strip(" `") for cell in line.strip("|").split("|")]
        for line in lines
        if line.startswith("|")
    ]
    (_, *names), _, *body = rows
    cells = {
        (name, family): cell for family, *row in body for name, cell in zip(names, row, strict=True)
    }
    notes = dict(re.findall(r"^(\d+)\. (?:`\w+`: )?(.+)$", "\n".join(lines), re.MULTILINE))
    return cells, notes


@cache
def build(family, nodes):
    return topologies.build(family, nodes)


def verdict(name, graph):
    """Tell what becomes of an algorithm on a topology, and what is said about it."""
    try:
        warnings = check_fit(plugins.make(name), graph, MODEL)
    except ConfigurationError as error:
        return "refused", [str(error)]
    return ("warns" if warnings else "yes"), list(warnings)


def test_the_table_has_every_algorithm_and_every_topology():
    cells, _ = read_table()
    assert set(cells) == {(name, family) for name in plugins.SHELF for family in FAMILIES}


@pytest.mark.slow
@pytest.mark.parametrize("name", plugins.SHELF)
def test_what_the_table_says_is_what_is_said(name):
    cells, notes = read_table()
    for family in FAMILIES:
        graph = build(family, SIZES.get(family, 16))
        outcome, texts = verdict(name, graph)
        told, *numbers = cells[name, family].replace(",", " ").split()
        assert (outcome, len(texts)) == (told, len(numbers)), f"{family}: {outcome}, {texts}"
        for number, text in zip(numbers, texts, strict=True):
            pattern = re.escape(notes[number]).replace("…", ".+")
            assert re.fullmatch(pattern, text), f"{family}: note {number} is not: {text}"


# --- runs -----------------------------------------------------------------------------------------


class Counting(Observer):
    def __init__(self):
        self.rounds = Counter()

    def trained(self, engine, node, round, outcome):
        self.rounds[node] += 1


def pull(task, vector):
    """Train toward a point of the node's own."""
    return vector + np.float32(0.3) * (np.float32(task.node) - vector)


def run(name, graph):
    """Run on links with a bandwidth and a latency; return how far the models are apart."""
    counting = Counting()
    engine = make(
        plugins.make(name),
        graph=graph,
        rounds=ROUNDS,
        size=40,
        function=pull,
        observer=counting,
        uplink=8e4,
        latency=0.01,
    )
    digest = engine.run()
    assert counting.rounds == dict.fromkeys(graph, ROUNDS)
    models = np.stack(engine.models())
    assert np.isfinite(models).all()
    return digest, models.std(axis=0).mean()


@cache
def apart_alone(family, nodes):
    return run("local", build(family, nodes))[1]


def check_runs(name, family, nodes):
    graph = build(family, nodes)
    if verdict(name, graph)[0] == "refused":
        pytest.skip("refused, as the table says")
    digest, apart = run(name, graph)
    assert run(name, graph) == (digest, apart), "a run repeats"
    if name != "local" and graph.number_of_edges():
        assert apart < apart_alone(family, nodes), "who exchanges models is closer together"


def matrix():
    for name in plugins.SHELF:
        default = plugins.load(name).default_topology
        for family in FAMILIES:
            quick = family == default
            yield pytest.param(name, family, marks=[] if quick else pytest.mark.slow)


@pytest.mark.parametrize(("name", "family"), list(matrix()))
def test_every_algorithm_ends_on_every_topology_that_it_takes(name, family):
    check_runs(name, family, SIZES.get(family, 8))


# Any other topology of so few nodes is one of these.
@pytest.mark.parametrize(
    ("family", "nodes"), [("chain", 1), ("chain", 2), ("chain", 3), ("star", 3), ("ring", 3)]
)
@pytest.mark.parametrize("name", plugins.SHELF)
@pytest.mark.slow
def test_every_algorithm_ends_on_few_nodes(name, family, nodes):
    check_runs(name, family, nodes)
