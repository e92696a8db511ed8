"""Callers that come and go at the worst moment: nothing of them is left."""

import asyncio
import gc
import socket
import struct
import warnings

import pytest

from flwr_decentral.channel.refusals import Reason
from flwr_decentral.channel.roster import Address
from flwr_decentral.channel.sockets import Entrance
from flwr_decentral.channel.stream import shake_hands
from flwr_decentral.channel.tls import explain

pytestmark = pytest.mark.net


def test_who_calls_as_listening_ends_is_refused_and_not_lost():
    async def work():
        loop = asyncio.get_running_loop()
        entrance = await Entrance.open(Address("127.0.0.1", 0))
        accepting = asyncio.ensure_future(entrance.accept())
        await asyncio.sleep(0.01)  # it waits
        with socket.create_connection(entrance.socket.getsockname()) as caller:
            # As the loop learns of the caller.
            loop.call_soon(accepting.cancel)
            with pytest.raises(asyncio.CancelledError):
                await accepting
            entrance.close()
            await asyncio.sleep(0)
            caller.settimeout(5.0)
            with pytest.raises(ConnectionResetError):
                caller.recv(1)

    asyncio.run(work())


def test_a_caller_that_has_reset_the_connection_leaves_nothing_open(passports):
    context = passports.good[0].security.load().server

    async def work():
        with socket.create_server(("127.0.0.1", 0)) as listening:
            caller = socket.create_connection(listening.getsockname())
            connection, _ = listening.accept()
            connection.setblocking(False)
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            caller.close()
            with pytest.raises(OSError) as caught:
                await shake_hands(connection, context, server_side=True, linger=0.1)
            assert explain(caught.value).reason == f"peer:{Reason.CLOSED}"

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        asyncio.run(work())
        gc.collect()
    assert not [each for each in caught if each.category is ResourceWarning]
