"""``flwr-decentral sidecar``: serve a node, and look at one that is served.

What a command needs is imported when it is called: other commands do without event loop and TLS.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from flwr_decentral.core import DecentralError

app = typer.Typer(
    name="sidecar",
    help="Gossip beside a SuperNode, or look at a sidecar that does.",
    invoke_without_command=True,
    no_args_is_help=True,
)

_Socket = Annotated[
    str,
    typer.Option(help="The local socket: a path, or a name after @ in the abstract namespace."),
]


@app.callback()
def serve(
    context: typer.Context,
    socket: _Socket = "",
    address: Annotated[str, typer.Option(help="Where peers reach this node: host:port.")] = "",
    listen: Annotated[str, typer.Option(help="Where to listen, if that is elsewhere.")] = "",
    ca: Annotated[Path | None, typer.Option(help="The CA of all nodes (PEM).")] = None,
    cert: Annotated[Path | None, typer.Option(help="This node's certificate (PEM).")] = None,
    key: Annotated[Path | None, typer.Option(help="Its private key (PEM).")] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Speak plaintext, without certificates.")
    ] = False,
    own: Annotated[bool, typer.Option("--own", help="End with the lease.", hidden=True)] = False,
) -> None:
    """Serve a node until a signal ends it."""
    if context.invoked_subcommand is not None:
        return
    from .roster import Address
    from .sidecar import Options, run_sidecar
    from .tls import Security

    if not socket:
        raise typer.BadParameter("name the local socket with --socket")
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(process)d %(levelname)s %(message)s"
    )
    try:
        place = Address.parse(address) if address else None
        local = place is not None and place.is_local
        options = Options(
            socket=socket,
            address=place,
            listen=Address.parse(listen) if listen else None,
            security=Security(ca=ca, cert=cert, key=key, insecure=insecure, local=local),
            own=own,
        )
        run_sidecar(options)
    except DecentralError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error


@app.command()
def status(
    socket: _Socket,
    as_json: Annotated[bool, typer.Option("--json", help="Print all there is, as JSON.")] = False,
) -> None:
    """Show peers, traffic, refusals, backlog and lease of a sidecar."""
    from .client import ask

    try:
        answer = ask(socket, "status", patience=0.0)
    except DecentralError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    if as_json:
        typer.echo(json.dumps(answer, indent=1))
        return
    console = Console()
    console.print(_overview(answer))
    if peers := answer.get("network", {}).get("peers"):
        console.print(_peers(peers))


def _overview(answer: dict[str, Any]) -> Table:
    """Show what concerns the whole node."""
    counted, network = answer.get("counted", {}), answer.get("network", {})
    refused = ", ".join(f"{name} {count}" for name, count in network.get("refused", {}).items())
    rows = {
        "address": answer["address"] or "none: this node only dials",
        "certificate": f"{answer['fingerprint'][:16]}…" if answer["fingerprint"] else "none",
        "process": str(answer["process"]),
        "run": answer["run"] or "none",
        "kept models": ", ".join(answer["kept"]) or "none",
    }
    if answer["run"]:
        rows |= {
            "node": f"{answer['index']}, epoch {answer['epoch']}, {answer['algorithm']}",
            "lease": f"{answer['lease']:.0f} s",
            "rounds": f"{counted['rounds']}, {'idle' if answer['idle'] else 'in a segment'}",
            "trainer": f"process {answer['trainer']}" if answer["trainer"] else "none",
            "sent": f"{counted['bytes-sent'] / 1e6:.3f} MB",
            "received": f"{counted['bytes-received'] / 1e6:.3f} MB",
            "backlog": f"{network.get('backlog', 0)} messages, "
            f"{network.get('backlog_bytes', 0) / 1e6:.3f} MB",
            "refused": refused or "none",
            "error": answer["error"] or "none",
        }
    table = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _peers(peers: dict[str, dict[str, Any]]) -> Table:
    """Show each link."""
    table = Table()
    for column in ("peer", "up", "sent MB", "received MB", "connected", "breaks"):
        table.add_column(column, justify="right")
    for peer, state in peers.items():
        breaks = ", ".join(f"{why} {count}" for why, count in state["breaks"].items())
        table.add_row(
            peer,
            "yes" if state["up"] else "no",
            f"{state['sent_bytes'] / 1e6:.3f}",
            f"{state['received_bytes'] / 1e6:.3f}",
            str(state["connected"]),
            breaks,
        )
    return table
