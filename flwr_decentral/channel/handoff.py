"""The trainer hand-off, the sidecar's end.

A sidecar outlives the processes that train for it. Each of those attaches over a local socket and
gets shared memory of its own, by descriptor: an input and an output. A slot belongs to one side at
a time, and changes hands with a message; there is no lock in the memory, so there is none that a
dead process could hold.

==========  ===========  =========================================================================
from        message      what it means
==========  ===========  =========================================================================
trainer     attach       here I am, with these facts
sidecar     welcome      your memory; or ``refused``, and why
trainer     next         I am ready: both slots are yours
sidecar     train        the input holds round r: both slots are yours; or ``leave``
trainer     done         the output holds the result of a generation: both slots are yours
trainer     failed       there is no result, and why
sidecar     counted      the result has been taken; or ``late``: nobody waits for it any more
trainer     fetch        put the node's current model into my input
sidecar     model        it is there
==========  ===========  =========================================================================

**Generations.** Each time a task is given away it gets another generation, and a result counts only
if its generation is the current one when the trainer says so over the socket. So it does not matter
what a process writes that was taken for dead: nobody shares its memory, and its word has expired.

**Death.** That a trainer is gone is told by the end of its connection, never by a process id. Its
task goes to the next trainer that is ready: the same round and seed, a new generation. The trainer
that was ready last is *the* trainer; one before it that is still around is sent away.

**Deadline.** A task that has no result in time is lost; whoever is still at it will be late.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from flwr_decentral.arena import Arena
from flwr_decentral.core import DecentralError, RuntimeFault, Vector, to_seconds
from flwr_decentral.localsocket import Frame, FrameBuffer, Listener, encode_frame, is_own

from .clock import Alarm, Clock
from .trainer import Done, Outcome, Task

HANDOFF: Final = 1
"""Version of what is said here; both ends must have the same."""

PATIENCE_S: Final = 30.0
"""How long a process may take to say who it is."""

Facts: TypeAlias = dict[str, Any]
"""What one side tells the other as they meet or part: anything that JSON can hold."""


@dataclass(frozen=True, kw_only=True)
class Slots:
    """What a trainer and the sidecar share.

    Attributes
    ----------
    size : int
        Scalars of the model.
    private_bytes : int (default: 0)
        Bytes of the model's private part, which is not averaged.
    blob : bytes (default: b"")
        Anything that trainers should read, such as the model's layout.
    """

    size: int
    private_bytes: int = 0
    blob: bytes = b""


@dataclass(eq=False)
class _Trainer:
    """A process that attaches. One that is ``ready`` has asked for a task and owns no slot."""

    socket: socket.socket
    process: int = 0
    arena: Arena | None = None
    ready: bool = False
    farewell: Facts | None = None
    buffer: FrameBuffer = field(default_factory=FrameBuffer)


def _admit_all(facts: Facts) -> Facts:
    del facts
    return {}


class Handoff:
    """Give tasks to whichever process has attached. A :class:`~.trainer.Trainer` for a pump.

    Parameters
    ----------
    slots : Slots
        What is shared.
    listener : Listener
        Where trainers attach. It is closed with this.
    clock : Clock
        The run's time.
    patience : int
        Nanoseconds after which a task without a result is lost.
    model : callable
        Returns the node's current model, for those who evaluate it.
    admit : callable, optional
        Called with the facts of each process that attaches; returns the facts that it is told, or
        raises a ``DecentralError`` to refuse it.

    Attributes
    ----------
    private : bytes
        The private part of the model, as the last result has left it.
    vanished, late, strangers : int
        Trainers that ended in the middle of a task, results that came too late, and connections
        that were refused for what they are.
    """

    def __init__(
        self,
        slots: Slots,
        listener: Listener,
        clock: Clock,
        patience: int,
        model: Callable[[], Vector],
        admit: Callable[[Facts], Facts] = _admit_all,
    ) -> None:
        self.private = bytes(slots.private_bytes)
        self.vanished = self.late = self.strangers = 0
        self._slots, self._listener, self._clock = slots, listener, clock
        self._patience, self._model, self._admit = patience, model, admit
        self._trainer: _Trainer | None = None
        self._task: tuple[Task, Done] | None = None
        self._generation = 0
        self._given = False
        self._alarm: Alarm | None = None
        self._attached: set[_Trainer] = set()
        self._jobs: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    # ------------------------------------------------------------------------------ for the pump

    def start(self, task: Task, done: Done) -> None:
        """Give a task to the trainer that is ready, or to the next that will be."""
        if self._task is not None:
            raise RuntimeFault(f"round {self._task[0].round} is in training already")
        self._task = (task, done)
        self._alarm = self._clock.call_at(self._clock.now() + self._patience, self._give_up)
        self._offer()

    def cancel(self) -> None:
        """Forget the task; its result will be late."""
        self._task, self._given = None, False
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    # ------------------------------------------------------------------------------ for the sidecar

    @property
    def trainer(self) -> int | None:
        """The process id of the trainer, for people to read; None if there is none."""
        return None if self._trainer is None else self._trainer.process

    def open(self) -> None:
        """Let trainers attach, from now on, in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._listener.socket, self._accept)

    def dismiss(self, facts: Facts) -> None:
        """Tell all who are attached to leave, the trainer as soon as it is ready."""
        for trainer in self._attached:
            trainer.farewell = facts
        if self._trainer is not None and self._trainer.ready:
            self._leave(self._trainer, facts)

    async def close(self) -> None:
        """Let go of everything; trainers notice by the end of their connections."""
        self.cancel()
        if self._loop is not None:
            self._loop.remove_reader(self._listener.socket)
        jobs = list(self._jobs)
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        self._listener.close()

    # ------------------------------------------------------------------------------ tasks

    def _offer(self) -> None:
        """Give the task away, if there are both a task and somebody who is ready."""
        trainer = self._trainer
        if self._task is None or self._given or trainer is None or not trainer.ready:
            return
        assert trainer.arena is not None
        task = self._task[0]
        self._generation += 1
        self._given, trainer.ready = True, False
        trainer.arena.input(0)[:] = task.model
        trainer.arena.private_input(0).data[:] = self.private
        header = {"round": task.round, "seed": task.seed, "generation": self._generation}
        self._say(trainer, "train", **header)

    def _finish(self, trainer: _Trainer, generation: object, error: str | None) -> None:
        """Take a result, if it is the one that is waited for."""
        current = self._given and trainer is self._trainer and generation == self._generation
        if self._task is None or not current:
            self.late += 1
            self._say(trainer, "late")
            return
        assert trainer.arena is not None
        outcome = Outcome(error=error or "")
        if error is None:
            outcome = Outcome(model=trainer.arena.output(0).copy())
            self.private = trainer.arena.private_output(0).tobytes()
        done = self._task[1]
        self.cancel()
        self._say(trainer, "counted")
        done(outcome)

    def _give_up(self) -> None:
        assert self._task is not None
        task, done = self._task
        at_work = self._given and self._trainer is not None
        who = f"process {self.trainer} is still at it" if at_work else "no trainer is attached"
        if not at_work and self._trainer is not None:
            who = f"process {self.trainer} has not asked for a task"
        self.cancel()
        seconds = to_seconds(self._patience)
        error = f"round {task.round} was not trained within {seconds:g} s: {who}"
        done(Outcome(error=error, lost=True))

    # ------------------------------------------------------------------------------ trainers

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.socket.accept()
        except OSError:
            return  # whoever called has hung up again
        if not is_own(connection):
            self.strangers += 1
            connection.close()
            return
        trainer = _Trainer(connection)
        job = asyncio.get_running_loop().create_task(self._attend(trainer))
        self._jobs.add(job)
        # Not within the task: one that is cancelled before it begins does nothing at all.
        job.add_done_callback(lambda job: self._lose(trainer, job))

    async def _attend(self, trainer: _Trainer) -> None:
        """Listen to one process until its connection ends."""
        connection = trainer.socket
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(PATIENCE_S) as limit:
                while data := await loop.sock_recv(connection, 1 << 16):
                    for frame in trainer.buffer.feed(data):
                        self._hear(trainer, frame)
                    if trainer.arena is not None:
                        limit.reschedule(None)
        except (OSError, TimeoutError):
            pass  # it has ended, or never said who it is
        except DecentralError as error:
            self.strangers += trainer.arena is None
            refusal = {"fault": error.fault, "reason": str(error.args[0])}
            self._say(trainer, "refused", **refusal)

    def _hear(self, trainer: _Trainer, frame: Frame) -> None:
        header = frame.header
        do = header.get("do")
        if (do == "attach") != (trainer.arena is None):
            when = "twice" if do == "attach" else "before it has attached"
            raise RuntimeFault(f"a trainer says {do!r} {when}")
        match do:
            case "attach":
                self._welcome(trainer, header)
            case "next":
                self._take_post(trainer)
            case "done":
                self._finish(trainer, header.get("generation"), None)
            case "failed":
                error = str(header.get("error")) or "it did not say why"
                self._finish(trainer, header.get("generation"), error)
            case "fetch":
                self._lend(trainer)
            case _:
                raise RuntimeFault(f"a trainer says {do!r}, which is no message")

    def _welcome(self, trainer: _Trainer, header: Mapping[str, Any]) -> None:
        if header.get("version") != HANDOFF:
            raise RuntimeFault(
                f"the trainer speaks version {header.get('version')!r} of the hand-off, the "
                f"sidecar version {HANDOFF}: install one version of flwr-decentral on both sides"
            )
        facts = header.get("facts")
        told = self._admit(facts if isinstance(facts, dict) else {})
        slots = self._slots
        arena = Arena.create(1, slots.size, slots.private_bytes, slots.blob)
        process = header.get("process")
        trainer.arena, trainer.process = arena, process if isinstance(process, int) else 0
        self._attached.add(trainer)
        data = encode_frame({"do": "welcome", "token": arena.ref.token, "facts": told})
        # The descriptor goes with the first byte.
        socket.send_fds(trainer.socket, [data[:1]], [arena.fileno()])
        trainer.socket.sendall(data[1:])

    def _take_post(self, trainer: _Trainer) -> None:
        """Let a process that is ready be the trainer."""
        former = self._trainer
        if former is not None and former is not trainer:
            self._leave(former, {"reason": f"process {trainer.process} has taken its place"})
            self._vacate(former)
        self._trainer, trainer.ready = trainer, True
        if trainer.farewell is not None:
            self._leave(trainer, trainer.farewell)
        else:
            self._offer()

    def _lend(self, trainer: _Trainer) -> None:
        if trainer is self._trainer and self._given:
            raise RuntimeFault("a trainer asks for the model in the middle of a task")
        assert trainer.arena is not None
        trainer.arena.input(0)[:] = self._model()
        trainer.arena.private_input(0).data[:] = self.private
        self._say(trainer, "model")

    def _leave(self, trainer: _Trainer, facts: Facts) -> None:
        trainer.ready = False
        self._say(trainer, "leave", facts=facts)

    def _vacate(self, trainer: _Trainer) -> None:
        """Take back what the trainer was at, for the next one."""
        self._trainer = None
        if self._given:
            self._given = False
            self.vanished += 1

    def _lose(self, trainer: _Trainer, job: asyncio.Task[None]) -> None:
        self._jobs.discard(job)
        if trainer is self._trainer:
            self._vacate(trainer)
        self._attached.discard(trainer)
        trainer.socket.close()
        if trainer.arena is not None:
            trainer.arena.close()

    def _say(self, trainer: _Trainer, do: str, **values: Any) -> None:
        # The other side asks and waits, so there is room for an answer, or nobody reads any more.
        try:
            trainer.socket.sendall(encode_frame({"do": do, **values}))
        except OSError:
            with contextlib.suppress(OSError):
                trainer.socket.shutdown(socket.SHUT_RDWR)
