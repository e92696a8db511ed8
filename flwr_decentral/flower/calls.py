"""Calling the user's function on a vector in shared memory, seeded, and taking its result."""

from __future__ import annotations

import random
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import numpy as np
from flwr.app import ConfigRecord, Context, Message, RecordDict
from numpy.typing import NDArray

from flwr_decentral.core import AlgorithmError, RuntimeFault, Vector
from flwr_decentral.core.layout import Layout
from flwr_decentral.core.transcript import vector_digest
from flwr_decentral.ops import Reference

from .records import decode, model_record, take_arrays, to_numpy

CallNext: TypeAlias = Callable[[Message, Context], Message]

_OPS: Final = Reference()


class Names(Protocol):
    """How the user's functions call the model and the config in a message."""

    @property
    def arrays_key(self) -> str:
        """Name of the record that holds the model."""

    @property
    def config_key(self) -> str:
        """Name of the record that holds the config."""


class Slot(NamedTuple):
    """Where a task's model lies, and where its result goes.

    Attributes
    ----------
    layout : Layout
        How the model lies in the vectors.
    model, private : ndarray of float32, shape (size,); ndarray of uint8
        Where to start.
    output, private_output : ndarray of float32, shape (size,); ndarray of uint8
        Where the result goes.
    """

    layout: Layout
    model: Vector
    private: NDArray[np.uint8]
    output: Vector
    private_output: NDArray[np.uint8]


@dataclass(frozen=True)
class Call:
    """A message that has not been answered yet."""

    message: Message
    context: Context
    call_next: CallNext


@dataclass(frozen=True, kw_only=True)
class Task:
    """One call of the user's function on a node's vector."""

    node: int
    round: int
    seed: int
    virtual_time: float

    def config(self, base: Mapping[str, Any]) -> ConfigRecord:
        """Make the config that the function gets, from what it was given for all rounds."""
        return ConfigRecord(
            {
                **base,
                "server-round": self.round,
                "seed": self.seed,
                "virtual-time": self.virtual_time,
            }
        )


def seed_everything(seed: int) -> None:
    """Seed the generators of ``random``, numpy and, where it is loaded, torch (all devices)."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - the user's code may draw from it
    if "torch" in sys.modules:
        _seed_torch(sys.modules["torch"], seed)


def _seed_torch(torch: Any, seed: int) -> None:
    if torch.cuda.is_available() or torch.backends.mps.is_available():
        torch.manual_seed(seed)
    else:
        # torch.manual_seed would note down, each time, to seed a device that is not there.
        torch.default_generator.manual_seed(seed)


def _run(call: Call, names: Names, slot: Slot, task: Task, config: Mapping[str, Any]) -> RecordDict:
    """Call the user's function on a node's vector; return its reply."""
    arrays = model_record(slot.layout, slot.model, slot.private)
    call.message.content = RecordDict(
        {names.arrays_key: arrays, names.config_key: task.config(config)}
    )
    seed_everything(task.seed)
    reply = call.call_next(call.message, call.context)
    if not isinstance(reply, Message):
        raise AlgorithmError(
            f"the function must return a Message, as Flower's do; it returned a "
            f"{type(reply).__name__}"
        )
    if reply.has_error():
        raise RuntimeFault(f"the function replied with an error: {reply.error.reason}")
    return reply.content


def run_seeded(
    call: Call, names: Names, slot: Slot, task: Task, config: Mapping[str, Any], state: bytes
) -> RecordDict:
    """Call the user's function with all generators seeded, also one that it only just loaded."""
    had_torch = "torch" in sys.modules
    content = _run(call, names, slot, task, config)
    if not had_torch and "torch" in sys.modules:
        # It was not seeded when the function started; the inputs are untouched, so run again.
        restore(call.context, state)
        content = _run(call, names, slot, task, config)
    return content


def restore(context: Context, state: bytes) -> None:
    """Give a node the state that it had."""
    context.state.clear()
    context.state.update(decode(state))


def train(
    call: Call, names: Names, slot: Slot, task: Task, config: Mapping[str, Any], state: bytes
) -> tuple[dict[str, str], RecordDict]:
    """Train once. What goes wrong in the user's function becomes an error in the outcome.

    ``state`` is the encoded state of the node before the task, which a failure restores.

    Returns
    -------
    dict of str to str
        The digest of the trained vector, or the error.
    RecordDict
        What else the function returned.
    """
    try:
        content = run_seeded(call, names, slot, task, config, state)
        arrays = to_numpy(take_arrays(content, names.arrays_key))
        slot.layout.flatten(arrays, slot.output, slot.private_output)
        if not _OPS.finite(slot.output):
            raise AlgorithmError(
                "training returned parameters that are not finite (NaN or Inf); "
                "a lower learning rate is the usual cure"
            )
    except Exception:  # noqa: BLE001 - whatever the user's function raises is a failed training
        restore(call.context, state)
        return {"error": traceback.format_exc()}, RecordDict()
    return {"digest": vector_digest(slot.output)}, content
