"""Forms of payloads, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from flwr_decentral.core.wire import WIRES, wire_bytes
from flwr_decentral.ops import codecs

any_vector = arrays.arrays(
    np.uint32, st.sampled_from([0, 1, 2, 255, 256, 257, 600]), elements=st.integers(0, 2**32 - 1)
).map(lambda bits: bits.view(np.float32))
finite_vector = arrays.arrays(
    np.float32,
    st.sampled_from([0, 1, 2, 255, 256, 257, 600]),
    elements=st.floats(-60000, 60000, width=32),
)


def of_bits(*bits: int) -> np.ndarray:
    return np.array(bits, np.uint32).view(np.float32)


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    return one.tobytes() == other.tobytes()


@pytest.mark.parametrize("wire", WIRES)
@given(x=any_vector)
def test_writing_what_was_read_gives_the_same_bytes(wire, x):
    once = codecs.encode(x, wire)
    assert once.dtype == np.uint8
    assert once.shape == (wire_bytes(len(x), wire),)
    back = codecs.decode(once, wire, len(x))
    assert back.dtype == np.float32
    assert back.shape == x.shape
    # What overflows to infinity poisons its block when it is written once more.
    if wire != "int8" or not np.isinf(back).any():
        assert same_bits(codecs.encode(back, wire), once)
        assert same_bits(codecs.rounded(back, wire), back)


@pytest.mark.parametrize("wire", WIRES)
@given(x=any_vector)
def test_what_is_not_finite_stays_so(wire, x):
    back = codecs.rounded(x, wire)
    assert not np.isfinite(back[~np.isfinite(x)]).any()


@given(x=finite_vector)
def test_errors_are_within_half_a_step(x):
    exact = x.astype(np.float64)
    tiny = 2.0**-126
    for wire, digits, least in (("bfloat16", 8, tiny), ("float16", 11, 2.0**-14)):
        error = np.abs(codecs.rounded(x, wire) - exact)
        assert (error <= np.maximum(np.abs(exact), least) * 2.0**-digits).all()
    error = np.abs(codecs.rounded(x, "int8") - exact)
    for start in range(0, len(x), 256):
        block = slice(start, start + 256)
        step = np.abs(exact[block]).max() / 127 * (1 + 2.0**-15)
        assert (error[block] <= step / 2 * (1 + 2.0**-20) + 2.0**-100).all()


@pytest.mark.parametrize(
    ("value", "rounded"),
    [
        (0x3F808000, 0x3F800000),  # a tie goes to even: down
        (0x3F818000, 0x3F820000),  # a tie goes to even: up
        (0x3F808001, 0x3F810000),  # just above a tie
        (0x3F807FFF, 0x3F800000),  # just below a tie
        (0x00000001, 0x00000000),  # the least denormal
        (0x00008001, 0x00010000),  # a denormal that is kept
        (0x80000000, 0x80000000),  # minus zero
        (0x7F7FFFFF, 0x7F800000),  # the largest number is beyond bfloat16's
        (0xFF800000, 0xFF800000),  # minus infinity
        (0x7F800001, 0x7FC00000),  # a signaling NaN is made quiet, not infinite
        (0xFFFFFFFF, 0xFFFF0000),
    ],
)
def test_bfloat16_to_the_bit(value, rounded):
    assert same_bits(codecs.rounded(of_bits(value), "bfloat16"), of_bits(rounded))


@pytest.mark.slow
@settings(deadline=None)  # the first example imports torch
@given(x=any_vector)
def test_bfloat16_is_torchs(x):
    torch = pytest.importorskip("torch")
    theirs = torch.from_numpy(x.copy()).to(torch.bfloat16).to(torch.float32).numpy()
    ours = codecs.rounded(x, "bfloat16")
    number = ~np.isnan(x)
    assert same_bits(ours[number], theirs[number])
    assert np.isnan(ours[~number]).all()


def test_int8_to_the_bit():
    x = np.zeros(300, np.float32)
    x[:4] = 1.27, -1.27, 0.005, 0.0149
    x[256:] = 0.5
    data = codecs.encode(x, "int8")
    scales, codes = data[:8].view("<f4"), data[8:].view(np.int8)
    # 1.27 / 127 is 0x3C23D70A as float32; up to 16 bits it is 0x3C23D800.
    assert scales.view(np.uint32)[0] == 0x3C23D800
    assert codes[:5].tolist() == [127, -127, 0, 1, 0]
    assert (codes[256:] == 127).all()


def test_int8_of_small_and_of_broken_blocks():
    x = np.full(4 * 256, 2.0**-101, np.float32)
    x[256:512], x[300] = 1, np.nan
    x[512:768], x[600] = 1, -np.inf
    x[768:] = np.ldexp(np.float32(1), -100)
    back = codecs.rounded(x, "int8")
    assert (back[:256] == 0).all()
    assert np.isnan(back[256:768]).all()
    assert (back[768:] > 0).all()


@pytest.mark.parametrize("wire", WIRES)
def test_a_wrong_number_of_bytes_is_refused(wire):
    data = codecs.encode(np.ones(5, np.float32), wire)
    with pytest.raises(ValueError, match="5 values are"):
        codecs.decode(data[:-1], wire, 5)


def test_float32_is_not_copied():
    x = np.ones(5, np.float32)
    assert codecs.rounded(x, "float32") is x
    assert np.shares_memory(codecs.encode(x, "float32"), x)
