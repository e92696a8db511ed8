"""What a trainer loses to the traffic of its sidecar, which shares the machine with it.

Two nodes send each other messages over TLS as fast as a cap of 100 MB/s each way allows, each in a
process of its own, as a sidecar and its neighbor. A third process trains meanwhile: local rounds of
a small and of a larger network. Printed is the CPU time of a local round, as the median of many,
with the traffic and without it, in turn; and what the traffic came to.

    python tests/bench/bench_interference.py --seconds 10 --repeat 3
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from bench_channel import Load, join
from rich.console import Console
from rich.table import Table

from flwr_decentral.channel.keys import make_keys
from flwr_decentral.channel.network import Network
from flwr_decentral.core import Message
from flwr_decentral.testing.ports import free_ports

MESSAGE = 1_000_000
CAP = 100e6
TASKS = ("W1", "W2")


class Flood:
    """A listener that keeps some messages queued, and counts what comes."""

    def __init__(self, peer: int) -> None:
        self.network: Network | None = None
        self.payload = np.ones(MESSAGE // 4, np.float32)
        self.nbytes = 0
        self._peer = peer

    def received(self, source: int, message: Message) -> None:
        """Count a message."""
        self.nbytes += message.nbytes

    def peer_up(self, peer: int) -> None:
        """Begin."""
        self._send()

    def peer_down(self, peer: int, dropped: Sequence[Message]) -> None:
        """Go on: it does not happen before the end."""

    def link_idle(self) -> None:
        """Send more."""
        self._send()

    def _send(self) -> None:
        assert self.network is not None
        for _ in range(4):
            self.network.send(self._peer, Message(kind="model", step=0, payload=self.payload))


def sidecar(role: int, load: Load, pipe: Connection) -> None:
    """Send and receive until told to stop; say how many bytes came, each second."""

    async def serve() -> None:
        flood = Flood(1 - role)
        network = flood.network = join(role, secure=True, load=load, uplink_bps=8 * CAP)
        await network.open(flood)
        pipe.send("ready")
        begin = time.perf_counter()
        await asyncio.to_thread(pipe.recv)
        pipe.send(flood.nbytes / (time.perf_counter() - begin))
        await network.close()

    asyncio.run(serve())


@contextmanager
def traffic(keys: Path, found: list[float]):
    """Let two nodes talk for as long as the block lasts, and note how much each has received."""
    context = multiprocessing.get_context("fork")
    load = Load(MESSAGE, 0, *free_ports(1), keys)
    pipes = [context.Pipe() for _ in range(2)]
    ends = [context.Process(target=sidecar, args=(role, load, pipes[role][1])) for role in (1, 0)]
    for end, role in zip(ends, (1, 0), strict=True):
        end.start()
        pipes[role][1].close()  # so that reading ends where a process does
        assert pipes[role][0].recv() == "ready"
    try:
        yield
    finally:
        for pipe, _ in pipes:
            pipe.send(None)
        found.append(sum(pipe.recv() for pipe, _ in pipes) / 2)
        for end in ends:
            end.join()


def train(name: str, seconds: float, pipe: Connection) -> None:
    """Train for some time; say what CPU time a local round takes, in milliseconds."""
    import torch  # in its own process: what is forked must not share its threads
    from training_tasks import TASKS, local_steps, network

    torch.set_num_threads(1)
    task = TASKS[name]
    net = network(task)
    local_steps(task, net, 0)
    times = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        begin = time.thread_time()
        local_steps(task, net, 0)
        times.append(time.thread_time() - begin)
    pipe.send(1e3 * statistics.median(times))


def measure(name: str, seconds: float) -> float:
    context = multiprocessing.get_context("fork")
    pipe, end = context.Pipe()
    trainer = context.Process(target=train, args=(name, seconds, end))
    trainer.start()
    end.close()
    cost = pipe.recv()
    trainer.join()
    return float(cost)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    before = os.getloadavg()[0]
    table = Table(title=f"CPU ms of a local round; load before: {before:.1f}")
    for heading in ("task", "alone", "beside traffic", "ratio", "MB/s each way"):
        table.add_column(heading, justify="right")
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        make_keys(keys, 2, 1)
        for name in TASKS:
            alone, beside, rates = [], [], []
            for _ in range(options.repeat):
                alone.append(measure(name, options.seconds))
                with traffic(keys, rates):
                    beside.append(measure(name, options.seconds))
            ratio = statistics.median(b / a for a, b in zip(alone, beside, strict=True))
            table.add_row(
                name,
                f"{statistics.median(alone):.2f}",
                f"{statistics.median(beside):.2f}",
                f"{ratio:.3f}",
                f"{statistics.median(rates) / 1e6:.0f}",
            )
    Console().print(table)


if __name__ == "__main__":
    main()
