"""A proxy: bytes come through as they are, as late and as slowly as it was told, or not at all."""

import asyncio
import contextlib
import os
import socket
import ssl

import pytest

from flwr_decentral.channel.keys import CA_CERT, CERT, KEY, make_keys, node_folder
from flwr_decentral.testing.processes import memory
from flwr_decentral.testing.proxy import ROOM, Line, Proxy

pytestmark = pytest.mark.net

DEADLINE = 20.0


class Server:
    """Keep who calls, and echo if that is wanted."""

    def __init__(self, *, echo: bool, tls: ssl.SSLContext | None) -> None:
        self.echo, self.tls = echo, tls
        self.calls: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = (
            asyncio.Queue()
        )
        self.got = 0

    async def open(self):
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0, ssl=self.tls)
        return self.server.sockets[0].getsockname()[:2]

    async def serve(self, reader, writer):
        if not self.echo:
            self.calls.put_nowait((reader, writer))
            return
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                self.got += len(data)
                writer.write(data)
                await writer.drain()
        writer.close()


def proxied(work, *, echo=True, tls=None):
    """Run a test's coroutine with a proxy in front of a server; nothing of it may be left."""

    async def whole():
        server = Server(echo=echo, tls=tls)
        target = await server.open()
        async with asyncio.timeout(DEADLINE):
            async with await Proxy.open(target) as proxy:
                await work(proxy, server)
            while not server.calls.empty():
                server.calls.get_nowait()[1].close()
        server.server.close()
        for _ in range(100):
            others = asyncio.all_tasks() - {asyncio.current_task()}
            if not others:
                break
            await asyncio.sleep(0.01)
        assert not others

    before = len(os.listdir("/proc/self/fd"))
    asyncio.run(whole())
    assert len(os.listdir("/proc/self/fd")) == before


async def dial(proxy, **how):
    return await asyncio.open_connection(*proxy.address, **how)


async def exchange(reader, writer, data: bytes) -> bytes:
    writer.write(data)
    return await reader.readexactly(len(data))


async def hang_up(writer):
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


def test_bytes_come_through_both_ways_as_they_are():
    data = os.urandom(3_000_000)

    async def work(proxy, server):
        reader, writer = await dial(proxy)
        writing = asyncio.ensure_future(exchange(reader, writer, data))
        assert await writing == data
        assert proxy.there.carried == proxy.back.carried == len(data)
        assert (proxy.accepted, proxy.open_connections) == (1, 1)
        await hang_up(writer)

    proxied(work)


def test_an_end_that_has_said_all_can_still_listen():
    async def work(proxy, server):
        reader, writer = await dial(proxy)
        theirs, answer = await server.calls.get()
        writer.write(b"question")
        writer.write_eof()
        assert await theirs.read() == b"question"
        answer.write(b"answer")
        answer.close()
        assert await reader.read() == b"answer"
        await hang_up(writer)
        while proxy.open_connections:
            await asyncio.sleep(0.01)

    proxied(work, echo=False)


def test_tls_goes_through(tmp_path):
    keys = tmp_path / "keys"
    make_keys(keys, 1, 1)
    files = node_folder(keys, 0)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(files / CERT, files / KEY)
    client = ssl.create_default_context(cafile=files / CA_CERT)
    client.check_hostname = False

    async def work(proxy, _):
        reader, writer = await dial(proxy, ssl=client)
        data = os.urandom(200_000)
        assert await exchange(reader, writer, data) == data
        assert proxy.there.carried > len(data)
        await hang_up(writer)

    proxied(work, tls=server)


def test_a_rate_is_kept_and_can_change():
    """An eighth of a second there at 8 Mbit/s; back, nothing holds it up."""
    data = os.urandom(125_000)

    async def work(proxy, server):
        loop = asyncio.get_running_loop()
        reader, writer = await dial(proxy)
        proxy.there.line.bps = 8e6
        took = []
        for _ in range(2):
            began = loop.time()
            assert await exchange(reader, writer, data) == data
            took.append(loop.time() - began)
            proxy.there.line.bps = 80e6
        assert took[0] >= 0.125
        assert took[1] >= 0.0125
        await hang_up(writer)

    proxied(work)


def test_ways_that_share_a_line_share_its_rate():
    data = os.urandom(50_000)

    async def work(proxy, server):
        line = proxy.there.line = Line(4e6)
        async with await Proxy.open(proxy._target) as other:
            other.there.line = line
            ends = [await dial(each) for each in (proxy, other)]
            began = asyncio.get_running_loop().time()
            await asyncio.gather(*(exchange(*end, data) for end in ends))
            assert asyncio.get_running_loop().time() - began >= 2 * len(data) * 8 / 4e6
            for _, writer in ends:
                await hang_up(writer)

    proxied(work)


def test_a_line_that_is_always_busy_loses_no_time():
    """Each piece is through when it should be, however late one looked."""
    line, now = Line(8e6), 5.0
    through = [line.carry(1000, now + 0.0005 * number) for number in range(100)]
    assert through == pytest.approx([now + 0.001 * (number + 1) for number in range(100)])
    assert line.carry(1000, 100.0) == pytest.approx(100.001)


def test_a_delay_makes_each_byte_late_and_keeps_their_order():
    async def work(proxy, server):
        loop = asyncio.get_running_loop()
        reader, writer = await dial(proxy)
        proxy.there.delay = proxy.back.delay = 0.1
        began = loop.time()
        writer.write(b"first")
        await asyncio.sleep(0.02)
        proxy.there.delay = 0.0
        writer.write(b"second")
        assert await reader.readexactly(11) == b"firstsecond"
        assert loop.time() - began >= 0.2
        await hang_up(writer)

    proxied(work)


def test_what_is_stalled_waits_and_then_goes_on():
    async def work(proxy, server):
        reader, writer = await dial(proxy)
        assert await exchange(reader, writer, b"before") == b"before"
        proxy.stall()
        writer.write(b"meanwhile")
        fresh, other = await dial(proxy)  # it is accepted
        other.write(b"new")
        await asyncio.sleep(0.1)
        assert server.got == len(b"before")
        proxy.heal()
        assert await reader.readexactly(9) == b"meanwhile"
        assert await fresh.readexactly(3) == b"new"
        for each in (writer, other):
            await hang_up(each)

    proxied(work)


def test_one_way_can_be_stalled_alone():
    async def work(proxy, server):
        reader, writer = await dial(proxy)
        proxy.back.stall()
        writer.write(b"heard")
        while server.got < 5:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert proxy.back.carried == 0
        proxy.back.resume()
        assert await reader.readexactly(5) == b"heard"
        await hang_up(writer)

    proxied(work)


def test_a_cut_resets_both_ends_refuses_new_ones_and_heals():
    async def work(proxy, server):
        reader, writer = await dial(proxy)
        theirs, answer = await server.calls.get()
        writer.write(b"x")
        assert await theirs.readexactly(1) == b"x"
        await proxy.cut()
        for each in (reader, theirs):
            with pytest.raises(ConnectionResetError):
                await each.read()
        with pytest.raises(ConnectionRefusedError):
            await dial(proxy)
        assert proxy.open_connections == 0
        await proxy.cut()  # again is no harm
        proxy.heal()
        again, more = await dial(proxy)
        theirs, reply = await server.calls.get()
        reply.write(b"back")
        assert await again.readexactly(4) == b"back"
        for each in (writer, more, answer, reply):
            await hang_up(each)

    proxied(work, echo=False)


def test_nobody_is_given_the_port_of_a_proxy_that_is_cut():
    async def work(proxy, server):
        await proxy.cut()
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(proxy.address)  # as whoever does not ask for a port in use

    proxied(work)


def test_a_reset_is_passed_on():
    async def work(proxy, server):
        _, writer = await dial(proxy)
        theirs, answer = await server.calls.get()
        writer.transport.abort()
        with contextlib.suppress(ConnectionResetError):
            assert await theirs.read() == b""
        await hang_up(answer)
        while proxy.open_connections:
            await asyncio.sleep(0.01)

    proxied(work, echo=False)


def test_nobody_at_the_target_is_a_reset():
    async def whole():
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))
            async with await Proxy.open(nobody.getsockname()) as proxy:
                reader, writer = await dial(proxy)
                with pytest.raises(ConnectionResetError):
                    await reader.read()
                await hang_up(writer)

    asyncio.run(whole())


@pytest.mark.parametrize("how", ["stall", "deaf"])
def test_what_waits_is_bounded(how):
    """Nobody takes anything: the sender is held up once some megabytes are on their way."""

    async def work(proxy, server):
        _, writer = await dial(proxy)
        writer.transport.set_write_buffer_limits(0)
        _, answer = await server.calls.get()
        answer.transport.pause_reading()
        if how == "stall":
            proxy.stall()
        sent, chunk = 0, bytes(1 << 16)
        before = memory(os.getpid())
        with contextlib.suppress(TimeoutError):
            while sent < 256 << 20:
                writer.write(chunk)
                async with asyncio.timeout(0.5):
                    await writer.drain()
                sent += len(chunk)
        # The sender's own buffer in the system may be some megabytes, too.
        assert sent < 32 << 20
        assert memory(os.getpid()) - before < 8 * ROOM
        (connection,) = proxy._connections
        assert not connection.done()
        writer.transport.abort()
        answer.transport.abort()

    proxied(work, echo=False)


@pytest.mark.parametrize("bps", [0.0, -1.0, float("nan")])
def test_a_rate_is_more_than_nothing(bps):
    with pytest.raises(ValueError, match="to halt it, stall"):
        Line(bps)


@pytest.mark.parametrize("seconds", [-1.0, float("inf"), float("nan")])
def test_a_delay_is_a_number_of_seconds(seconds):
    async def work(proxy, server):
        with pytest.raises(ValueError, match="zero or more"):
            proxy.there.delay = seconds
        assert proxy.there.delay == 0

    proxied(work)


def test_a_proxy_that_is_closed_stays_closed():
    async def whole():
        proxy = await Proxy.open(("127.0.0.1", 1))
        await proxy.close()
        with pytest.raises(ValueError, match="closed"):
            proxy.heal()
        with pytest.raises(ConnectionRefusedError):
            await dial(proxy)

    asyncio.run(whole())
