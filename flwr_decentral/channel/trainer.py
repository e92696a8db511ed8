"""What the pump asks of whoever trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from flwr_decentral.core import Vector


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One local round.

    Attributes
    ----------
    round : int
        Which one, counted from 1 over the whole run.
    seed : int
        For every random generator the trainer uses; in [0, 2**31).
    model : ndarray of float32, shape (D,)
        Where to start; not to be written to.
    """

    round: int
    seed: int
    model: Vector


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What came of a task.

    Attributes
    ----------
    model : ndarray of float32, shape (D,), optional
        The trained vector, a new array that the pump may keep; None if there is none.
    error : str
        Why there is none, or the empty string.
    lost : bool
        Nobody trained to the end: the trainer vanished, or never came. No fault of the training.
    """

    model: Vector | None = None
    error: str = ""
    lost: bool = False


Done: TypeAlias = Callable[[Outcome], None]
"""Who is told of an outcome, in the thread of the event loop."""


class Trainer(Protocol):
    """Something that trains, one task in flight."""

    def start(self, task: Task, done: Done) -> None:
        """Begin a task; ``done`` is called once, when it has ended."""

    def cancel(self) -> None:
        """Forget the task in flight, if there is one: ``done`` is not called any more."""
