"""Clocks: the real one, which never calls early, and the one for tests, which calls in order."""

import asyncio

from flwr_decentral.channel.clock import LoopClock
from flwr_decentral.core import MILLISECOND
from flwr_decentral.testing.clocks import ManualClock


def test_a_clock_starts_at_nothing_and_goes_on():
    async def work():
        clock = LoopClock(asyncio.get_running_loop())
        first, second = clock.now(), clock.now()
        assert 0 <= first <= second < 10**9

    asyncio.run(work())


def test_an_alarm_rings_once_and_never_early():
    async def work():
        clock = LoopClock(asyncio.get_running_loop())
        rung, over = [], asyncio.Event()
        due = [clock.now() + delay for delay in (0, 300, 40_000, MILLISECOND, 3 * MILLISECOND)]
        for at in due:
            clock.call_at(at, lambda at=at: rung.append((at, clock.now())))
        cancelled = clock.call_at(due[-1], lambda: rung.append("cancelled"))
        clock.call_at(due[-1], over.set)
        assert rung == [], "never from within"
        cancelled.cancel()
        cancelled.cancel()
        async with asyncio.timeout(20):
            await over.wait()
        assert sorted(at for at, _ in rung) == due
        assert all(now >= at for at, now in rung)

    asyncio.run(work())


def test_a_loop_that_calls_too_early_is_asked_again():
    class Early:
        """A loop whose clock is ahead."""

        def __init__(self):
            self.calls = []

        def call_later(self, delay, callback):
            self.calls.append((delay, callback))
            return self

        def cancel(self):
            self.calls.clear()

    loop = Early()
    clock, rung = LoopClock(loop), []
    alarm = clock.call_at(10**15, lambda: rung.append(1))
    loop.calls.pop()[1]()
    assert rung == []
    assert len(loop.calls) == 1, "it is set again"
    alarm.cancel()
    assert loop.calls == []


def test_a_manual_clock_rings_in_the_order_of_time_then_of_setting():
    clock, rung = ManualClock(), []
    for at in (5, 3, 5, 9):
        clock.call_at(at, lambda at=at: rung.append((clock.now(), at)))
    assert clock.due == 3
    assert not clock.ring()
    assert clock.advance(5) == 3
    assert rung == [(3, 3), (5, 5), (5, 5)]
    assert (clock.now(), clock.due) == (5, 9)


def test_a_manual_alarm_can_be_cancelled_and_may_set_another():
    clock, rung = ManualClock(), []
    first = clock.call_at(1, lambda: clock.call_at(2, lambda: rung.append(clock.now())))
    gone = clock.call_at(1, lambda: rung.append("gone"))
    gone.cancel()
    assert clock.due == 1
    assert clock.advance(10) == 2
    assert rung == [2]
    first.cancel()
    assert clock.due is None


def test_a_manual_clock_does_not_go_back_by_itself():
    clock, rung = ManualClock(), []
    clock.time = 7
    clock.call_at(3, lambda: rung.append(clock.now()))
    clock.advance(5)
    assert (rung, clock.now()) == ([7], 7)
