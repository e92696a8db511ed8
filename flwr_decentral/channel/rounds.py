"""The trainings of one machine: asked for, held back between segments, in flight, ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from flwr_decentral.core import (
    ConfigurationError,
    Event,
    RuntimeFault,
    Site,
    Train,
    TrainDone,
    TrainFailed,
)
from flwr_decentral.core.conduct import MAX_FAILURES, check_train

from .accounts import Accounts
from .clock import Clock
from .trainer import Outcome, Task, Trainer

_NOT_FINITE: Final = (
    "training returned parameters that are not finite (NaN or Inf); a lower learning rate is the "
    "usual cure"
)


@dataclass(frozen=True, kw_only=True)
class Segment:
    """How long a node trains before it reports.

    Attributes
    ----------
    last_round : int, optional
        The last round of it, counted over the whole run: for algorithms that go in lockstep.
    until : int, optional
        Nanoseconds since the start of the run after which no training starts; at least one of the
        two is given.
    """

    last_round: int | None = None
    until: int | None = None

    def __post_init__(self) -> None:
        if self.last_round is None and self.until is None:
            raise ConfigurationError("nothing would end the segment: give it a round or a time")

    def covers(self, round: int, at: int) -> bool:
        """Tell whether a round of the run may start at some time."""
        return not self.is_over(at) and (self.last_round is None or round <= self.last_round)

    def is_over(self, at: int) -> bool:
        """Tell whether the time is up."""
        return self.until is not None and at >= self.until


class Rounds:
    """Keep one machine's trainings in order. A new machine on the node gets another one of these.

    Parameters
    ----------
    name : str
        The algorithm, for errors.
    site : Site
        Where the machine runs.
    trainer : Trainer
        Who trains.
    clock : Clock
        The run's time.
    accounts : Accounts
        Where trainings are counted.
    after : int
        Rounds of the run before the machine's first.

    Attributes
    ----------
    asked : Train or None
        What has not been answered, be it held back or in flight.
    training : bool
        Whether the trainer is at work.
    halted : bool
        Whether the machine has halted.
    """

    def __init__(
        self, name: str, site: Site, trainer: Trainer, clock: Clock, accounts: Accounts, after: int
    ) -> None:
        self._name, self._site, self._after = name, site, after
        self._trainer, self._clock, self._accounts = trainer, clock, accounts
        self.asked: Train | None = None
        self.training = False
        self.halted = False
        self._last = self._began = self._failures = 0

    def ask(self, command: Train) -> None:
        """Take a command, without beginning with it.

        Raises
        ------
        AlgorithmError
            If it is not due.
        """
        check_train(
            self._name,
            self._site.node,
            command.round,
            in_flight=None if self.asked is None else self.asked.round,
            last=self._last,
            halted=self.halted,
        )
        self.asked, self._last = command, command.round

    def begin(self, segment: Segment | None, done: Callable[[Train, Outcome], None]) -> None:
        """Begin with what has been asked for, if the segment covers it; else hold it back."""
        command = self.asked
        if command is None or self.training or segment is None:
            return
        now, round = self._clock.now(), self._after + command.round
        if segment.covers(round, now):
            self.training, self._began = True, now
            seed = self._site.seeds.number("train", round)
            task = Task(round=round, seed=seed, model=command.model)
            self._trainer.start(task, partial(done, command))

    def complete(self, command: Train, outcome: Outcome, at: int) -> Event | None:
        """Take the outcome of a training; None if it is not the one in flight.

        Raises
        ------
        RuntimeFault
            If training fails too often, or returned another model.
        """
        if self.asked is not command:
            return None
        self.asked, self.training = None, False
        accounts, node = self._accounts, self._site.node
        accounts.rounds = round = self._after + command.round
        accounts.busy += at - self._began
        model, error = outcome.model, outcome.error
        if model is not None and len(model) != self._site.layout.size:
            raise RuntimeFault(
                f"the trainer of node {node} returned {len(model)} values in round {round}; the "
                f"model has {self._site.layout.size}"
            )
        if model is not None and not self._site.ops.finite(model):
            model, error = None, _NOT_FINITE
        if model is not None:
            accounts.trained += 1
            self._failures = 0
            return TrainDone(at=at, round=command.round, before=command.model, after=model)
        accounts.failed += 1
        accounts.tallies["training-lost" if outcome.lost else "training-failed"].count += 1
        self._failures += not outcome.lost
        if self._failures >= MAX_FAILURES:
            raise RuntimeFault(
                f"training failed {MAX_FAILURES} times in a row on node {node}, last in round "
                f"{round}:\n{error}"
            )
        return TrainFailed(at=at, round=command.round, reason=error)

    def is_done_with(self, segment: Segment) -> bool:
        """Tell whether no more training begins in a segment, and none is in flight."""
        if self.training:
            return False
        return self.asked is not None or self.halted or segment.is_over(self._clock.now())

    def busy(self) -> int:
        """Tell for how many nanoseconds the training in flight has gone on."""
        return self._clock.now() - self._began if self.training else 0

    def cancel(self) -> None:
        """Forget the training in flight."""
        if self.training:
            self._trainer.cancel()
