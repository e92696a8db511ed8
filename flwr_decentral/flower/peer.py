"""The ClientApp side of real time: training for the node's sidecar.

A SuperNode's node config says where the sidecar is, or how to start one:

================  ==============================================================================
``peer-socket``   the local socket of a sidecar that an operator has started; nothing else is read
``peer-address``  where peers reach this node, ``host:port``; empty if they cannot, and it dials
``peer-listen``   where the sidecar listens, if that is another address
``peer-ca``,      PEM files: the CA of all nodes, this node's certificate, and its key
``peer-cert``,
``peer-key``
``peer-insecure`` true to speak plaintext without certificates
================  ==============================================================================

Virtual nodes, of Flower's Simulation Engine, have none of this. Where they are to gossip in real
time, each gets a sidecar that meets the others over Unix sockets of the run.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from logging import INFO, WARNING
from typing import Any, Final, NamedTuple

import numpy as np
from flwr.app import ConfigRecord, RecordDict
from flwr.common.logger import log

from flwr_decentral.channel.attachment import Assignment, Attachment
from flwr_decentral.channel.client import NoSidecar, ask
from flwr_decentral.channel.orders import Order
from flwr_decentral.core import AlgorithmError, DecentralError
from flwr_decentral.core.layout import Layout

from .calls import Call, Slot, Task, run_seeded, train
from .control import CONTROL
from .records import encode, to_numpy, to_record
from .start import find, local_address, socket_of

_KEYS: Final = ("socket", "address", "listen", "ca", "cert", "key", "insecure")
_START_S: Final = 30.0
"""Seconds that a sidecar may take to start."""


class _Names(NamedTuple):
    arrays_key: str
    config_key: str


def has_peer(node_config: Mapping[str, Any]) -> bool:
    """Tell whether a node config speaks of a sidecar."""
    return any(f"peer-{key}" in node_config for key in _KEYS)


@contextlib.contextmanager
def local_peer(node_config: dict[str, Any], run: str) -> Iterator[None]:
    """Let a virtual node have a sidecar for one message: a Unix socket stands in its node config.

    Flower keeps the node config for the messages to come, of other runs too, so it is taken out
    again.

    Parameters
    ----------
    node_config : dict
        The node's.
    run : str
        What tells the sockets of this run from those of others; empty for no sidecar.
    """
    if not run:
        yield
        return
    name = f"flwr-decentral-peer-{os.getuid()}-{run}-{node_config['partition-id']}"
    node_config["peer-address"] = f"unix:{local_address(name)}"
    try:
        yield
    finally:
        del node_config["peer-address"]


def peer_facts(node_config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Ask this node's sidecar who it is, and start it if need be.

    Returns
    -------
    dict or None
        What the ServerApp has to know; ``error`` if there is no sidecar; None if there is to be
        none.
    """
    if not has_peer(node_config):
        return None
    try:
        place = find(node_config)
        return ask(place.address, "who", patience=_START_S, look=place.look)
    except DecentralError as error:
        return {"error": str(error.args[0])}


# --- a segment ------------------------------------------------------------------------------------


def segment(call: Call, control: Mapping[str, Any], config: dict[str, Any]) -> RecordDict:
    """Train for the sidecar until the segment is over; reply with the report."""
    order = Order.from_json(str(control["order"]))
    names = _names(control)
    place = find(call.context.node_config)
    blobs = _prime(call, control, names, order)
    values = {"order": str(control["order"]), "allowed": float(control["patience"])}
    try:
        answer = ask(place.address, "order", blobs, patience=_START_S, look=place.look, **values)
    except NoSidecar:
        raise  # it may be back for the next segment
    except DecentralError as refusal:
        return RecordDict({CONTROL: ConfigRecord({"error": str(refusal)})})
    if answer["do"] == "unprimed":
        return RecordDict({CONTROL: ConfigRecord({"unprimed": True})})
    rounds: list[int] = []
    contents: list[bytes] = []
    with Attachment(answer["handoff"], {}) as attachment:
        layout = Layout.unpack(attachment.blob)
        while (assignment := attachment.next()) is not None:
            content = _train(call, names, layout, attachment, assignment, config, order.index)
            if content is not None:
                rounds.append(assignment.round)
                contents.append(content)
        farewell = attachment.farewell or {}
    if "report" not in farewell:
        error = farewell.get("error") or farewell.get("reason") or "the sidecar did not say why"
        return RecordDict({CONTROL: ConfigRecord({"error": str(error)})})
    report: dict[str, Any] = {"report": json.dumps(farewell["report"])}
    return RecordDict({CONTROL: ConfigRecord({**report, "rounds": rounds, "contents": contents})})


def _prime(
    call: Call, control: Mapping[str, Any], names: _Names, order: Order
) -> tuple[bytes, ...]:
    """Take the model to begin with out of the message: layout, vector and private bytes."""
    if names.arrays_key not in call.message.content.array_records:
        return ()
    model = to_numpy(call.message.content.array_records[names.arrays_key])
    layout = Layout.of(model, private=control["private-keys"], frozen=control["frozen-keys"])
    if layout.hash != order.layout:
        raise AlgorithmError(
            f"node {order.index} lays the model out as {layout.hash}, the ServerApp as "
            f"{order.layout}: install one version of flwr-decentral everywhere"
        )
    vector, private = layout.flatten(model)
    return layout.pack(), vector.tobytes(), private.tobytes()


def _train(
    call: Call,
    names: _Names,
    layout: Layout,
    attachment: Attachment,
    assignment: Assignment,
    config: Mapping[str, Any],
    index: int,
) -> bytes | None:
    """Train one round, and hand it over; return the rest of the reply if it counts."""
    slot = Slot(
        layout,
        assignment.model,
        assignment.private,
        assignment.output,
        assignment.private_output,
    )
    task = Task(node=index, round=assignment.round, seed=assignment.seed, virtual_time=0.0)
    before = encode(call.context.state)
    outcome, content = train(call, names, slot, task, config, before)
    if "error" in outcome:
        log(INFO, "Training failed in round %d:\n%s", assignment.round, outcome["error"])
        attachment.fail(assignment, outcome["error"])
        return None
    return encode(content) if attachment.commit(assignment) else None


# --- between segments -----------------------------------------------------------------------------


def evaluate_own(call: Call, control: Mapping[str, Any], config: dict[str, Any]) -> RecordDict:
    """Evaluate the model that the sidecar holds; release it after that if this was the last."""
    content = _evaluate(call, control, config)
    if control["release"]:
        try:
            content.update(release(call, control, {}))
        except DecentralError as error:  # which is no reason to lose the evaluation
            log(WARNING, "The sidecar does not know that its run has ended: %s", error)
    return content


def _evaluate(call: Call, control: Mapping[str, Any], config: dict[str, Any]) -> RecordDict:
    with _fetching(call, control) as attachment:
        layout = Layout.unpack(attachment.blob)
        model, private = attachment.fetch()
        nothing = np.empty(0, np.float32), np.empty(0, np.uint8)
        slot = Slot(layout, model, private, *nothing)
        task = Task(
            node=int(control["node"]),
            round=int(control["round"]),
            seed=int(control["seed"]),
            virtual_time=0.0,
        )
        before = encode(call.context.state)
        content = run_seeded(call, _names(control), slot, task, config, before)
    for name in list(content.array_records):
        del content[name]
    return content


def fetch(call: Call, control: Mapping[str, Any], config: dict[str, Any]) -> RecordDict:
    """Send the model that the sidecar holds."""
    del config
    with _fetching(call, control) as attachment:
        layout = Layout.unpack(attachment.blob)
        model, private = attachment.fetch()
        return RecordDict({"model": to_record(layout.unflatten(model, private))})


def release(call: Call, control: Mapping[str, Any], config: dict[str, Any]) -> RecordDict:
    """Tell the sidecar that the run has ended; one that has ended itself need not be told."""
    del config
    with contextlib.suppress(NoSidecar):
        socket = socket_of(call.context.node_config)
        ask(socket, "release", patience=0.0, run=str(control["run"]))
    return RecordDict({CONTROL: ConfigRecord({"released": True})})


def _fetching(call: Call, control: Mapping[str, Any]) -> Attachment:
    """Attach to the sidecar without being its trainer."""
    place = find(call.context.node_config)
    answer = ask(
        place.address, "model", patience=_START_S, look=place.look, run=str(control["run"])
    )
    return Attachment(answer["handoff"], {})


def _names(control: Mapping[str, Any]) -> _Names:
    return _Names(str(control["arrays-key"]), str(control["config-key"]))
