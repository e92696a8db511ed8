"""The digits app, run many times in one run: an engine takes long to start."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from flwr_decentral.testing.superlink import LocalSuperLink

DIGITS = Path(__file__).parents[2] / "apps" / "digits"

EVERY = """
from flwr.serverapp import ServerApp

from digits_app import server_app

app = ServerApp()


@app.main()
def main(grid, context):
    for config in {configs!r}:
        context.run_config.update(config)
        server_app.main(grid, context)
"""
"""The app's own ServerApp, with one config after the other."""


def run_each(
    superlink: LocalSuperLink,
    folder: Path,
    configs: list[dict[str, str]],
    *,
    nodes: int,
    rounds: int,
    actors: int,
    timeout: float,
) -> list[dict[str, Any]]:
    """Run the app with each of some configs, and return the results that it has written."""
    app, results = folder / "digits", folder / "results"
    shutil.copytree(DIGITS, app, ignore=shutil.ignore_patterns("__pycache__"))
    (app / "digits_app" / "every.py").write_text(EVERY.format(configs=configs))
    project = app / "pyproject.toml"
    project.write_text(project.read_text().replace("server_app:app", "every:app"))
    config = {
        "num-server-rounds": rounds,
        "evaluate-every": rounds,
        "results-dir": str(results),
    }
    done = superlink.run(app, run_config=config, nodes=nodes, actors=actors, timeout=timeout)
    assert done.status == "finished:completed", done.log
    return [json.loads(path.read_text()) for path in results.glob("*.json")]
