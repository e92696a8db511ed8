"""Who takes part: from Flower's random node ids to node indexes 0 to n-1.

A ClientApp has no query handler to ask, so the roll is called with a ``train`` message that the mod
answers itself. The first answer says how many nodes there are; nodes may register late, and are
waited for. One ``evaluate`` message tells whether clients evaluate, and with the mod.
"""

from __future__ import annotations

import platform
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from logging import WARNING
from typing import Any, Final

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode
from flwr.common.logger import log

from flwr_decentral.core import ConfigurationError, RuntimeFault

from .control import CONTROL, PROTOCOL, load_facts
from .grid import GridMeter, pauses
from .mod import host_identity

_ROLL: Final = 256
"""How many nodes are asked at once: Flower scans all stored messages for each node."""

NOBODY: Final = 30.0
"""Seconds for which only dead processes may answer before the run fails."""

_DEAD: Final = (ErrorCode.UNKNOWN, ErrorCode.CLIENT_APP_CRASHED)
"""Errors that are no exception of the ClientApp."""

_MOD_MISSING: Final = (
    "write @app.train(mods=[decentral_mod]) and @app.evaluate(mods=[decentral_mod]), with "
    "from flwr_decentral.flower import decentral_mod"
)


@dataclass(frozen=True, kw_only=True)
class Roster:
    """The nodes of a run.

    Attributes
    ----------
    node_ids : tuple of int, shape (n,)
        Flower's id of each node index.
    evaluates : bool
        Whether the clients are to evaluate, and have an evaluate function.
    versions : mapping of str to str
        Versions of what the clients run on.
    threads : int
        Threads that one client trains with.
    peers : tuple of (mapping or None), shape (n,)
        What each node says of its sidecar; None if it has none.
    sockets : str
        What the Unix sockets of virtual nodes are called that gossip in real time; else empty.
    """

    node_ids: tuple[int, ...]
    evaluates: bool
    versions: Mapping[str, str]
    threads: int
    peers: tuple[Mapping[str, Any] | None, ...] = ()
    sockets: str = ""

    @property
    def all_versions(self) -> dict[str, str]:
        """Versions of what clients and ServerApp run on."""
        here = {"serverapp-python": platform.python_version()}
        return {**self.versions, **here, "flwr-decentral": version("flwr-decentral")}

    @property
    def in_real_time(self) -> bool:
        """Whether the nodes gossip by themselves: if any has a sidecar."""
        return any(peer is not None for peer in self.peers)


def call_roll(
    grid: GridMeter,
    *,
    at_least: int,
    patience: float,
    evaluation: bool = True,
    real_time: bool = False,
) -> Roster:
    """Find every node and its index.

    Parameters
    ----------
    grid : GridMeter
        Flower's grid.
    at_least : int
        Refuse to start with fewer nodes.
    patience : float
        Seconds to wait for nodes to register and to answer.
    evaluation : bool (default: True)
        Whether nodes are to evaluate at all.
    real_time : bool (default: False)
        Whether virtual nodes are to gossip by themselves.

    Raises
    ------
    ConfigurationError
        If the mod is missing, indexes are missing or taken twice, there are too few nodes, or more
        virtual nodes than can run at once.
    RuntimeFault
        If nodes did not register or answer in time, or run on another host.
    """
    deadline = time.monotonic() + patience
    first = _wait_for_nodes(grid, 1, deadline)[:_ROLL]
    facts = _ask(grid, first, deadline, room=real_time)
    expected = facts[first[0]]["nodes"]
    if expected < 1:
        raise ConfigurationError(
            f"Flower node {first[0]} has no partition-id and num-partitions in its node config; "
            "the position of a node in the topology is its partition-id"
        )
    if expected < at_least:
        raise ConfigurationError(
            f"there are {expected} nodes, but min_available_nodes or min_train_nodes asks for "
            f"{at_least}"
        )
    ids = _wait_for_nodes(grid, expected, deadline)
    rest = [node_id for node_id in ids if node_id not in facts]
    for start in range(0, len(rest), _ROLL):
        facts.update(_ask(grid, rest[start : start + _ROLL], deadline))
    node_ids = _order(facts, expected)
    peers = [facts[node_id].get("peer") for node_id in node_ids]
    sockets = ""
    if not any(peers):
        _check_hosts(facts)
        if real_time:
            _check_room(expected, facts[first[0]]["at-once"])
            sockets = secrets.token_hex(6)
            facts = _ask(grid, node_ids, deadline, sockets=sockets)
            peers = [facts[node_id]["peer"] for node_id in node_ids]
    return Roster(
        node_ids=node_ids,
        evaluates=evaluation and _evaluates(grid, node_ids[0], deadline),
        versions=facts[node_ids[0]]["versions"],
        threads=facts[node_ids[0]]["threads"],
        peers=tuple(peers),
        sockets=sockets,
    )


def peer_record(index: int, peer: Mapping[str, Any] | None) -> dict[str, Any]:
    """Write what a node said of its sidecar as a record of the peers' roster."""
    if peer is None:
        raise ConfigurationError(
            f"node {index} has no peer-address, peer-listen or peer-socket in its node config, and "
            "others have: give every SuperNode of the run a sidecar"
        )
    if error := peer.get("error"):
        raise ConfigurationError(f"the sidecar of node {index} is not ready: {error}")
    return {
        "index": index,
        "address": str(peer.get("address", "")),
        "fingerprint": str(peer.get("fingerprint", "")),
    }


def _wait_for_nodes(grid: GridMeter, count: int, deadline: float) -> list[int]:
    waits = pauses()
    while len(ids := grid.node_ids()) < count:
        if time.monotonic() > deadline:
            raise RuntimeFault(
                f"only {len(ids)} of {count} nodes have registered with Flower in time; start the "
                "missing ones, or allow more time with setup_timeout"
            )
        time.sleep(next(waits))
    return ids


def hello(
    node_id: int,
    message_type: str,
    *,
    ballast: bytes = b"",
    sockets: str = "",
    room: bool = False,
) -> Message:
    """Make the message that asks a node who it is; it changes nothing there.

    With ``sockets``, a virtual node starts a sidecar. With ``room``, it says how many clients the
    engine runs at once.
    """
    control = ConfigRecord({"do": "hello", "protocol": PROTOCOL, "config-key": "config"})
    control["ballast"], control["sockets"], control["room"] = ballast, sockets, room
    return Message(RecordDict({CONTROL: control}), node_id, message_type)


def facts_in(reply: Message) -> dict[str, Any]:
    """Read what a node says of itself out of its reply to :func:`hello`.

    Raises
    ------
    ConfigurationError
        If it did not answer with the mod.
    """
    node_id = reply.metadata.src_node_id
    if reply.has_error():
        raise ConfigurationError(
            f"Flower node {node_id} failed when it was asked who it is: {reply.error.reason}. "
            f"If its train function was called, the mod is missing: {_MOD_MISSING}"
        )
    if CONTROL not in reply.content:
        raise ConfigurationError(f"Flower node {node_id} answered without our mod: {_MOD_MISSING}")
    return load_facts(str(reply.content[CONTROL]["facts"]))


def _ask(
    grid: GridMeter,
    node_ids: Sequence[int],
    deadline: float,
    *,
    sockets: str = "",
    room: bool = False,
) -> dict[int, dict[str, Any]]:
    """Ask nodes who they are."""
    facts: dict[int, dict[str, Any]] = {}
    ask = partial(hello, message_type=MessageType.TRAIN, sockets=sockets, room=room)
    for reply in _answers(grid, node_ids, ask, deadline):
        facts[reply.metadata.src_node_id] = facts_in(reply)
    return facts


def _answers(
    grid: GridMeter, node_ids: Sequence[int], ask: Callable[[int], Message], deadline: float
) -> Iterator[Message]:
    """Ask nodes, and yield what they answer; ask again those whose client process has died.

    Asking has begun nothing there, so nothing is lost by a death: another process answers. A dead
    one that stays in Flower's pool takes some of the questions each time.
    """
    left, waits = list(node_ids), pauses()
    heard = time.monotonic()
    while left:
        dead: dict[int, str] = {}
        for reply in collect(grid, map(ask, left), deadline):
            if reply.has_error() and reply.error.code in _DEAD:
                dead[reply.metadata.src_node_id] = str(reply.error.reason)
                continue
            heard = time.monotonic()
            yield reply
        left = list(dead)
        if dead and time.monotonic() > min(heard + NOBODY, deadline):
            raise RuntimeFault(
                f"no client process is left that says who Flower node {left[0]} is: "
                f"{dead[left[0]]}; they may run out of memory: use fewer clients at once"
            )
        if dead:
            log(WARNING, "Asking %d nodes again, whose client process died.", len(dead))
            time.sleep(next(waits))


def _evaluates(grid: GridMeter, node_id: int, deadline: float) -> bool:
    """Find out whether clients evaluate; refuse an evaluate function without the mod."""
    ask = partial(hello, message_type=MessageType.EVALUATE)
    (reply,) = _answers(grid, [node_id], ask, deadline)
    if reply.has_error():
        if "No evaluate function registered" in str(reply.error.reason):
            log(WARNING, "The ClientApp has no evaluate function: nodes are not evaluated.")
            return False
        raise ConfigurationError(
            f"Flower node {node_id} failed when it was asked whether it evaluates: "
            f"{reply.error.reason}. If its evaluate function was called, the mod is missing: "
            f"{_MOD_MISSING}"
        )
    if CONTROL not in reply.content:
        raise ConfigurationError(f"the evaluate function lacks our mod: {_MOD_MISSING}")
    return True


def _check_hosts(facts: Mapping[int, Mapping[str, Any]]) -> None:
    here = host_identity()
    for node_id, fact in facts.items():
        if fact["host"] != here:
            raise RuntimeFault(
                f"node {fact['node']} (Flower node {node_id}) runs on host {fact['host']!r}, the "
                f"ServerApp on {here!r}: simulation in virtual time needs shared memory, so all "
                "its processes must be on one host. For real machines, give each SuperNode a "
                "peer-address in its node config"
            )


def _check_room(nodes: int, at_once: int) -> None:
    """Refuse more virtual nodes in real time than the engine runs at once, if that is known."""
    if 0 < at_once < nodes:
        raise ConfigurationError(
            f"{nodes} virtual nodes cannot gossip in real time: each takes a client of Flower's "
            f"Simulation Engine for as long as the run lasts, and the engine runs {at_once} at "
            "once. Take fewer nodes, give the engine more actors (init-args-num-cpus in the "
            "federation's configuration; 32 is the most), or leave real-time out: virtual time "
            "has no such limit"
        )


def _order(facts: Mapping[int, Mapping[str, Any]], expected: int) -> tuple[int, ...]:
    by_index: dict[int, int] = {}
    for node_id, fact in facts.items():
        index = fact["node"]
        if index in by_index:
            raise ConfigurationError(
                f"partition-id {index} is claimed by Flower nodes {by_index[index]} and {node_id}"
            )
        by_index[index] = node_id
    missing = sorted(set(range(expected)) - by_index.keys())
    beyond = sorted(by_index.keys() - set(range(expected)))
    if missing or beyond:
        raise ConfigurationError(
            f"num-partitions is {expected}, so the nodes' partition-ids must be 0 to "
            f"{expected - 1}; missing: {missing or 'none'}, beyond: {beyond or 'none'}"
        )
    return tuple(by_index[index] for index in range(expected))


def collect(grid: GridMeter, messages: Iterable[Message], deadline: float) -> Iterator[Message]:
    """Send messages and yield their replies as they come.

    Raises
    ------
    RuntimeFault
        If the deadline passes. It names the nodes that have not answered.
    """
    waiting: dict[str, int] = {}
    for message in messages:
        waiting[grid.push(message)] = message.metadata.dst_node_id
    for reply in grid.replies(waiting, deadline):
        waiting.pop(reply.metadata.reply_to_message_id)
        yield reply
    if waiting:
        names = ", ".join(map(str, list(waiting.values())[:8]))
        raise RuntimeFault(
            f"{len(waiting)} Flower nodes did not answer in time, among them {names}; their client "
            "processes may still be starting: allow more time with setup_timeout"
        )
