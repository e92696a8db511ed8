"""Getting the training done by Flower's clients, one Flower message for each task.

:class:`Dispatcher` holds what both ways of dispatching share: the arena, evaluation, and what to do
about tasks that were lost. :class:`MessageDispatcher` is the plain way, and the oracle for the
packed one in :mod:`flwr_decentral.flower.packed`: each task is one short ``train`` message.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from logging import WARNING
from typing import Any, Final

import numpy as np
from flwr.app import ConfigRecord, Error, Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode
from flwr.common.logger import log
from numpy.typing import NDArray

from flwr_decentral.arena import Arena
from flwr_decentral.core import RuntimeFault, Vector, to_seconds
from flwr_decentral.sim.trainer import Outcome, Task

from .control import CONTROL, Job, reported_error
from .grid import GridMeter
from .roster import NOBODY, Roster, collect, hello

_POLL: Final = 0.002
_IN_FLIGHT: Final = 64
"""How many messages are out at once: for each node Flower looks at all that it has stored."""
MAX_LOST: Final = 3
"""How many times a task may be lost with its process before the run fails."""
_BALLAST: Final = 1 << 24
"""Bytes that make a message take a moment, even where it fails."""


@dataclass
class Lost:
    """Count the tasks that were lost with the process that ran them."""

    total: int = 0
    times: dict[tuple[int, int], int] = field(default_factory=dict)

    def again(self, task: Task, why: str) -> None:
        """Note a loss, and let the task run again unless it was lost too often.

        Raises
        ------
        RuntimeFault
            At the loss after the last that is allowed.
        """
        key = (task.node, task.round)
        self.total += 1
        self.times[key] = self.times.get(key, 0) + 1
        log(WARNING, "Lost the training of node %d, round %d: %s", task.node, task.round, why)
        if self.times[key] > MAX_LOST:
            raise RuntimeFault(
                f"the process that trained node {task.node}, round {task.round}, died "
                f"{self.times[key]} times ({why}); it may run out of memory: give each client more "
                "resources, or use fewer clients at once"
            )


@dataclass
class Dead:
    """Know the client processes that have died.

    Flower leaves them in its pool, which is a stack, and on top of it: a dead process fails message
    after message at once, while others are at work, or idle below it. What it swallows so has not
    been lost, since nothing had begun; :meth:`Dispatcher._sift` keeps it from going there again.
    """

    reasons: set[str] = field(default_factory=set)
    since: float | None = None

    def __len__(self) -> int:
        return len(self.reasons)

    def learn(self, error: Error) -> bool:
        """Learn of a death from an error; tell whether it was known."""
        known = error.reason in self.reasons
        if error.code == ErrorCode.UNKNOWN:  # it is no exception of the ClientApp
            self.reasons.add(str(error.reason))
        return known

    def swallowed(self, error: Error) -> bool:
        """Tell whether a message went to a process that was known to be dead.

        Raises
        ------
        RuntimeFault
            If nobody else has answered for a long time.
        """
        if not self.learn(error):
            return False
        now = time.monotonic()
        self.since = self.since or now
        if now - self.since > NOBODY:
            raise RuntimeFault(f"no client process is left: {error.reason}")
        return True

    def answered(self) -> None:
        """Note that somebody is alive."""
        self.since = None


class Dispatcher(ABC):
    """Train and evaluate through Flower's clients.

    Parameters
    ----------
    meter : GridMeter
        The grid.
    roster : Roster
        Which Flower node is which.
    arena : Arena
        Where the vectors are.
    job : Job
        What all tasks have in common.
    train_config : mapping
        What the user's train function gets in its config.
    patience : float
        Seconds that one task may take.
    """

    name: str

    def __init__(
        self,
        meter: GridMeter,
        roster: Roster,
        arena: Arena,
        job: Job,
        train_config: Mapping[str, Any],
        patience: float,
    ) -> None:
        self.meter = meter
        self.roster = roster
        self.arena = arena
        self.job = job
        self.train_config = dict(train_config)
        self.patience = patience
        self.lost = Lost()
        self.dead = Dead()

    @abstractmethod
    def dispatch(self, task: Task, model: Vector) -> None:
        """Start a task; ``model`` is copied."""

    @abstractmethod
    def wait(self, node: int) -> Outcome:
        """Wait until the node's task has ended, and take its outcome."""

    @abstractmethod
    def settle(self) -> None:
        """Wait until every task has ended, and let go of the clients."""

    @abstractmethod
    def close(self) -> None:
        """End. Nothing of the run is left behind."""

    def private(self, node: int) -> NDArray[np.uint8]:
        """Copy a node's private bytes."""
        return self.arena.private_input(node).copy()

    def evaluate(
        self,
        models: Mapping[int, Vector],
        config: Mapping[str, Any],
        round: int,
        at: int,
        seed: int,
    ) -> dict[int, RecordDict]:
        """Let nodes evaluate their models.

        Parameters
        ----------
        models : mapping of int to ndarray of float32, shape (D,)
            Which nodes, and their models. No task may be in flight.
        config : mapping
            What the user's evaluate function gets in its config.
        round, at, seed : int
            The round, the virtual time in nanoseconds, and the seed of node 0; node i gets
            ``seed + i``.

        Returns
        -------
        dict of int to RecordDict
            What each node replied. Nodes whose evaluation failed are left out, and logged.
        """
        queue = deque(sorted(models))
        waiting: dict[str, int] = {}
        replies: dict[int, RecordDict] = {}
        swallowed: list[int] = []
        lost: dict[int, int] = {}
        deadline = time.monotonic() + self.patience
        while queue or waiting:
            while queue and len(waiting) < _IN_FLIGHT:
                node = queue.popleft()
                self.arena.input(node)[:] = models[node]
                waiting[self.meter.push(self._evaluation(node, config, round, at, seed))] = node
            for reply in self.meter.pull(waiting):
                node = waiting.pop(reply.metadata.reply_to_message_id)
                deadline = time.monotonic() + self.patience
                if not reply.has_error():
                    self.dead.answered()
                    if error := reported_error(reply.content):
                        log(WARNING, "Evaluation failed on node %d:\n%s", node, error)
                    else:
                        replies[node] = reply.content
                elif self.dead.swallowed(reply.error):
                    swallowed.append(node)
                else:
                    lost[node] = lost.get(node, 0) + 1
                    if lost[node] <= MAX_LOST:
                        queue.append(node)
                    log(WARNING, "Lost the evaluation of node %d: %s", node, reply.error.reason)
            if time.monotonic() > deadline:
                raise RuntimeFault(
                    f"no evaluation has ended for {self.patience:.0f} s; waiting for nodes "
                    f"{sorted(waiting.values())[:8]}"
                )
            if waiting:
                self._attend(_POLL)
            elif swallowed:
                self._sift()
                queue.extend(swallowed)
                swallowed.clear()
        return replies

    def _evaluation(
        self, node: int, config: Mapping[str, Any], round: int, at: int, seed: int
    ) -> Message:
        values = {
            "node": node,
            "round": round,
            "seed": (seed + node) % 2**31,
            "virtual-time": to_seconds(at),
            "fetch-state": self._holds_state(node),
        }
        return self._message(node, MessageType.EVALUATE, config, "evaluate", values)

    def _message(
        self,
        node: int,
        message_type: str,
        config: Mapping[str, Any],
        do: str,
        values: Mapping[str, Any],
    ) -> Message:
        content = RecordDict(
            {
                CONTROL: self.job.control(do, **values),
                self.job.config_key: ConfigRecord(dict(config)),
            }
        )
        return Message(content, self.roster.node_ids[node], message_type)

    def _sift(self, busy: Collection[int] = ()) -> None:
        """Bring living processes to the top of Flower's pool.

        There is one message more than there are dead processes, and each takes a moment: so they go
        to different processes, and one that is alive is back last. Busy nodes get none.
        """
        nodes = [node for node in range(len(self.roster.node_ids)) if node not in busy]
        messages = [
            hello(self.roster.node_ids[node], MessageType.TRAIN, ballast=bytes(_BALLAST))
            for node in nodes[: len(self.dead) + 1]
        ]
        for reply in collect(self.meter, messages, time.monotonic() + self.patience):
            if not reply.has_error():
                self.dead.answered()

    def _outcome(self, task: Task, reply: Mapping[str, Any], content: RecordDict) -> Outcome:
        """Read how a task has ended, and take its vector out of the arena."""
        if error := str(reply.get("error", "")):
            log(WARNING, "Training failed on node %d, round %d:\n%s", task.node, task.round, error)
            return Outcome(model=None, error=error)
        model = self.arena.output(task.node).copy()
        return Outcome(model=model, digest=str(reply["digest"]), extra=content)

    def _overdue(self, tasks: Iterable[Task]) -> RuntimeFault:
        """Make the error for no training having ended for longer than one may take.

        Tasks queue for a few clients, so how long one of them has waited says nothing.
        """
        flying = [f"node {task.node} (round {task.round})" for task in tasks]
        return RuntimeFault(
            f"no training has ended for {self.patience:.6g} s, which is what one may take; waiting "
            f"for {', '.join(flying[:8])}. Allow more with timeout"
        )

    def _commit(self, node: int, outcome: Outcome) -> Outcome:
        """Let a task change the private bytes, now that it ends in virtual time."""
        if outcome.model is not None:
            self.arena.private_input(node)[:] = self.arena.private_output(node)
        return outcome

    def _holds_state(self, node: int) -> bool:
        """Tell whether this dispatcher keeps the node's state, instead of Flower."""
        del node
        return False

    def _attend(self, seconds: float) -> None:
        """Spend up to some seconds on whatever else there is to do."""
        time.sleep(seconds)


class MessageDispatcher(Dispatcher):
    """Send one short ``train`` message for each task."""

    name = "message"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._tasks: dict[int, Task] = {}
        self._queue: OrderedDict[int, Task] = OrderedDict()
        self._ids: dict[str, int] = {}
        self._ended: dict[int, Outcome] = {}

    def dispatch(self, task: Task, model: Vector) -> None:
        """Start a task; ``model`` is copied."""
        self.arena.input(task.node)[:] = model
        self._tasks[task.node] = self._queue[task.node] = task
        self._fill()

    def _fill(self) -> None:
        """Send what there is room for."""
        while self._queue and len(self._ids) < _IN_FLIGHT:
            _, task = self._queue.popitem(last=False)
            self._push(task)

    def _await(self, node: int) -> None:
        if node in self._queue:
            self._queue.move_to_end(node, last=False)
        begin = time.monotonic()
        while not self._has_ended(node):
            if time.monotonic() > begin + self.patience:
                ended = len(self._ended)
                for other in self._tasks:  # what it has queued behind may have ended
                    self._has_ended(other)
                if len(self._ended) == ended:
                    flying = self._tasks.keys() - self._ended.keys()
                    raise self._overdue(self._tasks[other] for other in sorted(flying))
                begin = time.monotonic()
            time.sleep(_POLL)

    def wait(self, node: int) -> Outcome:
        """Wait until the node's task has ended, and take its outcome."""
        self._await(node)
        del self._tasks[node]
        return self._commit(node, self._ended.pop(node))

    def settle(self) -> None:
        """Wait until every task has ended."""
        for node in self._tasks:
            self._await(node)

    def close(self) -> None:
        """End: whatever is still in flight ends by itself, and its reply is dropped."""
        self._tasks.clear()
        self._queue.clear()
        self._ids.clear()

    def _push(self, task: Task) -> None:
        values = {
            "node": task.node,
            "round": task.round,
            "seed": task.seed,
            "virtual-time": to_seconds(task.at),
        }
        message = self._message(task.node, MessageType.TRAIN, self.train_config, "train", values)
        self._ids[self.meter.push(message)] = task.node

    def _has_ended(self, node: int) -> bool:
        # Only the awaited reply, unless others wait for room: each that is asked for costs a look.
        everybody = bool(self._queue)
        ids = [message_id for message_id, other in self._ids.items() if everybody or other == node]
        if swallowed := self._take(ids):
            swallowed += self._take(self._ids)  # where one has been, others may be
            self._sift({*self._ids.values(), *(task.node for task in swallowed)})
            for task in swallowed:
                self._push(task)
        self._fill()
        return node in self._ended

    def _take(self, ids: Iterable[str]) -> list[Task]:
        """Take replies, and send lost tasks again; return the tasks that were swallowed."""
        swallowed = []
        for reply in self.meter.pull(ids):
            task = self._tasks[self._ids.pop(reply.metadata.reply_to_message_id)]
            if not reply.has_error():
                self.dead.answered()
                content = reply.content
                self._ended[task.node] = self._outcome(task, content.pop(CONTROL), content)
            elif self.dead.swallowed(reply.error):
                swallowed.append(task)
            else:
                self.lost.again(task, str(reply.error.reason))
                self._push(task)
        return swallowed
