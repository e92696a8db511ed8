"""The ClientApp side: one mod, which makes an ordinary ClientApp decentralized.

    @app.train(mods=[decentral_mod])
    def train(msg, context): ...

    @app.evaluate(mods=[decentral_mod])
    def evaluate(msg, context): ...

The user's functions stay what they were: arrays and a config in, arrays and metrics out. Under
another strategy the mod does nothing. Under ``decentral(...)`` it takes the model from shared
memory instead of from the message, seeds every generator it knows of, calls the user's function,
and puts the result back. No parameter travels in a message.

A *host* is one long message in which the mod serves tasks of many nodes, each with the message,
metadata and context that Flower would have given to that node.
"""

from __future__ import annotations

import os
import platform
import random
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeAlias

import numpy as np
from flwr.app import ConfigRecord, Context, Message, RecordDict

from flwr_decentral.arena import Arena, ArenaRef
from flwr_decentral.core import AlgorithmError, RuntimeFault
from flwr_decentral.core.layout import Layout
from flwr_decentral.core.transcript import vector_digest
from flwr_decentral.localsocket import Connection, Frame
from flwr_decentral.ops import Reference

from .control import CONTROL, PROTOCOL, Job, dump_facts
from .records import (
    decode,
    encode,
    message_for,
    model_record,
    take_arrays,
    to_numpy,
)

Call: TypeAlias = Callable[[Message, Context], Message]


def decentral_mod(msg: Message, context: Context, call_next: Call) -> Message:
    """Train and evaluate on models that live on the nodes.

    A Flower mod, for ``@app.train(mods=[decentral_mod])`` and the same for ``@app.evaluate``.

    Parameters
    ----------
    msg : Message
        The message. One that does not come from ``decentral(...)`` is passed on untouched.
    context : Context
        The node's context. Its ``state`` persists for each node.
    call_next : callable
        The user's function, or the next mod.

    Returns
    -------
    Message
        The reply: metrics, never arrays.
    """
    control = msg.content.config_records.get(CONTROL) if msg.has_content() else None
    if control is None:
        return call_next(msg, context)
    if control["protocol"] != PROTOCOL:
        raise RuntimeFault(
            f"the ServerApp speaks version {control['protocol']!r} of our protocol, this ClientApp "
            f"version {PROTOCOL}: install one version of flwr-decentral on both sides"
        )
    config = _user_config(msg, control)
    content = _ACTIONS[str(control["do"])](_Call(msg, context, call_next), control, config)
    return Message(content, reply_to=msg)


@dataclass(frozen=True)
class _Call:
    """A message that has not been answered yet."""

    message: Message
    context: Context
    call_next: Call


@dataclass(frozen=True, kw_only=True)
class _Task:
    """One call of the user's function on a node's vector."""

    node: int
    round: int
    seed: int
    virtual_time: float

    def config(self, base: Mapping[str, Any]) -> ConfigRecord:
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


def facts_of(context: Context) -> dict[str, Any]:
    """List what the ServerApp has to know about this client."""
    versions = {"python": platform.python_version()}
    for name in ("flwr", "flwr-decentral", "numpy", "torch", "ray"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    torch = sys.modules.get("torch")
    # OMP_NUM_THREADS may be a list, one number for each level of nesting.
    named = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    threads = torch.get_num_threads() if torch else int(named) if named.isdigit() else 0
    return {
        "node": context.node_config.get("partition-id", -1),
        "nodes": context.node_config.get("num-partitions", -1),
        "host": host_identity(),
        "versions": versions,
        "threads": threads,
    }


def host_identity() -> str:
    """Identify this host and its boot: shared memory does not reach beyond it."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{socket.gethostname()} {file.read().strip()}"
    except OSError:  # not on Linux
        return socket.gethostname()


_OPS = Reference()
_attached: dict[ArenaRef, tuple[Arena, Layout]] = {}


def _attach(job: Job) -> tuple[Arena, Layout]:
    """Map the run's arena once in each process."""
    if job.arena not in _attached:
        _attached.clear()
        arena = Arena.attach(job.arena)
        _attached[job.arena] = (arena, Layout.unpack(arena.blob))
    return _attached[job.arena]


def _user_config(msg: Message, control: Mapping[str, Any]) -> dict[str, Any]:
    records = msg.content.config_records
    return dict(records.get(str(control["config-key"]), {}))


def _hello(call: _Call, control: Mapping[str, Any], config: dict[str, Any]) -> RecordDict:
    del control, config
    return RecordDict({CONTROL: ConfigRecord({"facts": dump_facts(facts_of(call.context))})})


def _run(call: _Call, job: Job, task: _Task, config: Mapping[str, Any]) -> RecordDict:
    """Call the user's function on a node's vector; return its reply."""
    arena, layout = _attach(job)
    arrays = model_record(layout, arena.input(task.node), arena.private_input(task.node))
    call.message.content = RecordDict({job.arrays_key: arrays, job.config_key: task.config(config)})
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


def _run_seeded(
    call: _Call, job: Job, task: _Task, config: Mapping[str, Any], state: bytes
) -> RecordDict:
    """Call the user's function with all generators seeded, also one that it only just loaded."""
    had_torch = "torch" in sys.modules
    content = _run(call, job, task, config)
    if not had_torch and "torch" in sys.modules:
        # It was not seeded when the function started; the inputs are untouched, so run again.
        _restore(call.context, state)
        content = _run(call, job, task, config)
    return content


def _restore(context: Context, state: bytes) -> None:
    context.state.clear()
    context.state.update(decode(state))


def _train(
    call: _Call, job: Job, task: _Task, config: Mapping[str, Any], state: bytes
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
    arena, layout = _attach(job)
    try:
        content = _run_seeded(call, job, task, config, state)
        arrays = to_numpy(take_arrays(content, job.arrays_key))
        output = arena.output(task.node)
        layout.flatten(arrays, output, arena.private_output(task.node))
        if not _OPS.finite(output):
            raise AlgorithmError(
                "training returned parameters that are not finite (NaN or Inf); "
                "a lower learning rate is the usual cure"
            )
    except Exception:  # noqa: BLE001 - whatever the user's function raises is a failed training
        _restore(call.context, state)
        return {"error": traceback.format_exc()}, RecordDict()
    return {"digest": vector_digest(output)}, content


def _train_once(call: _Call, control: Mapping[str, Any], config: dict[str, Any]) -> RecordDict:
    state = encode(call.context.state)
    outcome, content = _train(call, Job.of(control), _task_of(control), config, state)
    content[CONTROL] = ConfigRecord(dict(outcome))
    return content


def _task_of(values: Mapping[str, Any]) -> _Task:
    return _Task(
        node=values["node"],
        round=values["round"],
        seed=values["seed"],
        virtual_time=values["virtual-time"],
    )


def _evaluate(call: _Call, control: Mapping[str, Any], config: dict[str, Any]) -> RecordDict:
    """Evaluate once, with the state that the node has where it trains."""
    job, task = Job.of(control), _task_of(control)
    connection = None
    if control["fetch-state"]:
        connection = Connection(job.address, job.token, job.patience)
    try:
        before = encode(call.context.state)
        if connection is not None:
            connection.send({"do": "get-state", "node": task.node})
            frame = connection.receive()
            if frame is None:
                raise RuntimeFault("the engine ended while a node was fetching its state")
            before = frame.blobs[0]
            _restore(call.context, before)
        try:
            content = _run_seeded(call, job, task, config, before)
        except Exception:  # noqa: BLE001 - whatever the user's function raises
            _restore(call.context, before)
            return RecordDict({CONTROL: ConfigRecord({"error": traceback.format_exc()})})
        for name in list(content.array_records):
            del content[name]
        after = encode(call.context.state)
        if connection is not None:
            if after != before:
                connection.send({"do": "put-state", "node": task.node}, [after])
                connection.receive()
            call.context.state.clear()
        return content
    finally:
        if connection is not None:
            connection.close()


def _host(call: _Call, control: Mapping[str, Any], config: dict[str, Any]) -> RecordDict:
    """Serve tasks until the engine says to leave, or is gone."""
    job = Job.of(control)
    served = 0
    try:
        connection = Connection(job.address, job.token, job.patience)
    except OSError:
        # The run ended before this message's turn came: there is nothing left to serve.
        return RecordDict({CONTROL: ConfigRecord({"served": served})})
    try:
        _attach(job)
        connection.send({"do": "serve"})
        connection.wait_for_work()
        while (frame := connection.receive()) is not None and frame.header["do"] == "train":
            connection.send(*_serve(call, job, frame, config))
            served += 1
    except ConnectionError:
        pass  # the engine has ended, and with it the run
    finally:
        connection.close()
    return RecordDict({CONTROL: ConfigRecord({"served": served})})


def _serve(call: _Call, job: Job, frame: Frame, config: dict[str, Any]) -> Frame:
    """Train one node's task; answer with the outcome, its new state and what else was returned."""
    task, node_id = _task_of(frame.header), frame.header["node-id"]
    host = call.context
    context = Context(
        run_id=host.run_id,
        node_id=node_id,
        node_config={**host.node_config, "partition-id": task.node, "num-partitions": job.nodes},
        state=decode(frame.blobs[0]),
        run_config=dict(host.run_config),
    )
    name = f"{job.token}-{task.node}-{task.round}"
    message = message_for(call.message, node_id, name, RecordDict())
    own = _Call(message, context, call.call_next)
    outcome, content = _train(own, job, task, config, frame.blobs[0])
    return Frame({"node": task.node, **outcome}, (encode(context.state), encode(content)))


_ACTIONS: dict[str, Callable[[_Call, Mapping[str, Any], dict[str, Any]], RecordDict]] = {
    "hello": _hello,
    "host": _host,
    "train": _train_once,
    "evaluate": _evaluate,
}
