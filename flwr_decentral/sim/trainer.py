"""Who does the training while the engine keeps virtual time.

The engine hands out a :class:`Task` at the moment at which it starts in virtual time and asks for
its :class:`Outcome` when its completion is due. In between, as many tasks run at once as the
trainer has processes for. A task that is due earlier should run earlier; nothing else about the
order, the number of processes or the time it takes can change a result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from flwr_decentral.core import Vector
from flwr_decentral.core.transcript import vector_digest


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One local round of one node.

    Attributes
    ----------
    node, round : int
        Whose, and which.
    seed : int
        For every random generator the trainer uses; in [0, 2**31).
    at, due : int
        When it starts and ends in virtual time, in nanoseconds.
    """

    node: int
    round: int
    seed: int
    at: int
    due: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What came of a task.

    Attributes
    ----------
    model : ndarray of float32, shape (D,), optional
        The trained vector, a new array; None if training failed.
    digest : str
        A hash of that vector, or the empty string.
    error : str
        Why training failed, or the empty string.
    extra : object
        What else the trainer has to say, for the observer; the engine does not look at it.
    """

    model: Vector | None
    digest: str = ""
    error: str = ""
    extra: object = None


class Trainer(Protocol):
    """Something that trains, one task in flight for each node."""

    def dispatch(self, task: Task, model: Vector) -> None:
        """Start a task; ``model`` is copied."""
        ...

    def wait(self, node: int) -> Outcome:
        """Wait until the node's task has ended, and take its outcome."""
        ...

    def close(self) -> None:
        """End: outcomes that nobody waited for are dropped."""
        ...


@dataclass
class FunctionTrainer:
    """Train by calling a function in this process, for tests and benchmarks.

    Attributes
    ----------
    function : callable
        ``function(task, vector)`` returns the trained vector; what it raises is a failed training.
    """

    function: Callable[[Task, Vector], Vector]
    tasks: dict[int, tuple[Task, Vector]] = field(default_factory=dict)

    def dispatch(self, task: Task, model: Vector) -> None:
        """Keep a copy of the model; the function is called by :meth:`wait`."""
        if task.node in self.tasks:
            raise RuntimeError(f"node {task.node} has a task in flight already")
        self.tasks[task.node] = (task, model.copy())

    def wait(self, node: int) -> Outcome:
        """Call the function."""
        task, model = self.tasks.pop(node)
        try:
            trained = np.array(self.function(task, model), dtype=np.float32)
        except Exception as error:  # noqa: BLE001 - the user's function may raise anything
            return Outcome(model=None, error=f"{type(error).__name__}: {error}")
        return Outcome(model=trained, digest=vector_digest(trained))

    def close(self) -> None:
        """Forget what is in flight."""
        self.tasks.clear()
