import pytest

from .inprocess import task_identity


@pytest.fixture(scope="session", autouse=True)
def flower_home(tmp_path_factory):
    """Keep the results of runs that name no folder out of the user's home."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLWR_HOME", str(tmp_path_factory.mktemp("flower-home")))
        yield


@pytest.fixture
def identity():
    """Let a test make Messages outside of a run."""
    with task_identity():
        yield


@pytest.fixture(params=["packed", "message"])
def dispatch(request) -> str:
    return request.param
