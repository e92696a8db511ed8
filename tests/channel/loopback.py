"""Nodes on the loopback interface: certificates, ports, and listeners that remember."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives import serialization

from flwr_decentral.channel.connections import Settings
from flwr_decentral.channel.heads import Hello
from flwr_decentral.channel.keys import Authority
from flwr_decentral.channel.links import Timing
from flwr_decentral.channel.network import Network
from flwr_decentral.channel.roster import Address, Member, Roster
from flwr_decentral.channel.tls import Security, fingerprint
from flwr_decentral.core import Message, Seeds

LIMIT = 64 << 20
INSECURE = Security(insecure=True)
BRISK = Timing(shortest=0.02, longest=0.1, grace=1.0, linger=0.5)
"""Tries again at once; waits as long as ever where only a failing test would notice."""


@dataclass(frozen=True)
class Identity:
    """A certificate, and where its files are."""

    security: Security
    fingerprint: str


class Passports:
    """Certificates of all kinds, made once.

    ``good`` are those of nodes 0 to 3; the others are all made out to node 1.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        now, day = datetime.now(UTC), timedelta(days=1)
        ours, other = Authority.make("ours"), Authority.make("other")
        self._ca = self._pem("ca", ours.certificate)
        self.good = [self._issue(ours, f"node-{node}") for node in range(4)]
        self.stranger = self._issue(ours, "stranger")
        self.expired = self._issue(ours, "expired", begin=now - 2 * day, end=now - day)
        self.early = self._issue(ours, "early", begin=now + day, end=now + 2 * day)
        self.foreign = self._issue(other, "foreign")

    def _issue(self, authority: Authority, name: str, **dates: datetime) -> Identity:
        certificate, key = authority.issue(name, **dates)
        security = Security(
            ca=self._ca, cert=self._pem(name, certificate), key=self._pem(f"{name}-key", key)
        )
        return Identity(security, fingerprint(certificate.public_bytes(serialization.Encoding.DER)))

    def _pem(self, name: str, thing: Any) -> Path:
        path = self._folder / f"{name}.pem"
        pem = serialization.Encoding.PEM
        if hasattr(thing, "public_bytes"):
            path.write_bytes(thing.public_bytes(pem))
        else:
            kind, encryption = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            path.write_bytes(thing.private_bytes(pem, kind, encryption))
        return path


class Diary:
    """A listener that remembers, and lets others wait for what it hears."""

    def __init__(self) -> None:
        self.messages: list[tuple[int, Message]] = []
        self.ups: list[int] = []
        self.downs: list[int] = []
        self.dropped: list[Message] = []
        self.idles = 0
        self.on_message: Callable[[int, Message], None] = lambda source, message: None

    def received(self, source: int, message: Message) -> None:
        self.messages.append((source, message))
        self.on_message(source, message)

    def peer_up(self, peer: int) -> None:
        self.ups.append(peer)

    def peer_down(self, peer: int, dropped: Sequence[Message]) -> None:
        self.downs.append(peer)
        self.dropped += dropped

    def link_idle(self) -> None:
        self.idles += 1


async def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Let the loop run until something holds; fail if it does not in time."""
    try:
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.002)
    except TimeoutError:
        raise AssertionError("it did not come to that in time") from None


def run(work: Coroutine[Any, Any, None], seconds: float = 60.0) -> None:
    """Run a test's coroutine; let nothing of it go unheard."""

    async def watched() -> None:
        heard: list[dict[str, Any]] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: heard.append(context))
        async with asyncio.timeout(seconds):
            await work
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert not others, f"tasks are left: {others}"
        assert not heard, heard

    asyncio.run(watched())


@contextlib.contextmanager
def ports(count: int) -> Iterator[list[int]]:
    """Reserve ports: nobody else gets them, and whoever says REUSEADDR can listen there."""
    with contextlib.ExitStack() as stack:
        taken = []
        for _ in range(count):
            keeper = stack.enter_context(socket.socket())
            keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            keeper.bind(("127.0.0.1", 0))
            taken.append(keeper.getsockname()[1])
        yield taken


def hello(index: int, **other: Any) -> Hello:
    usual = Hello(
        run="7",
        epoch=0,
        index=index,
        incarnation=1,
        algorithm="dpsgd",
        version="0.1.0",
        layout="ab" * 16,
    )
    return replace(usual, **other)


class Loopback:
    """Some nodes with reserved ports, one roster, and a network for each that is asked for.

    Parameters
    ----------
    identities : sequence of Identity
        One for each node.
    edges : iterable of (int, int), optional
        By default every pair.
    secure : bool
        With TLS or without.
    """

    def __init__(
        self,
        taken: Sequence[int],
        identities: Sequence[Identity],
        edges: Iterable[tuple[int, int]] | None = None,
        *,
        secure: bool = True,
        unreachable: Sequence[int] = (),
    ) -> None:
        nodes = range(len(taken))
        self.ports = taken
        self.identities = identities
        self.secure = secure
        self.diaries = [Diary() for _ in nodes]
        self.networks: list[Network] = []
        pairs = [(a, b) for a in nodes for b in nodes if a < b] if edges is None else edges
        self.roster = Roster.of(
            [
                Member(
                    index=node,
                    address=None if node in unreachable else Address("127.0.0.1", taken[node]),
                    fingerprint=identities[node].fingerprint if secure else "",
                )
                for node in nodes
            ],
            pairs,
        )

    def make(
        self,
        index: int,
        *,
        security: Security | None = None,
        roster: Roster | None = None,
        settings: Settings | None = None,
        **other: Any,
    ) -> Network:
        usual = self.identities[index].security if self.secure else INSECURE
        network = Network(
            roster or self.roster,
            hello(**{"index": index, **other}),
            security or usual,
            settings or Settings(limit=LIMIT, timing=BRISK),
            Seeds(0).generator(index, "jitter"),
        )
        self.networks.append(network)
        return network

    async def open(self, index: int, **how: Any) -> Network:
        network = self.make(index, **how)
        await network.open(self.diaries[index])
        return network

    async def close(self) -> None:
        await asyncio.gather(*(network.close() for network in self.networks))


@contextlib.asynccontextmanager
async def loopback(
    identities: Sequence[Identity], nodes: int = 2, **how: Any
) -> AsyncIterator[Loopback]:
    """Reserve ports for nodes, and close their networks in the end."""
    with ports(nodes) as taken:
        world = Loopback(taken, identities, **how)
        try:
            yield world
        finally:
            await world.close()


def model(size: int, seed: int = 0, **other: Any) -> Message:
    payload = np.random.default_rng(seed).standard_normal(size).astype(np.float32)
    payload.flags.writeable = False
    return Message(**{"kind": "model", "step": seed, "payload": payload, **other})


def same(a: Message, b: Message) -> bool:
    payloads = (a.payload is None) == (b.payload is None)
    if payloads and a.payload is not None and b.payload is not None:
        payloads = a.payload.tobytes() == b.payload.tobytes()
    return payloads and (a.kind, a.step, dict(a.header)) == (b.kind, b.step, dict(b.header))
