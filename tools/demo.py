"""Run the digits app with an algorithm and without any exchange, and compare: ``make demo``.

It needs no network, about two minutes on two cores, and leaves nothing running. It succeeds only if
the nodes learn together what they cannot learn alone.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from rich.console import Console

from flwr_decentral.report.results import RunResult, table
from flwr_decentral.testing.superlink import LocalSuperLink, SuperLinkError

ROOT = Path(__file__).resolve().parents[1]
APP = ROOT / "apps" / "digits"
ALONE = "local"

# Mean test accuracy over the nodes: at least, and below.
EXPECTED = {"divshare": (0.85, 1.01), ALONE: (0.0, 0.35)}

# More processes would take longer to start than they save: each imports torch.
MOST_ACTORS = 4


class DemoError(Exception):
    """Say why the demo has failed."""


def main() -> int:
    """Run the demo and return its exit code."""
    options = parse_arguments()
    console = Console(width=None if sys.stdout.isatty() else 100)
    try:
        results = run_all(options, console)
    except KeyboardInterrupt:
        console.print("\ninterrupted; everything that was started has been ended")
        return 130
    except (DemoError, SuperLinkError) as error:
        console.print(f"\nthe demo failed: {error}", style="bold red", markup=False)
        return 1
    console.print()
    console.print(table(results, "accuracy"))
    for result in results:
        for path in result.write(ROOT / "results"):
            console.print(f"written: {path.relative_to(ROOT)}", style="dim", highlight=False)
    if failures := [text for result in results if (text := judge(result))]:
        console.print(f"\nthe demo failed: {'; '.join(failures)}", style="bold red")
        return 1
    words = [f"{accuracy(result):.1%} with {result.algorithm}" for result in results]
    console.print(f"\nmean accuracy of {options.nodes} nodes: {', '.join(words)}", style="bold")
    return 0


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=f"Compare an algorithm with nodes that train alone ({ALONE}).",
    )
    parser.add_argument("--algorithm", default="divshare", help="what to compare (divshare)")
    parser.add_argument("--rounds", type=int, help="local rounds of each node, if not the app's")
    parser.add_argument("--nodes", type=int, default=16, help="how many nodes (16)")
    parser.add_argument("--keep", action="store_true", help="keep the SuperLink's folder and log")
    return parser.parse_args()


def run_all(options: argparse.Namespace, console: Console) -> list[RunResult]:
    """Run the app once for each algorithm, on one SuperLink."""
    console.print("starting a SuperLink of its own")
    with LocalSuperLink(keep=options.keep) as superlink:
        if options.keep:
            console.print(f"its folder, which stays: {superlink.home}")
        return [
            run(superlink, algorithm, options, console)
            for algorithm in dict.fromkeys((options.algorithm, ALONE))
        ]


def run(
    superlink: LocalSuperLink, algorithm: str, options: argparse.Namespace, console: Console
) -> RunResult:
    """Run the app with one algorithm and read its result."""
    console.rule(f"{options.nodes} nodes, {algorithm}")
    folder = superlink.home / "results" / algorithm
    config: dict[str, int | str] = {"algorithm": algorithm, "results-dir": str(folder)}
    if options.rounds is not None:
        config["num-server-rounds"] = options.rounds
    outcome = superlink.run(
        APP,
        run_config=config,
        nodes=options.nodes,
        actors=min(len(os.sched_getaffinity(0)), MOST_ACTORS),
        timeout=600.0,
        # The log brings its own colors.
        echo=lambda line: print(f"  {line}", flush=True),
    )
    if not outcome.completed:
        why = outcome.details or "its log is above"
        raise DemoError(f"the run with {algorithm} is {outcome.status}: {why}")
    files = sorted(folder.glob("*.json"))
    if len(files) != 1:
        raise DemoError(f"the run with {algorithm} has written {len(files)} results, not one")
    console.print(f"{algorithm}: done in {outcome.seconds:.0f} s", highlight=False)
    return RunResult.from_json(files[0].read_text(encoding="utf-8"))


def accuracy(result: RunResult) -> float:
    """Return the mean accuracy of the nodes at the end."""
    return result.evaluations[-1].metrics["accuracy"].mean


def judge(result: RunResult) -> str:
    """Say what is wrong with a result; nothing if it is as expected."""
    least, most = EXPECTED.get(result.algorithm, (0.0, 1.01))
    if accuracy(result) < least:
        return f"{result.algorithm} reached {accuracy(result):.3f}, not {least}"
    if accuracy(result) >= most:
        return f"{result.algorithm} reached {accuracy(result):.3f}, not less than {most}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
