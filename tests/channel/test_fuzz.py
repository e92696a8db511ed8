"""The fuzzer of the frame decoder finds nothing, and would find what it looks for."""

import pytest

from flwr_decentral.channel import reader
from flwr_decentral.channel.refusals import Refusal

from . import fuzz_frames
from .fuzz_frames import FoundError, fuzz


def test_a_short_fuzz_finds_nothing_reaches_new_branches_and_can_be_repeated():
    first, again = (fuzz(400, seed=1) for _ in range(2))
    assert str(first) == str(again)
    assert first.kept
    assert first.items > 200
    assert len(first.refusals) >= 4


@pytest.mark.slow
def test_a_hundred_thousand_inputs_find_nothing():
    tally = fuzz(100_000, seed=2)
    assert tally.inputs == 100_000
    assert tally.kept > 20
    assert len(tally.refusals) >= 5


class Hasty(reader.FrameReader):
    """Raise something else than a refusal, sometimes."""

    def _expect(self, prefix, raw):
        try:
            super()._expect(prefix, raw)
        except Refusal as refusal:
            raise ValueError from refusal


class Trusting(reader.FrameReader):
    """Believe any length."""

    def __init__(self, **how):
        super().__init__(**{**how, "limit": 16 * fuzz_frames.LIMIT})


class Fickle(reader.FrameReader):
    """Take one byte less for a whole head."""

    def _begin(self):
        there = self._end - self._start
        return there != reader.PREFIX.size + 8 and super()._begin()


class Forgetful(reader.FrameReader):
    """Lose the last byte of a body that comes by way of the scratch in two parts."""

    def _fill(self):
        super()._fill()
        if self._left == 1 and self._incoming.filled:
            self._incoming.filled += 1
            self._left = 0


@pytest.mark.parametrize("wrong", [Hasty, Trusting, Fickle, Forgetful])
def test_mistakes_are_found_and_kept(wrong, monkeypatch, tmp_path):
    monkeypatch.setattr(fuzz_frames, "FrameReader", wrong)
    with pytest.raises(FoundError, match=f"written to {tmp_path}"):
        fuzz(20_000, seed=3, failures=tmp_path)
    assert len(list(tmp_path.glob("frames-3-*.bin"))) == 1
