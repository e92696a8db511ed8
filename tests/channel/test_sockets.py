"""Unix sockets between the nodes of one machine: they carry a run, and nobody else gets in."""

import asyncio
import secrets
import socket

import numpy as np
import pytest

from flwr_decentral.channel import sockets
from flwr_decentral.channel.connections import Settings
from flwr_decentral.channel.network import Network
from flwr_decentral.channel.roster import Address, Member, Roster
from flwr_decentral.channel.tls import Security
from flwr_decentral.core import ConfigurationError
from flwr_decentral.localsocket import native

from .loopback import BRISK, LIMIT, Diary, hello, model, run, same, until

pytestmark = pytest.mark.net
LOCAL = Security(local=True)


@pytest.fixture(params=["name", "path"])
def roster(request, tmp_path) -> Roster:
    """Two nodes that are reached by names, or by files."""
    token = secrets.token_hex(4)
    places = {"name": f"@flwr-decentral-test-{token}", "path": str(tmp_path / "node")}
    members = [
        Member(index=node, address=Address.parse(f"unix:{places[request.param]}-{node}"))
        for node in range(2)
    ]
    return Roster.of(members, [(0, 1)])


def network(roster, index, security=LOCAL) -> Network:
    settings = Settings(limit=LIMIT, timing=BRISK)
    return Network(roster, hello(index), security, settings, np.random.default_rng(index))


def test_messages_go_over_unix_sockets_that_leave_nothing_behind(roster, tmp_path, caplog):
    async def work():
        nodes, diaries = [network(roster, index) for index in range(2)], [Diary(), Diary()]
        for node, diary in zip(nodes, diaries, strict=True):
            await node.open(diary)
        await until(lambda: nodes[0].up == (1,) and nodes[1].up == (0,))
        sent = model(1 << 19)
        assert nodes[0].send(1, sent)
        assert nodes[1].send(0, sent)
        await until(lambda: all(diary.messages for diary in diaries))
        assert all(same(diary.messages[0][1], sent) for diary in diaries)
        for node in nodes:
            await node.close()

    run(work())
    assert not [path for path in tmp_path.iterdir() if path.is_socket()]
    assert not caplog.text, "there is nothing to warn of"


def test_another_user_is_refused_at_both_ends(roster, monkeypatch):
    async def work():
        monkeypatch.setattr(sockets, "is_own", lambda connection: False)
        nodes = [network(roster, index) for index in range(2)]
        for node in nodes:
            await node.open(Diary())
        await until(lambda: nodes[0].counters()["peers"][1]["unreachable"] > 1)
        await until(lambda: nodes[1].counters()["refused"].get("another-user", 0) > 1)
        assert nodes[0].up == nodes[1].up == ()
        for node in nodes:
            await node.close()

    run(work())


def test_an_address_in_use_is_said(roster):
    async def work():
        first, second = network(roster, 1), network(roster, 1)
        await first.open(Diary())
        with pytest.raises(ConfigurationError, match=r"node 1 cannot listen at unix:.*listens at"):
            await second.open(Diary())
        await second.close()
        await first.close()

    run(work())


def test_a_stranger_who_says_nothing_is_given_up(roster):
    async def work():
        node = network(roster, 1)
        await node.open(Diary())
        with socket.socket(socket.AF_UNIX) as caller:
            caller.setblocking(False)
            await asyncio.get_running_loop().sock_connect(
                caller, native(roster.members[1].address.path)
            )
            await until(lambda: node.counters()["handshakes"] == 1)
        await until(lambda: node.counters()["handshakes"] == 0)
        await node.close()

    run(work())


def test_sockets_of_this_machine_and_of_others_do_not_mix(roster, passports):
    far = Roster.of([roster.members[0], Member(index=1, address=Address("host", 9))], [(0, 1)])
    with pytest.raises(ConfigurationError, match=r"but nodes \[1\] do not: use Unix sockets for"):
        network(far, 0)
    with pytest.raises(ConfigurationError, match="no certificate fingerprints"):
        network(roster, 0, passports.good[0].security)
    with pytest.raises(ConfigurationError, match="need neither certificates nor insecure"):
        Security(local=True, insecure=True)


def test_no_port_is_opened_for_a_node_that_knows_no_certificates(roster):
    settings = Settings(limit=LIMIT, timing=BRISK, listen=Address("0.0.0.0", 48200))
    with pytest.raises(ConfigurationError, match=r"listen at 0.0.0.0:48200, where anyone could"):
        Network(roster, hello(0), LOCAL, settings, np.random.default_rng(0))
