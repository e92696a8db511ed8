"""The ServerApp side of real time: nodes gossip through their sidecars, segment by segment.

A *segment* is one long ``train`` message to each node; its reply carries metrics. Between segments
the nodes evaluate, which all of them wait for. The ServerApp bootstraps and keeps the books: it
holds no model, and no parameter passes through it, the initial model aside and, if that is asked
for, the models of the end.

A node is known by its partition-id and, with TLS, by its certificate. One that does not answer is
away until it comes back (:mod:`flwr_decentral.flower.seats`); its neighbors notice by themselves,
and the others go on.
"""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Mapping
from functools import partial
from hashlib import blake2b
from logging import INFO, WARNING
from typing import Any, Final

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.common.logger import log

from flwr_decentral.channel.orders import Order
from flwr_decentral.channel.roster import Roster as PeerRoster
from flwr_decentral.core import RuntimeFault
from flwr_decentral.core.seeds import RUN
from flwr_decentral.report.results import Evaluation
from flwr_decentral.sim.measures import average_model

from .control import CONTROL, PROTOCOL, reported_error
from .evaluation import average_private
from .grid import GridMeter
from .ledger import Ledger, describe
from .mission import Mission
from .records import array_bytes, decode, to_numpy, to_record
from .roster import Roster, peer_record
from .seats import LATE, Seat, Seats

_PAUSE: Final = 0.2
"""Seconds before another segment, after one in which no node has gone on."""
_LEASE: Final = 900.0
"""The most seconds that gossip goes on after the last segment, once a run has been stopped."""
_RENEW: Final = _LEASE / 3
"""Seconds after which a node without a call is called again, so that its lease does not end."""
_MOST_ROUNDS: Final = 2**31 - 1
_MARGIN: Final = 60.0
"""Seconds that Flower may take to bring a message to a node and its reply back."""


class RealTime:
    """Lead a run. See the head of :mod:`flwr_decentral.flower.realtime`.

    Parameters
    ----------
    mission : Mission
        What to do.
    meter : GridMeter
        The grid.
    roster : Roster
        Who answered the roll.
    ledger : Ledger
        Where metrics are gathered.

    Raises
    ------
    ConfigurationError
        If the nodes cannot be connected as the topology says.
    """

    def __init__(self, mission: Mission, meter: GridMeter, roster: Roster, ledger: Ledger) -> None:
        self.mission, self.meter, self.ledger = mission, meter, ledger
        self.run_id = secrets.token_hex(8)
        self.evaluates, self.sockets = roster.evaluates, roster.sockets
        self.seats = Seats(meter, roster.node_ids, self._welcome, roster.sockets)
        self.peers = PeerRoster.from_records(
            [peer_record(index, peer) for index, peer in enumerate(roster.peers)],
            mission.topology.edges,
        )
        self.epoch = 0
        self.initial_bytes = 0
        self._begin = time.monotonic()
        self._ordered: set[int] = set()
        self._rounds: list[int] = []
        self._advanced = self._begin
        self._stuck = False

    @property
    def elapsed(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._begin

    @property
    def done(self) -> int:
        """The rounds that are past for all nodes that are there."""
        return min(seat.round for seat in self.seats.present)

    @property
    def progress(self) -> int:
        """The rounds that are past on average, rounded down."""
        present = self.seats.present
        return sum(seat.round for seat in present) // len(present)

    def run(self) -> None:
        """Train to the end, and evaluate.

        Raises
        ------
        DecentralError
            If the run fails. It names the node at fault.
        """
        every = following = self.mission.evaluate_every
        last = self._is_over()
        while not last:
            self._segment(following)
            self.seats.hear_newcomers()
            if self._is_over():  # those that are late are waited for now
                self._settle(self.seats.present)
            last = self._is_over()  # unless somebody came back who has more to train
            if self.progress >= following or last:
                self._evaluate(last)
                following = self.progress + every
        self.ledger.finish()

    def fetch_average(self) -> ArrayRecord:
        """Have every node send its model, once, and average them.

        Raises
        ------
        RuntimeFault
            If none has.
        """
        layout = self.mission.layout
        vectors, privates = [], []
        primed = [seat for seat in self.seats.free if seat.primed]
        for index, content in self._ask_all(primed, "fetch", "its model").items():
            if error := reported_error(content):  # it may have come back without one just now
                log(WARNING, "Node %d cannot send its model:\n%s", index, error)
                continue
            vector, private = layout.flatten(to_numpy(content.array_records["model"]))
            vectors.append(vector)
            privates.append(private)
        if not vectors:
            raise RuntimeFault("no node has sent its model to be averaged")
        if len(vectors) < len(self.seats.all):
            log(WARNING, "Averaged %d of %d models.", len(vectors), len(self.seats.all))
        mean = average_model(vectors).astype(np.float32)
        return to_record(layout.unflatten(mean, average_private(layout, privates)))

    def release(self) -> None:
        """Tell every node that the run has ended, so that another can begin at once."""
        self.seats.close()
        asked = [seat for seat in self.seats.present if not seat.released]
        for seat in asked:
            message = self._message(seat, MessageType.TRAIN, RecordDict({}), do="release")
            self.seats.call(
                seat, message, "the end of the run", _ignore, seconds=_MARGIN, allowed=_MARGIN
            )
        self.seats.wait(lambda: any(seat.call for seat in asked))

    def digest(self) -> str:
        """Hash the digests of all models."""
        state = blake2b(digest_size=16, person=b"flwrd-models")
        for seat in self.seats.all:
            state.update(f"{seat.index} {seat.digest}\n".encode())
        return state.hexdigest()

    # ------------------------------------------------------------------------------ segments

    def _is_over(self) -> bool:
        duration = self.mission.settings.duration
        if duration is not None:
            return self.elapsed >= duration
        return self.mission.rounds is not None and self.done >= self.mission.rounds

    def _has_finished(self, seat: Seat) -> bool:
        """Tell whether a node has nothing more to train."""
        if self.mission.settings.duration is not None:
            return self._is_over()
        return self.mission.rounds is not None and seat.round >= self.mission.rounds

    def _settle(self, seats: list[Seat]) -> None:
        """Wait for some seats' replies for as long as they may take."""
        waiting = [*seats]

        def goes_on() -> bool:
            return any(seat.call for seat in waiting)

        while True:
            self.seats.wait(goes_on, time.monotonic() + LATE)
            if not goes_on():
                return
            waiting += self._renew_leases()

    def _renew_leases(self) -> list[Seat]:
        """Call those who have not been called for long, for no training; return them."""
        now = time.monotonic()
        held = (seat for seat in self.seats.free if seat.primed and not seat.released)
        due = [seat for seat in held if now > seat.renew_at]
        for seat in due:
            self._order(seat, seat.round, 1.0)
        return due

    def _limits(self, following: int) -> tuple[int, float]:
        """Tell how many rounds and how many seconds the next segment has at most.

        Lockstep stops for an evaluation, where all nodes have done the same rounds. Nobody else
        does.
        """
        settings, most = self.mission.settings, self.mission.rounds or _MOST_ROUNDS
        seconds = settings.segment
        if settings.duration is not None:
            return most, min(seconds, max(settings.duration - self.elapsed, 1.0))
        if not self.mission.algorithm.capabilities.synchronous:
            return most, seconds
        # A node that begins anew hears where the others are only if they go on.
        anew = self._stuck or any(not seat.primed for seat in self.seats.present)
        furthest = max(seat.round for seat in self.seats.present)
        return min(most, max(following, furthest + anew)), seconds

    def _segment(self, following: int) -> None:
        """Let every node train for a segment, and gather what they report.

        Nodes that need longer, or have gone, keep nobody from the next segment. Those that come
        back in time take part in this one.
        """
        until, seconds = self._limits(following)
        begin, left = time.monotonic(), seconds
        self._ordered.clear()

        def to_be_ordered() -> list[Seat]:
            """List those who are back, or were late and have answered; at first, all."""
            return [seat for seat in self.seats.free if seat.index not in self._ordered]

        def is_over() -> bool:
            called = self.seats.called
            if all(map(self._has_finished, self.seats.free)):
                return not called  # there is nobody who could go on without them
            late = time.monotonic() > begin + seconds + LATE
            return late or not any(seat.index in self._ordered for seat in called)

        while True:
            for seat in to_be_ordered():
                self._order(seat, until, left)
                self._ordered.add(seat.index)
            self.seats.wait(lambda: not (to_be_ordered() or is_over()), time.monotonic() + LATE)
            if is_over() and not to_be_ordered():
                break
            self._renew_leases()
            left = max(begin + seconds - time.monotonic(), 1.0)
        self._check_progress([seat.round for seat in self.seats.all])
        log(
            INFO,
            "[%.0f s] rounds %d%s, %d of %d nodes, %.3g MB sent",
            self.elapsed,
            self.progress,
            f"/{self.mission.rounds}" if self.mission.rounds else "",
            len(self.seats.present),
            len(self.seats.all),
            sum(seat.report.get("bytes-sent", 0) for seat in self.seats.all) / 1e6,
        )

    def _check_progress(self, rounds: list[int]) -> None:
        """Give up when no node has gone on for longer than a training may take."""
        now = time.monotonic()
        self._stuck = rounds == self._rounds
        if not self._stuck:
            self._rounds, self._advanced = rounds, now
            return
        if now - self._advanced > self.mission.patience + _MARGIN:
            raise RuntimeFault(
                f"no node has trained for {now - self._advanced:.0f} s; the nodes' rounds are "
                f"{rounds}. `flwr-decentral sidecar status` on the nodes shows who is connected"
            )
        time.sleep(_PAUSE)

    def _order(self, seat: Seat, until: int, seconds: float) -> None:
        """Call a seat to train for a segment."""
        mission = self.mission
        allowed = seconds + mission.patience + _MARGIN
        order = Order(
            run=self.run_id,
            resume=mission.settings.resume,
            epoch=self.epoch,
            index=seat.index,
            roster=self.peers,
            algorithm=mission.algorithm.name,
            version=mission.version,
            parameters=mission.algorithm.parameters,
            layout=mission.layout.hash,
            seed=mission.settings.seed,
            after=0 if seat.primed or mission.algorithm.capabilities.synchronous else self.done,
            until=max(until, seat.round),
            seconds=seconds,
            lease=seconds + _LEASE,
            uplink=mission.uplinks[seat.index],
        )
        content = RecordDict(
            {mission.options.configrecord_key: ConfigRecord(dict(mission.train_config))}
        )
        if not seat.primed:
            content[mission.options.arrayrecord_key] = mission.initial
        message = self._message(
            seat, MessageType.TRAIN, content, do="segment", order=order.to_json()
        )
        if not seat.primed:
            self.initial_bytes += array_bytes([message])
        seat.renew_at = time.monotonic() + seconds + _RENEW
        take = partial(self._take_report, seat)
        self.seats.call(seat, message, "its segment", take, seconds=seconds, allowed=allowed)

    def _message(
        self, seat: Seat, message_type: str, content: RecordDict, **control: Any
    ) -> Message:
        mission = self.mission
        content[CONTROL] = ConfigRecord(
            {
                "protocol": PROTOCOL,
                "arrays-key": mission.options.arrayrecord_key,
                "config-key": mission.options.configrecord_key,
                "private-keys": list(mission.settings.private_keys),
                "frozen-keys": list(mission.settings.frozen_keys),
                "patience": mission.patience,
                "run": self.run_id,
                "sockets": self.sockets,
                **control,
            }
        )
        assert seat.node_id is not None
        return Message(content, seat.node_id, message_type)

    def _take_report(self, seat: Seat, reply: Message) -> None:
        if error := reported_error(reply.content):
            raise RuntimeFault(f"node {seat.index} has failed:\n{error}")
        control = reply.content.config_records[CONTROL]
        if control.get("unprimed", False):
            log(
                WARNING,
                "The sidecar of node %d holds no model of this run; it begins anew.",
                seat.index,
            )
            seat.primed, seat.digest = False, ""
            return
        report = json.loads(str(control["report"]))
        if (name := self.mission.settings.resume) and not seat.primed:
            model = f"model kept as {name!r}" if report["resumed"] else "initial model"
            log(INFO, "Node %d has gone on from the %s.", seat.index, model)
        seat.primed, seat.round, seat.digest = True, report["round"], report["digest"]
        seat.report = report["counted"]
        rounds: Any = control["rounds"]
        contents: Any = control["contents"]
        for round, content in zip(rounds, contents, strict=True):
            self.ledger.trained(round, decode(content))

    def _welcome(self, seat: Seat, peer: Mapping[str, Any] | None) -> None:
        """Let a node come back, at another address perhaps."""
        records = self.peers.records()
        records[seat.index] = peer_record(seat.index, peer)
        if records != self.peers.records():
            self.peers = PeerRoster.from_records(records, self.peers.edges)
            self.epoch += 1
        self._ordered.discard(seat.index)

    # ------------------------------------------------------------------------------ evaluation

    def _evaluate(self, last: bool) -> None:
        free = {seat.index: seat for seat in self.seats.free if seat.primed}
        round = self.progress
        chosen = self.ledger.choose(round) if self.evaluates else []
        seats = [free[index] for index in chosen if index in free]
        replies = {}
        # A message less for each node: Flower starts a process for each message.
        release = last and not self.mission.settings.fetch_average
        for index, content in self._ask_all(
            seats, "evaluate-own", "its evaluation", release
        ).items():
            if error := reported_error(content):
                log(WARNING, "Evaluation failed on node %d:\n%s", index, error)
            else:
                replies[index] = content
        metrics = self.ledger.evaluated(round, replies)
        averaged = {}
        if self.mission.settings.fetch_average and self.mission.evaluate_fn is not None:
            try:
                arrays = self.fetch_average()
            except RuntimeFault as error:
                if last:
                    raise
                log(WARNING, "The average of all models is not evaluated: %s", error)
            else:
                record = self.mission.evaluate_fn(round, arrays)
                averaged = self.ledger.evaluated_average(round, record)
        evaluation = Evaluation(
            virtual_time_s=self.elapsed,
            round=round,
            metrics=metrics,
            averaged=averaged,
            consensus_distance=math.nan,
        )
        self.ledger.evaluations.append(evaluation)
        log(INFO, "[%.0f s] round %d | %s", self.elapsed, round, describe(evaluation))

    def _ask_all(
        self, seats: list[Seat], do: str, what: str, release: bool = False
    ) -> dict[int, RecordDict]:
        """Let nodes do something with their models; return what those say that can."""
        key = self.mission.options.configrecord_key
        seed = self.ledger.seeds.number(RUN, "evaluate", self.progress)
        replies: dict[int, RecordDict] = {}

        def take(seat: Seat, reply: Message) -> None:
            content = replies[seat.index] = reply.content
            seat.released = CONTROL in content and "released" in content[CONTROL]

        for seat in seats:
            content = RecordDict({key: ConfigRecord(dict(self.mission.evaluate_config))})
            message = self._message(
                seat,
                MessageType.EVALUATE,
                content,
                do=do,
                release=release,
                node=seat.index,
                round=seat.round,
                seed=(seed + seat.index) % 2**31,
            )
            allowed = self.mission.patience + _MARGIN
            take_it = partial(take, seat)
            self.seats.call(seat, message, what, take_it, seconds=_MARGIN, allowed=allowed)
        self._settle(seats)
        return dict(sorted(replies.items()))


def _ignore(reply: Message) -> None:
    del reply
