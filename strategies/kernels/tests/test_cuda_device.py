"""The CUDA backend on a real GPU. Without one, all of this is skipped."""

import importlib.util

import numpy as np
import pytest

from flwr_decentral.core import ConfigurationError, Rotation
from flwr_decentral.ops import Piece, Reference
from flwr_decentral.testing.backends import BackendConformance
from flwr_decentral_kernels.cuda import Cuda, DeviceMismatch

from .emulator import battery

pytestmark = pytest.mark.cuda
REFERENCE = Reference()


@pytest.fixture(scope="module")
def cuda():
    try:
        return Cuda()
    except ConfigurationError as error:
        pytest.skip(error.args[0])


@pytest.fixture(scope="module")
def torch():
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    import torch

    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    return torch


@pytest.fixture(scope="module")
def makers(torch):
    return {"numpy": battery.Host(), "tensor": battery.OnDevice("cuda", torch.cuda.synchronize)}


class TestCudaDevice(BackendConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def ops(cls, cuda):
        return cuda


@pytest.mark.parametrize("kind", ["numpy", "tensor"])
@pytest.mark.parametrize("name", battery.CHECKS)
def test_every_operation_has_the_bits_of_the_reference(name, kind, cuda, makers):
    for seed in range(40):
        battery.run(name, cuda, makers[kind], seed)


@pytest.mark.parametrize("granularity", [1, 64, 1024])
def test_a_large_model_has_the_bits_of_the_reference(granularity, cuda, torch):
    rng = np.random.default_rng(1)
    x = rng.standard_normal(10_000_003).astype(np.float32)
    partition = Rotation(len(x), 10, granularity, 5)
    pieces = [Piece(k % 10, REFERENCE.pack(x[::-1].copy(), partition, k % 10)) for k in range(60)]
    expected = REFERENCE.average(x, partition, pieces)
    on_device = [Piece(k, torch.from_numpy(payload).cuda()) for k, payload in pieces]
    given = torch.from_numpy(x).cuda()
    found = cuda.average(given, partition, on_device).cpu().numpy()
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))
    packed = cuda.pack_all(given, partition)
    for each, payload in zip(packed, REFERENCE.pack_all(x, partition), strict=True):
        np.testing.assert_array_equal(each.cpu().numpy(), payload)


def test_work_goes_in_the_order_of_torchs_current_stream(cuda, torch):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x = torch.zeros(1 << 24, device="cuda")
        for _ in range(20):
            x += 1
            x = cuda.combine([x], [1.0])
        found = x.max()
    stream.synchronize()
    assert float(found) == 20.0


def test_a_call_can_be_captured_in_a_graph(cuda, torch):
    x, y = torch.ones(1000, device="cuda"), torch.full((1000,), 3.0, device="cuda")
    cuda.pairwise(x, x, y, 0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        moved = cuda.pairwise(x, x, y, 0.5)
    y.fill_(5.0)
    graph.replay()
    torch.cuda.synchronize()
    assert moved.tolist() == [3.0] * 1000


def test_tensors_of_two_devices_do_not_mix(cuda, torch):
    with pytest.raises(DeviceMismatch):
        cuda.mix(torch.ones(4, device="cuda"), torch.ones(4), 0.5)
