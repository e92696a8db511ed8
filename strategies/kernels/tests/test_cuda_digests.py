"""Every algorithm gives the same run on the emulated GPU as with the reference."""

import pytest

from flwr_decentral import plugins
from flwr_decentral.core import ConfigurationError
from flwr_decentral.ops import Reference
from flwr_decentral.testing.transcripts import first_difference

from .test_digests import MORE, transcript

CASES = [
    (name, parameters)
    for name in plugins.SHELF
    for parameters in [{}, {"wire": "int8"}, *MORE.get(name, [])]
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "parameters"), CASES, ids=str)
def test_the_run_is_the_same(name, parameters, emulated):
    cuda, _, mock = emulated
    try:
        algorithm = plugins.make(name, **parameters)
    except ConfigurationError as error:
        assert "wire" in parameters
        pytest.skip(str(error))
    before = mock.calls(b"cuLaunchKernel")
    expected = transcript(algorithm, Reference())
    assert first_difference(expected, transcript(algorithm, cuda)) is None
    if name != "local":  # it trains alone
        assert mock.calls(b"cuLaunchKernel") > before
