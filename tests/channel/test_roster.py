"""The roster: who is refused in it, and who dials whom."""

import json

import pytest

from flwr_decentral.channel.roster import Address, Member, Roster, normal_fingerprint
from flwr_decentral.core import ConfigurationError


def member(index: int, port: int | None = 1, digit: str | None = None) -> Member:
    address = None if port is None else Address(f"host-{index}", port)
    return Member(index=index, address=address, fingerprint=(digit or f"{index:x}") * 64)


def refused(members, edges=()) -> str:
    with pytest.raises(ConfigurationError) as caught:
        Roster.of(members, edges)
    return str(caught.value)


def test_members_are_ordered_and_edges_go_both_ways():
    roster = Roster.of([member(2), member(0), member(1)], [(2, 0), (0, 2), (1, 2)])
    assert [m.index for m in roster.members] == [0, 1, 2]
    assert roster.edges == {(0, 2), (1, 2)}
    assert [roster.neighbors(node) for node in range(3)] == [(2,), (2,), (0, 1)]
    assert roster.index_of("2" * 64) == 2
    assert roster.index_of("9" * 64) is None


@pytest.mark.parametrize(
    ("lower", "higher", "dials"),
    [(1, 1, 3), (None, 1, 3), (1, None, 4)],
    ids=["both can be called", "the higher one", "the lower one"],
)
def test_the_lower_index_dials_if_the_other_is_reachable(lower, higher, dials):
    members = [member(node) for node in range(3)] + [member(3, lower), member(4, higher)]
    roster = Roster.of(members, [(3, 4)])
    assert roster.dialer(3, 4) == roster.dialer(4, 3) == dials


def test_an_edge_without_a_reachable_end_is_refused_naming_both():
    message = refused([member(0), member(1, None), member(2, None)], [(0, 1), (1, 2)])
    assert "nodes 1 and 2 are neighbors, but neither can be dialed" in message
    assert "peer-address" in message


def test_an_index_claimed_twice_is_refused_naming_both():
    message = refused([member(0), member(1, 7, "a"), Member(index=1, fingerprint="b" * 64)])
    assert "node 1 is claimed by the one at host-1:7 and one of bbbbbbbbbbbbbbbb…" in message
    assert "partition-id" in message


@pytest.mark.parametrize(
    ("indices", "complaint"),
    [
        ([0, 1, 3], "nodes [0, 1, 3]; they must be 0 to n-1, but [2] are missing"),
        ([1], "nodes [1]; they must be 0 to n-1, but [0] are missing"),
        ([-1, 0], "nodes [-1, 0]; they must be 0 to n-1, and [-1] cannot be"),
    ],
)
def test_missing_indices_are_refused(indices, complaint):
    assert complaint in refused([member(index, digit=f"{index + 5}") for index in indices])


def test_claims_of_two_nodes_to_the_same_are_refused_naming_both():
    assert "nodes 0 and 2 both claim fingerprint 000" in refused(
        [member(0), member(1), member(2, digit="0")]
    )
    twin = Member(index=1, address=Address("host-0", 1), fingerprint="1" * 64)
    assert "nodes 0 and 1 both claim address host-0:1" in refused([member(0), twin])


def test_a_roster_is_with_certificates_or_without():
    assert "nodes [1] have no certificate fingerprint" in refused([member(0), Member(index=1)])
    bare = [Member(index=node, address=Address("h", node + 1)) for node in range(2)]
    assert Roster.of(bare, [(0, 1)]).index_of("") is None


@pytest.mark.parametrize("edge", [(0, 2), (1, 1), (-1, 0)])
def test_an_edge_to_nowhere_is_refused(edge):
    assert f"an edge {min(edge)}-{max(edge)}" in refused([member(0), member(1)], [edge])


def test_a_port_that_is_not_known_yet_cannot_be_dialed():
    assert "nodes [0] have an address with port 0" in refused([member(0, 0)])


def test_records_survive_json_and_say_what_is_wrong_with_them():
    roster = Roster.of([member(0), member(1, None)], [(0, 1)])
    records = json.loads(json.dumps(roster.records()))
    assert Roster.from_records(records, [(0, 1)]) == roster
    colons = {**records[0], "fingerprint": ":".join(["00"] * 32)}
    assert Roster.from_records([colons, records[1]], [(0, 1)]) == roster
    for wrong, complaint in (
        ({"indx": 0}, "did you mean 'index'"),
        ({"index": True}, "no node of a roster"),
        ({"index": "0"}, "no node of a roster"),
        ({"index": 0, "address": "nowhere"}, "'nowhere' is no address"),
        ({"index": 0, "fingerprint": "abc"}, "'abc' is no SHA-256 fingerprint"),
    ):
        with pytest.raises(ConfigurationError, match=complaint):
            Roster.from_records([wrong], [])


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("10.0.0.7:48200", Address("10.0.0.7", 48200)),
        (" node-3.example:1 ", Address("node-3.example", 1)),
        ("[fe80::1]:65535", Address("fe80::1", 65535)),
        ("unix:@node-3", Address("unix:@node-3", 0)),
        ("unix:/run/node:3.sock", Address("unix:/run/node:3.sock", 0)),
    ],
)
def test_addresses_are_read_and_written(text, address):
    assert Address.parse(text) == address
    assert str(address) == text.strip()


@pytest.mark.parametrize(
    "text", ["", "host", "host:", ":1", "host:x", "h:65536", "::1:5", "h:-1", "unix:"]
)
def test_what_is_no_address_is_refused(text):
    with pytest.raises(ConfigurationError, match="is no address: write host:port"):
        Address.parse(text)


def test_fingerprints_have_one_form():
    assert normal_fingerprint(" SHA256:" + "Ab" * 32) == "ab" * 32
    with pytest.raises(ConfigurationError, match="64 hexadecimal digits"):
        normal_fingerprint("g" * 64)
