"""A capped uplink sends as much as its cap allows, on clocks that call a little late."""

import numpy as np
import pytest

from flwr_decentral.channel.uplink import Uplink
from flwr_decentral.core import SECOND, Message

CAP = 4e6


@pytest.mark.parametrize("late_ms", [1, 3])
def test_what_alarms_are_late_is_made_up_for(late_ms):
    uplink = Uplink(1 << 20, CAP)
    uplink.open(1)
    message = Message(kind="m", step=0, payload=np.ones(1250, np.float32))
    now = pieces = nbytes = 0
    uplink.put(1, message)
    while now < 10 * SECOND:
        while (piece := uplink.next(now)) is not None:
            pieces += 1
            nbytes += piece.size
            uplink.acknowledge(1, pieces, now)
            uplink.put(1, message)
        now = max(now, uplink.free_at) + late_ms * SECOND // 1000
    assert 0.98 * CAP <= 8 * nbytes / (now / SECOND) <= 1.01 * CAP


@pytest.mark.parametrize(("idle", "burst"), [(False, 2), (True, 1)])
def test_no_more_than_20_ms_are_made_up_for_and_none_of_idle_time(idle, burst):
    uplink = Uplink(1 << 20, CAP)
    uplink.open(1)
    message = Message(kind="m", step=0, payload=np.ones(1250, np.float32))
    uplink.put(1, message)
    assert uplink.next(0) is not None
    if idle:
        assert uplink.next(SECOND // 2) is None
    for _ in range(5):
        uplink.put(1, message)
    pieces = 0
    while uplink.next(SECOND) is not None:
        pieces += 1
    assert pieces == burst
