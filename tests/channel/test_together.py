"""Pumps whose trainers are processes that die, next to the run in virtual time they stand for."""

import asyncio
import re
import signal
import sys

import networkx as nx
import pytest

from flwr_decentral.channel.clock import LoopClock
from flwr_decentral.channel.handoff import Handoff, Slots
from flwr_decentral.channel.memory import Switchboard, carried_by
from flwr_decentral.channel.pump import Pump
from flwr_decentral.channel.rounds import Segment
from flwr_decentral.core import SECOND
from flwr_decentral.localsocket import Listener
from flwr_decentral.testing.toys import Lockstep

from . import virtual

pytestmark = [
    pytest.mark.net,
    pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's"),
]

ROUNDS, SEGMENT = 5, 3
TRAINER = """
import os, signal, sys
import numpy as np
from flwr_decentral.channel.attachment import Attachment
address, node, dies = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with Attachment(address, {}) as attachment:
    while (task := attachment.next()) is not None:
        if task.round == dies:
            task.output[:] = np.nan
            os.kill(os.getpid(), signal.SIGKILL)
        noise = np.random.default_rng(task.seed).normal(size=len(task.model)).astype(np.float32)
        learned = task.model - np.float32(0.3) * (task.model - np.float32(node))
        task.output[:] = learned + np.float32(0.01) * noise
        assert attachment.commit(task)
"""
"""What :func:`virtual.learn` does, in a process of its own that may die in some round."""


class Node:
    """A sidecar, but for its network: a pump, a hand-off, and whoever trains."""

    def __init__(self, algorithm, site, link, notes):
        self.site, self.link = site, link
        clock, listener = LoopClock(asyncio.get_running_loop()), Listener()
        self.address = listener.address
        slots = Slots(size=site.layout.size)
        self.handoff = Handoff(
            slots, listener, clock, 100 * SECOND, lambda: self.pump.machine.model
        )
        self.pump = Pump(algorithm, site, link, self.handoff, clock, notes.append)

    async def open(self):
        self.handoff.open()
        self.pump.start(patience=20 * SECOND)
        await self.link.open(self.pump)

    async def close(self):
        self.pump.stop("the run has ended")
        await self.link.close()
        await self.handoff.close()

    async def serve(self, segment, deaths):
        """Be a SuperNode: start a process for the segment, and another for each that dies."""
        running = asyncio.ensure_future(self.pump.run(segment))
        codes = []
        for dies in (*deaths, 0):
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", TRAINER, self.address, str(self.site.node), str(dies)
            )
            if not dies:
                await running
                self.handoff.dismiss(self.pump.metrics())
            codes.append(await process.wait())
        return codes


def test_trainers_that_are_killed_change_nothing():
    graph, algorithm, lines = nx.path_graph(2), Lockstep(), []
    sites = virtual.sites(graph)

    async def work():
        board = Switchboard(graph, carried_by(asyncio.get_running_loop().call_soon))
        nodes = [Node(algorithm, site, board.transport(site.node), lines) for site in sites]
        async with asyncio.timeout(60):
            for node in nodes:
                await node.open()
            first = await asyncio.gather(
                nodes[0].serve(Segment(last_round=SEGMENT), deaths=[1, 2]),
                nodes[1].serve(Segment(last_round=SEGMENT), deaths=[]),
            )
            second = await asyncio.gather(
                *(node.serve(Segment(last_round=ROUNDS), deaths=[]) for node in nodes)
            )
            assert first == [[-signal.SIGKILL, -signal.SIGKILL, 0], [0]]
            assert second == [[0], [0]]
            assert [node.handoff.vanished for node in nodes] == [2, 0]
            assert nodes[0].pump.metrics()["failed-rounds"] == 0
            for node in nodes:
                await node.close()

    asyncio.run(work())
    _, expected = virtual.run(algorithm, graph, rounds=ROUNDS)
    trained = re.compile(r"n\d TrainDone round=\d+ before=\S+ after=\S+")
    assert sorted(trained.search(line)[0] for line in lines if "TrainDone" in line) == sorted(
        trained.search(line)[0] for line in expected if "TrainDone" in line
    )
    assert len([line for line in lines if "TrainDone" in line]) == 2 * ROUNDS
