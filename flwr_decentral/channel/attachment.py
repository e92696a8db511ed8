"""The trainer hand-off, the trainer's end: see :mod:`flwr_decentral.channel.handoff`.

It blocks, as the user's training does, but never for more than a second at a time: in between it
looks whether the process has been asked to stop.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from flwr_decentral.arena import Arena
from flwr_decentral.core import RuntimeFault, Vector, error_of
from flwr_decentral.localsocket import Frame, FrameBuffer, encode_frame

from .client import connect
from .handoff import HANDOFF, Facts

SLICE_S: Final = 1.0
"""The longest that anything blocks before it looks around."""


_open: WeakSet[Attachment] = WeakSet()


def _forget_in_child() -> None:
    """Close a forked child's copies of the sockets, such as those of a data loader's workers.

    With them open, the sidecar would not see the end of a parent that has died.
    """
    for attachment in list(_open):
        attachment.hang_up()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


class Aborted(RuntimeFault):
    """Tell that this process was asked to stop while it waited for the sidecar."""


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """One round to train.

    Attributes
    ----------
    round, seed : int
        Which round of the run, and the seed of every generator.
    generation : int
        What the result is known by.
    model, private : ndarray of float32, shape (D,); ndarray of uint8
        Where to start; read-only.
    output, private_output : ndarray of float32, shape (D,); ndarray of uint8
        Where the result goes.
    """

    round: int
    seed: int
    generation: int
    model: Vector
    private: NDArray[np.uint8]
    output: Vector
    private_output: NDArray[np.uint8]


class Attachment:
    """Train for a sidecar.

    Parameters
    ----------
    address : str
        Where the sidecar listens.
    facts : dict
        What it is told of this process.
    patience : float (default: 10.0)
        Seconds to wait for a sidecar that is about to start.
    abort : callable, optional
        Tells whether this process has been asked to stop.

    Attributes
    ----------
    facts : dict
        What the sidecar has told this process.
    farewell : dict or None
        What it said as it told this process to leave.

    Raises
    ------
    RuntimeFault
        If there is no sidecar, or it belongs to another user.
    DecentralError
        If it refuses this process, with the fault that it has found.
    Aborted
        If this process has been asked to stop.
    """

    def __init__(
        self,
        address: str,
        facts: Facts,
        *,
        patience: float = 10.0,
        abort: Callable[[], bool] = lambda: False,
    ) -> None:
        self.farewell: Facts | None = None
        self._address, self._abort = address, abort
        self._buffer, self._frames = FrameBuffer(), list[Frame]()
        self._passed: list[int] = []
        self._arena: Arena | None = None
        self._socket = connect(address, patience, self._look)
        self._socket.settimeout(SLICE_S)
        _open.add(self)
        try:
            self._say("attach", version=HANDOFF, process=os.getpid(), facts=facts)
            welcome = self._hear("welcome").header
            self.facts: Facts = welcome["facts"]
            if not self._passed:
                raise RuntimeFault(f"the sidecar at {address} has passed no memory")
            self._arena = Arena.receive(self._passed.pop(), welcome["token"])
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def blob(self) -> bytes:
        """What the sidecar has for every trainer to read."""
        return self._memory.blob

    def next(self) -> Assignment | None:
        """Wait for a round to train; None if there is none and this process is to leave."""
        if self.farewell is not None:
            return None
        self._say("next")
        frame = self._hear("train", "leave")
        if frame.header["do"] == "leave":
            self.farewell = frame.header["facts"]
            return None
        header = frame.header
        return self._assignment(header["round"], header["seed"], header["generation"])

    def fetch(self) -> tuple[Vector, NDArray[np.uint8]]:
        """Ask for the node's current model and private bytes; not in the middle of a round."""
        self._say("fetch")
        self._hear("model")
        assignment = self._assignment(0, 0, 0)
        return assignment.model, assignment.private

    def commit(self, assignment: Assignment) -> bool:
        """Hand over what is in the output; False if nobody waits for it any more."""
        return self._report("done", generation=assignment.generation)

    def fail(self, assignment: Assignment, error: str) -> bool:
        """Say that there is no result, and why; False if nobody waits for one any more."""
        return self._report("failed", generation=assignment.generation, error=error)

    def hang_up(self) -> None:
        """Close the connection; the memory stays."""
        self._socket.close()

    def close(self) -> None:
        """Let go of everything."""
        self.hang_up()
        if self._arena is not None:
            self._arena.close()
        for fd in self._passed:
            os.close(fd)
        self._passed.clear()

    @property
    def _memory(self) -> Arena:
        assert self._arena is not None
        return self._arena

    def _assignment(self, round: int, seed: int, generation: int) -> Assignment:
        memory = self._memory
        model, private = memory.input(0), memory.private_input(0)
        model.flags.writeable = private.flags.writeable = False
        return Assignment(
            round=round,
            seed=seed,
            generation=generation,
            model=model,
            private=private,
            output=memory.output(0),
            private_output=memory.private_output(0),
        )

    def _report(self, do: str, **values: Any) -> bool:
        if self.farewell is not None:
            return False
        self._say(do, **values)
        frame = self._hear("counted", "late", "leave")
        if frame.header["do"] == "leave":  # another process has taken this one's place
            self.farewell = frame.header["facts"]
        return bool(frame.header["do"] == "counted")

    def _look(self) -> None:
        if self._abort():
            raise Aborted("this process was asked to stop while it waited for the sidecar")

    def _say(self, do: str, **values: Any) -> None:
        data = memoryview(encode_frame({"do": do, **values}))
        while data:
            self._look()
            try:
                data = data[self._socket.send(data) :]
            except TimeoutError:
                continue
            except OSError as error:
                # What it said before it went, such as a refusal, may still be there to read.
                with contextlib.suppress(OSError):
                    self._receive()
                if not self._frames:
                    raise self._gone() from error
                return

    def _hear(self, *expected: str) -> Frame:
        """Wait for one of some messages."""
        while not self._frames:
            self._look()
            try:
                if not self._receive():
                    raise self._gone()
            except TimeoutError:
                continue
            except OSError as error:
                raise self._gone() from error
        frame = self._frames.pop(0)
        do = frame.header.get("do")
        if do == "refused":
            raise error_of(frame.header.get("fault"), frame.header.get("reason"))
        if do not in expected:
            raise RuntimeFault(f"the sidecar at {self._address} says {do!r}, not {expected}")
        return frame

    def _receive(self) -> bool:
        """Take in what has come, descriptors included; False at the end of the connection."""
        if self._arena is None:
            flags = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
            data, passed, _, _ = socket.recv_fds(self._socket, 1 << 16, 1, flags)
            self._passed += passed
        else:
            data = self._socket.recv(1 << 16)
        self._frames += self._buffer.feed(data)
        return bool(data)

    def _gone(self) -> RuntimeFault:
        return RuntimeFault(f"the sidecar at {self._address} has ended")
