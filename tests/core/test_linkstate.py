from itertools import permutations

import networkx as nx
import pytest

from flwr_decentral.core import Message
from flwr_decentral.core.linkstate import Claim, LinkState

RING = nx.freeze(nx.cycle_graph(5))


def knowledge(*claims, node=0):
    links = LinkState(node, RING)
    for claim in claims:
        links.hear(claim)
    return links


def test_at_first_all_links_are_up_and_nothing_is_to_tell():
    links = knowledge()
    assert links.edges == {(0, 1), (1, 2), (2, 3), (3, 4), (0, 4)}
    assert links.view == 0
    assert list(links) == []
    assert links.see(1, up=True) is None


def test_a_link_is_up_if_neither_end_claims_otherwise():
    links = knowledge(Claim(2, 3, 1, False), Claim(3, 2, 1, False))
    assert (2, 3) not in links.edges
    links.hear(Claim(2, 3, 2, True))
    assert (2, 3) not in links.edges
    links.hear(Claim(3, 2, 2, True))
    assert (2, 3) in links.edges


def test_own_links_are_claimed_with_rising_versions():
    links = knowledge()
    assert links.see(4, up=False) == Claim(0, 4, 1, False)
    assert links.see(4, up=False) is None
    assert links.see(4, up=True) == Claim(0, 4, 2, True)
    assert links.edges == knowledge().edges
    assert links.view != 0


def test_old_news_goes_no_further():
    claim = Claim(1, 2, 3, False)
    links = knowledge()
    assert links.hear(claim) == claim
    view = links.view
    assert links.hear(claim) is None
    assert links.hear(Claim(1, 2, 2, True)) is None
    assert links.view == view


def test_the_order_of_arrival_does_not_matter():
    claims = [
        Claim(1, 2, 1, False),
        Claim(1, 2, 2, True),
        Claim(1, 2, 2, False),
        Claim(3, 4, 7, False),
    ]
    seen = {(each.view, each.edges) for each in (knowledge(*p) for p in permutations(claims))}
    assert len(seen) == 1
    assert (1, 2) not in seen.pop()[1]


def test_a_node_outbids_what_a_former_self_has_claimed():
    links = knowledge()
    assert links.hear(Claim(0, 1, 6, False)) == Claim(0, 1, 7, True)
    links = knowledge()
    links.see(1, up=False)
    assert links.hear(Claim(0, 1, 1, True)) == Claim(0, 1, 2, False)
    # What is true is believed, with its version.
    assert links.hear(Claim(0, 1, 9, False)) == Claim(0, 1, 9, False)
    assert links.see(1, up=True) == Claim(0, 1, 10, True)


def test_a_view_is_the_same_number_for_the_same_claims_alone():
    one, other = knowledge(Claim(1, 2, 1, False)), knowledge(Claim(2, 1, 1, False), node=3)
    assert one.view != other.view
    assert one.edges == other.edges
    for links, claims in ((one, list(other)), (other, list(one))):
        for claim in claims:
            links.hear(claim)
    assert one.view == other.view
    assert 0 <= one.view < 2**63


def test_messages_carry_claims():
    claim = Claim(1, 2, 3, False)
    message = claim.message(step=9)
    assert message.step == 9
    assert message.payload is None
    assert knowledge().read(message) == claim


@pytest.mark.parametrize(
    "changes",
    [{"peer": 3}, {"version": 0}, {"version": 1.5}, {"up": 2}, {"node": -1}],
    ids=["no-link", "version", "fraction", "up", "node"],
)
def test_claims_that_make_no_sense_are_not_read(changes):
    header = dict(Claim(1, 2, 3, False)._asdict()) | changes
    assert knowledge().read(Message(kind="link", step=1, header=header)) is None
    del header["up"]
    assert knowledge().read(Message(kind="link", step=1, header=header)) is None


def test_a_snapshot_is_everything():
    links = knowledge(Claim(1, 2, 3, False))
    other = LinkState(0, RING)
    other.restore(links.snapshot())
    assert (other.view, list(other)) == (links.view, list(links))
    other.hear(Claim(3, 4, 1, False))
    assert list(links) == [Claim(1, 2, 3, False)]
