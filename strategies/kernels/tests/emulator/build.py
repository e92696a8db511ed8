"""Build the mock driver, and put a backend on it."""

import ctypes
import functools
import shutil
import subprocess
from pathlib import Path

from flwr_decentral_kernels.cuda.driver import Driver
from flwr_decentral_kernels.cuda.tensors import Tensors
from flwr_decentral_kernels.library import resource

from .battery import OnDevice

HERE = Path(__file__).parent
KERNELS = resource("cuda/kernels.cu")
FLAGS = (
    *("-std=c++20", "-O1", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"),
    # The arithmetic of the GPU: no fused products; and its complaints: no address out of line.
    *("-ffp-contract=off", "-fno-strict-aliasing", "-fsanitize-undefined-trap-on-error"),
    "-fsanitize=alignment,bounds,shift,signed-integer-overflow",
)


def compiler():
    """Find g++, or None."""
    return shutil.which("g++")


def run(*command):
    """Run g++."""
    done = subprocess.run(
        [compiler(), *map(str, command)], capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        raise RuntimeError(f"g++ {' '.join(map(str, command))}\n{done.stderr[-5000:]}")


def build_driver(folder):
    """Compile the mock driver without its kernels."""
    target = folder / "mock_driver.o"
    run(*FLAGS, "-c", "-o", target, HERE / "mock_driver.cpp")
    return target


def build(folder, driver, kernels=KERNELS):
    """Link the mock driver with a version of the kernels, and give the library's path."""
    target = folder / "libcuda-mock.so"
    # "../codecs.h" is looked for from the folder of the kernels, then from these.
    folders = [f"-I{each}" for each in (kernels.parent, KERNELS.parent, HERE)]
    source = HERE / "emulated_kernels.cpp"
    run(*FLAGS, *folders, "-shared", "-o", target, source, driver)
    return target


class Mock:
    """A loaded mock driver."""

    def __init__(self, path):
        self.path, self.library = path, ctypes.CDLL(str(path))
        self._set = []

    def driver(self):
        """Open it as the backend opens the real one."""
        return Driver(str(self.path))

    def set(self, name, value):
        """Make a function fail with a status, until `reset`."""
        self._set.append(name)
        self.library.mock_set(name.encode(), value)

    def reset(self):
        """Let everything work again."""
        while self._set:
            self.library.mock_set(self._set.pop().encode(), -1)

    def __getattr__(self, name):
        return functools.partial(getattr(self.library, f"mock_{name}"))


class Emulated(Tensors):
    """Take tensors on the host for tensors on the GPU, and put guards around the new ones."""

    kind = "cpu"

    def __init__(self, mock):
        self.maker = OnDevice("cpu", mock.synchronize)

    def stream(self, device):
        return 0

    def empty(self, length, dtype, device):
        return self.maker.empty(length, dtype)

    # torch keeps memory for work on the stream; the mock's work it does not know of.
    def copy(self, tensor):
        copy = self.maker.empty(len(tensor), str(tensor.dtype).removeprefix("torch."))
        return copy.copy_(tensor)

    def number(self, tensor):
        self.maker.synchronize()
        return super().number(tensor)
