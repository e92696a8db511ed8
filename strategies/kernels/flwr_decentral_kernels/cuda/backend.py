"""Vector arithmetic on an NVIDIA GPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from flwr_decentral.core.fragments import Partition
from flwr_decentral.core.wire import BLOCK, Wire, check_wire, wire_bytes
from flwr_decentral.ops import checks, codecs
from flwr_decentral.ops.contract import Piece
from flwr_decentral.ops.reference import Reference

from .arrays import Buffer, Call, HostCall, TensorCall
from .driver import Device, Driver
from .image import Image, load
from .kernels import MOST_SUMMANDS, MOST_SUMS, MOST_TERMS, Extent, Summands, Terms
from .memory import Staging
from .tables import (
    WHOLE,
    Region,
    extent,
    extent_of,
    inboxes,
    is_known,
    region_of,
    regions,
    tables,
    threads,
)
from .tensors import Tensors, is_tensor


class _Equipment(NamedTuple):
    device: Device
    image: Image
    staging: Staging


@cache
def _driver() -> Driver:
    return Driver()


@cache
def _equip(device: Device) -> _Equipment:
    return _Equipment(device, load(device), Staging(device))


class Cuda:
    """Vector arithmetic on a GPU. See :class:`~flwr_decentral.ops.contract.Ops`.

    CUDA tensors of torch are used in place, on torch's current stream, without waiting for it, and
    tensors are what comes out. numpy arrays are copied to the first device and back.

    A rotation, interleaved or contiguous partition is handled on the device. For others, arrays go
    through the reference, and tensors are refused.

    Parameters
    ----------
    driver : Driver, optional
        By default the driver of this machine.
    tensors : Tensors, optional
        What to ask of torch.

    Raises
    ------
    ConfigurationError
        If there is no GPU, or no image of the kernels for it.
    """

    name = "cuda"

    def __init__(self, driver: Driver | None = None, tensors: Tensors | None = None) -> None:
        self._driver = driver or _driver()
        self._tensors = tensors or Tensors()
        self._reference = Reference()
        _equip(self._driver.device(0))

    def describe(self) -> str:
        """Say what is used."""
        device, image, _ = _equip(self._driver.device(0))
        cuda, capability = self._driver.version, device.capability
        return (
            f"{device.name}, compute capability {capability[0]}.{capability[1]}; driver for CUDA "
            f"{cuda[0]}.{cuda[1]}; kernels from {image.origin}; devices: {self._driver.count}"
        )

    def update(self, x: Any, before: Any, after: Any) -> Any:
        """Apply what training did."""
        if x is before:
            self._rules(x).check_vectors(x, after)
            return after
        return self._dense("fdk_update", (x, before, after))[0]

    def combine(self, vectors: Sequence[Any], weights: Sequence[float], out: Any = None) -> Any:
        """Sum weighted vectors, from the first to the last."""
        checks.check_weights(vectors, weights)
        rules = self._rules(vectors[0])
        length = rules.check_vectors(*vectors)
        if out is not None:
            rules.check_out(out, length, apart_from=vectors[1:], or_the_same_as=vectors[0])
        with self._call(vectors[0]) as call:
            read = [call.read(vector) for vector in vectors]
            target = call.new(length) if out is None else call.into(out)
            of = extent(length, *read, target.address)
            for start in range(0, len(read), MOST_TERMS):
                part = read[start : start + MOST_TERMS]
                terms = Terms(count=len(part), resumes=start > 0)
                terms.vector[: len(part)] = part
                terms.weight[: len(part)] = [float(w) for w in weights[start : start + len(part)]]
                _run(call, "fdk_combine", of, terms, target.address)
            return call.give(target)[0]

    def pairwise(self, x: Any, mine: Any, theirs: Any, weight: float) -> Any:
        """Move toward a peer by what it was apart."""
        return self._dense("fdk_pairwise", (x, mine, theirs), float(weight))[0]

    def mix(self, x: Any, y: Any, share: float) -> tuple[Any, Any]:
        """Move two vectors toward each other."""
        first, second = self._dense("fdk_mix", (x, y), float(share), results=2)
        return first, second

    def mix_pairwise(
        self,
        x: Any,
        y: Any,
        mine: Any,
        theirs: Any,
        *,
        share: float | None,
        weights: tuple[float, float],
    ) -> tuple[Any, Any]:
        """Mix two vectors, then move both toward a peer."""
        inputs = (x, y, mine, theirs)
        scalars = (share is not None, float(share or 0), float(weights[0]), float(weights[1]))
        first, second = self._dense("fdk_mix_pairwise", inputs, *scalars, results=2)
        return first, second

    def mix_update(
        self, x: Any, y: Any, before: Any, after: Any, *, share: float | None
    ) -> tuple[Any, Any]:
        """Mix two vectors, then apply to both what training did."""
        inputs = (x, y, before, after)
        scalars = (share is not None, float(share or 0))
        first, second = self._dense("fdk_mix_update", inputs, *scalars, results=2)
        return first, second

    def sums_without(self, vectors: Sequence[Any], left_out: Sequence[int]) -> list[Any]:
        """Sum all vectors but one, for each of several that are left out."""
        checks.check_left_out(len(vectors), left_out)
        length = self._rules(vectors[0]).check_vectors(*vectors)
        with self._call(vectors[0]) as call:
            read = [call.read(vector) for vector in vectors]
            sums = [call.new(length) for _ in left_out]
            of = extent(length, *read, *(each.address for each in sums))
            for begin in range(0, len(sums), MOST_SUMS):
                some = sums[begin : begin + MOST_SUMS]
                for first in range(0, len(read), MOST_SUMMANDS):
                    part = read[first : first + MOST_SUMMANDS]
                    table = Summands(count=len(part), first=first, sums=len(some))
                    table.vector[: len(part)] = part
                    table.out[: len(some)] = [each.address for each in some]
                    table.left_out[: len(some)] = left_out[begin : begin + len(some)]
                    _run(call, "fdk_sums_without", of, table)
            return call.give(*sums)

    def pack(self, x: Any, partition: Partition, fragment: int) -> Any:
        """Copy one fragment out of a vector."""
        self._rules(x).check_partitioned(x, partition)
        length = partition.length(fragment)
        if not _known(partition, x):
            return self._reference.pack(x, partition, fragment)
        region = region_of(partition, fragment)
        with self._call(x) as call:
            source, payload = call.read(x) + 4 * region.start, call.new(length)
            of = extent_of(region, length, source, payload.address)
            number = fragment - region.first
            _run(call, "fdk_pack", of, source, region.turns, number, payload.address)
            return call.give(payload)[0]

    def pack_all(self, x: Any, partition: Partition) -> list[Any]:
        """Copy every fragment out of a vector."""
        self._rules(x).check_partitioned(x, partition)
        if not _known(partition, x):
            return list(self._reference.pack_all(x, partition))
        with self._call(x) as call:
            source = call.read(x)
            payloads = [call.new(partition.length(k)) for k in range(partition.fragments)]
            addresses = [payload.address for payload in payloads]
            for region in regions(partition):
                begin = source + 4 * region.start
                for table, of in tables(region, addresses, begin):
                    _run(call, "fdk_pack_all", of, begin, region.turns, table)
            return call.give(*payloads)

    def assemble(self, partition: Partition, payloads: Sequence[Any]) -> Any:
        """Put all fragments together again."""
        checks.check_partition(partition)
        lengths = [partition.length(fragment) for fragment in range(partition.fragments)]
        first = payloads[0] if payloads else None
        self._rules(first).check_payloads(payloads, lengths)
        if not _known(partition, first):
            return self._reference.assemble(partition, payloads)
        with self._call(first) as call:
            addresses = [call.read(payload) for payload in payloads]
            out = call.new(partition.size)
            for region in regions(partition):
                begin = out.address + 4 * region.start
                for table, of in tables(region, addresses, begin):
                    _run(call, "fdk_assemble", of, table, region.turns, begin)
            return call.give(out)[0]

    def average(
        self, x: Any, partition: Partition, pieces: Sequence[Piece], out: Any = None
    ) -> Any:
        """Average a vector with an inbox of fragments, each coordinate by its own count."""
        rules = self._rules(x)
        rules.check_partitioned(x, partition)
        rules.check_pieces(x, pieces, partition.length)
        if out is not None:
            received = [payload for _, payload in pieces]
            rules.check_out(out, partition.size, apart_from=received, or_the_same_as=x)
        if not _known(partition, x):
            return self._reference.average(x, partition, pieces, out)
        with self._call(x) as call:
            by_fragment: dict[int, list[int]] = {}
            for fragment, payload in pieces:
                by_fragment.setdefault(fragment, []).append(call.read(payload))
            source, target = call.read(x), call.new(len(x)) if out is None else call.into(out)
            for region in regions(partition):
                self._average(call, region, source, target.address, by_fragment)
            return call.give(target)[0]

    @staticmethod
    def _average(
        call: Call, region: Region, source: int, target: int, by_fragment: dict[int, list[int]]
    ) -> None:
        begin, target = source + 4 * region.start, target + 4 * region.start
        pieces = [by_fragment.get(region.first + k, []) for k in range(region.turns.fragments)]
        for inbox, read in inboxes(pieces):
            of = extent_of(region, region.stop - region.start, begin, target, *read)
            _run(call, "fdk_average", of, begin, inbox, region.turns, target)
            # The first launch has copied what it did not average; the others go on from there.
            begin = target

    def finite(self, x: Any) -> bool:
        """Tell whether every value is finite."""
        length = self._rules(x).check_vectors(x)
        with self._call(x) as call:
            source, broken = call.read(x), call.new(1, "int32")
            call.clear(broken)
            _run(call, "fdk_finite", extent(length, source), source, broken.address)
            return not call.number(broken)

    def encode(self, x: Any, wire: Wire) -> Any:
        """Turn a vector into bytes."""
        check_wire(wire)
        length = self._rules(x).check_vectors(x)
        if wire == "float32" and not is_tensor(x):
            return codecs.encode(x, wire)
        with self._call(x) as call:
            return call.give(_encode(call, call.read(x), length, wire))[0]

    def decode(self, data: Any, wire: Wire, length: int) -> Any:
        """Turn bytes into a vector."""
        self._rules(data).check_bytes(data, wire, length)
        if wire == "float32" and not is_tensor(data):
            return codecs.decode(data, wire, length)
        with self._call(data) as call:
            return call.give(_decode(call, call.read(data), length, wire))[0]

    def rounded(self, x: Any, wire: Wire) -> Any:
        """Round a vector to what its receivers read."""
        check_wire(wire)
        length = self._rules(x).check_vectors(x)
        if wire == "float32":
            return x
        with self._call(x) as call:
            data = _encode(call, call.read(x), length, wire)
            return call.give(_decode(call, data.address, length, wire))[0]

    def _rules(self, first: Any) -> Any:
        """Give the checks for vectors of the kind of the first."""
        return self._tensors if is_tensor(first) else checks

    def _call(self, like: Any) -> Call:
        tensor = is_tensor(like)
        device, image, staging = _equip(
            self._driver.device(like.device.index or 0 if tensor else 0)
        )
        if tensor:
            return TensorCall(device, image, self._tensors, like)
        return HostCall(device, image, staging)

    def _dense(
        self, kernel: str, inputs: Sequence[Any], *scalars: float, results: int = 1
    ) -> list[Any]:
        """Run a kernel that takes vectors, numbers and as many vectors for its results."""
        length = self._rules(inputs[0]).check_vectors(*inputs)
        with self._call(inputs[0]) as call:
            read = [call.read(vector) for vector in inputs]
            new = [call.new(length) for _ in range(results)]
            written = [buffer.address for buffer in new]
            _run(call, kernel, extent(length, *read, *written), *read, *scalars, *written)
            return call.give(*new)


def _run(call: Call, kernel: str, of: Extent, *arguments: Any) -> None:
    if of.length:
        call.launch(kernel, *arguments, of, threads=threads(of))


def _encode(call: Call, x: int, length: int, wire: Wire) -> Buffer:
    data = call.new(wire_bytes(length, wire), "uint8")
    if wire == "float32":
        _copy(call, x, data.address, length)
    elif wire != "int8":
        _run(call, f"fdk_encode_{wire}", extent(length, x, data.address), x, data.address)
    elif length:
        blocks = -(-length // BLOCK)
        codes, of = data.address + 4 * blocks, extent(length, x)
        # A warp of 32 threads takes a block.
        call.launch("fdk_encode_int8", x, data.address, codes, of, threads=32 * blocks)
    return data


def _decode(call: Call, data: int, length: int, wire: Wire) -> Buffer:
    out = call.new(length)
    if wire == "int8":
        of, codes = extent(length, out.address), data + 4 * -(-length // BLOCK)
        _run(call, "fdk_decode_int8", of, data, codes, out.address)
    elif wire == "float32":
        _copy(call, data, out.address, length)
    else:
        of = extent(length, data, out.address)
        _run(call, f"fdk_decode_{wire}", of, data, out.address)
    return out


def _copy(call: Call, source: int, target: int, length: int) -> None:
    _run(call, "fdk_pack", extent(length, source, target), source, WHOLE, 0, target)


def _known(partition: Partition, like: Any) -> bool:
    """Tell whether there are kernels for a partition; refuse tensors if there are none."""
    if not is_known(partition) and is_tensor(like):
        raise TypeError(
            f"there is no CUDA code for a {type(partition).__name__} partition; use a Rotation, or "
            "hand over numpy arrays"
        )
    return is_known(partition)
