"""Pairing: two neighbors at a time exchange vectors, without a master and without a deadlock.

Each node runs one :class:`Pairing`. In its *turn* a node invites its neighbors, one after the
other in random order, until one accepts. An exchange then takes three more messages:

=========  =====================  =================================================================
message    from, to               says
=========  =====================  =================================================================
invite     inviter, host          shall we exchange? This is my exchange number e
busy       host, inviter          not now: I have an exchange of my own
offer      host, inviter          yes, and this is my vector
answer     inviter, host          this is mine: the exchange has taken place
void       inviter, host          too late: it has not
done       host, inviter          I have your answer, you may forget it
=========  =====================  =================================================================

The inviter averages when the offer arrives, at once and with its vector of that moment; the host
when the answer arrives, by the *difference* of the two vectors. So both move by exact opposites,
whatever training has done to the host's model in between, and no update is lost.

=============  ====================================================================================
state          what a node does in it
=============  ====================================================================================
idle           accepts any invitation
inviting       waits for an offer. It is busy for all others, except that of two nodes that invite
               each other the higher one gives its invitation up and becomes the host
offering       waits for an answer. It is busy for all others
=============  ====================================================================================

*No deadlock.* Every wait ends by itself. An inviter whose patience ends invites the next neighbor;
an offer that comes late is still welcome. A host offers again, with twice the patience each time,
and after the last attempt puts the exchange aside, in doubt, and is idle.

*No half exchange.* The inviter alone decides, once, and keeps its answer until it is told that it
has arrived. The host asks until it knows: when its patience ends, when the peer is back after its
link was down, when it hears an invitation of that peer, and when it would invite it. Whatever is
lost, repeated or overtaken, an exchange takes place at both ends exactly once or not at all, as
soon as the two have been able to talk. A host that never can counts it as unsettled.

*At most once.* Numbers decide what is new. Exchanges are numbered by their inviter, offers by their
attempt; what is not above the last one heard of is a repetition and is ignored. A link delivers
nothing of before a ``PeerUp``, after which a peer may have started over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any, Final, NamedTuple

import numpy as np

from .commands import Command, Report, Send, SetTimer
from .events import Received
from .message import Message, Vector
from .state import Part
from .wire import Wire

PATIENCE: Final = "pairing"
"""The name of the timer; its owner hands what it leads to on to :meth:`Pairing.lose_patience`."""

IDLE: Final = "idle"
INVITING: Final = "inviting"
OFFERING: Final = "offering"

_ATTEMPTS: Final = 4
"""How often a host offers before it puts an exchange aside."""


class Exchange(NamedTuple):
    """What takes place now: this node moves by a part of ``theirs - mine``.

    Attributes
    ----------
    peer : int
        With whom.
    step : int
        The peer's step when it sent its vector.
    mine, theirs : ndarray of float32, shape (D,)
        What the two have sent each other.
    """

    peer: int
    step: int
    mine: Vector
    theirs: Vector


class Offer(NamedTuple):
    """What a host has sent, and remembers until it knows what has become of it."""

    exchange: int
    attempt: int
    step: int
    vector: Vector


class Answer(NamedTuple):
    """What an inviter has sent, and remembers until it has arrived."""

    exchange: int
    step: int
    vector: Vector


class Pairing(Part):
    """One node's side of all its exchanges.

    Every method returns the commands to carry out. The owner passes on the events that concern
    exchanges, and its current vector with each message; a vector that was passed in is sent, so it
    must not be written to.

    Parameters
    ----------
    node : int
        This node's index.
    peers : numpy.random.Generator
        What decides whom to invite.
    wire : {"float32", "bfloat16", "float16", "int8"}
        The form in which vectors travel; what is passed in has been rounded to it.

    Attributes
    ----------
    state : {"idle", "inviting", "offering"}
        See the table above.
    peer : int
        With whom, unless idle.
    patience : int
        How long to wait for a message, in nanoseconds. While it is 0, this node accepts nothing.
    offer : Offer, optional
        What waits for its answer, while offering.
    doubts : dict of int to Offer
        What was put aside, by peer.
    answers : dict of int to Answer
        What may still be asked for, by peer: as a rule nothing or one.
    """

    STATE = (
        "peers",
        "state",
        "peer",
        "patience",
        "offer",
        "doubts",
        "answers",
        "_untried",
        "_number",
        "_asked",
        "_decided",
        "_heard",
    )

    def __init__(self, node: int, peers: np.random.Generator, wire: Wire = "float32") -> None:
        self.node = node
        self.peers = peers
        self.wire = wire
        self.state, self.peer = IDLE, node
        self.patience = 0
        self.offer: Offer | None = None
        self.doubts: dict[int, Offer] = {}
        self.answers: dict[int, Answer] = {}
        self._untried: list[int] = []
        # How many invitations this node has sent, and the last one to each peer.
        self._number = 0
        self._asked: dict[int, int] = {}
        # By peer: its last offer that this node has decided on, and its last invitation.
        self._decided: dict[int, tuple[int, int]] = {}
        self._heard: dict[int, int] = {}

    @property
    def idle(self) -> bool:
        """Whether a turn may begin."""
        return self.state == IDLE

    def begin(self, among: Set[int], *, at: int, step: int) -> list[Command]:
        """Begin a turn, if idle: invite neighbors in random order until one accepts.

        Parameters
        ----------
        among : set of int
            The neighbors that can be reached.
        at : int
            Now, in nanoseconds.
        step : int
            This node's step, for its messages.
        """
        if not self.idle or not self.patience:
            return []
        order = self.peers.permutation(len(among)).tolist()
        everyone = sorted(among)
        self._untried = [everyone[place] for place in order]
        return list(self._invite(at, step))

    def concerns(self, message: Message) -> bool:
        """Tell whether a message may make this node send its vector of now."""
        return message.kind == "offer" or (message.kind == "invite" and self.state != OFFERING)

    def receive(
        self, event: Received, vector: Vector, *, step: int
    ) -> tuple[list[Command], Exchange | None]:
        """Take in a message.

        Parameters
        ----------
        event : Received
            What came.
        vector : ndarray of float32, shape (D,)
            This node's vector: of now, if it :meth:`concerns` it.
        step : int
            This node's step.

        Returns
        -------
        list of Command, Exchange or None
            What to do, and the exchange that takes place with this.
        """
        source, message = event.source, event.message
        number = message.header.get("exchange")
        if not isinstance(number, int) or number < 1:
            return [_useless("bad-message", message)], None
        match message.kind:
            case "invite":
                return list(self._hear_invite(event, number, vector, step)), None
            case "offer":
                return self._hear_offer(source, number, message, vector, step)
            case "answer":
                return self._hear_answer(source, number, message, step)
            case "busy":
                return list(self._hear_busy(source, number, event.at, step)), None
            case "void":
                return self._close_offer(source, number)[1], None
            case "done":
                if self._answered(source) == number:
                    del self.answers[source]
                return [], None
        return [_useless("bad-message", message)], None

    def lose_patience(self, *, at: int, step: int) -> list[Command]:
        """Go on without the message that was waited for, or ask for it again."""
        if self.state == INVITING:
            return [Report(name="unanswered-invitation"), *self._invite(at, step)]
        if self.offer is None:
            return []
        tried = self.offer.attempt
        if tried == _ATTEMPTS:
            return self._put_aside()
        self.offer = self.offer._replace(attempt=tried + 1)
        return [self._send_offer(self.peer, self.offer), self._wait(at, 2**tried)]

    def miss(self, peer: int, *, at: int, step: int) -> list[Command]:
        """Do without a neighbor that has gone."""
        self._untried = [other for other in self._untried if other != peer]
        if self.idle or self.peer != peer:
            return []
        return list(self._invite(at, step)) if self.state == INVITING else self._put_aside()

    def meet(self, peer: int) -> list[Command]:
        """Finish what was put aside when a neighbor went, now that it is back."""
        self._heard.pop(peer, None)
        return self._renew(peer)

    def end(self) -> list[Command]:
        """Count the exchanges of which this node does not know whether they have taken place."""
        unsettled = len(self.doubts) + (self.offer is not None)
        return [Report(name="unsettled-exchange", count=unsettled)] if unsettled else []

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Become what :meth:`snapshot` has described."""
        super().restore(snapshot)
        self.offer = None if self.offer is None else Offer(*self.offer)
        self.doubts = {peer: Offer(*each) for peer, each in self.doubts.items()}
        self.answers = {peer: Answer(*each) for peer, each in self.answers.items()}

    # What the inviter does.

    def _invite(self, at: int, step: int) -> Iterator[Command]:
        """Invite the next neighbor of this turn; be idle when there is none left."""
        waited = not self.idle
        self.state = IDLE
        while self._untried:
            peer = self._untried.pop()
            if peer in self.doubts:
                yield from self._renew(peer)
                continue
            self._number += 1
            self.state, self.peer = INVITING, peer
            self._asked[peer] = self._number
            yield _send(peer, "invite", step, exchange=self._number)
            yield self._wait(at)
            return
        if waited:
            yield SetTimer(name=PATIENCE, at=None)

    def _hear_busy(self, source: int, number: int, at: int, step: int) -> Iterator[Command]:
        if self._invites(source, number):
            yield from self._invite(at, step)

    def _hear_offer(
        self, source: int, number: int, message: Message, vector: Vector, step: int
    ) -> tuple[list[Command], Exchange | None]:
        attempt = message.header.get("attempt")
        theirs = message.payload
        if not isinstance(attempt, int) or theirs is None or len(theirs) != len(vector):
            return [_useless("bad-message", message)], None
        last = self._decided.get(source, (0, 0))
        if (number, attempt) <= last:
            return [_useless("stale-message", message)], None
        self._decided[source] = number, attempt
        if self._answered(source) == number:
            repeated = self._send_answer(source, self.answers[source], attempt)
            return [_useless("repeated-offer", message), repeated], None
        commands: list[Command] = []
        if self._invites(source, number):
            self.state, self._untried = IDLE, []
            commands.append(SetTimer(name=PATIENCE, at=None))
        # Between an offer of its own and the answer, a node takes part in nothing else.
        if number == last[0] or number != self._asked.get(source) or self.state == OFFERING:
            void = _send(source, "void", step, exchange=number, attempt=attempt)
            return [*commands, _useless("refused-offer", message), void], None
        self.answers[source] = Answer(number, step, vector)
        commands.append(self._send_answer(source, self.answers[source], attempt))
        return commands, Exchange(source, message.step, vector, theirs)

    def _invites(self, peer: int, number: int) -> bool:
        """Tell whether this node waits for what becomes of an invitation."""
        return self.state == INVITING and self.peer == peer and self._asked[peer] == number

    def _answered(self, peer: int) -> int:
        """Return the number of the exchange whose answer is kept for a peer, or 0."""
        return self.answers[peer].exchange if peer in self.answers else 0

    # What the host does.

    def _hear_invite(
        self, event: Received, number: int, vector: Vector, step: int
    ) -> Iterator[Command]:
        source = event.source
        if number <= self._heard.get(source, 0):
            yield _useless("stale-message", event.message)
            return
        self._heard[source] = number
        crossed = self.state == INVITING and self.peer == source
        if crossed and self.node < source:
            return
        if self.patience and source not in self.doubts and (crossed or self.idle):
            self.state, self.peer, self._untried = OFFERING, source, []
            self.offer = Offer(number, 1, step, vector)
            yield self._send_offer(source, self.offer)
            yield self._wait(event.at)
        else:
            yield _send(source, "busy", step, exchange=number)
            yield from self._renew(source)

    def _hear_answer(
        self, source: int, number: int, message: Message, step: int
    ) -> tuple[list[Command], Exchange | None]:
        offer, commands = self._close_offer(source, number)
        theirs = message.payload
        if offer is None:
            return [_useless("stale-message", message)], None
        if theirs is None or len(theirs) != len(offer.vector):
            return [*commands, _useless("bad-message", message)], None
        done = _send(source, "done", step, exchange=number)
        return [*commands, done], Exchange(source, message.step, offer.vector, theirs)

    def _close_offer(self, peer: int, number: int) -> tuple[Offer | None, list[Command]]:
        """Take out the offer of an exchange, if there is one."""
        if self.offer is not None and self.peer == peer and self.offer.exchange == number:
            offer, self.offer, self.state = self.offer, None, IDLE
            return offer, [SetTimer(name=PATIENCE, at=None)]
        if peer in self.doubts and self.doubts[peer].exchange == number:
            return self.doubts.pop(peer), []
        return None, []

    def _put_aside(self) -> list[Command]:
        assert self.offer is not None
        self.doubts[self.peer] = self.offer
        self.offer, self.state = None, IDLE
        return [SetTimer(name=PATIENCE, at=None), Report(name="doubtful-exchange")]

    def _renew(self, peer: int) -> list[Command]:
        """Offer once more what was put aside, without waiting for the answer."""
        if peer not in self.doubts:
            return []
        offer = self.doubts[peer]
        self.doubts[peer] = offer._replace(attempt=offer.attempt + 1)
        return [self._send_offer(peer, self.doubts[peer])]

    def _wait(self, at: int, times: int = 1) -> SetTimer:
        return SetTimer(name=PATIENCE, at=at + times * self.patience)

    def _send_offer(self, to: int, offer: Offer) -> Send:
        return self._send_vector(to, "offer", offer, offer.attempt)

    def _send_answer(self, to: int, answer: Answer, attempt: int) -> Send:
        return self._send_vector(to, "answer", answer, attempt)

    def _send_vector(self, to: int, kind: str, what: Offer | Answer, attempt: int) -> Send:
        message = Message(
            kind=kind,
            step=what.step,
            payload=what.vector,
            header={"exchange": what.exchange, "attempt": attempt},
            wire=self.wire,
        )
        return Send(to=to, message=message)


def _send(to: int, kind: str, step: int, **header: int) -> Send:
    return Send(to=to, message=Message(kind=kind, step=step, header=header))


def _useless(name: str, message: Message) -> Report:
    return Report(name=name, nbytes=message.nbytes)
