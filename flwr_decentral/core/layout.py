"""How a model's tensors lie in one flat float32 vector.

Every tensor of a model has one of three roles:

========  =====================  ===================================================================
role      lives in               which tensors
========  =====================  ===================================================================
shared    the flat vector        floating-point tensors: trained, sent and averaged
private   the node's own bytes   what is not averaged: every integer and boolean tensor, and the
                                 floating-point ones whose name matches a *private* pattern (by
                                 default the running statistics of normalization layers)
frozen    the layout, once       what never changes: names that match a *frozen* pattern
========  =====================  ===================================================================

Shared tensors lie in the vector in the model's own order, each in C order. float16 and bfloat16 are
widened, which is exact; float64 is rounded, which is not, and :attr:`Layout.rounded` says so. On
the way back each tensor gets its own shape and dtype again. bfloat16, which numpy does not know, is
held as ``uint16`` bits and declared with ``dtypes={"name": "bfloat16"}``.

The :attr:`Layout.hash` identifies names, shapes, dtypes and roles: two nodes whose hashes differ do
not train the same model.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from math import prod
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from .errors import AlgorithmError, ConfigurationError, suggest
from .message import Vector

Role = Literal["shared", "private", "frozen"]

PRIVATE_BY_DEFAULT: Final = ("*running_mean", "*running_var", "*num_batches_tracked")
"""Name patterns of tensors that stay on their node unless asked for: running statistics."""

_FLOATS: Final = ("float16", "bfloat16", "float32", "float64")
_LENGTH: Final = struct.Struct("<Q")


@dataclass(frozen=True)
class Tensor:
    """One tensor of a model.

    Attributes
    ----------
    name : str
        Its key in the state dict.
    shape : tuple of int
        Its shape; ``()`` for a scalar.
    dtype : str
        Its numpy dtype name, or ``"bfloat16"``.
    role : {"shared", "private", "frozen"}
        Where it lives.
    start : int
        Its offset: in scalars of the flat vector if shared, in bytes of the private or frozen
        bytes otherwise.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: Role
    start: int

    @property
    def length(self) -> int:
        """Its number of scalars."""
        return prod(self.shape)

    @property
    def storage(self) -> np.dtype[Any]:
        """The numpy dtype in which its values are held."""
        return np.dtype("uint16" if self.dtype == "bfloat16" else self.dtype)

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self.length * self.storage.itemsize


@dataclass(frozen=True)
class Layout:
    """The order of a model's tensors and the role of each.

    Make one with :meth:`of`. Layouts compare by their tensors.

    Examples
    --------
    >>> model = {"w": np.ones((2, 3), np.float32), "seen": np.array(4)}
    >>> layout = Layout.of(model)
    >>> layout.size, layout.private_bytes
    (6, 8)
    >>> vector, private = layout.flatten(model)
    >>> {name: value.shape for name, value in layout.unflatten(vector, private).items()}
    {'w': (2, 3), 'seen': ()}
    """

    tensors: tuple[Tensor, ...]
    frozen: bytes = b""

    @classmethod
    def of(
        cls,
        model: Mapping[str, NDArray[Any]],
        *,
        private: Iterable[str] = PRIVATE_BY_DEFAULT,
        frozen: Iterable[str] = (),
        dtypes: Mapping[str, str] | None = None,
    ) -> Layout:
        """Lay out a model.

        Parameters
        ----------
        model : mapping of str to ndarray
            The tensors in their order; their values matter for the frozen ones only.
        private, frozen : iterable of str
            Shell-style patterns of names. Frozen wins over private.
        dtypes : mapping of str to str, optional
            Declared dtypes, for what numpy cannot say: ``{"w": "bfloat16"}`` of a uint16 array.

        Raises
        ------
        ConfigurationError
            If a pattern matches nothing that it was written for, a dtype is not supported, or
            nothing is left to share.
        """
        private, frozen, dtypes = tuple(private), tuple(frozen), dict(dtypes or {})
        _check_patterns(model, private, frozen)
        for name in dtypes:
            if name not in model:
                raise ConfigurationError(f"dtypes names {name!r}; {suggest(name, model)}")
        tensors, fixed, offsets = [], [], {"shared": 0, "private": 0, "frozen": 0}
        for name, value in model.items():
            array = np.asarray(value)
            if array.dtype.kind not in "biufc":
                raise ConfigurationError(
                    f"tensor {name!r} holds {array.dtype}, which is no number that numpy knows; "
                    "hold bfloat16 as uint16 bits and declare it in dtypes"
                )
            dtype = dtypes.get(name, array.dtype.name)
            held = "uint16" if dtype == "bfloat16" else dtype
            if array.dtype.name != held or not array.dtype.isnative:
                raise ConfigurationError(f"{name!r} is declared {dtype} but holds {array.dtype}")
            role = _role(name, dtype, private, frozen)
            tensor = Tensor(name, tuple(array.shape), dtype, role, offsets[role])
            offsets[role] += tensor.length if role == "shared" else tensor.nbytes
            tensors.append(tensor)
            if role == "frozen":
                fixed.append(array.tobytes())
        if not offsets["shared"]:
            raise ConfigurationError(
                "the model has no tensor to share: each of "
                f"{', '.join(model) or '(none)'} is an integer, private or frozen"
            )
        return cls(tuple(tensors), b"".join(fixed))

    @cached_property
    def size(self) -> int:
        """The length of the flat vector, D."""
        return sum(tensor.length for tensor in self.tensors if tensor.role == "shared")

    @cached_property
    def private_bytes(self) -> int:
        """The size of a node's private tensors, in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors if tensor.role == "private")

    @cached_property
    def shared(self) -> tuple[Tensor, ...]:
        """The shared tensors, in order."""
        return tuple(tensor for tensor in self.tensors if tensor.role == "shared")

    @cached_property
    def _names(self) -> dict[str, None]:
        return dict.fromkeys(tensor.name for tensor in self.tensors)

    @cached_property
    def rounded(self) -> tuple[str, ...]:
        """Names of the float64 tensors, which lose precision in the vector."""
        return tuple(tensor.name for tensor in self.shared if tensor.dtype == "float64")

    @cached_property
    def hash(self) -> str:
        """32 hexadecimal digits that identify names, shapes, dtypes, roles and frozen values."""
        state = hashlib.blake2b(digest_size=16, person=b"flwrd-layout")
        for tensor in self.tensors:
            state.update(f"{tensor.name}\0{tensor.shape}\0{tensor.dtype}\0{tensor.role}\n".encode())
        state.update(self.frozen)
        return state.hexdigest()

    def pack(self) -> bytes:
        """Write the layout as bytes, frozen values included; :meth:`unpack` reads them."""
        description = json.dumps([asdict(tensor) for tensor in self.tensors]).encode()
        return _LENGTH.pack(len(description)) + description + self.frozen

    @classmethod
    def unpack(cls, data: bytes) -> Layout:
        """Read what :meth:`pack` wrote."""
        (length,) = _LENGTH.unpack_from(data)
        end = _LENGTH.size + length
        entries = json.loads(data[_LENGTH.size : end])
        tensors = (Tensor(**{**entry, "shape": tuple(entry["shape"])}) for entry in entries)
        return cls(tuple(tensors), data[end:])

    def flatten(
        self,
        model: Mapping[str, NDArray[Any]],
        out: Vector | None = None,
        private_out: NDArray[np.uint8] | None = None,
    ) -> tuple[Vector, NDArray[np.uint8]]:
        """Put a model's tensors into a flat vector and private bytes.

        Parameters
        ----------
        model : mapping of str to ndarray
            The same tensors, with the same shapes and dtypes, as the layout was made of.
        out : ndarray of float32, shape (size,), optional
            Where to put the vector.
        private_out : ndarray of uint8, shape (private_bytes,), optional
            Where to put the private bytes.

        Raises
        ------
        AlgorithmError
            If names, shapes or dtypes differ, or a frozen tensor has changed. It names the tensor.
        """
        self._check_names(model)
        vector = np.empty(self.size, np.float32) if out is None else out
        private = np.empty(self.private_bytes, np.uint8) if private_out is None else private_out
        for tensor in self.tensors:
            array = np.ascontiguousarray(model[tensor.name])
            if np.shape(model[tensor.name]) != tensor.shape or array.dtype != tensor.storage:
                raise AlgorithmError(
                    f"tensor {tensor.name!r} changed from {tensor.shape} {tensor.dtype} to "
                    f"{np.shape(model[tensor.name])} {array.dtype}; a model must keep its shapes "
                    "and dtypes throughout a run"
                )
            if tensor.role == "shared":
                target = vector[tensor.start : tensor.start + tensor.length]
                target[:] = _widen(array.reshape(-1), tensor.dtype)
            elif tensor.role == "private":
                raw = array.reshape(-1).view(np.uint8)
                private[tensor.start : tensor.start + tensor.nbytes] = raw
            elif array.tobytes() != self.frozen[tensor.start : tensor.start + tensor.nbytes]:
                raise AlgorithmError(
                    f"tensor {tensor.name!r} is declared frozen, but training changed it; "
                    "freeze it in the optimizer too, or take it off the frozen keys"
                )
        return vector, private

    def unflatten(
        self, vector: Vector, private: NDArray[np.uint8] | None = None
    ) -> dict[str, NDArray[Any]]:
        """Make a model's tensors from a flat vector and private bytes.

        Parameters
        ----------
        vector : ndarray of float32, shape (size,)
            The shared values.
        private : ndarray of uint8, shape (private_bytes,), optional
            The private ones; may be left out if there are none.

        Returns
        -------
        dict of str to ndarray
            New arrays, in the model's order, with the model's shapes and dtypes.
        """
        if private is None:
            private = np.empty(0, np.uint8)
        if len(vector) != self.size or len(private) != self.private_bytes:
            raise AlgorithmError(
                f"this layout has {self.size} shared scalars and {self.private_bytes} private "
                f"bytes, got {len(vector)} and {len(private)}"
            )
        frozen = np.frombuffer(self.frozen, np.uint8)
        model: dict[str, NDArray[Any]] = {}
        for tensor in self.tensors:
            if tensor.role == "shared":
                part = vector[tensor.start : tensor.start + tensor.length]
                value = _narrow(part, tensor.dtype)
            else:
                source = private if tensor.role == "private" else frozen
                raw = source[tensor.start : tensor.start + tensor.nbytes]
                value = np.frombuffer(raw.tobytes(), tensor.storage).copy()
            model[tensor.name] = value.reshape(tensor.shape)
        return model

    def _check_names(self, model: Mapping[str, NDArray[Any]]) -> None:
        names = self._names
        missing = [name for name in names if name not in model]
        extra = [name for name in model if name not in names]
        if missing or extra:
            raise AlgorithmError(
                "the model's tensors changed in mid-run: "
                f"missing {missing or 'none'}, new {extra or 'none'}; "
                "return the same state dict from every call"
            )


def _check_patterns(
    model: Mapping[str, Any], private: tuple[str, ...], frozen: tuple[str, ...]
) -> None:
    for label, patterns in (("private", private), ("frozen", frozen)):
        for pattern in patterns:
            if pattern in PRIVATE_BY_DEFAULT:
                continue
            if not any(fnmatchcase(name, pattern) for name in model):
                raise ConfigurationError(
                    f"{label} pattern {pattern!r} matches no tensor of the model; its tensors are "
                    f"{', '.join(model)}"
                )


def _role(name: str, dtype: str, private: tuple[str, ...], frozen: tuple[str, ...]) -> Role:
    if any(fnmatchcase(name, pattern) for pattern in frozen):
        return "frozen"
    if any(fnmatchcase(name, pattern) for pattern in private):
        return "private"
    if dtype in _FLOATS:
        return "shared"
    if np.dtype(dtype).kind in "iub":
        return "private"
    raise ConfigurationError(
        f"tensor {name!r} has dtype {dtype}, which cannot be averaged; supported are "
        f"{', '.join(_FLOATS)}, integers and booleans (make it private to keep it local)"
    )


def _widen(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Convert to float32; exact but for float64."""
    if dtype == "bfloat16":
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values


def _narrow(values: Vector, dtype: str) -> NDArray[Any]:
    """Convert from float32, to the nearest value, ties to even."""
    if dtype == "bfloat16":
        bits = values.view(np.uint32)
        high = bits >> np.uint32(16)
        rounded = (bits + np.uint32(0x7FFF) + (high & np.uint32(1))) >> np.uint32(16)
        quiet = high | np.uint32(0x40)
        return np.where(np.isnan(values), quiet, rounded).astype(np.uint16)
    return values.astype(dtype)
