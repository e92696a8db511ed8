"""Who sits where, and what each was asked: messages to nodes that may go away and come back.

A node is known by its partition-id; Flower's node ids change when a SuperNode registers anew. So a
node index is a *seat*, which a Flower node takes. A *call* is a message to it whose reply is taken
whenever it comes, at most one at a time, and nobody else has to wait for it.

Flower says if a SuperNode has been silent for a minute. One that was started anew, and was back
before anybody looked, has lost its call without a word, under the same node id. Since a SuperNode
takes one message at a time, there is a way to find out: one that answers a question while its call
is unanswered is not at it any more.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from logging import INFO, WARNING
from typing import Any, Final

from flwr.app import Message, MessageType
from flwr.common.logger import log

from flwr_decentral.core import ConfigurationError, RuntimeFault

from .grid import GridMeter, pauses
from .roster import facts_in, hello

LATE: Final = 30.0
"""Seconds beyond its time after which a call is late: others go on, and it is asked about."""
_LOOK: Final = 5.0
"""Seconds from one look for nodes that have come back to the next."""
_AGAIN: Final = 20.0
"""Seconds after which a node that cannot take a seat is asked again."""
_ANSWER: Final = 15.0
"""Seconds within which a node that is there answers a question: Flower starts a process for it."""
_LOST: Final = 60.0
"""Seconds after which a question to a node without a seat is asked again; four times as many after
each that follows, since all of them are answered where the node has only been busy."""
_NOBODY: Final = 60.0
"""Seconds that all nodes may be away, as when the SuperLink could not be reached for a while."""


@dataclass
class Call:
    """A message that has not been answered.

    Attributes
    ----------
    what : str
        What is waited for, as in "its segment".
    take : callable
        Called with the reply, if that is no error.
    late : float
        Seconds on the monotonic clock: when it is late, and is asked about.
    deadline : float
        When the node is given up.
    """

    what: str
    take: Callable[[Message], None]
    late: float
    deadline: float
    again: float = LATE


@dataclass(frozen=True)
class _Question:
    """A question who a node is.

    Attributes
    ----------
    node_id : int
        What Flower calls it.
    since : float
        Seconds on the monotonic clock: when it was asked.
    doubted : Call or None
        The call that the node may have lost; None for a node without a seat.
    """

    node_id: int
    since: float
    doubted: Call | None


@dataclass
class Seat:
    """A node of the run.

    Attributes
    ----------
    index : int
        Its node index.
    node_id : int or None
        What Flower calls it now; None while it is away.
    primed : bool
        Whether its sidecar holds a model of this run.
    round : int
        The rounds that are past for it.
    report : dict
        What its sidecar has counted since it was primed.
    digest : str
        The hash of its model after its last segment.
    released : bool
        Whether its sidecar knows that the run has ended.
    renew_at : float
        Seconds on the monotonic clock: when its lease is to be renewed.
    call : Call or None
        What it has not answered yet.
    """

    index: int
    node_id: int | None
    primed: bool = False
    round: int = 0
    report: dict[str, float] = field(default_factory=dict)
    digest: str = ""
    released: bool = False
    renew_at: float = math.inf
    call: Call | None = None


class Seats:
    """The seats of a run, and the calls to those who sit there.

    Parameters
    ----------
    meter : GridMeter
        The grid.
    node_ids : sequence of int
        Flower's id of each node index.
    welcome : callable
        ``welcome(seat, peer)`` is called when a node has come back, with what it says of its
        sidecar. It raises ConfigurationError if the node cannot take part.
    sockets : str
        What the sockets of virtual nodes are called; empty in a deployment.
    """

    def __init__(
        self,
        meter: GridMeter,
        node_ids: Sequence[int],
        welcome: Callable[[Seat, Mapping[str, Any] | None], None],
        sockets: str = "",
    ) -> None:
        self.all = [Seat(index, node_id) for index, node_id in enumerate(node_ids)]
        self._meter, self._welcome, self._sockets = meter, welcome, sockets
        self._calls: dict[str, Seat] = {}
        self._questions: dict[str, _Question] = {}
        self._next_look = 0.0
        self._left_out: dict[int, float] = {}
        self._unanswered: Counter[int] = Counter()
        self._alone_since: float | None = None
        self._closing = False

    @property
    def present(self) -> list[Seat]:
        """Those that are not away.

        Raises
        ------
        RuntimeFault
            If all are.
        """
        present = [seat for seat in self.all if seat.node_id is not None]
        if not present:
            raise self._nobody()
        return present

    @property
    def free(self) -> list[Seat]:
        """Those that are not away and have no call to answer."""
        return [seat for seat in self.all if seat.node_id is not None and seat.call is None]

    @property
    def called(self) -> list[Seat]:
        """Those that have a call to answer."""
        return [seat for seat in self.all if seat.call is not None]

    def call(
        self,
        seat: Seat,
        message: Message,
        what: str,
        take: Callable[[Message], None],
        *,
        seconds: float,
        allowed: float,
    ) -> None:
        """Send a message to a free seat.

        Parameters
        ----------
        seat, message
            To whom, and what.
        what : str
            What is waited for then, as in "its segment".
        take : callable
            Called with the reply, if that is no error; errors mean that the node is away.
        seconds : float
            How long the reply takes usually.
        allowed : float
            How long it may take at most.
        """
        assert seat.call is None, "one call at a time"
        now = time.monotonic()
        try:
            message_id = self._meter.push(message)
        except RuntimeFault as refusal:
            self._lose(seat, str(refusal))
            return
        seat.call = Call(what, take, now + seconds + LATE, now + allowed)
        self._calls[message_id] = seat

    def wait(self, goes_on: Callable[[], bool], until: float = math.inf) -> bool:
        """Wait for replies, and take all that come; leave when somebody is back.

        Parameters
        ----------
        goes_on : callable
            Whether there is something to wait for.
        until : float
            When to go on without it, in seconds on the monotonic clock.

        Returns
        -------
        bool
            False if somebody is back, who may be called before more is waited for.

        Raises
        ------
        RuntimeFault
            If all nodes have been away for a minute.
        """
        waits = pauses()
        while True:
            heard, came = self._hear()
            if came:
                return False
            now = time.monotonic()
            self._check_calls(now)
            if not self._is_alone(now) and (not goes_on() or now > until):
                return True
            if now > self._next_look:
                self._look_around(now)
            if heard:
                waits = pauses()
            else:
                time.sleep(next(waits))

    def hear_newcomers(self) -> None:
        """Let those who are asked for the first time who they are say so."""
        self._look_around(time.monotonic())
        asked = {
            message_id: question.since + _ANSWER
            for message_id, question in self._questions.items()
            if question.doubted is None and self._unanswered[question.node_id] == 1
        }
        until = max(asked.values(), default=0.0)
        while not self.wait(lambda: not self._questions.keys().isdisjoint(asked), until):
            continue

    def close(self) -> None:
        """Wait for no call any more, and for nobody to come back: the run ends."""
        self._closing = True
        self._calls.clear()
        self._questions.clear()
        for seat in self.all:
            seat.call = None

    # ------------------------------------------------------------------------------ inside

    def _hear(self) -> tuple[int, bool]:
        """Take what has come; tell how much it was, and whether somebody is back."""
        came = False
        replies = self._meter.pull([*self._calls, *self._questions])
        # Its call may have been answered just before a question was.
        replies.sort(key=lambda reply: reply.metadata.reply_to_message_id in self._questions)
        for reply in replies:
            message_id = reply.metadata.reply_to_message_id
            if (question := self._questions.get(message_id)) is not None:
                came |= self._take_answer(question, reply)
            elif (seat := self._calls.pop(message_id, None)) is not None:
                call, seat.call = seat.call, None
                assert call is not None
                if reply.has_error():
                    self._lose(seat, f"{call.what} ended with {reply.error.reason}")
                else:
                    call.take(reply)
        return len(replies), came

    def _check_calls(self, now: float) -> None:
        for seat in [*self._calls.values()]:
            call = seat.call
            assert call is not None
            if now > call.deadline:
                self._lose(seat, f"{call.what} did not end in time")
            elif now > call.late and not self._sockets:  # a virtual node has no SuperNode
                # Each question costs a process there, as soon as the node is free.
                call.late, call.again = now + call.again, 4 * call.again
                assert seat.node_id is not None
                self._ask(seat.node_id, call)

    def _is_alone(self, now: float) -> bool:
        """Tell whether all nodes are away."""
        if self._closing or any(seat.node_id is not None for seat in self.all):
            self._alone_since = None
            return False
        if self._alone_since is None:
            self._alone_since = now
        if now > self._alone_since + _NOBODY:
            raise self._nobody()
        return True

    def _nobody(self) -> RuntimeFault:
        return RuntimeFault(
            f"none of the {len(self.all)} nodes answers any more: look at their SuperNodes' logs"
        )

    def _lose(self, seat: Seat, why: str) -> None:
        log(WARNING, "Node %d (Flower node %s) is away: %s", seat.index, seat.node_id, why)
        self._calls = {key: other for key, other in self._calls.items() if other is not seat}
        seat.node_id = seat.call = None
        self._next_look = 0.0

    def _sitting(self, node_id: int) -> Seat | None:
        return next((seat for seat in self.all if seat.node_id == node_id), None)

    def _look_around(self, now: float) -> None:
        """Ask the nodes that have no seat who they are, should somebody be away."""
        self._next_look = now + _LOOK
        if self._closing or all(seat.node_id is not None for seat in self.all):
            return
        self._left_out = {node_id: end for node_id, end in self._left_out.items() if end > now}
        asked = {
            each.node_id
            for each in self._questions.values()
            if each.since > now - _LOST * 4 ** (self._unanswered[each.node_id] - 1)
        }
        for node_id in self._meter.node_ids():
            if node_id not in asked | self._left_out.keys() and self._sitting(node_id) is None:
                self._ask(node_id)

    def _ask(self, node_id: int, doubted: Call | None = None) -> None:
        try:
            message_id = self._meter.push(hello(node_id, MessageType.TRAIN, sockets=self._sockets))
        except RuntimeFault as refusal:
            self._leave_out(node_id, f"Flower node {node_id} is left out: {refusal}")
        else:
            self._questions[message_id] = _Question(node_id, time.monotonic(), doubted)
            self._unanswered[node_id] += doubted is None

    def _take_answer(self, question: _Question, reply: Message) -> bool:
        """Learn who a node is; tell whether it has taken a seat again."""
        node_id = question.node_id
        # One answer is enough.
        del self._unanswered[node_id]
        self._questions = {
            message_id: other
            for message_id, other in self._questions.items()
            if other.node_id != node_id
        }
        sitting = self._sitting(node_id)
        call = None if sitting is None else sitting.call
        if sitting is not None and (call is None or call is not question.doubted):
            return False
        try:
            facts = facts_in(reply)
        except ConfigurationError as error:
            if sitting is not None:  # its call says what has become of it
                return False
            return self._leave_out(node_id, f"Flower node {node_id} is left out: {error}")
        peer = facts.get("peer")
        if sitting is not None and call is not None:
            if (peer or {}).get("training", False):
                return False
            self._lose(sitting, f"its SuperNode has started anew, and {call.what} is lost")
        seat = self.all[facts["node"]] if facts["node"] in range(len(self.all)) else None
        if seat is None or seat.node_id is not None:
            claim = f"Flower node {node_id} claims a seat that is taken; left out."
            return self._leave_out(node_id, claim)
        try:
            self._welcome(seat, peer)
        except ConfigurationError as error:
            return self._leave_out(node_id, f"Node {seat.index} stays away for now: {error}")
        seat.node_id = node_id  # its sidecar says whether it still holds its model
        log(INFO, "Node %d is back, as Flower node %d.", seat.index, node_id)
        return True

    def _leave_out(self, node_id: int, why: str) -> bool:
        log(WARNING, "%s", why)
        self._left_out[node_id] = time.monotonic() + _AGAIN
        return False
