"""A whole deployment on this machine: SuperLink, SuperNodes and sidecars, with certificates.

The SuperLink has TLS and authenticates its SuperNodes; beside each SuperNode is a sidecar, and
sidecars know each other by certificates too. All of it is in one folder and belongs to a ``with``
block, in the end of which nothing is left, whatever becomes of the process that opened it.

>>> with Deployment(nodes=4) as deployment:  # doctest: +SKIP
...     run = deployment.run("apps/digits", run_config={"algorithm": "dpsgd"}, echo=print)
>>> run.status  # doctest: +SKIP
'finished:completed'
"""

# ruff: noqa: TID251 - a deployment is processes, with ports and deadlines

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from flwr_decentral.channel.client import ask
from flwr_decentral.channel.keys import (
    CA_CERT,
    CERT,
    KEY,
    make_keys,
    make_superlink_keys,
    node_folder,
)

from .ports import free_ports
from .processes import family
from .superlink import COMMAND_TIMEOUT, START_TIMEOUT, SuperLink

_HOST: Final = "127.0.0.1"
_DAYS: Final = 30
_BRISK: Final = {
    # Seconds from one look for work to the next, where Flower lets one choose; all nodes look, and
    # share this machine's cores.
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.4",
    "OMP_NUM_THREADS": "1",
}


class Deployment(SuperLink):
    """Start a SuperLink, SuperNodes and sidecars, and end them and all they have started.

    Parameters
    ----------
    nodes : int (default: 4)
        How many SuperNodes.
    operated : bool (default: True)
        Whether the sidecars are started here, as an operator would; otherwise ClientApps start
        them.
    keep, environ, start_timeout
        See :class:`~flwr_decentral.testing.superlink.SuperLink`.
    """

    def __init__(
        self,
        nodes: int = 4,
        *,
        operated: bool = True,
        keep: bool = False,
        environ: Mapping[str, str] | None = None,
        start_timeout: float = START_TIMEOUT,
    ) -> None:
        added = _BRISK | dict(environ or {})
        super().__init__(keep=keep, environ=added, start_timeout=start_timeout)
        self._nodes, self._operated = nodes, operated
        self._port, *others = free_ports(1 + 2 * nodes)
        self._node_ports, self._peer_ports = others[:nodes], others[nodes:]

    def status(self, node: int) -> dict[str, Any]:
        """Ask the sidecar of a node how it is; only for those that were started here."""
        return ask(self._socket(node), "status")

    def crash(self) -> None:
        """Kill the SuperLink and the ServerApps, as when their machine fails."""
        superlink = self._processes.pop("superlink")
        # A SuperExec, in a session of its own, starts the ServerApps.
        for process in family(superlink.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        superlink.wait()

    def restart(self) -> None:
        """Start the SuperLink again after :meth:`crash`; the SuperNodes find it by themselves."""
        self._serve()

    def kill_supernode(self, node: int) -> None:
        """Kill a SuperNode, and nothing that it has started."""
        supernode = self._processes.pop(f"supernode-{node}")
        supernode.kill()
        supernode.wait()

    def start_supernode(self, node: int) -> None:
        """Start a SuperNode again after :meth:`kill_supernode`."""
        self._start_supernode(node, self._configs[node])

    def _start(self) -> None:
        make_superlink_keys(self.home / "superlink", _HOST, self._nodes, _DAYS)
        make_keys(self.home / "keys", self._nodes, _DAYS)
        self._configs = [self._configure(node) for node in range(self._nodes)]
        self._serve()
        # A command each, whose time is that of Python's start: so several at once.
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(self._register, range(self._nodes)))
        for node in range(self._nodes):
            self.start_supernode(node)

    def _serve(self) -> None:
        folder = self.home / "superlink"
        self._start_superlink(
            *("--ssl-ca-certfile", str(folder / CA_CERT)),
            *("--ssl-certfile", str(folder / CERT)),
            *("--ssl-keyfile", str(folder / KEY)),
            # With it, SuperNodes survive when the SuperLink does not.
            *("--database", str(self.home / "state.db")),
            "--enable-supernode-auth",
            port=self._port,
            ca=folder / CA_CERT,
        )

    def _configure(self, node: int) -> dict[str, str | int]:
        """Write a node config; start the sidecar, unless the ClientApp does."""
        folder = node_folder(self.home / "keys", node)
        own = {
            "address": f"{_HOST}:{self._peer_ports[node]}",
            "ca": str(folder / CA_CERT),
            "cert": str(folder / CERT),
            "key": str(folder / KEY),
        }
        place: dict[str, str | int] = {"partition-id": node, "num-partitions": self._nodes}
        if not self._operated:
            return place | {f"peer-{key}": value for key, value in own.items()}
        options = [word for key, value in own.items() for word in (f"--{key}", value)]
        name, address = f"sidecar-{node}", self._socket(node)
        self._spawn(name, "flwr-decentral", "sidecar", "--socket", address, *options)
        return place | {"peer-socket": address}

    def _socket(self, node: int) -> str:
        return str(self.home / f"sidecar-{node}.sock")

    def _register(self, node: int) -> None:
        key = self.home / "superlink" / f"supernode-{node}.pub"
        what = f"flwr supernode register to register SuperNode {node}"
        self._flwr(["supernode", "register", str(key)], what, COMMAND_TIMEOUT)

    def _start_supernode(self, node: int, config: Mapping[str, str | int]) -> None:
        folder = self.home / "superlink"
        self._spawn(
            f"supernode-{node}",
            "flower-supernode",
            *("--root-certificates", str(folder / CA_CERT)),
            *("--superlink", f"{_HOST}:{self._port}"),
            *("--auth-supernode-private-key", str(folder / f"supernode-{node}")),
            *("--host", _HOST, "--port", str(self._node_ports[node])),
            *("--node-config", " ".join(f"{key}={json.dumps(v)}" for key, v in config.items())),
        )
