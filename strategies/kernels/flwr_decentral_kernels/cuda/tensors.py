"""CUDA tensors of torch: what is known of them, and what is refused.

torch is never imported here: whoever hands over a tensor has it already.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

from flwr_decentral.core.fragments import Partition
from flwr_decentral.core.wire import Wire, check_wire, wire_bytes
from flwr_decentral.ops.checks import check_partition
from flwr_decentral.ops.contract import Piece

from .errors import DeviceMismatch


def is_tensor(array: Any) -> bool:
    """Tell whether something is a tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


class Tensors:
    """What the backend asks of torch.

    The checks refuse for tensors what :mod:`flwr_decentral.ops.checks` refuses for numpy arrays, by
    the same names, and tensors that lie elsewhere than on one GPU.
    """

    kind: Final = "cuda"

    def stream(self, device: Any) -> int:
        """Give the handle of the stream that torch is working on."""
        return int(sys.modules["torch"].cuda.current_stream(device).cuda_stream)

    def empty(self, length: int, dtype: str, device: Any) -> Any:
        """Make a tensor on a device, in the order of torch's current stream."""
        torch = sys.modules["torch"]
        return torch.empty(length, dtype=getattr(torch, dtype), device=device)

    def copy(self, tensor: Any) -> Any:
        """Copy a tensor to an address that suits all kernels, in the order of the stream."""
        return tensor.clone()

    def number(self, tensor: Any) -> int:
        """Wait for the stream, and read a tensor's first value."""
        return int(tensor[0])

    def check_vectors(self, *vectors: Any) -> int:
        """Demand vectors of one length on one GPU, and give the length."""
        self._check_together(vectors)
        lengths = {len(vector) for vector in vectors}
        if len(lengths) > 1:
            raise ValueError(f"vectors of lengths {sorted(lengths)} do not go together")
        return lengths.pop()

    def check_partitioned(self, x: Any, partition: Partition) -> None:
        """Demand a partition, and a vector of the length that it is of."""
        check_partition(partition)
        if self.check_vectors(x) != partition.size:
            raise ValueError(
                f"the partition is of {partition.size} values, got a vector of {len(x)}"
            )

    def check_out(
        self, out: Any, length: int, *, apart_from: Sequence[Any], or_the_same_as: Any
    ) -> None:
        """Demand a vector that a result may be written to."""
        self._check_together([or_the_same_as, out])
        if len(out) != length:
            raise ValueError(
                f"a result of {length} values does not fit into a vector of {len(out)}"
            )
        if out.data_ptr() != or_the_same_as.data_ptr() and _overlap(out, or_the_same_as):
            raise ValueError("the vector for the result overlaps its first input in part")
        if any(_overlap(out, vector) for vector in apart_from):
            raise ValueError("the vector for the result overlaps an input")

    def check_pieces(self, x: Any, pieces: Sequence[Piece], length: Callable[[int], int]) -> None:
        """Demand fragments of the length that they have here, on the GPU of x."""
        self._check_together([x, *(payload for _, payload in pieces)])
        for fragment, payload in pieces:
            expected = length(fragment)
            if len(payload) != expected:
                raise ValueError(
                    f"fragment {fragment} has {expected} values here, a peer sent {len(payload)}"
                )

    def check_payloads(self, payloads: Sequence[Any], lengths: Sequence[int]) -> None:
        """Demand all fragments of a partition, in their order."""
        self._check_together(payloads)
        if [len(payload) for payload in payloads] != lengths:
            raise ValueError(
                f"the fragments have {lengths} values, got {[len(each) for each in payloads]}"
            )

    def check_bytes(self, data: Any, wire: Wire, length: int) -> None:
        """Demand as many bytes as a vector is on a wire."""
        check_wire(wire)
        self._check(data, "uint8")
        expected = wire_bytes(length, wire)
        if len(data) != expected:
            raise ValueError(f"{length} values as {wire} take {expected} bytes, got {len(data)}")

    def _check_together(self, vectors: Sequence[Any]) -> None:
        """Demand vectors on one GPU, of any lengths."""
        for each in vectors:
            self._check(each, "float32")
            if each.device != vectors[0].device:
                raise DeviceMismatch(
                    f"one vector lies on {vectors[0].device}, another on {each.device}; move them "
                    "together first"
                )

    def _check(self, tensor: Any, dtype: str) -> None:
        if not is_tensor(tensor):
            raise DeviceMismatch(
                f"beside a tensor there is a {type(tensor).__name__}, which is not on the GPU; "
                "move it there first"
            )
        if tensor.device.type != self.kind:
            raise DeviceMismatch(
                f"a tensor lies on {tensor.device}: move it to the GPU, or hand over numpy arrays"
            )
        if str(tensor.dtype) != f"torch.{dtype}":
            raise TypeError(f"a tensor of {dtype} is needed, not of {tensor.dtype}")
        if tensor.requires_grad:
            raise TypeError("a tensor requires a gradient, and none is computed; detach() it")
        if tensor.ndim != 1 or not tensor.is_contiguous():
            raise ValueError(
                f"a vector is one-dimensional and contiguous, got shape {tuple(tensor.shape)} and "
                f"strides {tuple(tensor.stride())}"
            )


def _overlap(a: Any, b: Any) -> bool:
    first, second = int(a.data_ptr()), int(b.data_ptr())
    return first < second + 4 * len(b) and second < first + 4 * len(a)
