"""Try a deployment on this machine: SuperLink, SuperNodes and sidecars, all with certificates.

    python tools/deployment.py --run apps/digits --run-config 'algorithm="dpsgd"'

starts a SuperLink with TLS and node authentication, four SuperNodes that are registered with it,
and a sidecar beside each, and runs the app through ``flwr run``. Before that it runs the app in
virtual time, on Flower's Simulation Engine. It prints what both have reached, and ends everything
again. Without ``--run`` it prints what to type, and waits for Ctrl-C.

It is for trying out on one machine; docs/deployment.md says what is different on three.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from click import ClickException
from flwr.common.config import parse_config_args

from flwr_decentral.core import ConfigurationError, DecentralError
from flwr_decentral.plugins import installed
from flwr_decentral.report.results import RunResult
from flwr_decentral.testing.commands import Config
from flwr_decentral.testing.deployment import Deployment
from flwr_decentral.testing.superlink import LocalSuperLink, SuperLink, SuperLinkError

TIMEOUT = 900.0
"""Seconds for one run."""


@dataclass(frozen=True)
class Pair:
    """A run in real time and the same one in virtual time.

    Attributes
    ----------
    real, virtual : RunResult
        What came of them.
    seconds : float
        How long the one in real time took, from the command to its end.
    """

    real: RunResult
    virtual: RunResult
    seconds: float

    @property
    def difference(self) -> float:
        """By how much the mean accuracy in real time is the higher one."""
        return accuracy(self.real) - accuracy(self.virtual)

    def row(self) -> str:
        """Write a row of the table."""
        cells = (
            self.real.algorithm,
            str(self.real.rounds),
            f"{accuracy(self.real):.3f}",
            f"{accuracy(self.virtual):.3f}",
            f"{self.difference:+.3f}",
            str(self.real.grid_array_bytes),
            f"{self.seconds:.0f}",
        )
        return f"| {' | '.join(cells)} |"


HEAD = (
    "| algorithm | rounds | accuracy, sidecars | accuracy, virtual time | difference "
    "| array bytes over the Grid | seconds |\n|---|---|---|---|---|---|---|"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Start a deployment, and run an app on it or wait; return the exit code."""
    options = parse_arguments(arguments)
    # Also where a shell starts it in the background, with signals ignored: what was started is
    # ended on the way out.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        if options.run is None:
            return wait(options)
        pairs = compare(options)
    except KeyboardInterrupt:
        print("\ninterrupted; everything that was started has been ended")
        return 130
    except (DecentralError, SuperLinkError) as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    print(HEAD)
    for pair in pairs:
        print(pair.row())
    apart = [pair for pair in pairs if abs(pair.difference) > options.within]
    for pair in apart:
        print(f"{pair.real.algorithm} is off by {pair.difference:+.3f}", file=sys.stderr)
    return 1 if apart else 0


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, default=4, help="how many SuperNodes (4)")
    parser.add_argument("--run", type=Path, metavar="APP", help="the app to run")
    parser.add_argument("--run-config", default="", help="what to run it with, as for flwr run")
    parser.add_argument(
        "--algorithms",
        nargs="+",
        metavar="NAME",
        help="run it with each of these, one after another, or with all that are installed",
    )
    parser.add_argument(
        "--within",
        type=float,
        default=float("inf"),
        help="fail if the accuracies differ by more than this",
    )
    parser.add_argument(
        "--own", action="store_true", help="let the ClientApps start the sidecars themselves"
    )
    parser.add_argument("--keep", action="store_true", help="keep the folder, with all logs")
    return parser.parse_args(arguments)


def wait(options: argparse.Namespace) -> int:
    """Keep a deployment running until Ctrl-C."""
    with Deployment(options.nodes, operated=not options.own, keep=options.keep) as deployment:
        print(f"everything is in {deployment.home}; to run an app:", flush=True)
        print(f"  FLWR_HOME={deployment.home} flwr run APP\nCtrl-C ends it.", flush=True)
        signal.pause()
    return 0


def compare(options: argparse.Namespace) -> list[Pair]:
    """Run the app in virtual time and in real time, with each algorithm."""
    configs = run_configs(options)
    pairs: list[Pair] = []
    with LocalSuperLink(keep=options.keep, environ={"OMP_NUM_THREADS": "1"}) as superlink:
        announce(superlink, "a SuperLink for simulations")
        actors = min(options.nodes, os.cpu_count() or 1)
        virtual = [
            run(superlink, options.run, config, nodes=options.nodes, actors=actors)[0]
            for config in configs
        ]
    with Deployment(options.nodes, operated=not options.own, keep=options.keep) as deployment:
        announce(deployment, f"a SuperLink, {options.nodes} SuperNodes and their sidecars")
        for config, its in zip(configs, virtual, strict=True):
            mine, seconds = run(deployment, options.run, config)
            pairs.append(Pair(mine, its, seconds))
            print(pairs[-1].row(), flush=True)
    return pairs


def run_configs(options: argparse.Namespace) -> list[Config]:
    """Write the run config of each run down."""
    try:
        given = parse_config_args([options.run_config])
    except ClickException as error:
        raise ConfigurationError(
            f"--run-config {options.run_config!r} cannot be read: {error.message}"
        ) from error
    if options.algorithms is None:
        return [given]
    names = sorted(installed()) if options.algorithms == ["all"] else options.algorithms
    return [{**given, "algorithm": name} for name in names]


def run(superlink: SuperLink, app: Path, config: Config, **options: int) -> tuple[RunResult, float]:
    """Run the app; return its result, and how many seconds that took."""
    folder = tempfile.mkdtemp(prefix="results-", dir=superlink.home)
    outcome = superlink.run(
        app,
        run_config={**config, "results-dir": folder},
        timeout=TIMEOUT,
        # The log brings its own colors.
        echo=lambda line: print(f"  {line}", flush=True),
        **options,
    )
    if not outcome.completed:
        why = outcome.details or "its log is above"
        raise SuperLinkError(f"the run is {outcome.status}: {why}")
    found = list(Path(folder).glob("*.json"))
    if len(found) != 1:
        raise SuperLinkError(
            f"the run has written {len(found)} results, not one: the app has to call "
            "decentral(...) once, with the run config"
        )
    (path,) = found
    return RunResult.from_json(path.read_text(encoding="utf-8")), outcome.seconds


def accuracy(result: RunResult) -> float:
    """Return the mean accuracy of the nodes at the end."""
    metrics = result.evaluations[-1].metrics if result.evaluations else {}
    if "accuracy" not in metrics:
        raise SuperLinkError(
            f"the app's evaluate function returns no 'accuracy', but {sorted(metrics)}"
        )
    return metrics["accuracy"].mean


def announce(superlink: SuperLink, what: str) -> None:
    """Say what has been started."""
    print(f"started {what} in {superlink.home}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
