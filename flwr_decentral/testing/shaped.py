"""Networks of nodes on this machine whose links go through proxies: slow, late, stalled or cut.

Every link has a :class:`~flwr_decentral.testing.proxy.Proxy` of its own, to which the end that
dials is sent by its roster. All that leaves a node goes through one line, as in virtual time.
"""

from __future__ import annotations

import asyncio  # noqa: TID251 - networks are opened and closed together
import contextlib
import math
import socket  # noqa: TID251 - a port is the system's to give
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType

import networkx as nx

from flwr_decentral.channel.connections import Settings
from flwr_decentral.channel.heads import Hello
from flwr_decentral.channel.keys import CA_CERT, CERT, KEY, node_folder
from flwr_decentral.channel.links import Timing
from flwr_decentral.channel.network import Network
from flwr_decentral.channel.roster import Address, Member, Roster
from flwr_decentral.channel.tls import Security
from flwr_decentral.channel.trainer import Done, Outcome, Task
from flwr_decentral.core import Seeds, Vector

from .proxy import Line, Proxy, Way

_HOST = "127.0.0.1"


class Neighborhood:
    """Make the networks of all nodes of a graph; opens its proxies in an ``async with`` block.

    Parameters
    ----------
    graph : networkx.Graph
        The nodes, 0 to n-1, and who is linked to whom.
    keys : path
        What :func:`flwr_decentral.channel.keys.make_keys` has made for at least as many nodes.
    timing : Timing, optional
        How long networks wait for what.
    limit : int (default: 64 MiB)
        Bytes of the longest payload.

    Attributes
    ----------
    proxies : dict of (int, int) to Proxy
        One for each edge, by (who dials, who is dialed).
    lines : list of Line
        What all that leaves a node goes through.
    networks : list of Network
        Those that were made; they are closed in the end.
    """

    def __init__(
        self,
        graph: nx.Graph[int],
        keys: Path,
        *,
        timing: Timing | None = None,
        limit: int = 64 << 20,
    ) -> None:
        self.graph, self.timing = graph, timing or Timing()
        self.proxies: dict[tuple[int, int], Proxy] = {}
        self.lines = [Line() for _ in graph]
        self.networks: list[Network] = []
        self._limit = limit
        homes = [node_folder(keys, node) for node in range(len(graph))]
        self._securities = [
            Security(ca=home / CA_CERT, cert=home / CERT, key=home / KEY) for home in homes
        ]
        self._fingerprints: list[str] = []
        self._places: list[Address] = []
        self._opened = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Neighborhood:
        """Reserve a port for each node, and open a proxy for each edge."""
        async with contextlib.AsyncExitStack() as stack:
            for security in self._securities:
                contexts = security.load()
                assert contexts is not None
                self._fingerprints.append(contexts.fingerprint)
                # Bound and not listening: nobody else gets it, whoever says REUSEADDR can listen.
                keeper = stack.enter_context(socket.socket())
                keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                keeper.bind((_HOST, 0))
                self._places.append(Address(_HOST, keeper.getsockname()[1]))
            for a, b in self.graph.edges:
                dialer, other = min(a, b), max(a, b)
                proxy = await stack.enter_async_context(
                    await Proxy.open(tuple(self._places[other]))
                )
                self.proxies[dialer, other] = proxy
                proxy.there.line, proxy.back.line = self.lines[dialer], self.lines[other]
            self._opened = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close everything."""
        async with self._opened:
            await asyncio.gather(*(network.close() for network in self.networks))

    def network(
        self,
        node: int,
        *,
        incarnation: int = 1,
        listen: Address | None = None,
        uplink_bps: float = math.inf,
        algorithm: str = "any",
    ) -> Network:
        """Make the network of a node; it is not open yet."""
        hello = Hello(
            run="shaped",
            epoch=0,
            index=node,
            incarnation=incarnation,
            algorithm=algorithm,
            version="0",
            layout="",
        )
        settings = Settings(
            limit=self._limit,
            listen=listen,
            uplink_bps=None if math.isinf(uplink_bps) else uplink_bps,
            timing=self.timing,
        )
        network = Network(
            self.roster(node),
            hello,
            self._securities[node],
            settings,
            Seeds(incarnation).generator(node, "jitter"),
        )
        self.networks.append(network)
        return network

    def roster(self, node: int) -> Roster:
        """Make the roster of a node, which has the proxies' addresses for whom it dials."""
        members = []
        for peer, place in enumerate(self._places):
            proxy = self.proxies.get((node, peer))
            address = place if proxy is None else Address(*proxy.address)
            fingerprint = self._fingerprints[peer]
            members.append(Member(index=peer, address=address, fingerprint=fingerprint))
        return Roster.of(members, self.graph.edges)

    def security(self, node: int) -> Security:
        """Tell by which certificate a node is known."""
        return self._securities[node]

    def place(self, node: int) -> Address:
        """Tell where a node listens; its neighbors are told the address of a proxy."""
        return self._places[node]

    def proxy(self, a: int, b: int) -> Proxy:
        """Return the proxy of an edge."""
        return self.proxies[min(a, b), max(a, b)]

    def way(self, source: int, to: int) -> Way:
        """Return what leads from one node to another."""
        proxy = self.proxy(source, to)
        return proxy.there if source < to else proxy.back

    def between(self, group: Iterable[int]) -> list[Proxy]:
        """List the proxies of all edges between some nodes and the others."""
        inside = set(group)
        return [proxy for (a, b), proxy in self.proxies.items() if (a in inside) != (b in inside)]


class Steady:
    """A trainer whose every round takes the same time; it needs no more of the machine than that.

    Parameters
    ----------
    node : int
        Whose trainer it is.
    seconds : float
        How long a round takes.
    train : callable
        ``train(node, round, vector)`` returns the trained vector.
    """

    def __init__(
        self, node: int, seconds: float, train: Callable[[int, int, Vector], Vector]
    ) -> None:
        self._node, self._seconds, self._train = node, seconds, train
        self._alarm: asyncio.TimerHandle | None = None

    def start(self, task: Task, done: Done) -> None:
        """Begin a task."""
        loop = asyncio.get_running_loop()
        self._alarm = loop.call_at(loop.time() + self._seconds, self._end, task, done)

    def cancel(self) -> None:
        """Forget the task in flight."""
        if self._alarm is not None:
            self._alarm.cancel()

    def _end(self, task: Task, done: Done) -> None:
        self._alarm = None
        done(Outcome(model=self._train(self._node, task.round, task.model.copy())))
