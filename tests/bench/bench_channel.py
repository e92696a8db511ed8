"""What the network between nodes costs beside the encryption itself.

One process sends messages to another over the loopback interface: through two networks, with TLS
and without; through a gRPC stream with mutual TLS, whose messages are bytes; and through a bare TLS
and a bare plain socket that send the same bytes with neither frames, nor credit, nor checks. The
ways take turns, several times; printed are medians, the network's rate as a share of the bare
socket's, and the CPU time of both processes together. With ``--rtt`` the bytes go through a proxy
that delays them, in a process of its own.

    python tests/bench/bench_channel.py --sizes 1000000 --repeat 5
    python tests/bench/bench_channel.py --rtt 50 --megabytes 20 --repeat 3
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import multiprocessing
import os
import resource
import socket
import ssl
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from flwr_decentral.channel.connections import Settings
from flwr_decentral.channel.heads import Hello
from flwr_decentral.channel.keys import (
    CA_CERT,
    CERT,
    KEY,
    make_keys,
    make_superlink_keys,
    node_folder,
)
from flwr_decentral.channel.network import Network
from flwr_decentral.channel.roster import Address, Member, Roster
from flwr_decentral.channel.tls import Security
from flwr_decentral.core import Message, Seeds
from flwr_decentral.testing.ports import free_ports
from flwr_decentral.testing.proxy import Proxy

WAYS = ("bare TLS", "network TLS", "gRPC TLS", "bare plain", "network plain")


@dataclass(frozen=True)
class Cost:
    """Seconds of one transfer: on the wall, and of both processes' CPU."""

    wall: float
    cpu: float


@dataclass(frozen=True)
class Load:
    """How much to send, and where."""

    size: int
    count: int
    port: int
    keys: Path
    dialed: int = 0

    @property
    def calls(self) -> int:
        """The port that node 0 calls: node 1's, or that of a proxy."""
        return self.dialed or self.port


def cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def security(load: Load, node: int) -> Security:
    home = node_folder(load.keys, node)
    return Security(ca=home / CA_CERT, cert=home / CERT, key=home / KEY)


# --- the ways -------------------------------------------------------------------------------------


def bare(role: int, secure: bool, load: Load, pipe: Connection) -> None:
    """Send from node 0 to node 1 as fast as a blocking socket can."""
    contexts = security(load, role).load() if secure else None
    if role == 1:
        with socket.create_server(("127.0.0.1", load.port)) as listening:
            pipe.send("ready")
            connection, _ = listening.accept()
    else:
        connection = socket.create_connection(("127.0.0.1", load.calls))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if contexts is not None:
        context = contexts.server if role else contexts.client
        connection = context.wrap_socket(connection, server_side=bool(role))
    with connection:
        memory = memoryview(np.ones(load.size // 4, np.float32)).cast("B")
        begin, used = time.perf_counter(), cpu()
        for _ in range(load.count):
            if role == 0:
                connection.sendall(memory)
                continue
            got = 0
            while got < len(memory):
                got += connection.recv_into(memory[got:])
        if role == 0:
            connection.recv(1)
        else:
            connection.send(b"!")
        pipe.send((time.perf_counter() - begin, cpu() - used))


class Counting:
    """A listener that waits for a peer, and then for so many messages."""

    def __init__(self, count: int) -> None:
        self.up, self.all = asyncio.Event(), asyncio.Event()
        self.left = count

    def received(self, source: int, message: Message) -> None:
        """Count a message."""
        self.left -= 1
        if self.left <= 0:
            self.all.set()

    def peer_up(self, peer: int) -> None:
        """Begin."""
        self.up.set()

    def peer_down(self, peer: int, dropped: Sequence[Message]) -> None:
        """Go on: it does not happen before the end."""

    def link_idle(self) -> None:
        """Go on."""


def join(role: int, *, secure: bool, load: Load, uplink_bps: float | None = None) -> Network:
    """Make one of the two networks."""
    certificates = [security(load, node) for node in (0, 1)]
    roster = Roster.of(
        [
            Member(
                index=node,
                address=Address("127.0.0.1", load.calls) if node else None,
                fingerprint=certificates[node].load().fingerprint if secure else "",
            )
            for node in (0, 1)
        ],
        [(0, 1)],
    )
    hello = Hello(
        run="bench", epoch=0, index=role, incarnation=1, algorithm="none", version="0", layout=""
    )
    listen = Address("127.0.0.1", load.port) if role else None
    return Network(
        roster,
        hello,
        certificates[role] if secure else Security(insecure=True),
        Settings(limit=load.size, listen=listen, uplink_bps=uplink_bps),
        Seeds(0).generator(role, "jitter"),
    )


async def networked(role: int, secure: bool, load: Load, pipe: Connection) -> None:
    """Send from node 0 to node 1 through networks; node 1 answers the last message."""
    network = join(role, secure=secure, load=load)
    counting = Counting(load.count if role else 1)
    await network.open(counting)
    if role:
        pipe.send("ready")
    await counting.up.wait()
    payload = np.ones(load.size // 4, np.float32)
    begin, used = time.perf_counter(), cpu()
    if role == 0:
        for step in range(load.count):
            network.send(1, Message(kind="model", step=step, payload=payload))
    await counting.all.wait()
    if role == 1:
        network.send(0, Message(kind="done", step=0))
    pipe.send((time.perf_counter() - begin, cpu() - used))
    await network.close()


def streamed(role: int, load: Load, pipe: Connection) -> None:
    """Send from node 0 to node 1 through one gRPC stream, which node 1 answers at its end."""
    import grpc  # in its own process: gRPC must not be there before a fork

    own = load.keys.parent / "grpc"
    ca, cert, key = ((own / name).read_bytes() for name in (CA_CERT, CERT, KEY))
    options = [(f"grpc.max_{kind}_message_length", -1) for kind in ("send", "receive")]
    if role == 0:
        credentials = grpc.ssl_channel_credentials(ca, key, cert)
        with grpc.secure_channel(f"127.0.0.1:{load.calls}", credentials, options) as channel:
            grpc.channel_ready_future(channel).result(timeout=30)
            payload = np.ones(load.size // 4, np.float32)
            begin, used = time.perf_counter(), cpu()
            # Vectors are what there is to send, and gRPC takes bytes.
            channel.stream_unary("/bench/send")(payload.tobytes() for _ in range(load.count))
            pipe.send((time.perf_counter() - begin, cpu() - used))
        return
    done = threading.Event()

    def take(requests: Iterator[bytes], context: object) -> bytes:
        begin, used = time.perf_counter(), cpu()
        for request in requests:
            np.frombuffer(request, np.float32)
        pipe.send((time.perf_counter() - begin, cpu() - used))
        done.set()
        return b"!"

    handlers = {"send": grpc.stream_unary_rpc_method_handler(take)}
    server = grpc.server(ThreadPoolExecutor(1), options=options)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("bench", handlers)])
    server.add_secure_port(
        f"127.0.0.1:{load.port}",
        grpc.ssl_server_credentials([(key, cert)], ca, require_client_auth=True),
    )
    server.start()
    pipe.send("ready")
    done.wait(300)
    server.stop(5).wait()


def work(way: str, role: int, load: Load, pipe: Connection) -> None:
    """Be one of the two processes."""
    kind, secure = way.split()[0], way.endswith("TLS")
    if kind == "bare":
        bare(role, secure, load, pipe)
    elif kind == "gRPC":
        streamed(role, load, pipe)
    else:
        asyncio.run(networked(role, secure, load, pipe))


def delay(seconds: float, target: int, pipe: Connection) -> None:
    """Be a proxy, until the pipe ends."""

    async def serve() -> None:
        async with await Proxy.open(("127.0.0.1", target)) as proxy:
            proxy.there.delay = proxy.back.delay = seconds
            pipe.send(proxy.address[1])
            await asyncio.to_thread(pipe.recv)

    asyncio.run(serve())


def measure(way: str, load: Load, rtt: float) -> Cost:
    """Run both processes; the sender's clock counts, until it has heard that all is there."""
    context = multiprocessing.get_context("fork")
    if rtt:
        pipe, end = context.Pipe()
        proxy = context.Process(target=delay, args=(rtt / 2, load.port, end))
        proxy.start()
        cost = measure(way, replace(load, dialed=pipe.recv()), 0.0)
        pipe.send(None)
        proxy.join()
        return cost
    pipes = [context.Pipe() for _ in range(2)]
    ends = [
        context.Process(target=work, args=(way, role, load, pipes[role][1])) for role in range(2)
    ]
    ends[1].start()
    pipes[1][1].close()  # so that reading ends where a process does
    assert pipes[1][0].recv() == "ready"
    ends[0].start()
    pipes[0][1].close()
    costs = [pipes[role][0].recv() for role in range(2)]
    for end in ends:
        end.join()
    return Cost(costs[0][0], costs[0][1] + costs[1][1])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[1_000, 36_000, 1_000_000, 10_000_000]
    )
    parser.add_argument("--megabytes", type=float, default=200.0, help="of each transfer")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--rtt", type=float, default=0.0, help="milliseconds, by a proxy")
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # plaintext is on purpose here
    title = f"{ssl.OPENSSL_VERSION}; {options.rtt:g} ms; load before: {os.getloadavg()[0]:.1f}"
    table = Table(title=title)
    for heading in ("bytes", "way", "MB/s", "of bare", "CPU ms/MB", "times bare"):
        table.add_column(heading, justify="left" if heading == "way" else "right")
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        make_keys(keys, 2, 1)
        make_superlink_keys(keys.parent / "grpc", "127.0.0.1", 0, 1)
        for size in options.sizes:
            count = min(20_000, max(1, round(options.megabytes * 1e6 / size)))
            found: dict[str, list[Cost]] = {way: [] for way in WAYS}
            for _ in range(options.repeat):
                for way in WAYS:
                    load = Load(size, count, *free_ports(1), keys)
                    found[way].append(measure(way, load, options.rtt / 1e3))
            megabytes = size * count / 1e6
            base = Cost(1.0, 1.0)
            for way in WAYS:
                wall = statistics.median(cost.wall for cost in found[way])
                used = statistics.median(cost.cpu for cost in found[way])
                base = Cost(wall, used) if way.startswith("bare") else base
                table.add_row(
                    f"{size:,}",
                    way,
                    f"{megabytes / wall:.0f}",
                    f"{base.wall / wall:.2f}",
                    f"{1e3 * used / megabytes:.2f}",
                    f"{used / base.cpu:.2f}",
                )
    console = Console()
    console.print(table)
    console.print(f"load after: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
