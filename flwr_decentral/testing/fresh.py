"""Run an algorithm in a process of its own, to see whether anything depends on the process."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import subprocess  # noqa: TID251  another process is the point of this module
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import networkx as nx

from flwr_decentral.core import Algorithm, RuntimeFault
from flwr_decentral.core.algorithm import Topology

from .cluster import Cluster
from .faults import Faults
from .problems import Targets

_FAULTS = Faults(drop=0.1, duplicate=0.1, reorder=True)
_ROUNDS = 10
_TIMEOUT_S = 120
_HASH_SEED = "PYTHONHASHSEED"  # decides the order of sets of strings


def transcript_here(algorithm: Algorithm, topology: Topology) -> list[str]:
    """Run an algorithm under some faults, and return the transcript."""
    problem = Targets(nodes=len(topology))
    cluster = Cluster(
        algorithm,
        topology=topology,
        initial=problem.tensors,
        train=problem.train,
        rounds=_ROUNDS,
        faults=_FAULTS,
    )
    return cluster.run().transcript


def transcript_in_fresh_process(algorithm: Algorithm, topology: Topology) -> list[str]:
    """Do what :func:`transcript_here` does in a new Python process, with another hash seed.

    Parameters
    ----------
    algorithm : Algorithm
        Its class is imported there by name or, failing that, from its file.
    topology : networkx.Graph
        The graph.

    Raises
    ------
    RuntimeFault
        If the process fails; its error output is in the message.
    """
    cls = type(algorithm)
    order = {
        "module": cls.__module__,
        "file": inspect.getsourcefile(cls),
        "class": cls.__qualname__,
        "parameters": algorithm.parameters,
        "nodes": len(topology),
        "edges": [list(edge) for edge in topology.edges],
    }
    path = os.pathsep.join(filter(None, sys.path))
    hash_seed = "2" if os.environ.get(_HASH_SEED) == "1" else "1"
    environment = {**os.environ, _HASH_SEED: hash_seed, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps(order),
        capture_output=True,
        text=True,
        env=environment,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeFault(f"{algorithm} fails in a fresh process:\n{done.stderr}")
    return done.stdout.splitlines()


def main() -> None:
    """Carry out the order on standard input, and write the transcript to standard output."""
    order = json.load(sys.stdin)
    cls: Any = _load(order["module"], order["file"])
    for name in order["class"].split("."):
        cls = getattr(cls, name)
    topology: Topology = nx.Graph()
    topology.add_nodes_from(range(order["nodes"]))
    topology.add_edges_from(map(tuple, order["edges"]))
    for line in transcript_here(cls(**order["parameters"]), topology):
        sys.stdout.write(f"{line}\n")


def _load(module: str, file: str) -> ModuleType:
    """Import a module by its name or, where only a test runner knows that, from its file."""
    try:
        return importlib.import_module(module)
    except ImportError:
        spec = importlib.util.spec_from_file_location(Path(file).stem, file)
        assert spec is not None
        assert spec.loader is not None
        loaded = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = loaded
        spec.loader.exec_module(loaded)
        return loaded


if __name__ == "__main__":
    main()
