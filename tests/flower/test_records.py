"""Records: what Flower carries becomes bytes and numpy arrays, and comes back as it was."""

import copy

import numpy as np
import pytest
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Error,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from hypothesis import given
from hypothesis import strategies as st

from flwr_decentral.core import AlgorithmError, ConfigurationError
from flwr_decentral.core.layout import Layout
from flwr_decentral.flower.grid import GridMeter
from flwr_decentral.flower.records import (
    array_bytes,
    decode,
    encode,
    message_for,
    model_record,
    take_arrays,
    to_numpy,
    to_record,
)

INTS = st.integers(-(2**63), 2**63 - 1)
FLOATS = st.floats(width=64)  # NaN, infinities and -0.0 included
TEXTS = st.text(max_size=8)
BYTES = st.binary(max_size=8)
KEYS = st.text(max_size=5)


def lists(*kinds):
    return st.one_of([st.lists(kind, max_size=4) for kind in kinds])


METRICS = st.one_of(INTS, FLOATS, lists(INTS, FLOATS))
CONFIGS = st.one_of(
    INTS, FLOATS, TEXTS, BYTES, st.booleans(), lists(INTS, FLOATS, TEXTS, BYTES, st.booleans())
)
ARRAYS = st.builds(
    Array,
    dtype=st.sampled_from(["float32", "int64", "bfloat16"]),
    shape=st.lists(st.integers(0, 3), max_size=3).map(tuple),
    stype=st.sampled_from(["numpy.ndarray", "torch.tensor"]),
    data=st.binary(max_size=20),
)
RECORDS = st.dictionaries(
    KEYS,
    st.one_of(
        st.dictionaries(KEYS, METRICS, max_size=4).map(MetricRecord),
        st.dictionaries(KEYS, CONFIGS, max_size=4).map(ConfigRecord),
        st.dictionaries(KEYS, ARRAYS, max_size=3).map(ArrayRecord),
    ),
    max_size=4,
).map(RecordDict)


def spelled(value):
    """Spell a value out so that 1, 1.0 and True differ, and NaN equals itself."""
    if isinstance(value, list):
        return [spelled(item) for item in value]
    if isinstance(value, Array):
        return (value.dtype, value.shape, value.stype, value.data)
    return (type(value).__name__, repr(value))


def listing(records: RecordDict):
    return [
        (name, type(record).__name__, [(key, spelled(value)) for key, value in record.items()])
        for name, record in records.items()
    ]


@pytest.mark.slow
@given(RECORDS)
def test_every_value_comes_back_in_its_place_and_with_its_type(records):
    assert listing(decode(encode(records))) == listing(records)


def test_nothing_is_no_bytes():
    assert encode(RecordDict()) == b""
    assert listing(decode(b"")) == []
    assert encode(RecordDict({"empty": MetricRecord()})) != b""


def test_a_scalar_stays_a_scalar_and_a_view_is_laid_out():
    view = np.arange(6, dtype=np.float32).reshape(2, 3).T
    record = to_record({"scalar": np.float32(1.5), "count": np.array(3), "view": view})
    assert [array.shape for array in record.values()] == [(), (), (3, 2)]
    back = to_numpy(record)
    assert back["scalar"] == np.float32(1.5)
    assert back["count"].dtype == np.int64
    assert (back["view"] == view).all()


def test_an_array_that_numpy_has_not_serialized_is_refused_by_name():
    array = Array(dtype="float32", shape=(1,), stype="torch.tensor", data=b"1234")
    with pytest.raises(ConfigurationError, match=r"'odd' is serialized as 'torch\.tensor'"):
        to_numpy(ArrayRecord({"odd": array}))


# --- the model in a reply -------------------------------------------------------------------------


def model(value: float) -> ArrayRecord:
    return to_record({"w": np.array([value], np.float32)})


def test_the_model_is_taken_by_its_name_and_no_array_is_left():
    content = RecordDict({"other": model(1), "mine": model(2), "metrics": MetricRecord()})
    assert to_numpy(take_arrays(content, "mine"))["w"] == 2
    assert list(content) == ["metrics"]


def test_the_only_model_is_taken_whatever_its_name():
    content = RecordDict({"metrics": MetricRecord(), "other": model(1)})
    assert to_numpy(take_arrays(content, "mine"))["w"] == 1
    assert list(content) == ["metrics"]


@pytest.mark.parametrize(
    ("content", "returned"),
    [
        ({}, "no records"),
        ({"metrics": MetricRecord()}, r"\['metrics'\]"),
        ({"b": model(1), "a": model(2)}, r"\['a', 'b'\]"),
    ],
)
def test_a_reply_whose_model_is_not_clear_is_refused(content, returned):
    with pytest.raises(AlgorithmError, match=f"one ArrayRecord named 'mine'.*{returned}"):
        take_arrays(RecordDict(content), "mine")


# --- the layout -----------------------------------------------------------------------------------


def test_a_layout_comes_back_with_its_frozen_values():
    tensors = {
        "w": np.ones((2, 3), np.float32),
        "half": np.ones(3, np.float16),
        "scale": np.array(2, np.float32),
        "bn.running_mean": np.zeros(2, np.float32),
        "steps": np.array(4),
        "embedding": np.arange(5, dtype=np.float32),
    }
    layout = Layout.of(tensors, frozen=["embed*"])
    back = Layout.unpack(layout.pack())
    assert back == layout
    assert back.hash == layout.hash
    restored = to_numpy(model_record(back, *layout.flatten(tensors)))
    assert list(restored) == list(tensors)
    for name, value in tensors.items():
        assert restored[name].shape == value.shape
        assert restored[name].tobytes() == value.tobytes()


# --- messages -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("identity")
def test_a_message_for_another_node_keeps_all_but_the_address():
    like = Message(RecordDict(), 12, MessageType.TRAIN, ttl=60.0, group_id="3")
    message = message_for(like, 34, "name", RecordDict({"m": MetricRecord({"a": 1})}))
    metadata = dict(vars(message.metadata))
    assert metadata.pop("_dst_node_id") == 34
    assert metadata.pop("_message_id") == "name"
    assert metadata.items() <= vars(like.metadata).items()
    assert message.content["m"]["a"] == 1
    reply = Message(RecordDict(), reply_to=message)
    assert reply.metadata.src_node_id == 34
    assert reply.metadata.reply_to_message_id == "name"


@pytest.mark.usefixtures("identity")
def test_array_bytes_are_counted_in_all_records_of_all_messages():
    two = RecordDict({"a": model(1), "m": MetricRecord({"x": 1}), "b": model(2)})
    message = Message(two, 1, MessageType.TRAIN)
    failed = Message(Error(code=1, reason="?"), reply_to=message)
    one = sum(len(array.data) for array in model(1).values())
    assert array_bytes([message, failed, message]) == 4 * one
    assert array_bytes([failed]) == 0


@pytest.mark.usefixtures("identity")
def test_the_meter_counts_what_goes_out_and_what_comes_in():
    message = Message(RecordDict({"a": model(1)}), 1, MessageType.TRAIN)
    reply = Message(RecordDict({"a": model(1), "b": model(2)}), reply_to=message)

    class FakeGrid:
        def push_messages(self, messages):
            return ["id" for _ in messages]

        def pull_messages(self, ids):
            return [reply for _ in ids]

    one = array_bytes([message])
    meter = GridMeter(FakeGrid())
    assert meter.push(message) == "id"
    assert meter.array_bytes == one > 0
    assert meter.pull(["id"]) == [reply]
    assert meter.array_bytes == 3 * one


VALUES = np.arange(6, dtype=np.float16).reshape(2, 3)
FIELDS = ("dtype", "shape", "stype", "data")


def lazy(values):
    layout = Layout.of({"w": values})
    return model_record(layout, *layout.flatten({"w": values}))["w"]


def fields_of(array):
    return {name: getattr(array, name) for name in FIELDS}


def test_an_array_of_the_model_looks_like_flowers_own():
    array, own = lazy(VALUES), Array(VALUES)
    assert fields_of(array) == fields_of(own)
    assert array == own
    assert own == array
    assert array != Array(VALUES + 1)
    assert array != "array"
    assert Array(**fields_of(array)).numpy().tolist() == VALUES.tolist()
    with pytest.raises(AttributeError, match="ModelArray.*nothing"):
        _ = array.nothing


def test_an_array_of_the_model_gives_out_copies():
    array = lazy(VALUES)
    for _ in range(2):
        array.numpy()[:] = 9
    assert array.numpy().tolist() == VALUES.tolist()


def test_an_array_of_the_model_takes_other_bytes():
    array = lazy(VALUES)
    array.data = Array(VALUES + 1).data
    assert array.numpy().tolist() == (VALUES + 1).tolist()


@pytest.mark.parametrize("carry", [copy.copy, copy.deepcopy])
def test_an_array_of_the_model_leaves_as_flowers_own(carry):
    carried = carry(lazy(VALUES))
    assert type(carried) is Array
    assert carried == Array(VALUES)
