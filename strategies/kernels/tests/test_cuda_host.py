"""The host's side of the CUDA backend, on a mock driver: what it loads, launches and refuses."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from flwr_decentral.core import ConfigurationError, Interleaved, Layerwise, Rotation
from flwr_decentral.ops import Piece, Reference, choose
from flwr_decentral_kernels import library
from flwr_decentral_kernels.cuda import Cuda, DeviceMismatch, KernelError, image, nvrtc
from flwr_decentral_kernels.cuda.driver import Driver
from flwr_decentral_kernels.cuda.memory import Staging
from flwr_decentral_kernels.cuda.tables import region_of
from flwr_decentral_kernels.cuda.tensors import Tensors

slow = pytest.mark.slow  # the mock driver has to be built
REFERENCE = Reference()


def normal(*shape):
    return np.random.default_rng(7).standard_normal(shape).astype(np.float32)


@pytest.fixture
def cuda(mock, fatbin, monkeypatch):
    """Make a backend on the mock driver."""
    monkeypatch.setattr(image, "resource", lambda name: fatbin)
    return Cuda(driver=mock.driver())


@pytest.fixture
def compiler():
    """Find NVRTC, which torch's wheels for CUDA bring."""
    for path in nvrtc.libraries():
        try:
            return nvrtc.Nvrtc(path)
        except KernelError:
            continue
    return pytest.skip("there is no NVRTC here")


def test_what_cannot_be_numbered_is_refused():
    for partition in (Rotation(2**33, 2, 4), Rotation(2**32, 2**31, 8), Interleaved(2**31, 2)):
        with pytest.raises(ValueError, match="too many to number; take larger blocks"):
            region_of(partition, 0)
    assert region_of(Rotation(2**33, 2, 8), 0).stop == 2**33


def test_a_bad_file_of_builtins_refuses_the_compiler_beside_it(tmp_path):
    (tmp_path / "libnvrtc-builtins.so.13.0").write_bytes(b"not a library")
    with pytest.raises(KernelError, match=r"libnvrtc\.so\.13 cannot be loaded: .*builtins"):
        nvrtc.Nvrtc(str(tmp_path / "libnvrtc.so.13"))


def test_nothing_is_loaded_out_of_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "libnvrtc-builtins.so.13.0").write_bytes(b"not a library")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KernelError, match=r"^(?!.*builtins).*libnvrtc-of-nobody\.so"):
        nvrtc.Nvrtc("libnvrtc-of-nobody.so")


class TestWithoutGpu:
    def test_a_missing_driver_is_said(self):
        with pytest.raises(ConfigurationError, match="needs an NVIDIA GPU, and there is no driver"):
            Driver("libcuda-of-nobody.so.1")

    def test_a_driver_without_what_is_needed_is_too_old(self):
        with pytest.raises(ConfigurationError, match=r"too old .*Install one for CUDA 12 or newer"):
            Driver("libc.so.6")

    def test_the_choice_of_a_machine_without_gpu_is_refused(self):
        try:
            Driver()
        except ConfigurationError:
            with pytest.raises(ConfigurationError, match="take another backend"):
                choose("cuda")
        else:
            pytest.skip("there is a GPU")

    @slow
    def test_a_driver_that_finds_no_device_is_said(self, mock):
        mock.set("cuInit", 100)
        with pytest.raises(
            ConfigurationError, match=r"GPU: there is none\. .*CUDA_VISIBLE_DEVICES"
        ):
            mock.driver()

    @slow
    def test_a_driver_that_does_not_start_is_said(self, mock):
        mock.set("cuInit", 999)
        with pytest.raises(ConfigurationError, match="unknown CUDA error 999"):
            mock.driver()

    @slow
    def test_a_device_that_is_too_old_is_said(self, mock):
        mock.set("major", 7)
        with pytest.raises(ConfigurationError, match=r"Mock GPU 0 has compute capability 7\.0"):
            Cuda(driver=mock.driver())

    @slow
    def test_a_device_that_is_not_there_is_said(self, mock):
        with pytest.raises(ConfigurationError, match="no CUDA device 2, but 2"):
            mock.driver().device(2)


@slow
class TestImages:
    def test_what_was_built_ahead_is_taken(self, cuda):
        assert cuda.describe() == (
            "Mock GPU 0, compute capability 9.0; driver for CUDA 13.0; kernels from fatbin; "
            "devices: 2"
        )

    def test_what_the_driver_refuses_is_compiled_and_kept(
        self, mock, fatbin, compiler, tmp_path, monkeypatch
    ):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        find = image.resource
        monkeypatch.setattr(
            image, "resource", lambda name: fatbin if name.endswith("fatbin") else find(name)
        )
        mock.set("refuse fatbin", 209)
        version = "{}.{}".format(*compiler.version)
        assert f"kernels from NVRTC {version};" in Cuda(driver=mock.driver()).describe()
        (kept,) = (tmp_path / "flwr-decentral" / "kernels").iterdir()
        assert kept.suffix == ".sm_90"
        assert kept.read_bytes().startswith(b"\x7fELF")
        assert f"kernels from NVRTC {version}, from " in Cuda(driver=mock.driver()).describe()
        # What was damaged is made again.
        kept.write_bytes(b"half a file")
        assert f"kernels from NVRTC {version};" in Cuda(driver=mock.driver()).describe()
        assert kept.read_bytes().startswith(b"\x7fELF")

    def test_what_is_older_than_its_source_is_not_taken(self, fatbin, tmp_path, monkeypatch):
        source = tmp_path / "kernels.cu"
        source.write_text("")
        monkeypatch.setattr(image, "resource", lambda name: source)
        os.utime(source, (2e9, 2e9))
        assert image._outdated(fatbin)
        os.utime(source, (1e9, 1e9))
        assert not image._outdated(fatbin)

    def test_what_was_installed_with_its_source_is_taken(self, tmp_path, monkeypatch):
        built = tmp_path / "kernels.fatbin"
        for path in (built, tmp_path / "src" / image.SOURCE, tmp_path / "src" / "codecs.h"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")
        # An installer writes files one after the other, and keeps no times.
        os.utime(built, (1e9, 1e9))
        monkeypatch.setattr(library, "_HERE", tmp_path)
        assert library.resource(image.SOURCE) == tmp_path / "src" / image.SOURCE
        assert not image._outdated(built)

    def test_a_device_newer_than_the_compiler_gets_ptx(self, mock, compiler, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        mock.set("major", 99)
        find = image.resource
        monkeypatch.setattr(image, "resource", lambda n: None if n.endswith("fatbin") else find(n))
        assert "kernels from NVRTC" in Cuda(driver=mock.driver()).describe()
        (kept,) = (tmp_path / "flwr-decentral" / "kernels").iterdir()
        assert kept.suffix == f".compute_{compiler.architectures[-1]}"

    def test_a_folder_that_cannot_be_written_is_no_reason_to_stop(self, tmp_path):
        in_the_way = tmp_path / "file"
        in_the_way.write_text("")
        image._keep(in_the_way / "folder" / "image", b"data")

    def test_without_any_image_each_reason_is_given(self, mock, fatbin, monkeypatch):
        find = image.resource
        monkeypatch.setattr(
            image, "resource", lambda name: fatbin if name.endswith("fatbin") else find(name)
        )
        monkeypatch.setattr(image, "libraries", lambda: ["/nowhere/libnvrtc.so.13"])
        mock.set("refuse fatbin", 209)
        with pytest.raises(ConfigurationError) as refused:
            Cuda(driver=mock.driver())
        for reason in ("CUDA_ERROR_NO_BINARY_FOR_GPU", "/nowhere/libnvrtc.so.13 cannot be loaded"):
            assert reason in str(refused.value)

    def test_source_that_does_not_compile_is_shown(self, compiler):
        with pytest.raises(KernelError, match=r"COMPILATION(.|\n)*identifier \"nonsense\""):
            compiler.compile(b"__global__ void f() { nonsense(); }", {}, "sm_90")

    def test_an_image_without_one_of_the_kernels_is_refused(self, mock, fatbin, monkeypatch):
        monkeypatch.setitem(image.SIGNATURES, "fdk_unheard_of", ())
        with pytest.raises(KernelError, match="cuLibraryGetKernel failed: CUDA_ERROR_NOT_FOUND"):
            image.Image(mock.driver().device(0), fatbin.read_bytes(), "here")
        assert mock.depth() == 0


@slow
class TestFailures:
    @pytest.mark.parametrize(
        ("function", "status", "name"),
        [
            ("cuLaunchKernel", 719, "CUDA_ERROR_LAUNCH_FAILED"),
            ("cuStreamSynchronize", 719, "CUDA_ERROR_LAUNCH_FAILED"),
            ("cuMemcpyHtoDAsync_v2", 1, "CUDA_ERROR_INVALID_VALUE"),
            ("cuMemcpyDtoHAsync_v2", 1, "CUDA_ERROR_INVALID_VALUE"),
            ("cuMemAlloc_v2", 2, "CUDA_ERROR_OUT_OF_MEMORY"),
            ("cuCtxPushCurrent_v2", 201, "CUDA_ERROR_INVALID_CONTEXT"),
        ],
    )
    def test_an_error_has_the_drivers_name_and_leaves_all_in_order(
        self, cuda, mock, function, status, name
    ):
        x, y = normal(2, 100)
        mock.set(function, status)
        message = rf"\[runtime\] {function.removesuffix('_v2')} failed: {name} \(as the mock says\)"
        with pytest.raises(KernelError, match=message):
            cuda.mix(x, y, 0.5)
        assert mock.depth() == 0
        mock.reset()
        for found, expected in zip(cuda.mix(x, y, 0.5), REFERENCE.mix(x, y, 0.5), strict=True):
            np.testing.assert_array_equal(found, expected)

    def test_memory_that_suffices_without_room_to_grow_is_enough(self, cuda, mock):
        x, y = normal(2, 1_000_000)
        cuda.pack(normal(100), Rotation(100, 1, 4), 0)
        mock.set("memory", 4_000_256)
        np.testing.assert_array_equal(
            cuda.combine([x, y], [0.5, 2.0]), REFERENCE.combine([x, y], [0.5, 2.0])
        )

    def test_without_pinned_memory_all_goes_on(self, mock, fatbin, monkeypatch):
        monkeypatch.setattr(image, "resource", lambda name: fatbin)
        mock.set("cuMemHostAlloc", 2)
        cuda = Cuda(driver=mock.driver())
        x, y = normal(2, 1000)
        np.testing.assert_array_equal(cuda.mix(x, y, 0.1)[0], REFERENCE.mix(x, y, 0.1)[0])


@slow
class TestMemory:
    def test_vectors_larger_than_the_window_go_in_slices(self, mock):
        device = mock.driver().device(0)
        staging = Staging(device, window=1000)
        arrays = [normal(n) for n in (0, 1, 249, 250, 251, 7000)]
        with device:
            addresses = [staging.upload(array) for array in arrays]
            back = [np.empty_like(array) for array in arrays]
            for address, array in zip(addresses, back, strict=True):
                staging.download(address, array)
            staging.synchronize()
            staging.release()
        for found, expected in zip(back, arrays, strict=True):
            np.testing.assert_array_equal(found, expected)
        assert mock.pending() == 0

    def test_what_failed_to_arrive_is_not_written_later(self, mock):
        device = mock.driver().device(0)
        staging = Staging(device, window=1000)
        out = np.zeros(100, np.float32)
        with device:
            staging.download(staging.upload(normal(100)), out)
            mock.set("cuStreamSynchronize", 719)
            with pytest.raises(KernelError):
                staging.synchronize()
            mock.reset()
            staging.upload(normal(50))
            staging.release()
        assert not out.any()

    def test_memory_is_used_again(self, cuda, mock):
        # More than one slab at first, then one.
        x = normal(1_000_000)
        cuda.combine([x, x.copy()], [0.5, 0.5])
        cuda.combine([x, x.copy()], [0.5, 0.5])
        before = mock.calls(b"cuMemAlloc_v2"), mock.allocated()
        cuda.combine([x, x.copy()], [0.5, 0.5])
        assert (mock.calls(b"cuMemAlloc_v2"), mock.allocated()) == before

    def test_a_vector_that_is_read_twice_is_copied_once(self, cuda, mock):
        x, y = normal(2, 100)
        before = mock.calls(b"cuMemcpyHtoDAsync_v2")
        cuda.pairwise(x, x, y, 0.5)
        assert mock.calls(b"cuMemcpyHtoDAsync_v2") == before + 2

    def test_threads_take_turns(self, cuda):
        vectors = normal(8, 2, 500)
        results = [None] * 8

        def work(i):
            for _ in range(20):
                results[i] = cuda.mix(*vectors[i], 0.25)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        for (x, y), found in zip(vectors, results, strict=True):
            for each, expected in zip(found, REFERENCE.mix(x, y, 0.25), strict=True):
                np.testing.assert_array_equal(each, expected)


@slow
def test_another_precision_is_refused_though_the_reference_knows_it(cuda):
    x, out, partition = np.ones(40), np.zeros(40), Rotation(40, 2, 4)
    for call in (
        lambda: cuda.update(x, x.copy(), x),
        lambda: cuda.combine([x, x], [1.0, 2.0], out=out),
        lambda: cuda.sums_without([x, x], [0]),
        lambda: cuda.mix(x, x, 0.5),
        lambda: cuda.pack(x, partition, 0),
        lambda: cuda.pack_all(x, partition),
        lambda: cuda.assemble(partition, [x[:20], x[20:]]),
        lambda: cuda.average(x, partition, [Piece(0, x[:20])], out=out),
        lambda: cuda.average(x, partition, [], out=out),
        lambda: cuda.finite(x),
        lambda: cuda.encode(x, "int8"),
        lambda: cuda.rounded(x.astype(">f4"), "float16"),
    ):
        with pytest.raises(TypeError, match="float32, got (float64|>f4)"):
            call()
    assert not out.any()


@slow
class TestTensors:
    """What is refused, before anything is started."""

    @pytest.fixture
    def refused(self, emulated):
        cuda, _, mock = emulated
        before = mock.calls(b"cuLaunchKernel")
        yield cuda
        assert mock.calls(b"cuLaunchKernel") == before

    def test_a_tensor_that_wants_a_gradient(self, refused):
        import torch

        x = torch.ones(4)
        with pytest.raises(TypeError, match=r"requires a gradient, .*detach\(\)"):
            refused.mix(x, torch.ones(4, requires_grad=True), 0.5)

    def test_other_types_and_shapes(self, refused):
        import torch

        x = torch.ones(4)
        for other in (torch.ones(4, dtype=torch.float64), torch.ones(4, dtype=torch.bfloat16)):
            with pytest.raises(TypeError, match="a tensor of float32 is needed"):
                refused.mix(x, other, 0.5)
        for other in (torch.ones(8)[::2], torch.ones(2, 2)):
            with pytest.raises(ValueError, match="one-dimensional and contiguous"):
                refused.mix(x, other, 0.5)
        with pytest.raises(ValueError, match="lengths"):
            refused.mix(x, torch.ones(5), 0.5)

    def test_arrays_beside_tensors(self, refused):
        import torch

        x, partition = torch.ones(8), Rotation(8, 2, 4)
        with pytest.raises(DeviceMismatch, match="beside a tensor there is a ndarray"):
            refused.mix(x, np.ones(8, np.float32), 0.5)
        with pytest.raises(TypeError, match="numpy array, got torch"):
            refused.mix(np.ones(8, np.float32), x, 0.5)
        with pytest.raises(DeviceMismatch):
            refused.average(x, partition, [Piece(0, np.ones(4, np.float32))])

    def test_a_tensor_on_the_host(self, mock, fatbin, monkeypatch):
        import torch

        monkeypatch.setattr(image, "resource", lambda name: fatbin)
        cuda = Cuda(driver=mock.driver(), tensors=Tensors())
        with pytest.raises(DeviceMismatch, match="lies on cpu: move it to the GPU"):
            cuda.finite(torch.ones(4))

    def test_results_that_would_overlap(self, refused):
        import torch

        whole, partition = torch.ones(100), Rotation(64, 4, 4)
        x, piece = whole[:64], Piece(1, whole[64:80])
        for out in (whole[4:68], whole[20:84], torch.ones(63)):
            with pytest.raises(ValueError):
                refused.average(x, partition, [piece], out=out)
        with pytest.raises(ValueError, match="overlaps an input"):
            refused.combine([torch.ones(64), x], [1.0, 1.0], out=x)

    def test_pieces_and_payloads_that_do_not_fit(self, refused):
        import torch

        x, partition = torch.ones(64), Rotation(64, 4, 4)
        with pytest.raises(ValueError, match="fragment 1 has 16 values here, a peer sent 15"):
            refused.average(x, partition, [Piece(1, torch.ones(15))])
        with pytest.raises(ValueError):
            refused.average(x, partition, [Piece(4, torch.ones(16))])
        with pytest.raises(ValueError, match=r"\[16, 16, 16, 16\] values, got \[16\]"):
            refused.assemble(partition, [torch.ones(16)])
        with pytest.raises(ValueError, match="partition is of 64 values"):
            refused.pack(torch.ones(65), partition, 0)
        with pytest.raises(ValueError, match="300 values as int8 take 308 bytes, got 300"):
            refused.decode(torch.ones(300, dtype=torch.uint8), "int8", 300)
        with pytest.raises(TypeError, match="uint8"):
            refused.decode(torch.ones(308), "int8", 300)

    def test_a_partition_without_kernels(self, refused):
        import torch

        with pytest.raises(TypeError, match="no CUDA code for a Layerwise partition"):
            refused.pack(torch.ones(30), Layerwise([10, 20], 3), 1)


ABUSE = """
import sys
from flwr_decentral_kernels.cuda.driver import Driver
from flwr_decentral_kernels.cuda.image import Image
from flwr_decentral_kernels.cuda.kernels import Extent
from flwr_decentral_kernels.cuda.memory import Staging
device = Driver(sys.argv[1]).device(0)
image = Image(device, open(sys.argv[2], "rb").read(), "here")
staging = Staging(device)
with device:
    # The largest slab, so that what lies behind it is the guard.
    x, y, z = (staging.reserve(1 << 20) for _ in range(3))
    length, chunks = 4 * 64, 64
    if sys.argv[3] == "misaligned":
        z += 4
    if sys.argv[3] == "beyond":
        length = (1 << 18) + 8
    image.launch("fdk_mix", [x, y, 0.5, z, z, Extent(length, chunks)], 256, staging.stream)
    staging.synchronize()
"""


@slow
@pytest.mark.parametrize(
    ("how", "survives"), [("right", True), ("misaligned", False), ("beyond", False)]
)
def test_the_emulated_gpu_complains_as_a_real_one_does(mock_path, fatbin, how, survives):
    command = [sys.executable, "-c", ABUSE, str(mock_path), str(fatbin), how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode == 0) is survives, done.stderr
    # A signal, not an error of the test's own.
    assert survives or done.returncode < 0, done.stderr
