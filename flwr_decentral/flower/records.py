"""Between Flower's records and ours.

Flower carries a model as an ``ArrayRecord`` (named arrays, each serialized by itself) and
everything else as metric and config records. Here they become numpy arrays and bytes, and back. No
pickle: :func:`encode` writes a JSON description followed by the raw bytes.
"""

from __future__ import annotations

import base64
import io
import json
import struct
from collections.abc import Iterable, Mapping
from functools import lru_cache
from math import prod
from typing import Any, Final

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, Metadata, MetricRecord, RecordDict
from numpy.typing import NDArray

from flwr_decentral.core import AlgorithmError, ConfigurationError, Vector
from flwr_decentral.core.layout import Layout

_STYPE: Final = "numpy.ndarray"
_NPY_1_0: Final = b"\x93NUMPY\x01\x00"
_LENGTH: Final = struct.Struct("<Q")
_KINDS: Final[Mapping[str, type]] = {
    "arrays": ArrayRecord,
    "metrics": MetricRecord,
    "config": ConfigRecord,
}


def to_numpy(record: ArrayRecord) -> dict[str, NDArray[Any]]:
    """Deserialize every array of a record, without copying where that can be.

    Raises
    ------
    ConfigurationError
        If an array was not serialized by numpy.
    """
    arrays = {}
    for name, array in record.items():
        if array.stype != _STYPE:
            raise ConfigurationError(
                f"array {name!r} is serialized as {array.stype!r}; only {_STYPE!r} can be read"
            )
        arrays[name] = _load(array)
    return arrays


def _load(array: Array) -> NDArray[Any]:
    """Read what ``numpy.save`` wrote, a header seen before at the price of a look-up."""
    data = array.data
    end = 10 + int.from_bytes(data[8:10], "little")
    if data[:8] != _NPY_1_0:
        return array.numpy()
    shape, plain, dtype = _read_header(data[:end])
    if not plain:
        return array.numpy()
    return np.frombuffer(data, dtype, prod(shape), end).reshape(shape)


@lru_cache(maxsize=4096)
def _read_header(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    stream = io.BytesIO(header)
    np.lib.format.read_magic(stream)
    shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(stream)
    return shape, not fortran_order and not dtype.hasobject, dtype


def to_record(model: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    """Serialize named arrays into a record, as ``numpy.save`` would."""
    return ArrayRecord({name: _dump(value) for name, value in model.items()})


def _dump(value: NDArray[Any]) -> Array:
    header = _write_header(value.dtype, value.shape)
    data = header + value.tobytes()
    return Array(dtype=_dtype_name(value.dtype), shape=value.shape, stype=_STYPE, data=data)


_dtype_name = lru_cache(maxsize=64)(str)


@lru_cache(maxsize=4096)
def _write_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    stream = io.BytesIO()
    description = {
        "descr": np.lib.format.dtype_to_descr(dtype),
        "fortran_order": False,
        "shape": shape,
    }
    np.lib.format.write_array_header_1_0(stream, description)
    return stream.getvalue()


class ModelArray(Array):
    """An array that is serialized only if somebody asks for its bytes.

    User functions ask for numpy arrays or torch tensors, and get a copy each time, as from Flower's
    own arrays. Pickled, or copied, it is one of Flower's own.

    Parameters
    ----------
    values : ndarray
        The values. They are kept, and must not change.
    """

    def __init__(self, values: NDArray[Any]) -> None:
        # Flower's own __init__ checks types that are known here.
        fields = {"dtype": _dtype_name(values.dtype), "shape": values.shape, "stype": _STYPE}
        self.__dict__.update(fields, _values=values)

    def numpy(self) -> NDArray[Any]:
        """Return a copy of the values."""
        values: NDArray[Any] | None = self.__dict__.get("_values")
        return super().numpy() if values is None else values.copy()

    def __getattr__(self, name: str) -> Any:
        # Called for what is not there: the bytes, as long as nobody has asked for them.
        values = self.__dict__.get("_values")
        if name != "data" or values is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self.__dict__["data"] = _dump(values).data
        return self.__dict__["data"]

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "data":
            self.__dict__.pop("_values", None)
        super().__setattr__(name, value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Array):
            return NotImplemented
        mine, theirs = (
            (array.dtype, array.shape, array.stype, array.data) for array in (self, other)
        )
        return mine == theirs

    __hash__ = None  # type: ignore[assignment] # like Flower's

    def __reduce__(self) -> tuple[Any, ...]:
        return Array, (self.dtype, self.shape, self.stype, self.data)


def model_record(layout: Layout, vector: Vector, private: NDArray[np.uint8]) -> ArrayRecord:
    """Make the ArrayRecord that a user's function gets from a flat vector and private bytes."""
    record = ArrayRecord()  # which would copy arrays that it is made of
    for name, values in layout.unflatten(vector, private).items():
        record[name] = ModelArray(values)
    return record


def take_arrays(content: RecordDict, key: str) -> ArrayRecord:
    """Remove the model from a reply and return it.

    Raises
    ------
    AlgorithmError
        If there is none, or it is not clear which it is.
    """
    records = content.array_records
    if key not in records and len(records) != 1:
        raise AlgorithmError(
            f"the train function must return its model as one ArrayRecord named {key!r}; it "
            f"returned {sorted(content) or 'no records'}"
        )
    name = key if key in records else next(iter(records))
    arrays = records[name]
    for other in list(records):
        del content[other]
    return arrays


def array_bytes(messages: Iterable[Message]) -> int:
    """Count the bytes of all arrays in messages."""
    return sum(
        len(array.data)
        for message in messages
        if message.has_content()
        for record in message.content.array_records.values()
        for array in record.values()
    )


def encode(records: RecordDict) -> bytes:
    """Write records as bytes; nothing for no records.

    The order of records and of their keys, and the types of all values, come back from
    :func:`decode`.
    """
    if not records:
        return b""
    description: list[tuple[str, str, Any]] = []
    blobs: list[bytes] = []
    for name, record in records.items():
        if isinstance(record, ArrayRecord):
            entries = [(k, a.dtype, a.shape, a.stype, len(a.data)) for k, a in record.items()]
            blobs.extend(array.data for array in record.values())
            description.append((name, "arrays", entries))
        else:
            kind = "metrics" if isinstance(record, MetricRecord) else "config"
            description.append((name, kind, [(k, _plain(v)) for k, v in record.items()]))
    head = json.dumps(description).encode()
    return b"".join((_LENGTH.pack(len(head)), head, *blobs))


def decode(data: bytes) -> RecordDict:
    """Read what :func:`encode` wrote."""
    records = RecordDict()
    if not data:
        return records
    (length,) = _LENGTH.unpack_from(data)
    start = _LENGTH.size + length
    for name, kind, entries in json.loads(data[_LENGTH.size : start]):
        if kind == "arrays":
            arrays = ArrayRecord()
            for key, dtype, shape, stype, nbytes in entries:
                chunk = data[start : start + nbytes]
                arrays[key] = Array(dtype=dtype, shape=tuple(shape), stype=stype, data=chunk)
                start += nbytes
            records[name] = arrays
        else:
            records[name] = _KINDS[kind]({key: _rich(value) for key, value in entries})
    return records


def _plain(value: Any) -> Any:
    """Write bytes as ``{"bytes": base64}``: records hold no dicts, so that is unambiguous."""
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _rich(value: Any) -> Any:
    if isinstance(value, dict):
        return base64.b64decode(value["bytes"])
    return [_rich(item) for item in value] if isinstance(value, list) else value


def message_for(model: Message, node_id: int, message_id: str, content: RecordDict) -> Message:
    """Make the message that a node would have got from Flower itself.

    Parameters
    ----------
    model : Message
        A message of the same run, whose remaining metadata is taken over.
    node_id : int
        The Flower node that the message is for.
    message_id : str
        Its id.
    content : RecordDict
        Its content.
    """
    like = model.metadata
    metadata = Metadata(
        run_id=like.run_id,
        message_id=message_id,
        src_node_id=like.src_node_id,
        dst_node_id=node_id,
        reply_to_message_id="",
        group_id=like.group_id,
        created_at=like.created_at,
        ttl=like.ttl,
        message_type=like.message_type,
        src_task_id=like.src_task_id,
        dst_task_id=like.dst_task_id,
    )
    return Message(metadata=metadata, content=content)  # type: ignore[call-overload, no-any-return]
