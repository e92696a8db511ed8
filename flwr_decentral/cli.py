"""The command line: what is installed, and whether it works here.

Nothing here imports Flower, and only ``doctor`` imports torch, so that a command answers at once,
and answers even where one of them is broken.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flwr_decentral import __version__, ops, plugins
from flwr_decentral.arena import Arena, available_memory
from flwr_decentral.channel import commands as sidecar
from flwr_decentral.core.algorithm import Capabilities
from flwr_decentral.core.errors import DecentralError

app = typer.Typer(
    name="flwr-decentral",
    help="Decentralized federated learning for Flower.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(sidecar.app)

State = Literal["ok", "note", "broken"]

_STYLES: Final = {"ok": "green", "note": "yellow", "broken": "bold red"}
_GIB: Final = 2**30
_ROOMY: Final = _GIB


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that ``doctor`` looked at.

    Attributes
    ----------
    topic, detail : str
        What was looked at, and what was found.
    state : {"ok", "note", "broken"}
        Whether runs work with it, work without something, or do not work.
    remedy : str
        What to do about it, if anything.
    """

    topic: str
    detail: str
    state: State = "ok"
    remedy: str = ""


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"flwr-decentral {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Let Flower train without a server that holds the model."""


@app.command("list")
def list_installed(
    topologies: Annotated[
        bool, typer.Option("--topologies", help="List the topologies instead.")
    ] = False,
) -> None:
    """List the installed algorithms, or the topologies."""
    console = Console()
    if topologies:
        console.print(_topologies())
        return
    found = plugins.installed()
    if found:
        console.print(_algorithms(found))
    else:
        console.print("No algorithm is installed.")
    for plugin in found.values():
        if plugin.error:
            console.print(Text(plugin.error, style="red"))
    missing = [name for name in plugins.SHELF if name not in found]
    if missing:
        console.print("Not installed:", highlight=False)
    for name in missing:
        console.print(f"  {name}: {plugins.pip_line(name)}", highlight=False)


@app.command()
def doctor() -> None:
    """Check the installation and this machine, and say how to get what is missing."""
    console = Console()
    shown = Table.grid(padding=(0, 2))
    findings = []
    for finding in _examine():
        findings.append(finding)
        state = Text(finding.state, style=_STYLES[finding.state])
        shown.add_row(state, finding.topic, Text(finding.detail))
    console.print(shown)
    remedies = [finding for finding in findings if finding.remedy]
    if remedies:
        console.print("\nWhat to do:")
        for finding in remedies:
            console.print(Text(f"  {finding.topic}: {finding.remedy}"), soft_wrap=True)
    if any(finding.state == "broken" for finding in findings):
        raise typer.Exit(1)


@app.command()
def keys(
    folder: Annotated[Path, typer.Argument(help="Where to write them: a new or empty folder.")],
    nodes: Annotated[int, typer.Option(help="How many nodes, numbered from 0.", min=1)],
    days: Annotated[int, typer.Option(help="How long the certificates hold.", min=1)] = 365,
) -> None:
    """Make a private CA and a certificate for each node, for a trial."""
    from flwr_decentral.channel import keys as maker

    try:
        prints = maker.make_keys(folder, nodes, days)
    except DecentralError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"Made a CA and {nodes} certificates that hold {days} days.\n")
    for node, fingerprint in enumerate(prints):
        console.print(f"node {node}  sha256:{fingerprint}")
    home = f"{maker.node_folder(folder, 0)}/"
    console.print(
        f"\nCopy one folder to each host, {home} to the one of node 0, and keep the files readable "
        "by its user alone.\nThen name them in that SuperNode's --node-config, with its own "
        "partition-id and address:\n"
    )
    console.print(
        f'  partition-id=0 num-partitions={nodes} peer-address="HOST:PORT" '
        f'peer-ca="PATH/{maker.CA_CERT}" peer-cert="PATH/{maker.CERT}" '
        f'peer-key="PATH/{maker.KEY}"',
        markup=False,
    )
    console.print(
        f"\n{folder / maker.CA_KEY} can sign more nodes: no host needs it, so keep it offline or "
        "delete it."
    )


def _algorithms(found: dict[str, plugins.Plugin]) -> Table:
    shown = Table(show_lines=True)
    headings = ("algorithm", "version", "capabilities", "topology", "hyper-parameters", "paper")
    for heading in headings:
        shown.add_column(heading, overflow="fold")
    for name, plugin in found.items():
        if plugin.error:
            shown.add_row(name, plugin.version, Text("cannot be used", style="red"))
            continue
        algorithm = plugin.algorithm
        parameters = plugins.hyperparameters(algorithm)
        cells = (
            name,
            plugin.version,
            "\n".join(_traits(algorithm.capabilities)),
            algorithm.default_topology,
            "\n".join(_declared(key, default) for key, default in parameters.items()),
            algorithm.paper,
        )
        shown.add_row(*map(Text, cells))
    return shown


def _traits(capabilities: Capabilities) -> Iterator[str]:
    if not capabilities.communicates:
        yield "no exchange"
        return
    yield "synchronous" if capabilities.synchronous else "asynchronous"
    if capabilities.pairwise:
        yield "pairwise"
    if capabilities.needs_tree:
        yield "needs a tree"
    if capabilities.uses_fragments:
        yield "fragments"


def _declared(name: str, default: object) -> str:
    return f"{name} (required)" if default is dataclasses.MISSING else f"{name} = {default!r}"


def _topologies() -> Table:
    from flwr_decentral.core import topology

    shown = Table()
    shown.add_column("topology", overflow="fold")
    shown.add_column("what it is")
    for usage, summary in topology.names().items():
        shown.add_row(Text(usage), Text(summary))
    return shown


def _examine() -> Iterator[Finding]:
    """Look at everything, the essential first."""
    yield Finding(topic="flwr-decentral", detail=__version__)
    yield Finding(topic="python", detail=f"{platform.python_version()} ({sys.executable})")
    yield _package("flwr", "flwr>=1.42,<2", least=(1, 42), below=(2, 0))
    yield _package("numpy", "numpy>=1.26", least=(1, 26))
    yield _package("networkx", "networkx>=3.2", least=(3, 2))
    yield _package("ray", "flwr-decentral[simulation]", optional="flwr run in simulation")
    torch, finding = _torch()
    yield finding
    yield _threads(torch)
    yield from _backends()
    yield _arena()
    yield _shm()
    yield _gpus(torch)
    yield from _plugins()


def _package(
    name: str,
    requirement: str,
    *,
    least: tuple[int, int] = (0, 0),
    below: tuple[int, int] | None = None,
    optional: str = "",
) -> Finding:
    """Look at a package without importing it."""
    remedy = f"pip install '{requirement}'"
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        detail = f"not installed; needed for {optional or 'everything'}"
        state: State = "note" if optional else "broken"
        return Finding(topic=name, detail=detail, state=state, remedy=remedy)
    if find_spec(name) is None:
        detail = f"{version} is installed, but there is no module {name}"
        repair = f"pip install --force-reinstall '{requirement}'"
        return Finding(topic=name, detail=detail, state="broken", remedy=repair)
    numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))
    if numbers < least or (below and numbers >= below):
        detail = f"{version} does not fit {requirement}"
        return Finding(topic=name, detail=detail, state="broken", remedy=remedy)
    return Finding(topic=name, detail=version)


def _torch() -> tuple[Any, Finding]:
    if find_spec("torch") is None:
        detail = "not installed; only apps that train with it need it"
        return None, Finding(topic="torch", detail=detail, state="note", remedy="pip install torch")
    try:
        torch = importlib.import_module("torch")
    except Exception as error:  # noqa: BLE001 - a broken torch may raise anything
        detail = f"cannot be imported: {type(error).__name__}: {error}"
        remedy = "pip install --force-reinstall torch"
        return None, Finding(topic="torch", detail=detail, state="note", remedy=remedy)
    return torch, Finding(topic="torch", detail=str(torch.__version__))


def _threads(torch: Any) -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    detail = f"{cores} cores; OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'not set')}"
    if torch is not None:
        detail += f"; torch uses {torch.get_num_threads()}"
    return Finding(topic="threads", detail=detail)


def _backends() -> Iterator[Finding]:
    """Look at the arithmetic that runs would use, and at what else is installed."""
    names = sorted(ops.available())
    wanted = os.environ.get(ops.VARIABLE) or ops.Reference.name
    topic = "arithmetic"
    try:
        chosen = ops.choose()
        yield Finding(topic=topic, detail=f"{chosen.name}: {_trait(chosen)}")
    except Exception as error:  # noqa: BLE001 - so may a stranger's backend
        remedy = f"unset {ops.VARIABLE}, which means {ops.Reference.name}"
        yield Finding(topic=topic, detail=_reason(error), state="broken", remedy=remedy)
    for name in names:
        if name == wanted:
            continue
        topic = f"arithmetic {name}"
        try:
            detail = f"{_trait(ops.choose(name))}; {ops.VARIABLE}={name} chooses it"
            yield Finding(topic=topic, detail=detail)
        except Exception as error:  # noqa: BLE001 - as above
            yield Finding(topic=topic, detail=f"cannot be used: {_reason(error)}", state="note")


def _trait(backend: ops.Ops) -> str:
    """Let a backend describe itself, which one of an earlier version cannot."""
    describe = getattr(backend, "describe", None)
    return describe() if describe else type(backend).__module__


def _reason(error: Exception) -> str:
    return str(error.args[0]) if isinstance(error, DecentralError) else repr(error)


def _arena() -> Finding:
    """Make shared memory, map it a second time as a trainer does, and look for what was written."""
    topic = "shared memory"
    try:
        arena = Arena.create(nodes=1, size=1024)
        try:
            arena.input(0)[:] = 1
            other = Arena.attach(arena.ref)
            intact = bool(other.input(0).sum() == 1024)
            other.close()
        finally:
            arena.close()
    except (DecentralError, OSError) as error:
        detail = str(error.args[0]) if isinstance(error, DecentralError) else str(error)
        remedy = "allow memory files (memfd_create) and /proc/PID/fd, or free some memory"
        return Finding(topic=topic, detail=detail, state="broken", remedy=remedy)
    if not intact:
        detail = "what one process writes another does not see"
        return Finding(topic=topic, detail=detail, state="broken", remedy="use another kernel")
    kind = "memory file" if hasattr(os, "memfd_create") else "temporary file"
    free = available_memory()
    room = "" if free is None else f"; {free / _GIB:.1f} GiB of memory available"
    return Finding(topic=topic, detail=f"a {kind} can be made and mapped{room}")


def _shm() -> Finding:
    """Look at the place where Ray keeps its objects."""
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return Finding(topic="/dev/shm", detail="not there; Ray uses a folder on disk instead")
    detail = f"{usage.free / _GIB:.1f} of {usage.total / _GIB:.1f} GiB free"
    if usage.free < _ROOMY:
        remedy = "give Ray more of it, for example with: docker run --shm-size=2g"
        return Finding(topic="/dev/shm", detail=detail, state="note", remedy=remedy)
    return Finding(topic="/dev/shm", detail=detail)


def _gpus(torch: Any) -> Finding:
    if torch is not None and torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return Finding(topic="GPUs", detail=f"torch sees {', '.join(names)}")
    names = _nvidia_smi()
    if not names:
        return Finding(topic="GPUs", detail="none; training runs on the CPU")
    blind = "torch is not installed" if torch is None else "torch does not"
    detail = f"the driver sees {', '.join(names)}, but {blind}"
    remedy = "install a torch built for CUDA: https://pytorch.org/get-started/locally"
    return Finding(topic="GPUs", detail=detail, state="note", remedy=remedy)


def _nvidia_smi() -> list[str]:
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()]


def _plugins() -> Iterator[Finding]:
    found = plugins.installed()
    for name, plugin in found.items():
        topic, detail = f"algorithm {name}", f"{plugin.distribution} {plugin.version}"
        if plugin.error:
            yield Finding(topic=topic, detail=plugin.error, state="broken")
        else:
            yield Finding(topic=topic, detail=detail)
    if not found:
        remedy = "pip install 'flwr-decentral[all]'"
        yield Finding(topic="algorithms", detail="none is installed", state="note", remedy=remedy)


if __name__ == "__main__":
    app()
