"""What the compilers make of the CUDA kernels, on machines without a GPU."""

import re
import shutil
import subprocess

import pytest

from flwr_decentral_kernels.cuda import KernelError, image, nvrtc
from flwr_decentral_kernels.cuda.kernels import SIGNATURES
from flwr_decentral_kernels.library import resource

pytestmark = pytest.mark.slow
NVCC = shutil.which("nvcc")
FLAGS = ["-std=c++17", "-fmad=false", "-prec-div=true", "-ftz=false"]


def nvcc(*arguments):
    if NVCC is None:
        pytest.skip("there is no nvcc here")
    command = [NVCC, *FLAGS, *map(str, arguments), str(resource("cuda/kernels.cu"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr, done.stderr
    return done.stdout + done.stderr


def check_ptx(text):
    """Look for what would change bits, and for the wide accesses that make the kernels fast."""
    for entry in SIGNATURES:
        assert re.search(rf"\.entry {entry}\(", text), entry
    for wrong in (
        r"fma\.",
        r"mad\.f32",
        r"\.ftz",
        r"div\.(full|approx)",
        r"rcp\.",
        r"(ld|st)\.local",
    ):
        assert not re.search(wrong, text), wrong
    for kernel in re.split(r"\.entry ", text)[1:]:
        name = kernel[: kernel.index("(")]
        if name != "fdk_decode_int8":  # reads four bytes at a time
            assert re.search(r"ld\.global\.v4\.(f32|u32|u16)", kernel), name
        if name not in ("fdk_finite", "fdk_encode_int8"):
            assert re.search(r"st\.global\.v4\.(f32|u32|u16)", kernel), name


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_nothing_is_spilled(target, tmp_path):
    report = nvcc("-cubin", f"-arch={target}", "-Xptxas", "-v", "-o", tmp_path / "kernels.cubin")
    stack = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", report)
    registers = [int(number) for number in re.findall(r"Used (\d+) registers", report)]
    assert len(stack) == len(registers) == len(SIGNATURES)
    assert set(stack) == {("0", "0")}
    # 64 registers still let 1024 threads live on each multiprocessor, half of what it can hold.
    assert max(registers) <= 64


def test_ptx_of_nvcc_has_the_bits_of_the_reference(tmp_path):
    path = tmp_path / "kernels.ptx"
    nvcc("-ptx", "-arch=compute_80", "-o", path)
    check_ptx(path.read_text())


def test_nvrtc_compiles_the_same_source_without_any_header():
    source, headers = image.sources()
    found = 0
    for library in nvrtc.libraries():
        try:
            compiler = nvrtc.Nvrtc(library)
        except KernelError:
            continue
        found += 1
        for capability in ((8, 0), (9, 0)):
            target = compiler.target(capability)
            assert target == f"sm_{capability[0]}0"
            assert compiler.compile(source, headers, target).startswith(b"\x7fELF")
        check_ptx(compiler.compile(source, headers, "compute_80").decode())
        break
    if not found:
        pytest.skip("there is no NVRTC here")
