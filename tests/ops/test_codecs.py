"""Vectors as bytes: golden values, and oracles that treat one value at a time."""

import math
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_decentral.core import WIRES, ConfigurationError, check_wire, wire_bytes
from flwr_decentral.core.wire import BLOCK
from flwr_decentral.ops.codecs import decode, encode, rounded

some = settings(max_examples=60, deadline=None)

# Zeros, denormals, the edges of half precision, ties of either parity, infinities, NaNs.
EDGES = np.array(
    [
        *(0, 0x80000000, 1, 0x80000001, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF),
        *(0x7F800000, 0xFF800000, 0x7F800001, 0xFFC12345, 0x7FFFFFFF, 0xFFFFFFFF),
        *(0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F7F8000, 0x7F7F7FFF),
        *(0x3F801000, 0x3F803000, 0x3F801001, 0x3F800FFF, 0x477FEFFF, 0x477FF000, 0x47800000),
        *(0x38800000, 0x387FFFFF, 0x33800000, 0x33000000, 0x33000001, 0x33C00000, 0x32FFFFFF),
    ],
    np.uint32,
)


def vectors(max_size=40):
    bits = st.one_of(st.sampled_from(EDGES.tolist()), st.integers(0, 2**32 - 1))
    return st.lists(bits, max_size=max_size).map(lambda b: np.array(b, np.uint32).view(np.float32))


def tame(seed, size):
    rng = np.random.default_rng(seed)
    return (rng.normal(size=size) * 10.0 ** rng.integers(-3, 3)).astype(np.float32)


def bits(x):
    assert x.dtype == np.float32
    return x.view(np.uint32).tolist()


def bfloat16_by_hand(value):
    """Choose between the two neighbors of one value, exactly."""
    (whole,) = struct.unpack("<I", struct.pack("<f", value))
    if math.isnan(value):
        return whole >> 16 | 0x40
    below = whole >> 16
    if math.isinf(value):
        return below

    def magnitude(half):
        # What follows the largest finite value counts as its next multiple, not as infinity.
        exponent, mantissa = half >> 7 & 0xFF, half & 0x7F
        return math.ldexp(mantissa + (128 if exponent else 0), max(exponent, 1) - 134)

    low, high = magnitude(below), magnitude(below + 1)
    up, down = high - abs(value), abs(value) - low
    return below + (up < down or (up == down and below & 1))


def float16_by_hand(value, whole):
    if math.isnan(value):
        return whole >> 16 & 0x8000 | 0x7E00 | whole >> 13 & 0x3FF
    try:
        return struct.unpack("<H", struct.pack("<e", value))[0]
    except OverflowError:
        return whole >> 16 & 0x8000 | 0x7C00


def sixteen_bits_up(value):
    fraction, exponent = math.frexp(value)
    return math.ldexp(math.ceil(fraction * 2**16), exponent - 16)


def int8_by_hand(x):
    scales, codes = b"", b""
    for start in range(0, len(x), BLOCK):
        block = x[start : start + BLOCK]
        if not all(map(math.isfinite, block.tolist())):
            scales += struct.pack("<I", 0x7FC00000)
            codes += bytes(len(block))
            continue
        peak = max(map(abs, block))
        scale = sixteen_bits_up(peak / np.float32(127)) if peak >= 2.0**-100 else 0.0
        scales += struct.pack("<f", scale)
        for value in block:
            code = round(float(value / np.float32(scale))) if scale else 0
            codes += struct.pack("<b", code)
    return scales + codes


class TestEncode:
    @given(vectors())
    @some
    def test_bfloat16_is_the_nearest_value_or_the_even_one_of_two(self, x):
        expected = [bfloat16_by_hand(value) for value in x.tolist()]
        # A signaling NaN does not survive a Python float.
        nan = np.isnan(x)
        assert (np.array(expected)[~nan] == encode(x, "bfloat16").view("<u2")[~nan]).all()
        quiet = [whole >> 16 | 0x40 for whole in bits(x[nan])]
        assert encode(x, "bfloat16").view("<u2")[nan].tolist() == quiet

    @given(vectors())
    @some
    def test_float16_is_what_the_standard_library_makes(self, x):
        expected = [float16_by_hand(*each) for each in zip(x.tolist(), bits(x), strict=True)]
        assert encode(x, "float16").view("<u2").tolist() == expected

    @pytest.mark.slow
    @given(st.integers(0, 2**32), st.sampled_from([0, 1, 255, 256, 257, 511, 512, 700]), vectors())
    @some
    def test_int8_has_a_scale_for_each_block(self, seed, size, odd):
        x = tame(seed, size)
        at = np.random.default_rng(seed).integers(0, max(size, 1), min(len(odd), size))
        x[at] = odd[: len(at)]
        assert encode(x, "int8").tobytes() == int8_by_hand(x)

    @given(st.integers(1, 300), st.integers(0, 2**32))
    @some
    def test_int8_of_tiny_values(self, units, seed):
        tiny = np.random.default_rng(seed).integers(-units, units + 1, 300)
        x = (tiny * 2.0**-149).astype(np.float32)
        assert encode(x, "int8").tobytes() == int8_by_hand(x)

    def test_golden_bytes(self):
        x = np.array([1.0, -2.5, 0.1, 65520.0, np.inf], np.float32)
        assert encode(x, "float32").tobytes() == struct.pack("<5f", *x.tolist())
        assert encode(x, "bfloat16").tobytes().hex() == "803f20c0cd3d8047807f"
        assert encode(x, "float16").tobytes().hex() == "003c00c1662e007c007c"
        assert encode(x[:3], "int8").tobytes().hex() == "0043a13c338105"
        assert encode(x, "int8").tobytes().hex() == "0000c07f0000000000"

    @pytest.mark.parametrize("wire", WIRES[1:])
    def test_bytes_are_new(self, wire):
        x = tame(1, 300)
        kept = x.copy()
        data = encode(x, wire)
        assert data.dtype == np.uint8
        assert data.shape == (wire_bytes(300, wire),)
        data[:] = 0
        assert bits(x) == bits(kept)


class TestDecode:
    @given(st.lists(st.integers(0, 2**16 - 1), max_size=40))
    @some
    def test_bfloat16_is_the_upper_half(self, halves):
        data = np.array(halves, "<u2").view(np.uint8)
        assert bits(decode(data, "bfloat16", len(halves))) == [half << 16 for half in halves]

    def test_float16_knows_every_value(self):
        halves = np.arange(2**16).astype("<u2")
        x = decode(halves.view(np.uint8), "float16", len(halves))
        nan = (halves & 0x7C00 == 0x7C00) & (halves & 0x3FF != 0)
        expected = [struct.unpack("<e", half.tobytes())[0] for half in halves[~nan]]
        assert bits(x[~nan]) == bits(np.array(expected, np.float32))
        upper = halves[nan].astype(np.uint32)
        assert (
            bits(x[nan]) == ((upper & 0x8000) << 16 | 0x7FC00000 | (upper & 0x3FF) << 13).tolist()
        )
        assert encode(x, "float16").view("<u2")[~nan].tolist() == halves[~nan].tolist()

    @given(st.integers(0, 600), st.integers(0, 2**32))
    @some
    def test_int8_is_a_product_whatever_the_bytes_are(self, size, seed):
        data = np.random.default_rng(seed).integers(0, 256, wire_bytes(size, "int8"), np.uint8)
        count = -(-size // BLOCK)
        scales = np.frombuffer(data.tobytes(), "<f4", count)
        codes = data[4 * count :].view(np.int8)
        with np.errstate(all="ignore"):
            expected = [np.float32(codes[p]) * scales[p // BLOCK] for p in range(size)]
        np.testing.assert_array_equal(decode(data, "int8", size), np.array(expected, np.float32))

    def test_float32_shares_memory_that_is_aligned(self):
        x = tame(2, 300)
        data = encode(x, "float32")
        assert np.shares_memory(data, x)
        assert np.shares_memory(decode(data, "float32", 300), x)
        odd = np.zeros(1201, np.uint8)[1:]
        odd[:] = data
        back = decode(odd, "float32", 300)
        assert back.flags.aligned
        assert bits(back) == bits(x)

    @given(vectors())
    @some
    def test_float32_keeps_every_bit(self, x):
        assert bits(decode(encode(x, "float32"), "float32", len(x))) == bits(x)

    @pytest.mark.parametrize("wire", WIRES[1:])
    def test_a_vector_is_new_and_its_bytes_may_lie_anywhere(self, wire):
        data = encode(tame(2, 300), wire)
        shifted = np.empty(len(data) + 1, np.uint8)[1:]
        shifted[:] = data
        x = decode(shifted, wire, 300)
        assert bits(x) == bits(decode(data, wire, 300))
        assert x.flags.writeable
        x[:] = 0
        assert shifted.tolist() == data.tolist()


@pytest.mark.parametrize(("wire", "bound"), [("bfloat16", 2.0**-8), ("float16", 2.0**-11)])
def test_what_is_lost_is_at_most_half_a_unit_of_each_value(wire, bound):
    x = tame(3, 5000)
    x = x[np.abs(x) > 2**-13]
    assert (np.abs(decode(encode(x, wire), wire, len(x)) - x) <= bound * np.abs(x)).all()


def test_what_int8_loses_is_at_most_half_a_unit_of_the_largest_of_a_block():
    x = tame(4, 5000)
    peak = np.maximum.reduceat(np.abs(x), np.arange(0, len(x), BLOCK)).repeat(BLOCK)[: len(x)]
    assert (np.abs(decode(encode(x, "int8"), "int8", len(x)) - x) <= peak / 253).all()


@pytest.mark.parametrize("wire", WIRES)
@given(st.integers(0, 2**32), st.sampled_from([0, 1, 255, 256, 257, 700]), vectors())
@some
def test_writing_what_was_read_gives_the_same_bytes(wire, seed, size, odd):
    x = tame(seed, size)
    at = np.random.default_rng(seed).integers(0, max(size, 1), min(len(odd), size))
    x[at] = odd[: len(at)]
    once = encode(x, wire)
    back = decode(once, wire, size)
    # The largest values of all overflow when they are rounded up, and infinity spoils its block.
    if wire != "int8" or not np.isinf(back).any():
        assert encode(back, wire).tobytes() == once.tobytes()
        assert bits(rounded(back, wire)) == bits(back)
        assert bits(rounded(x, wire)) == bits(back)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("wire", WIRES)
def test_no_wire_hides_a_value_that_is_not_finite(wire, bad):
    x = tame(5, 600)
    x[300] = bad
    assert not np.isfinite(decode(encode(x, wire), wire, 600)[300])


@pytest.mark.parametrize("wire", WIRES[1:])
def test_reading_takes_little_memory_whatever_came(wire):
    """A part of it at a time, beside the vector itself: all ones are NaN, the dearest there is."""
    length = 1_000_000
    data = np.full(wire_bytes(length, wire), 0xFF, np.uint8)
    tracemalloc.start()
    try:
        x = decode(data, wire, length)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert np.isnan(x).all()
    assert peak < x.nbytes + 4_000_000


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("length", [65_535, 65_536, 65_537, 131_073])
def test_long_vectors_are_read_like_short_ones(wire, length):
    x = tame(7, length)
    back = decode(encode(x, wire), wire, length)
    for start in range(0, length, BLOCK):
        part = x[start : start + BLOCK].copy()
        assert bits(back[start : start + BLOCK]) == bits(rounded(part, wire))


def test_an_unknown_wire_is_refused():
    x, data = np.ones(3, np.float32), np.zeros(6, np.uint8)
    for call in (
        lambda: check_wire("bf16"),
        lambda: rounded(x, "bf16"),
        lambda: encode(x, "bf16"),
        lambda: decode(data, "bf16", 3),
    ):
        with pytest.raises(ConfigurationError, match="no wire 'bf16'.* known: bfloat16, float16"):
            call()


@pytest.mark.parametrize("wire", WIRES)
def test_what_is_no_vector_is_refused(wire):
    for bad in (np.ones(3), np.ones(3, np.int32), [1.0, 2.0]):
        with pytest.raises(TypeError, match="float32|a vector is"):
            encode(bad, wire)
    for bad in (np.ones((2, 2), np.float32), np.ones(6, np.float32)[::2]):
        with pytest.raises(ValueError, match="contiguous"):
            encode(bad, wire)


@pytest.mark.parametrize("wire", WIRES)
def test_bytes_of_another_number_are_refused(wire):
    data = encode(tame(6, 300), wire)
    for bad in (data[:-1], np.append(data, data[:1]), data[:0]):
        with pytest.raises(ValueError, match=f"300 values as {wire} take"):
            decode(bad, wire, 300)
    with pytest.raises(TypeError, match="uint8"):
        decode(data.view(np.int8), wire, 300)
    with pytest.raises(ValueError, match="contiguous"):
        decode(np.repeat(data, 2)[::2], wire, 300)
