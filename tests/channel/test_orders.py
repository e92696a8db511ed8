"""Orders: what is written is read, and anything else is refused whole."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flwr_decentral.channel.orders import Order
from flwr_decentral.channel.roster import Address, Member, Roster
from flwr_decentral.core import ConfigurationError


def make(**changes):
    members = [
        Member(index=i, address=Address(f"10.0.0.{i}", 7000), fingerprint=f"{i + 1:064x}")
        for i in range(3)
    ]
    values = {
        "run": "42",
        "epoch": 1,
        "index": 1,
        "roster": Roster.of(members, [(0, 1), (2, 1)]),
        "algorithm": "dpsgd",
        "version": "0.1.0",
        "parameters": {"patience": 600.0, "order": "adapt-then-combine"},
        "layout": "ab" * 16,
        "seed": 7,
        "until": 10,
        "lease": 240.0,
    }
    return Order(**{**values, **changes})


@given(
    seconds=st.floats(min_value=1e-6, max_value=1e9) | st.just(math.inf),
    uplink=st.floats(min_value=1, max_value=1e12) | st.just(math.inf),
    seed=st.integers(0, 2**63),
    run=st.text(min_size=1),
    parameters=st.dictionaries(
        st.text(), st.none() | st.booleans() | st.integers() | st.text(), max_size=3
    ),
)
def test_what_is_written_is_read(**changes):
    order = make(**changes)
    assert Order.from_json(order.to_json()) == order


def test_the_topology_holds_every_member():
    alone = Roster.of([Member(index=0), Member(index=1)], [])
    assert sorted(make(roster=alone).topology) == [0, 1]
    assert sorted(make().topology.edges) == [(0, 1), (1, 2)]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"run": ""}, "must be named"),
        ({"index": 3}, "index 3 is no member"),
        ({"index": -1}, "index -1 is no member"),
        ({"epoch": -1}, "0 or more"),
        ({"until": -1}, "0 or more"),
        ({"after": -1}, "0 or more"),
        ({"seconds": 0.0}, "positive"),
        ({"seconds": math.nan}, "positive"),
        ({"lease": math.inf}, "positive"),
        ({"lease": math.nan}, "positive"),
        ({"uplink": -1.0}, "positive"),
    ],
)
def test_what_cannot_be_is_refused(changes, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        make(**changes)


def changed(**changes):
    values = json.loads(make().to_json())
    for name, value in changes.items():
        if value is None:
            del values[name]
        else:
            values[name] = value
    return json.dumps(values)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "no order"),
        ("[]", "no order"),
        ("{}", "no order"),
        ('"orders"', "no order"),
        (changed(orders=2), "install one version of flwr-decentral everywhere"),
        (changed(until=None), "has the fields"),
        (changed(more=1), "has the fields"),
        (changed(epoch=True), "epoch of an order cannot be True"),
        (changed(epoch=1.5), "epoch of an order cannot be 1.5"),
        (changed(parameters=[]), "parameters of an order"),
        (changed(edges=[[0, 1, 2]]), "pair of indices"),
        (changed(edges=[[0, "1"]]), "pair of indices"),
        (changed(edges=[[0, True]]), "pair of indices"),
        (changed(edges=[[0, 3]]), "edge 0-3"),
        (changed(members=[{"index": 0, "port": 1}]), "no 'port'"),
        (changed(members=[{"index": 1}]), "must be 0 to n-1"),
        (changed(members=[3]), "a member is a table"),
        (changed(lease="long"), "lease of an order cannot be 'long'"),
    ],
)
def test_what_is_no_order_is_refused(text, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        Order.from_json(text)


@pytest.mark.slow
@given(st.text() | st.recursive(st.none() | st.integers(), st.lists).map(json.dumps))
def test_nothing_else_gets_through(text):
    with pytest.raises(ConfigurationError):
        Order.from_json(text)
