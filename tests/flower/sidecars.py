"""Sidecars of a federation on this machine: real processes, with certificates."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context, Message

from flwr_decentral.channel.client import ask
from flwr_decentral.channel.keys import CA_CERT, CERT, KEY, node_folder
from flwr_decentral.testing.ports import free_ports


class Sidecars:
    """One sidecar for each node; ends them at the end of the ``with`` block.

    Parameters
    ----------
    keys : Path
        What :func:`flwr_decentral.channel.keys.make_keys` has made.
    count : int
        How many.
    """

    def __init__(self, keys: Path, count: int) -> None:
        self.keys, self.count = keys, count
        self.token = secrets.token_hex(4)
        self.ports = free_ports(count)
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Sidecars:
        for node in range(self.count):
            self.start(node)
        for node in range(self.count):
            self.ask(node, "who")
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            process.wait(timeout=20)

    def start(self, node: int) -> None:
        self.processes[node] = subprocess.Popen(
            [
                *(sys.executable, "-m", "flwr_decentral.cli", "sidecar"),
                *("--socket", self.socket(node)),
                *self.arguments(node),
            ],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    def kill(self, node: int) -> None:
        self.processes[node].kill()
        self.processes[node].wait()

    def socket(self, node: int) -> str:
        return f"@flwr-decentral-test-{self.token}-{node}"

    def config(self, node: int) -> dict[str, str]:
        """Write what a node config says, without a socket."""
        folder = node_folder(self.keys, node)
        return {
            "peer-address": f"127.0.0.1:{self.ports[node]}",
            "peer-ca": str(folder / CA_CERT),
            "peer-cert": str(folder / CERT),
            "peer-key": str(folder / KEY),
        }

    def arguments(self, node: int) -> list[str]:
        pairs = [
            (f"--{key.removeprefix('peer-')}", value) for key, value in self.config(node).items()
        ]
        return [word for pair in pairs for word in pair]

    def ask(self, node: int, do: str, **values: Any) -> dict[str, Any]:
        return ask(self.socket(node), do, patience=30.0, **values)

    def mod(self, msg: Message, context: Context, call_next) -> Message:
        """Be the node config, which Flower's Simulation Engine does not let one write."""
        node = int(context.node_config["partition-id"])
        context.node_config["peer-socket"] = self.socket(node)
        return call_next(msg, context)


def configured(config: Mapping[int, Mapping[str, Any]]):
    """Make a mod that adds to each node's config."""

    def mod(msg: Message, context: Context, call_next) -> Message:
        context.node_config.update(config[int(context.node_config["partition-id"])])
        return call_next(msg, context)

    return mod
