"""Listening ends at any moment, and nothing of it is left."""

import asyncio
import socket
import traceback

import pytest

from flwr_decentral.channel.roster import Address
from flwr_decentral.channel.sockets import Entrance

pytestmark = pytest.mark.net


@pytest.mark.xfail(
    raises=AssertionError,
    reason="asyncio's sock_accept takes a caller for a future that is cancelled: an error in the "
    "log of a node that ends as it is called, and a caller that waits until it is collected",
)
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
