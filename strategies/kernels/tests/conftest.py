import os
from pathlib import Path

import pytest

from flwr_decentral_kernels import library

LIBRARY = os.environ.get("FLWR_DECENTRAL_TEST_LIBRARY")
"""Names a library that is to be tested instead of the installed one."""

if LIBRARY:
    _resource = library.resource
    library.resource = lambda name: Path(LIBRARY) if name == library.LIBRARY else _resource(name)

READY = "FLWR_DECENTRAL_TEST_MOCK"
"""Names a mock driver that is built already, with other kernels perhaps."""


@pytest.fixture(scope="session")
def mock_path(tmp_path_factory):
    """Build the mock driver, once."""
    from .emulator import build

    if READY in os.environ:
        return Path(os.environ[READY])
    if build.compiler() is None:
        pytest.skip("there is no g++ to build the emulator with")
    folder = tmp_path_factory.mktemp("mock")
    return build.build(folder, build.build_driver(folder))


@pytest.fixture
def mock(mock_path):
    """Give the mock driver, which works as it should until a test sets it to fail."""
    from .emulator import build

    mock = build.Mock(mock_path)
    yield mock
    mock.reset()
    mock.synchronize()


@pytest.fixture(scope="session")
def fatbin(tmp_path_factory):
    """Write an image that the mock driver takes, whose kernels are its own."""
    path = tmp_path_factory.mktemp("image") / "kernels.fatbin"
    path.write_bytes(b"\x50\xed\x55\xba" + bytes(60))
    return path


@pytest.fixture(scope="session")
def emulated(mock_path, fatbin):
    """Give a backend on the mock driver, makers of its arrays by kind, and the driver."""
    from flwr_decentral_kernels.cuda import Cuda, image

    from .emulator import battery, build

    mock = build.Mock(mock_path)
    tensors = build.Emulated(mock)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(image, "resource", lambda name: fatbin)
        ops = Cuda(driver=mock.driver(), tensors=tensors)
    return ops, {"numpy": battery.Host(), "tensor": tensors.maker}, mock
