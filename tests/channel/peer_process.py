"""A node in a process of its own: it keeps what it gets to itself, and answers with its digest.

python peer_process.py '{"index": 1, "records": [...], "edges": [[0, 1]], "files": {...}}'
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from flwr_decentral.channel.connections import Settings
from flwr_decentral.channel.heads import Hello
from flwr_decentral.channel.network import Network
from flwr_decentral.channel.roster import Roster
from flwr_decentral.channel.tls import Security
from flwr_decentral.core import Message, Seeds
from flwr_decentral.core.transcript import vector_digest


class Answering:
    """Answer each message with a text that depends on all of its bytes."""

    def __init__(self) -> None:
        self.network: Network | None = None

    def received(self, source: int, message: Message) -> None:
        assert self.network is not None
        digest = "" if message.payload is None else vector_digest(message.payload)
        self.network.send(source, Message(kind=digest, step=message.step))

    def peer_up(self, peer: int) -> None: ...

    def peer_down(self, peer: int, dropped: Sequence[Message]) -> None: ...

    def link_idle(self) -> None: ...


async def main(config: dict) -> None:
    answering = Answering()
    answering.network = Network(
        Roster.from_records(config["records"], map(tuple, config["edges"])),
        Hello(**config["hello"]),
        Security(**{name: Path(path) for name, path in config["files"].items()}),
        Settings(limit=64 << 20),
        Seeds(0).generator(config["index"], "jitter"),
    )
    await answering.network.open(answering)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await answering.network.close()


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
