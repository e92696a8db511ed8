"""Getting the training done by a few long Flower messages, each of which serves many tasks.

Flower spends several milliseconds on a message, scans every stored message for every node ten times
a second, and runs as many messages at once as it has actors. So the packed dispatcher sends a
handful of ``train`` messages that stay: in each, the mod connects to the engine's local socket and
trains one node after another. Such a message is a *host*. Which host trains which task makes no
difference to the result.

The hosts hold Flower's actors, so they leave before an evaluation and come back after it. A host
that dies takes its tasks with it; their inputs are untouched, and they run again on another host.
"""

from __future__ import annotations

import heapq
import os
import selectors
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from logging import WARNING
from typing import Any, Final

from flwr.app import MessageType
from flwr.common.logger import log

from flwr_decentral.core import RuntimeFault, Vector, to_seconds
from flwr_decentral.localsocket import Frame, FrameBuffer, Listener, encode_frame
from flwr_decentral.sim.trainer import Outcome, Task

from .dispatch import Dispatcher
from .records import decode
from .roster import NOBODY

_MOST_HOSTS: Final = 32
"""Flower never runs more messages at once."""
_WINDOW: Final = 2
"""Tasks that a host has at once: the one that it trains and one to go on with."""
_LOOK_AFTER: Final = 1.0
_NO_HOST: Final = 120.0
"""Seconds that tasks may wait with no host to train them, while none is known to have died."""
_TTL: Final = 30 * 24 * 3600.0


@dataclass
class _Host:
    """A client process that serves tasks, or has a question."""

    connection: socket.socket
    buffer: FrameBuffer = field(default_factory=FrameBuffer)
    outgoing: bytearray = field(default_factory=bytearray)
    tasks: dict[int, Task] = field(default_factory=dict)
    known: bool = False
    serves: bool = False
    leaves: bool = False
    stuffed: bool = False


class PackedDispatcher(Dispatcher):
    """Let a few long ``train`` messages serve all tasks."""

    name = "packed"

    def __init__(self, listener: Listener, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener.socket, selectors.EVENT_READ)
        self._hosts: dict[socket.socket, _Host] = {}
        self._messages: dict[str, int] = {}
        self._most = min(len(self.roster.node_ids), _MOST_HOSTS)
        self._seen = 0
        self._open = False
        self._ready: list[tuple[int, int, Task]] = []
        self._running: dict[int, Task] = {}
        self._ended: dict[int, Outcome] = {}
        self._state: dict[int, bytes] = {}
        self._looked = self._last_host = self._last_end = time.monotonic()

    # ------------------------------------------------------------------------------ tasks

    def dispatch(self, task: Task, model: Vector) -> None:
        """Start a task; ``model`` is copied."""
        self.arena.input(task.node)[:] = model
        self._running[task.node] = task
        heapq.heappush(self._ready, (task.due, task.node, task))
        if not self._open:
            self._invite()
        self._fill()

    def wait(self, node: int) -> Outcome:
        """Wait until the node's task has ended, and take its outcome."""
        begin = time.monotonic()
        while node not in self._ended:
            if not self._open:
                self._invite()
            self._attend(_LOOK_AFTER)
            self._look_after_hosts()
            self._check_progress(begin)
        return self._commit(node, self._ended.pop(node))

    def settle(self) -> None:
        """Wait until every task has ended, and let the hosts return."""
        begin = time.monotonic()
        while self._running:
            self._attend(_LOOK_AFTER)
            self._look_after_hosts()
            self._check_progress(begin)
        self._dismiss()

    def _check_progress(self, begin: float) -> None:
        if self._running and time.monotonic() > max(begin, self._last_end) + self.patience:
            raise self._overdue(self._running.values())

    def close(self) -> None:
        """Close the sockets; hosts that still serve see that and return."""
        for connection in list(self._hosts):
            connection.close()
        self._hosts.clear()
        self._selector.close()
        self._listener.close()

    def _holds_state(self, node: int) -> bool:
        return node in self._state

    # ------------------------------------------------------------------------------ hosts

    def _invite(self) -> None:
        """Send host messages: one more than there were hosts, or one for each core at first.

        Flower compares every stored message with every node ten times a second, so messages that
        nobody serves are not free.
        """
        if not self._open:  # else they are asked again, and time goes on
            self._open, self._last_host = True, time.monotonic()
        if self.dead:
            self._sift()
        self._push_hosts(self._seen + 1 if self._seen else os.cpu_count() or 1)

    def _push_hosts(self, count: int) -> None:
        """Send some more host messages, each to another node."""
        taken = {*self._messages.values()}
        free = (node for node in range(self._most) if node not in taken)
        for node in islice(free, count):
            message = self._message(node, MessageType.TRAIN, self.train_config, "host", {})
            message.metadata.ttl = _TTL
            self._messages[self.meter.push(message)] = node

    def _dismiss(self) -> None:
        """Tell every host to leave, those included whose turn has yet to come."""
        self._open = False
        for host in self._hosts.values():
            self._show_out(host)
        deadline = time.monotonic() + self.patience
        while self._messages:
            self._attend(0.005)
            self._pull_hosts()
            if time.monotonic() > deadline:
                raise RuntimeFault(
                    f"{len(self._messages)} client processes did not return when they were told to"
                )

    def _pull_hosts(self) -> None:
        for reply in self.meter.pull(self._messages):
            del self._messages[reply.metadata.reply_to_message_id]
            if reply.has_error() and not self.dead.learn(reply.error):
                log(WARNING, "A client process ended with an error: %s", reply.error.reason)

    def _look_after_hosts(self) -> None:
        """Notice hosts that have gone, and say so if none is left."""
        now = time.monotonic()
        if now - self._looked < _LOOK_AFTER:
            return
        self._looked = now
        self._pull_hosts()
        if any(host.serves for host in self._hosts.values()):
            self._last_host = now
            return
        most = NOBODY if self.dead else _NO_HOST
        if self._running and now - self._last_host > most:
            raise RuntimeFault(
                f"no client process has been there to train for {most:.0f} s, with "
                f"{len(self._running)} tasks waiting: they have all died, or none could start; see "
                "the errors above"
            )
        if self._running and self._open and not self._messages:
            self._invite()

    # ------------------------------------------------------------------------------ sockets

    def _attend(self, seconds: float) -> None:
        """Handle what arrives within some seconds, and keep the hosts busy."""
        for key, events in self._selector.select(seconds):
            if key.fileobj is self._listener.socket:
                self._accept()
                continue
            host = self._hosts[key.fileobj]  # type: ignore[index]
            if events & selectors.EVENT_WRITE:
                self._write(host)
            if events & selectors.EVENT_READ:
                self._read(host)
        self._fill()

    def _accept(self) -> None:
        connection = self._listener.accept()
        if connection is None:
            return
        connection.setblocking(False)
        self._hosts[connection] = _Host(connection)
        self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, host: _Host) -> None:
        try:
            data = host.connection.recv(1 << 20)
        except OSError:
            data = b""
        try:
            frames = host.buffer.feed(data)
        except RuntimeFault as error:
            log(WARNING, "Closed a connection: %s", error)
            data, frames = b"", []
        for frame in frames:
            if not host.known and frame.header.get("token") != self.job.token:
                log(WARNING, "Closed a connection: it has not shown the run's token.")
                data = b""
                break
            self._handle(host, frame)
        if not data:
            self._forget(host)

    def _handle(self, host: _Host, frame: Frame) -> None:
        header = frame.header
        if not host.known:
            host.known = True
        elif header.get("do") == "serve":
            if self._open and not host.leaves:
                self._employ(host)
            else:
                self._show_out(host)
        elif header.get("do") == "get-state":
            self._send(host, {"do": "state"}, [self._state.get(header["node"], b"")])
        elif header.get("do") == "put-state":
            self._state[header["node"]] = frame.blobs[0]
            self._send(host, {"do": "done"})
        else:
            self._finish(host, frame)

    def _employ(self, host: _Host) -> None:
        host.serves = True
        serving = sum(1 for _ in self._serving())
        self._seen = max(self._seen, serving)
        if serving >= len(self._messages):  # there may be more where these came from
            self._push_hosts(serving)

    def _show_out(self, host: _Host) -> None:
        """Tell a host to leave. Its connection ends later, and gets no task until then."""
        host.serves, host.leaves = False, True
        self._send(host, {"do": "leave"})

    def _finish(self, host: _Host, frame: Frame) -> None:
        node, (state, records) = frame.header["node"], frame.blobs
        task = host.tasks.pop(node)
        self._last_end = time.monotonic()
        del self._running[node]
        if state:
            self._state[node] = state
        else:
            self._state.pop(node, None)
        self._ended[node] = self._outcome(task, frame.header, decode(records))

    def _forget(self, host: _Host) -> None:
        """Drop a connection. What its process was to train runs again elsewhere."""
        self._selector.unregister(host.connection)
        host.connection.close()
        del self._hosts[host.connection]
        for number, task in enumerate(host.tasks.values()):
            if number == 0:  # the others it had not begun
                self.lost.again(task, "its client process has ended")
            heapq.heappush(self._ready, (task.due, task.node, task))

    def _fill(self) -> None:
        """Give ready tasks to the hosts with the fewest, the earliest due first."""
        while self._ready:
            host = min(self._serving(), key=lambda host: len(host.tasks), default=None)
            if host is None or len(host.tasks) >= _WINDOW:
                return
            _, node, task = heapq.heappop(self._ready)
            host.tasks[node] = task
            header = {
                "do": "train",
                "node": node,
                "node-id": self.roster.node_ids[node],
                "round": task.round,
                "seed": task.seed,
                "virtual-time": to_seconds(task.at),
            }
            self._send(host, header, [self._state.get(node, b"")])

    def _send(self, host: _Host, header: dict[str, Any], blobs: Sequence[bytes] = ()) -> None:
        """Send what the host takes now, and the rest when it reads on.

        Waiting for it here would be a deadlock: it may itself be sending a large state.
        """
        host.outgoing += encode_frame(header, blobs)
        self._write(host)

    def _write(self, host: _Host) -> None:
        try:
            while host.outgoing:
                del host.outgoing[: host.connection.send(host.outgoing)]
        except BlockingIOError:
            pass
        except OSError:
            host.outgoing.clear()  # it has gone, which reading will tell
        if host.stuffed != bool(host.outgoing):
            host.stuffed = not host.stuffed
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if host.stuffed else 0)
            self._selector.modify(host.connection, events)

    def _serving(self) -> Iterator[_Host]:
        return (host for host in self._hosts.values() if host.serves)
