"""Listening ends at any moment, and nothing of it is left."""

import asyncio
import socket

import pytest

from flwr_decentral.channel.roster import Address
from flwr_decentral.channel.sockets import Entrance

from .loopback import run

pytestmark = pytest.mark.net


@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.xfail(
    raises=AssertionError,
    reason="asyncio's sock_accept takes a caller for a future that is cancelled: an error in the "
    "log of a node that ends as it is called, and a caller that waits in vain",
)
def test_who_calls_as_listening_ends_is_refused_and_not_lost():
    async def work():
        entrance = await Entrance.open(Address("127.0.0.1", 0))
        accepting = asyncio.ensure_future(entrance.accept())
        await asyncio.sleep(0)
        with socket.create_connection(entrance.socket.getsockname()):
            # Before the loop has looked at the socket, and after it has learned of the caller.
            asyncio.get_running_loop().call_soon(accepting.cancel)
            with pytest.raises(asyncio.CancelledError):
                await accepting
            entrance.close()

    run(work())
