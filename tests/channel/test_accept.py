"""Callers that come and go at the worst moment: nothing of them is left."""

import asyncio
import gc
import socket
import struct
import traceback
import warnings

import pytest

from flwr_decentral.channel.roster import Address
from flwr_decentral.channel.sockets import Entrance
from flwr_decentral.channel.stream import shake_hands

pytestmark = pytest.mark.net


def test_who_calls_as_listening_ends_is_refused_and_not_lost():
    lost = []

    def note(_, context):
        for frame, _ in traceback.walk_tb(context["exception"].__traceback__):
            if "conn" in frame.f_locals:
                lost.append(context["message"])
                frame.f_locals["conn"].close()

    async def work():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(note)
        entrance = await Entrance.open(Address("127.0.0.1", 0))
        accepting = asyncio.ensure_future(entrance.accept())
        await asyncio.sleep(0)
        with socket.create_connection(entrance.socket.getsockname()):
            # As the loop learns of the caller.
            loop.call_soon(accepting.cancel)
            with pytest.raises(asyncio.CancelledError):
                await accepting
            entrance.close()
            await asyncio.sleep(0)

    asyncio.run(work())
    assert not lost


def test_a_caller_that_has_reset_the_connection_leaves_nothing_open(passports):
    context = passports.good[0].security.load().server

    async def work():
        with socket.create_server(("127.0.0.1", 0)) as listening:
            caller = socket.create_connection(listening.getsockname())
            connection, _ = listening.accept()
            connection.setblocking(False)
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            caller.close()
            with pytest.raises(OSError):
                await shake_hands(connection, context, server_side=True, linger=0.1)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        asyncio.run(work())
        gc.collect()
    assert not [each for each in caught if each.category is ResourceWarning]
