"""Two ways to run RelaySGD in float64: the machines on an exact runtime, and the equations."""

from collections import Counter, deque
from typing import NamedTuple

import numpy as np
import pytest

from flwr_decentral.core import (
    Layout,
    Received,
    Report,
    Seeds,
    Send,
    Site,
    Started,
    TimerFired,
    Train,
    TrainDone,
    Tree,
)
from flwr_decentral.ops import Reference


class Float64(Reference):
    """The reference arithmetic without its rounding to float32, unnoticed by the machines."""

    def combine(self, vectors, weights, out=None):
        total = weights[0] * vectors[0]
        for vector, weight in zip(vectors[1:], weights[1:], strict=True):
            total += weight * vector
        return total

    def assemble(self, partition, payloads):
        x = np.empty(partition.size)
        for k, payload in enumerate(payloads):
            x[partition.indices(k)] = payload
        return x

    def pack_all(self, x, partition):
        return [x[partition.indices(k)] for k in range(partition.fragments)]


class Run(NamedTuple):
    """What a run has shown: models after each round, messages by round, and reports."""

    models: np.ndarray  # (rounds + 1, n, D)
    sent: list
    reports: list  # a Counter for each node

    @property
    def last(self):
        return self.models[-1]


def run(algorithm, graph, train, rounds, *, initial=None, size=1, drop=0.0, ops=None, seed=0):
    """Let all nodes train at once, deliver everything that is not lost, and end every wait."""
    n, ops = len(graph), ops or Float64()
    dtype = np.float64 if isinstance(ops, Float64) else np.float32
    initial = np.zeros(size, dtype) if initial is None else np.ascontiguousarray(initial, dtype)
    layout = Layout.of({"x": np.zeros(len(initial), np.float32)})
    machines = [
        algorithm.machine(
            Site(
                node=node,
                topology=graph,
                layout=layout,
                initial=initial,
                seeds=Seeds(0).of(node),
                ops=ops,
            )
        )
        for node in range(n)
    ]
    mail, due, sent, lost = deque(), {}, [], np.random.default_rng(seed)
    reports = [Counter() for _ in range(n)]
    models = [np.tile(initial, (n, 1))]

    def step(node, event):
        for command in machines[node].step(event):
            match command:
                case Train():
                    due[node] = command
                case Send() if lost.random() >= drop:
                    mail.append((command.to, node, command.message))
                    sent.append((node, command.to, command.message))
                case Report():
                    reports[node][command.name] += command.total or command.count

    def deliver():
        while mail:
            to, source, message = mail.popleft()
            step(to, Received(at=0, source=source, message=message))

    for node in range(n):
        step(node, Started(at=0, up=tuple(sorted(graph[node]))))
    for number in range(1, rounds + 1):
        deliver()
        for node, command in sorted(due.items()):
            assert command.round == number
            after = train(node, number, command.model)
            step(node, TrainDone(at=0, round=number, before=command.model, after=after))
        deliver()
        for node, machine in enumerate(machines):
            if machine.waits_for:
                step(node, TimerFired(at=0, name="patience"))
        models.append([due[node].model for node in range(n)])
    return Run(np.array(models), sent, reports)


def equations(tree, train, rounds, *, initial, overlap=False, grad=False):
    """Compute RelaySGD from its lags, without any message; models after each round.

    x_i(t + 1) is the mean over j of y_j(t - lag_ij), or of x(0) where that is before the beginning;
    or x_i(t) plus the mean of u_j(t - lag_ij).
    """
    n, lags = len(tree), tree.lags(overlap=overlap)
    x = [np.tile(np.asarray(initial, float), (n, 1))]
    rows, fill = np.arange(n), np.zeros_like(x[0][0]) if grad else x[0][0]
    # What all nodes contributed before the beginning, and then in each step.
    told = [np.tile(fill, (n, 1))] * (lags.max() + 1)
    start = len(told)
    for t in range(rounds):
        y = np.array([train(i, t + 1, x[t][i]) for i in rows])
        told.append(y - x[t] if grad else y)
        history = np.array(told[-(lags.max() + 1) :])
        heard = history[len(history) - 1 - lags, rows[None, :]]
        x.append((x[t] if grad else 0) + heard.sum(axis=1) / n)
        assert len(told) == start + t + 1
    return np.array(x)


@pytest.fixture(scope="session")
def exact():
    """Run the machines."""
    return run


@pytest.fixture(scope="session")
def academic():
    """Solve the equations."""
    return lambda graph, *arguments, **options: equations(Tree.of(graph), *arguments, **options)
