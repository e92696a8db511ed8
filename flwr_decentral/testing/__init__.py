"""For authors of algorithms: a conformance kit, an adversarial cluster, toys and tiny problems.

The kit itself is :mod:`flwr_decentral.testing.conformance`, which alone needs pytest and hypothesis
(``pip install flwr-decentral[testing]``).
"""

from flwr_decentral.core.conduct import Tally

from .cluster import Cluster
from .faults import Faults, Outage, Split
from .network import Sent
from .sites import make_site

__all__ = ["Cluster", "Faults", "Outage", "Sent", "Split", "Tally", "make_site"]
