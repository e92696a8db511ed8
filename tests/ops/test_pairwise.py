"""What every backend must do for exchanges of two nodes, bit for bit."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flwr_decentral.core import ConfigurationError
from flwr_decentral.ops import available, choose

some = settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.differing_executors]
)
weights = st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(0, 10))
seeds = st.integers(0, 2**32)


@pytest.fixture(scope="module", params=sorted(available()))
def ops(request):
    try:
        return choose(request.param)
    except ConfigurationError as error:
        pytest.skip(str(error))


def vector(*values):
    return np.array(values, np.float32)


def draw(seed, count, size=33):
    rng = np.random.default_rng(seed)
    return list(rng.normal(size=(count, size)).astype(np.float32) * 10.0 ** rng.integers(-3, 4))


def float32s(arrays):
    return [np.asarray(array, np.float32) for array in arrays]


def bits(array):
    assert array.dtype == np.float32
    return array.view(np.uint32).tolist()


class TestPairwise:
    @given(seeds, weights)
    @some
    def test_bit_for_bit_the_loop_over_single_coordinates(self, ops, seed, weight):
        x, mine, theirs = float32s(draw(seed, 3))
        kept = [each.copy() for each in (x, mine, theirs)]
        moved = ops.pairwise(x, mine, theirs, weight)
        expected = [x[p] + np.float32(weight) * (theirs[p] - mine[p]) for p in range(len(x))]
        assert bits(moved) == bits(np.array(expected, np.float32))
        assert moved is not x
        for array, copy in zip((x, mine, theirs), kept, strict=True):
            assert bits(array) == bits(copy)

    @given(seeds, weights)
    @some
    def test_the_two_ends_move_by_exact_opposites(self, ops, seed, weight):
        mine, theirs = float32s(draw(seed, 2))
        here = ops.pairwise(np.zeros_like(mine), mine, theirs, weight)
        there = ops.pairwise(np.zeros_like(mine), theirs, mine, weight)
        np.testing.assert_array_equal(here, -there)

    @given(seeds, weights)
    @some
    def test_equal_models_stay_as_they_are(self, ops, seed, weight):
        x, same = float32s(draw(seed, 2))
        np.testing.assert_array_equal(ops.pairwise(x, same, same.copy(), weight), x)

    def test_half_is_the_middle(self, ops):
        x, y = vector(1, 2), vector(5, -2)
        assert ops.pairwise(x, x, y, 0.5).tolist() == [3, 0]

    def test_a_fused_multiply_add_is_told_apart(self, ops):
        a = np.float32(1 + 2**-12)
        assert ops.pairwise(vector(-1), vector(0), vector(a), float(a)).tolist() == [2.0**-11]

    def test_a_weight_is_rounded_before_it_is_used(self, ops):
        moved = ops.pairwise(vector(0), vector(0), vector(3), 1 / 3)
        assert moved == np.float32(3) * np.float32(1 / 3)

    @pytest.mark.parametrize("lengths", [(3, 4, 4), (4, 3, 4), (4, 4, 3), (1, 4, 4), (4, 1, 4)])
    def test_wrong_lengths_are_refused(self, ops, lengths):
        with pytest.raises(ValueError):
            ops.pairwise(*(np.ones(length, np.float32) for length in lengths), 0.5)


class TestMix:
    @given(seeds, st.floats(0, 0.5))
    @some
    def test_bit_for_bit_the_loop_over_single_coordinates(self, ops, seed, share):
        x, y = float32s(draw(seed, 2))
        kept = x.copy(), y.copy()
        mixed, rest = ops.mix(x, y, share)
        steps = [np.float32(share) * (y[p] - x[p]) for p in range(len(x))]
        assert bits(mixed) == bits(np.array([a + d for a, d in zip(x, steps, strict=True)]))
        assert bits(rest) == bits(np.array([b - d for b, d in zip(y, steps, strict=True)]))
        assert (bits(x), bits(y)) == (bits(kept[0]), bits(kept[1]))
        assert len({id(each) for each in (x, y, mixed, rest)}) == 4

    @given(seeds, st.floats(0, 0.5))
    @some
    def test_the_sum_stays(self, ops, seed, share):
        x, y = float32s(draw(seed, 2))
        mixed, rest = (each.astype(np.float64) for each in ops.mix(x, y, share))
        largest = np.maximum(np.abs(x), np.abs(y))
        assert (np.abs((mixed + rest) - (x.astype(np.float64) + y)) <= 2**-23 * largest).all()

    @given(seeds, st.floats(0, 0.5))
    @some
    def test_equal_vectors_stay_as_they_are(self, ops, seed, share):
        (x,) = float32s(draw(seed, 1))
        for each in ops.mix(x, x.copy(), share):
            np.testing.assert_array_equal(each, x)

    def test_nothing_and_half(self, ops):
        x, y = vector(1, 2), vector(5, -2)
        assert [each.tolist() for each in ops.mix(x, y, 0.0)] == [[1, 2], [5, -2]]
        assert [each.tolist() for each in ops.mix(x, y, 0.5)] == [[3, 0], [3, 0]]

    def test_a_fused_multiply_add_is_told_apart(self, ops):
        a = np.float32(1 + 2**-12)
        # With x = -1 the difference is a, times a is 1 + 2^-11 after rounding.
        x, y = vector(-1), vector(np.float32(a - 1))
        mixed, rest = ops.mix(x, y, float(a))
        assert mixed.tolist() == [2.0**-11]
        assert rest == y - np.float32(a * a)

    @pytest.mark.parametrize("lengths", [(3, 4), (4, 3), (1, 4), (4, 1)])
    def test_wrong_lengths_are_refused(self, ops, lengths):
        with pytest.raises(ValueError):
            ops.mix(*(np.ones(length, np.float32) for length in lengths), 0.5)
