"""A whole deployment on this machine: SuperLink, SuperNodes and sidecars, all with certificates.

    python tools/deployment.py --run apps/digits --run-config 'algorithm="dpsgd"'

starts a SuperLink with TLS and node authentication, four SuperNodes that are registered with it,
and a sidecar beside each, runs the app, prints where the results are, and ends everything again.
Without ``--run`` it prints what to type, and waits for Ctrl-C.

All that it makes is in one folder: certificates and keys, Flower's settings, logs and results. It
is for trying out on one machine; docs/deployment.md says what is different on three.
"""

from __future__ import annotations

import argparse
import datetime
import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from flwr_decentral.channel.keys import CA_CERT, CERT, KEY, make_keys, node_folder
from flwr_decentral.testing.ports import free_ports

CONNECTION = "deployment"
BIN = Path(sys.executable).parent
ENDED = ("finished:completed", "finished:failed", "finished:stopped")


class Deployment:
    """Processes that are started together, and end together.

    Parameters
    ----------
    folder : Path
        Where everything is put.
    nodes : int
        How many SuperNodes.
    operated : bool
        Whether the sidecars are started here; otherwise the SuperNodes' ClientApps start them.
    """

    def __init__(self, folder: Path, nodes: int, operated: bool = True) -> None:
        self.folder, self.nodes, self.operated = folder, nodes, operated
        self.home = folder / "flwr"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.environ = os.environ | {
            "FLWR_HOME": str(self.home),
            "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}",  # Flower starts its own
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "OMP_NUM_THREADS": "1",
        }
        self.port, *others = free_ports(1 + 2 * nodes)
        self.node_ports, self.peer_ports = others[:nodes], others[nodes:]

    def __enter__(self) -> Deployment:
        try:
            self._start()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def run(self, app: Path, run_config: str = "", timeout: float = 900.0) -> tuple[str, str]:
        """Run an app; return the run's status and its log."""
        command = ["flwr", "run", str(app), CONNECTION, "--format", "json"]
        command += ["--run-config", run_config] if run_config else []
        run_id = str(json.loads(self.call(*command))["run-id"])
        deadline = time.monotonic() + timeout
        while (status := self.status(run_id)) not in ENDED:
            if time.monotonic() > deadline:
                self.call("flwr", "stop", run_id, CONNECTION)
                raise TimeoutError(f"run {run_id} was {status} after {timeout:.0f} s")
            time.sleep(2.0)
        return status, self.call("flwr", "log", run_id, CONNECTION, "--show")

    def status(self, run_id: str) -> str:
        """Ask for a run's status."""
        told = self.call("flwr", "ls", CONNECTION, "--run-id", run_id, "--format", "json")
        return str(json.loads(told)["runs"][0]["status"])

    def call(self, name: str, *arguments: str) -> str:
        """Call a command of this environment; return what it prints."""
        done = subprocess.run(
            [BIN / name, *arguments], env=self.environ, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{name} {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")
        return done.stdout

    def end(self) -> None:
        """End every process, the SuperNodes first."""
        for process in reversed(self.processes.values()):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        for process in self.processes.values():
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    # ------------------------------------------------------------------------------ start

    def _start(self) -> None:
        self.home.mkdir(parents=True, exist_ok=True)
        (self.folder / "logs").mkdir(exist_ok=True)
        tls = self.folder / "superlink"
        make_superlink_certificate(tls)
        make_keys(self.folder / "keys", self.nodes, 30)
        (self.home / "config.toml").write_text(
            f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
            f'address = "127.0.0.1:{self.port}"\nroot-certificates = "{tls / "ca.pem"}"\n'
        )
        certificates = [
            *("--ssl-ca-certfile", str(tls / "ca.pem")),
            *("--ssl-certfile", str(tls / "cert.pem")),
            *("--ssl-keyfile", str(tls / "key.pem")),
        ]
        self._spawn(
            "superlink",
            "flower-superlink",
            *certificates,
            "--enable-supernode-auth",
            *("--host", "127.0.0.1", "--port", str(self.port)),
        )
        wait_for_port(self.port)
        for node in range(self.nodes):
            self._start_node(node, tls)

    def _start_node(self, node: int, tls: Path) -> None:
        keys = node_folder(self.folder / "keys", node)
        mine = {
            "address": f"127.0.0.1:{self.peer_ports[node]}",
            "ca": str(keys / CA_CERT),
            "cert": str(keys / CERT),
            "key": str(keys / KEY),
        }
        config = {"partition-id": node, "num-partitions": self.nodes}
        if self.operated:
            address = str(self.folder / f"sidecar-{node}.sock")
            options = [word for key, value in mine.items() for word in (f"--{key}", value)]
            self._spawn(
                f"sidecar-{node}", "flwr-decentral", "sidecar", "--socket", address, *options
            )
            config["peer-socket"] = address
        else:
            config |= {f"peer-{key}": value for key, value in mine.items()}
        identity = self.folder / f"supernode-{node}"
        make_supernode_key(identity)
        self.call("flwr", "supernode", "register", f"{identity}.pub", CONNECTION)
        self._spawn(
            f"supernode-{node}",
            "flower-supernode",
            *("--root-certificates", str(tls / "ca.pem")),
            *("--superlink", f"127.0.0.1:{self.port}"),
            *("--auth-supernode-private-key", str(identity)),
            *("--host", "127.0.0.1", "--port", str(self.node_ports[node])),
            *("--node-config", " ".join(f"{k}={json.dumps(v)}" for k, v in config.items())),
        )

    def _spawn(self, name: str, command: str, *arguments: str) -> None:
        with (self.folder / "logs" / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                [BIN / command, *arguments],
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


def make_superlink_certificate(folder: Path) -> None:
    """Make a CA of its own for the SuperLink, and its certificate for 127.0.0.1."""
    folder.mkdir(mode=0o700)
    now = datetime.datetime.now(datetime.UTC)
    ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    ca_name, name = (
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])
        for text in ("trial SuperLink CA", "trial SuperLink")
    )

    def certificate(subject: x509.Name, public, ca: bool) -> x509.Certificate:
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(ca_name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(days=30))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        )
        if not ca:
            names = [
                x509.DNSName("localhost"),
                x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
            ]
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(ca_key, hashes.SHA256())

    pem = serialization.Encoding.PEM
    (folder / "ca.pem").write_bytes(
        certificate(ca_name, ca_key.public_key(), True).public_bytes(pem)
    )
    (folder / "cert.pem").write_bytes(certificate(name, key.public_key(), False).public_bytes(pem))
    (folder / "key.pem").touch(mode=0o600)
    (folder / "key.pem").write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )


def make_supernode_key(path: Path) -> None:
    """Make the key pair by which the SuperLink knows a SuperNode, as ``ssh-keygen`` would."""
    key = ec.generate_private_key(ec.SECP384R1())
    path.touch(mode=0o600)
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.OpenSSH,
            serialization.NoEncryption(),
        )
    )
    Path(f"{path}.pub").write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        )
    )


def wait_for_port(port: int, seconds: float = 60.0) -> None:
    """Wait until somebody listens."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
        except OSError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"nobody listens at port {port} after {seconds:.0f} s") from None
            time.sleep(0.2)
        else:
            return


def main(arguments: Sequence[str] | None = None) -> int:
    """Start a deployment, and run an app on it or wait."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--folder", type=Path, help="a new one in the temporary folder by default")
    parser.add_argument("--run", type=Path, metavar="APP", help="the app to run")
    parser.add_argument("--run-config", default="", help="what the app is run with")
    parser.add_argument(
        "--own", action="store_true", help="let the ClientApps start the sidecars themselves"
    )
    options = parser.parse_args(arguments)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="flwr-decentral-deployment-"))
    print(f"everything is in {folder}")
    with Deployment(folder, options.nodes, operated=not options.own) as deployment:
        if options.run is None:
            print(f"to run an app:\n  FLWR_HOME={deployment.home} flwr run APP {CONNECTION}")
            try:
                signal.pause()
            except KeyboardInterrupt:
                return 0
        results = f'results-dir="{folder / "results"}"'
        status, log = deployment.run(options.run, f"{options.run_config} {results}".strip())
    print(log)
    print(f"status: {status}")
    return 0 if status == "finished:completed" else 1


if __name__ == "__main__":
    sys.exit(main())
