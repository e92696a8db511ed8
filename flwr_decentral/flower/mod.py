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
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeAlias

from flwr.app import ConfigRecord, Context, Message, RecordDict

from flwr_decentral.arena import Arena, ArenaRef
from flwr_decentral.core import RuntimeFault
from flwr_decentral.core.layout import Layout
from flwr_decentral.localsocket import Connection, Frame

from .calls import Call, CallNext, Slot, Task, restore, run_seeded, train
from .control import CONTROL, PROTOCOL, Job, dump_facts
from .peer import evaluate_own, fetch, local_peer, peer_facts, release, segment
from .records import (
    decode,
    encode,
    message_for,
)


def decentral_mod(msg: Message, context: Context, call_next: CallNext) -> Message:
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
    with local_peer(context.node_config, str(control.get("sockets", ""))):
        content = _ACTIONS[str(control["do"])](Call(msg, context, call_next), control, config)
    return Message(content, reply_to=msg)


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
        "peer": peer_facts(context.node_config),
    }


def host_identity() -> str:
    """Identify this host and its boot: shared memory does not reach beyond it."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{socket.gethostname()} {file.read().strip()}"
    except OSError:  # not on Linux
        return socket.gethostname()


def clients_at_once() -> int:
    """Tell how many clients Flower's Simulation Engine runs at once; 0 where that is not known.

    It makes as many actors as the resources of the engine allow, and serves them with a pool of
    threads that has Python's usual size.
    """
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return 0
    needs = ray.get_runtime_context().get_assigned_resources()
    needs = {name: needs[name] for name in ("CPU", "GPU") if needs.get(name)}
    actors = [
        min(int(host["Resources"].get(name, 0) / need) for name, need in needs.items())
        for host in ray.nodes()
        if host["Alive"] and needs
    ]
    threads = min(32, (getattr(os, "process_cpu_count", os.cpu_count)() or 1) + 4)
    return min(sum(actors), threads)


_Action: TypeAlias = Callable[[Call, Mapping[str, Any], dict[str, Any]], RecordDict]

_attached: dict[ArenaRef, tuple[Arena, Layout]] = {}


def _attach(job: Job) -> tuple[Arena, Layout]:
    """Map the run's arena once in each process."""
    if job.arena not in _attached:
        _attached.clear()
        arena = Arena.attach(job.arena)
        _attached[job.arena] = (arena, Layout.unpack(arena.blob))
    return _attached[job.arena]


def _slot(job: Job, node: int) -> Slot:
    arena, layout = _attach(job)
    return Slot(
        layout,
        arena.input(node),
        arena.private_input(node),
        arena.output(node),
        arena.private_output(node),
    )


def _user_config(msg: Message, control: Mapping[str, Any]) -> dict[str, Any]:
    records = msg.content.config_records
    return dict(records.get(str(control["config-key"]), {}))


def _hello(call: Call, control: Mapping[str, Any], config: dict[str, Any]) -> RecordDict:
    del config
    facts = facts_of(call.context)
    if control.get("room", False):  # not always: it takes a request to Ray
        facts["at-once"] = clients_at_once()
    return RecordDict({CONTROL: ConfigRecord({"facts": dump_facts(facts)})})


def _train_once(call: Call, control: Mapping[str, Any], config: dict[str, Any]) -> RecordDict:
    state = encode(call.context.state)
    job, task = Job.of(control), _task_of(control)
    outcome, content = train(call, job, _slot(job, task.node), task, config, state)
    content[CONTROL] = ConfigRecord(dict(outcome))
    return content


def _task_of(values: Mapping[str, Any]) -> Task:
    return Task(
        node=values["node"],
        round=values["round"],
        seed=values["seed"],
        virtual_time=values["virtual-time"],
    )


def _evaluate(call: Call, control: Mapping[str, Any], config: dict[str, Any]) -> RecordDict:
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
            restore(call.context, before)
        try:
            content = run_seeded(call, job, _slot(job, task.node), task, config, before)
        except Exception:  # noqa: BLE001 - whatever the user's function raises
            restore(call.context, before)
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


def _host(call: Call, control: Mapping[str, Any], config: dict[str, Any]) -> RecordDict:
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


def _serve(call: Call, job: Job, frame: Frame, config: dict[str, Any]) -> Frame:
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
    own = Call(message, context, call.call_next)
    slot = _slot(job, task.node)
    outcome, content = train(own, job, slot, task, config, frame.blobs[0])
    return Frame({"node": task.node, **outcome}, (encode(context.state), encode(content)))


def _reporting(action: _Action) -> _Action:
    """Let an error be the reply: whatever the user raises is no reason to lose the node."""

    def report(call: Call, control: Mapping[str, Any], config: dict[str, Any]) -> RecordDict:
        state = encode(call.context.state)
        try:
            return action(call, control, config)
        except Exception:  # noqa: BLE001 - see above
            restore(call.context, state)
            return RecordDict({CONTROL: ConfigRecord({"error": traceback.format_exc()})})

    return report


_ACTIONS: dict[str, _Action] = {
    "hello": _hello,
    "host": _host,
    "train": _train_once,
    "evaluate": _evaluate,
    "segment": segment,
    "evaluate-own": _reporting(evaluate_own),
    "fetch": _reporting(fetch),
    "release": _reporting(release),
}
