from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from flwr_decentral.core import AlgorithmError, ConfigurationError, Layout
from flwr_decentral.core.layout import PRIVATE_BY_DEFAULT


def model_of_every_kind():
    rng = np.random.default_rng(0)
    return {
        "conv.weight": rng.normal(size=(3, 2, 5)).astype(np.float32),
        "conv.bias": rng.normal(size=3).astype(np.float16),
        "bn.running_mean": rng.normal(size=3).astype(np.float32),
        "bn.num_batches_tracked": np.array(7),
        "scale": np.array(2.5, np.float32),
        "nothing": np.empty((0, 4), np.float32),
        "mask": np.array([True, False]),
        "embedding": rng.normal(size=(2, 2)).astype(np.float32),
        "wide": rng.normal(size=4),
    }


def assert_same(model, other):
    assert list(model) == list(other)
    for name, value in model.items():
        assert other[name].shape == value.shape, name
        assert other[name].dtype == value.dtype, name
        assert other[name].tobytes() == value.tobytes(), name


def round_trip(model, **options):
    layout = Layout.of(model, **options)
    return layout.unflatten(*layout.flatten(model))


# Round trips


def test_a_model_of_every_kind_comes_back_bit_for_bit():
    model = model_of_every_kind()
    model["wide"] = model["wide"].astype(np.float32).astype(np.float64)
    assert_same(model, round_trip(model, frozen=["embedding"]))


def tensors(dtype):
    shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
    numbers = {"allow_nan": False} if np.dtype(dtype).kind == "f" else None
    return hnp.arrays(dtype, shapes, elements=numbers)


@given(
    st.lists(
        st.sampled_from([np.float16, np.float32, np.int64, np.uint8, np.bool_]).flatmap(tensors),
        max_size=6,
    ),
    st.sets(st.integers(0, 5)),
    st.sets(st.integers(0, 5)),
)
@settings(max_examples=60, deadline=None)
def test_any_model_comes_back_bit_for_bit(drawn, private, frozen):
    model = {"first": np.ones(2, np.float32)}
    model.update({f"layer.{i}": tensor for i, tensor in enumerate(drawn)})
    options = {
        role: [f"layer.{i}" for i in chosen if i < len(drawn)]
        for role, chosen in (("private", private), ("frozen", frozen))
    }
    assert_same(model, round_trip(model, **options))


def test_the_roles_of_the_tensors():
    layout = Layout.of(model_of_every_kind(), frozen=["embedding"])
    roles = {tensor.name: tensor.role for tensor in layout.tensors}
    assert roles == {
        "conv.weight": "shared",
        "conv.bias": "shared",
        "bn.running_mean": "private",
        "bn.num_batches_tracked": "private",
        "scale": "shared",
        "nothing": "shared",
        "mask": "private",
        "embedding": "frozen",
        "wide": "shared",
    }
    assert layout.size == 30 + 3 + 1 + 0 + 4
    assert layout.private_bytes == 3 * 4 + 8 + 2
    assert layout.rounded == ("wide",)


def test_shared_tensors_lie_in_the_models_order_in_c_order():
    model = {
        "b": np.array([[1, 2], [3, 4]], np.float32, order="F"),
        "i": np.array([9]),
        "a": np.array(5, np.float32),
    }
    vector, private = Layout.of(model).flatten(model)
    assert vector.dtype == np.float32
    assert vector.tolist() == [1, 2, 3, 4, 5]
    assert private.tobytes() == model["i"].tobytes()


def test_flatten_writes_where_it_is_told():
    model = {"w": np.arange(3, dtype=np.float32), "i": np.array([1, 2], np.uint8)}
    layout = Layout.of(model)
    out, private_out = np.zeros(3, np.float32), np.zeros(2, np.uint8)
    vector, private = layout.flatten(model, out, private_out)
    assert vector is out
    assert private is private_out
    assert out.tolist() == [0, 1, 2]
    assert private_out.tolist() == [1, 2]


def test_unflatten_makes_new_writable_arrays():
    model = model_of_every_kind()
    layout = Layout.of(model, frozen=["embedding"])
    vector, private = layout.flatten(model)
    kept = vector.copy(), private.copy()
    again = layout.unflatten(vector, private)
    for value in again.values():
        value[...] = 0
    np.testing.assert_array_equal(vector, kept[0])
    np.testing.assert_array_equal(private, kept[1])
    np.testing.assert_array_equal(
        layout.unflatten(vector, private)["embedding"], model["embedding"]
    )


def test_a_strided_tensor_is_read_in_its_own_order():
    base = np.arange(12, dtype=np.float32).reshape(3, 4)
    model = {"w": base[:, ::2].T, "i": np.arange(6)[::-2]}
    vector, private = Layout.of(model).flatten(model)
    assert vector.tolist() == [0, 4, 8, 2, 6, 10]
    assert private.view(np.int64).tolist() == [5, 3, 1]


# Precision


def test_float64_is_rounded_to_float32_and_said_so():
    model = {"w": np.array([1 / 3, 1.0])}
    layout = Layout.of(model)
    assert layout.rounded == ("w",)
    again = layout.unflatten(*layout.flatten(model))["w"]
    assert again.dtype == np.float64
    assert again.tolist() == [float(np.float32(1 / 3)), 1.0]


def test_a_private_float64_is_not_rounded():
    model = {"w": np.ones(1, np.float32), "own": np.array([1 / 3])}
    layout = Layout.of(model, private=["own"])
    assert layout.rounded == ()
    assert layout.unflatten(*layout.flatten(model))["own"].tolist() == [1 / 3]


def test_every_float16_survives():
    bits = np.arange(2**16, dtype=np.uint16)
    model = {"w": bits.view(np.float16)[np.isfinite(bits.view(np.float16))]}
    assert_same(model, round_trip(model))
    special = {"w": np.array([np.inf, -np.inf, np.nan, -0.0], np.float16)}
    np.testing.assert_array_equal(round_trip(special)["w"], special["w"])
    assert np.signbit(round_trip(special)["w"][3])


def test_averages_go_back_to_float16_by_rounding_to_even():
    layout = Layout.of({"w": np.zeros(4, np.float16)})
    ulp = 2.0**-10
    values = np.array([1 + ulp / 2, 1 + 3 * ulp / 2, 2.0**-24, 2.0**-26], np.float32)
    expected = [1.0, 1 + 2 * ulp, 2.0**-24, 0.0]
    assert layout.unflatten(values)["w"].tolist() == expected


def bfloat16_value(bits):
    return Fraction(float((np.array([bits], np.uint32) << np.uint32(16)).view(np.float32)[0]))


def nearest_bfloat16(value):
    """Round a float32 to bfloat16 bits by comparing exact distances, ties to even."""
    bits = int(np.float32(value).view(np.uint32))
    sign, magnitude = bits >> 31 << 15, bits & 0x7FFFFFFF
    if magnitude > 0x7F800000:
        return sign | magnitude >> 16 | 0x40
    if magnitude == 0x7F800000:
        return sign | 0x7F80
    below = magnitude >> 16
    exact = Fraction(abs(float(value)))
    # The value after the last finite one counts as 2**128 in rounding.
    above = Fraction(2**128) if below + 1 == 0x7F80 else bfloat16_value(below + 1)
    down, up = exact - bfloat16_value(below), above - exact
    return sign | (below if down < up or (down == up and below % 2 == 0) else below + 1)


def to_bfloat16(values):
    layout = Layout.of({"w": np.zeros(len(values), np.uint16)}, dtypes={"w": "bfloat16"})
    return layout.unflatten(np.asarray(values, np.float32))["w"]


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=30))
@settings(max_examples=80, deadline=None)
def test_bfloat16_rounds_to_the_nearest_ties_to_even(patterns):
    # Patterns just at, below and above the middle of two neighbors are drawn as well.
    near = [pattern & 0xFFFF0000 | low for pattern in patterns for low in (0x7FFF, 0x8000, 0x8001)]
    values = np.array(patterns + near, np.uint32).view(np.float32)
    assert to_bfloat16(values).tolist() == [nearest_bfloat16(value) for value in values]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (0x3F808000, 0x3F80),  # a tie, down to even
        (0x3F818000, 0x3F82),  # a tie, up to even
        (0x00008000, 0x0000),  # half the smallest subnormal
        (0x00008001, 0x0001),
        (0x00018000, 0x0002),
        (0x80000001, 0x8000),  # a negative number becomes minus zero
        (0x007F8000, 0x0080),  # the largest subnormals round up to a normal number
        (0x7F7FFFFF, 0x7F80),  # the largest float32 overflows to infinity
        (0x7F800000, 0x7F80),
        (0xFF800000, 0xFF80),
        (0x7F800001, 0x7FC0),  # not to infinity: what is left of a NaN is made quiet
        (0xFFFFFFFF, 0xFFFF),
    ],
)
def test_bfloat16_corner_cases(pattern, expected):
    value = np.array([pattern], np.uint32).view(np.float32)
    assert to_bfloat16(value).tolist() == [expected]


def test_every_bfloat16_comes_back():
    bits = np.arange(2**16, dtype=np.uint16)
    back = round_trip_bfloat16(bits)
    nan = (bits & 0x7F80 == 0x7F80) & (bits & 0x7F != 0)
    np.testing.assert_array_equal(back[~nan], bits[~nan])
    np.testing.assert_array_equal(back[nan], bits[nan] | 0x40)


def round_trip_bfloat16(bits):
    return round_trip({"w": bits}, dtypes={"w": "bfloat16"})["w"]


def test_bfloat16_is_averaged_as_a_number_and_uint16_is_private():
    bits = np.array([0x3F80, 0xC000], np.uint16)
    layout = Layout.of({"w": bits, "n": bits}, dtypes={"w": "bfloat16"})
    vector, private = layout.flatten({"w": bits, "n": bits})
    assert vector.tolist() == [1.0, -2.0]
    assert private.tobytes() == bits.tobytes()


# Patterns


def test_running_statistics_are_private_unless_asked_for():
    model = {"w": np.ones(2, np.float32), "bn.running_var": np.ones(3, np.float32)}
    assert Layout.of(model).size == 2
    assert Layout.of(model, private=()).size == 5
    assert Layout.of(model, private=["w"]).size == 3


def test_integers_are_private_whatever_the_patterns():
    model = {"w": np.ones(2, np.float32), "n": np.array(3)}
    assert [tensor.role for tensor in Layout.of(model, private=()).tensors] == ["shared", "private"]


def test_frozen_wins_over_private():
    model = {"w": np.ones(2, np.float32), "f": np.ones(2, np.float32)}
    layout = Layout.of(model, private=["f"], frozen=["f"])
    assert layout.tensors[1].role == "frozen"


@pytest.mark.parametrize("role", ["private", "frozen"])
def test_a_pattern_that_matches_nothing_is_refused(role):
    with pytest.raises(ConfigurationError, match=rf"{role} pattern 'head\.\*' matches no .* are w"):
        Layout.of({"w": np.ones(2, np.float32)}, **{role: ["w", "head.*"]})


def test_the_default_patterns_may_match_nothing():
    assert Layout.of({"w": np.ones(2, np.float32)}, private=PRIVATE_BY_DEFAULT).size == 2


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ({}, {}, r"no tensor to share: each of \(none\)"),
        ({"n": np.array(3)}, {}, "no tensor to share: each of n is an integer"),
        ({"w": np.ones(2, np.float32)}, {"private": ["*"]}, "no tensor to share"),
        ({"w": np.ones(0, np.float32)}, {}, "no tensor to share"),
        ({"c": np.ones(2, np.complex64)}, {}, "'c' has dtype complex64, which cannot be averaged"),
        ({"o": np.array([None])}, {"private": ["o"]}, "'o' holds object, which is no number"),
        ({"s": np.array(["a"])}, {"private": ["s"]}, "'s' holds <U1, which is no number"),
        ({"w": np.ones(2, ">f4")}, {}, "'w' is declared float32 but holds >f4"),
        (
            {"w": np.ones(2, np.float32)},
            {"dtypes": {"v": "bfloat16"}},
            "dtypes names 'v'; known: w",
        ),
        (
            {"w": np.ones(2, np.float32)},
            {"dtypes": {"w": "bfloat16"}},
            "'w' is declared bfloat16 but holds float32",
        ),
        (
            {"w": np.ones(2, np.float32)},
            {"dtypes": {"w": "float7"}},
            "'w' is declared float7 but holds float32",
        ),
    ],
)
def test_a_model_that_cannot_be_laid_out_is_refused(model, options, message):
    with pytest.raises(ConfigurationError, match=message):
        Layout.of(model, **options)


# Models that change


def test_a_frozen_tensor_that_changed_is_named():
    model = {"w": np.ones(2, np.float32), "f": np.ones(2, np.float32)}
    layout = Layout.of(model, frozen=["f"])
    layout.flatten({**model, "w": np.zeros(2, np.float32)})
    with pytest.raises(AlgorithmError, match="'f' is declared frozen, but training changed it"):
        layout.flatten({**model, "f": np.array([1, 1 + 2e-7], np.float32)})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.ones((3, 2), np.float32), r"'w' changed from \(2, 3\) float32 to \(3, 2\) float32"),
        (np.ones(6, np.float32), r"to \(6,\) float32"),
        (np.ones((2, 3)), r"to \(2, 3\) float64"),
        (np.ones((2, 3), np.float16), r"to \(2, 3\) float16"),
        (np.array(1, np.float32), r"to \(\) float32"),
    ],
)
def test_a_tensor_that_changed_its_shape_or_dtype_is_named(value, message):
    model = {"v": np.ones(1, np.float32), "w": np.ones((2, 3), np.float32)}
    layout = Layout.of(model)
    with pytest.raises(AlgorithmError, match=message):
        layout.flatten({**model, "w": value})


def test_a_scalar_is_not_a_vector_of_one():
    layout = Layout.of({"w": np.array(1, np.float32)})
    with pytest.raises(AlgorithmError, match=r"'w' changed from \(\) float32 to \(1,\)"):
        layout.flatten({"w": np.ones(1, np.float32)})


def test_tensors_that_appear_or_disappear_are_named():
    layout = Layout.of({"w": np.ones(1, np.float32), "v": np.ones(1, np.float32)})
    with pytest.raises(AlgorithmError, match=r"missing \['v'\], new \['u'\]"):
        layout.flatten({"w": np.ones(1, np.float32), "u": np.ones(1, np.float32)})


@pytest.mark.parametrize(("shared", "private"), [(1, 8), (3, 8), (2, 0), (2, 9)])
def test_vectors_of_the_wrong_length_do_not_become_a_model(shared, private):
    layout = Layout.of({"w": np.ones(2, np.float32), "n": np.array(1)})
    with pytest.raises(AlgorithmError, match="2 shared scalars and 8 private bytes, got"):
        layout.unflatten(np.ones(shared, np.float32), np.zeros(private, np.uint8))


def test_private_bytes_may_be_left_out_only_where_there_are_none():
    assert Layout.of({"w": np.ones(2, np.float32)}).unflatten(np.ones(2, np.float32))
    layout = Layout.of({"w": np.ones(2, np.float32), "n": np.array(1)})
    with pytest.raises(AlgorithmError, match="got 2 and 0"):
        layout.unflatten(np.ones(2, np.float32))


# The hash


def test_the_hash_identifies_everything_but_the_values_that_move():
    base = {"w": np.ones((2, 3), np.float32), "v": np.ones(4, np.float32)}
    layouts = [
        Layout.of(base),
        Layout.of({"v": base["v"], "w": base["w"]}),
        Layout.of({"w2": base["w"], "v": base["v"]}),
        Layout.of({**base, "w": np.ones((3, 2), np.float32)}),
        Layout.of({**base, "w": np.ones(6, np.float32)}),
        Layout.of({**base, "w": np.ones((2, 3), np.float16)}),
        Layout.of({**base, "u": np.array(1)}),
        Layout.of(base, private=["v"]),
        Layout.of(base, frozen=["v"]),
        Layout.of({**base, "v": np.zeros(4, np.float32)}, frozen=["v"]),
        Layout.of({**base, "v": np.ones(4, np.uint16)}),
        Layout.of({**base, "v": np.ones(4, np.uint16)}, dtypes={"v": "bfloat16"}),
    ]
    assert len({layout.hash for layout in layouts}) == len(layouts)
    assert len(set(layouts)) == len(layouts)
    other_values = Layout.of({name: value * 7 for name, value in base.items()})
    assert other_values.hash == layouts[0].hash
    assert other_values == layouts[0]
    assert len(layouts[0].hash) == 32
    assert int(layouts[0].hash, 16)


def test_the_golden_hash():
    layout = Layout.of(
        {"w": np.ones((2, 3), np.float32), "f": np.ones(2, np.float16), "n": np.array(1)},
        frozen=["f"],
    )
    assert layout.hash == "0fbf44cae4bdc22158176c52f2540cd7"
