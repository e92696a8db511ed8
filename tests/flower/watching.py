"""Watching a run from outside: what crosses the grid, what clients are given, what stays open.

Nothing here asks the package under test what it has done.
"""

from __future__ import annotations

import os
import threading
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from flwr.app import ConfigRecord, Context, Message, MetricRecord
from flwr.serverapp import Grid

from flwr_decentral.flower import DecentralResult

from . import toys
from .toys import arrays_of, federate, make_client, node_of, round_of, to_arrays

NODES, ROUNDS = 4, 4
MODEL = {"w": np.zeros(25_000, np.float32)}
WHAT = {
    "algorithm": "divshare",
    "fragments": 5,
    "degree": 2,
    "evaluate_every": 2,
    "transcript": True,
    "run_config": {"local-epochs": 3},
}


class CountingGrid(Grid):
    """Count all that is pushed and pulled, without any help of what is tested."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.array_bytes = self.other_bytes = 0
        self.messages = Counter()

    def push_messages(self, messages):
        messages = list(messages)
        self.count("pushed", messages)
        return self.grid.push_messages(messages)

    def pull_messages(self, message_ids):
        replies = list(self.grid.pull_messages(message_ids))
        self.count("pulled", replies)
        return replies

    def count(self, way, messages):
        for message in messages:
            self.messages[way, message.metadata.message_type] += 1
            for record in message.content.values() if message.has_content() else ():
                for value in record.values():
                    data = getattr(value, "data", None)
                    if data is not None:
                        self.array_bytes += len(data)
                    else:
                        self.other_bytes += len(repr(value))

    def get_node_ids(self):
        return self.grid.get_node_ids()

    def get_nodes(self):
        raise AssertionError("not asked for")

    def create_message(self, *arguments, **keywords):
        raise AssertionError("deprecated by Flower")

    def send_and_receive(self, messages, *, timeout=None):
        raise AssertionError("it would wait for all replies")

    def set_run(self, run):
        raise AssertionError("Flower's business")

    @property
    def run(self):
        return self.grid.run


@dataclass(frozen=True)
class Call:
    """What one call of a user's function was given."""

    metadata: dict
    context: dict
    content: tuple[str, ...]
    config: dict
    state: dict
    model: bytes


@dataclass
class Observed:
    """A run, and what was seen of it."""

    folder: Path
    calls: dict[tuple[str, int, int], list[Call]] = field(default_factory=lambda: defaultdict(list))
    averages: list[tuple[int, bytes]] = field(default_factory=list)
    grid: CountingGrid | None = None
    result: DecentralResult | None = None
    open_before: Counter = field(default_factory=Counter)
    open_meanwhile: Counter = field(default_factory=Counter)
    open_after: Counter = field(default_factory=Counter)
    threads_after: int = 0

    def train(self, msg: Message, context: Context) -> Message:
        self.note("train", msg, context)
        context.state["memory"] = MetricRecord({"round": round_of(msg)})
        return toys.train(msg, context)

    def evaluate(self, msg: Message, context: Context) -> Message:
        self.note("evaluate", msg, context)
        return toys.evaluate(msg, context)

    def note(self, kind: str, msg: Message, context: Context) -> None:
        metadata = msg.metadata
        call = Call(
            metadata={
                "run_id": metadata.run_id,
                "src_node_id": metadata.src_node_id,
                "dst_node_id": metadata.dst_node_id,
                "message_type": metadata.message_type,
                "reply_to_message_id": metadata.reply_to_message_id,
                "group_id": metadata.group_id,
            },
            context={
                "run_id": context.run_id,
                "node_id": context.node_id,
                "node_config": dict(context.node_config),
                "run_config": dict(context.run_config),
            },
            content=tuple(msg.content),
            config=dict(msg.content["config"]),
            state={name: dict(record) for name, record in context.state.items()},
            model=arrays_of(msg)["w"].tobytes(),
        )
        self.calls[kind, node_of(context), round_of(msg)].append(call)
        self.open_meanwhile |= open_things()

    def average(self, round: int, arrays) -> MetricRecord:
        self.averages.append((round, to_arrays(arrays)["w"].tobytes()))
        return MetricRecord({"mean": float(to_arrays(arrays)["w"].mean())})

    def wrap(self, grid: Grid) -> Grid:
        self.grid = CountingGrid(grid)
        return self.grid

    @property
    def final_models(self) -> list[bytes]:
        return [self.calls["evaluate", node, ROUNDS][-1].model for node in range(NODES)]


def open_things() -> Counter:
    """List the memory files that this process has open, and our sockets on this machine."""
    found = Counter()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:
            continue  # it was the listing itself, or is another thread's
        if "flwr-decentral" in target:
            found["memory"] += 1
    prefix = f"@flwr-decentral-{os.getpid()}-"
    found["sockets"] = Path("/proc/net/unix").read_text().count(prefix)
    return found


def observe(folder: Path, **changes) -> Observed:
    """Run ``WHAT``, with changes."""
    seen = Observed(folder, open_before=open_things())
    threads = threading.active_count()
    seen.result = federate(
        make_client(seen.train, seen.evaluate),
        NODES,
        ROUNDS,
        initial=MODEL,
        results_dir=folder,
        start={
            "train_config": ConfigRecord({"learning-rate": 0.5, "server-round": -1}),
            "evaluate_config": ConfigRecord({"batches": 7}),
            "evaluate_fn": seen.average,
        },
        **{**WHAT, "wrap": seen.wrap, **changes},
    )
    seen.open_after = open_things()
    seen.threads_after = threading.active_count() - threads
    return seen
