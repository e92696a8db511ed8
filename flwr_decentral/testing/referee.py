"""Hold machines to the contract of :mod:`flwr_decentral.core.algorithm`, and say who broke it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from flwr_decentral.core import (
    HEADER_BYTES,
    AlgorithmError,
    Layout,
    Message,
    Send,
    Train,
    Vector,
    Wire,
)
from flwr_decentral.core.algorithm import Algorithm, Topology
from flwr_decentral.core.transcript import vector_digest
from flwr_decentral.ops import codecs

MAX_HEADER_NUMBERS = (HEADER_BYTES - 24) // 8
"""How many numbers a header has room for beside the kind, the step and both addresses."""


@dataclass(slots=True)
class _Record:
    """What a node has asked for so far."""

    last_round: int = 0
    training: Vector | None = None
    digest: str = ""
    halted: bool = False


class Referee:
    """Check what machines ask for, and that nobody writes to a vector that others read.

    A vector that was sent or handed to the trainer is frozen at once, so that a later write fails
    where it happens; a digest of it finds the writes that go around the flag.

    Parameters
    ----------
    algorithm : Algorithm
        Whose machines they are; errors name it.
    topology : networkx.Graph
        Who may talk to whom.
    layout : Layout
        How long a model is.
    """

    def __init__(self, algorithm: Algorithm, topology: Topology, layout: Layout) -> None:
        self._name = algorithm.name
        self._topology, self._layout = topology, layout
        self._records = [_Record() for _ in topology]
        self._sent: list[tuple[int, Message, str]] = []

    def breach(self, node: int, what: str) -> AlgorithmError:
        """Make the error that says what a node did."""
        return AlgorithmError(f"{self._name}: node {node} {what}")

    def send(self, node: int, command: Send) -> None:
        """Check a message, and remember its payload."""
        message = command.message
        if command.to not in self._topology[node]:
            raise self.breach(node, f"sends to {command.to}, which is no neighbor of it")
        numbers = list(message.header.values())
        if not all(type(number) in (bool, int, float) for number in numbers):
            raise self.breach(node, f"sends a header of other than int and float: {numbers}")
        if len(numbers) > MAX_HEADER_NUMBERS:
            raise self.breach(
                node,
                f"sends {len(numbers)} numbers in a header that has room for "
                f"{MAX_HEADER_NUMBERS}: put them into the payload",
            )
        if message.payload is not None:
            self._check_rounded(node, message.payload, message.wire)
            self._own(node, message.payload, "sends")
            self._sent.append((node, message, vector_digest(message.payload)))

    def _check_rounded(self, node: int, payload: Vector, wire: Wire) -> None:
        rounded = codecs.rounded(payload, wire)
        if not np.array_equal(rounded, payload, equal_nan=True):
            raise self.breach(
                node, f"sends values as {wire} that were not rounded to it: use on_wire"
            )

    def train(self, node: int, command: Train) -> None:
        """Check a training that is asked for."""
        record = self._records[node]
        if record.training is not None:
            raise self.breach(
                node,
                f"asks for round {command.round} while its training of round "
                f"{record.last_round} goes on",
            )
        if command.round <= record.last_round:
            raise self.breach(
                node, f"asks for round {command.round} after round {record.last_round}"
            )
        if record.halted:
            raise self.breach(node, f"asks for round {command.round} after it has halted")
        self._own(node, command.model, "trains")
        if len(command.model) != self._layout.size:
            raise self.breach(
                node, f"trains {len(command.model)} values of a model of {self._layout.size}"
            )
        record.last_round = command.round
        record.training, record.digest = command.model, vector_digest(command.model)

    def trained(self, node: int) -> None:
        """Check that a vector was left alone while it was in training."""
        record = self._records[node]
        assert record.training is not None
        if vector_digest(record.training) != record.digest:
            raise self.breach(
                node, f"wrote to the vector that it had given to training of {record.last_round}"
            )
        record.training = None

    def halt(self, node: int) -> None:
        """Note that a node asks for no more training."""
        self._records[node].halted = True

    def check_sent(self) -> None:
        """Check that every payload still is what was sent."""
        for node, message, digest in self._sent:
            assert message.payload is not None
            if vector_digest(message.payload) != digest:
                raise self.breach(
                    node,
                    f"or a receiver wrote to the payload of a {message.kind!r} message of step "
                    f"{message.step} after it was sent; its receivers share it",
                )

    def _own(self, node: int, vector: Any, verb: str) -> None:
        """Check what a vector is, and freeze it."""
        if not (
            isinstance(vector, np.ndarray)
            and vector.dtype == np.float32
            and vector.ndim == 1
            and vector.flags.c_contiguous
        ):
            kind = getattr(vector, "dtype", type(vector).__name__)
            raise self.breach(
                node,
                f"{verb} {kind} of shape {np.shape(vector)}; a vector is float32, "
                "one-dimensional and contiguous",
            )
        vector.flags.writeable = False
