"""Sites made by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import networkx as nx
from numpy.typing import NDArray

from flwr_decentral.core import ConfigurationError, Layout, Seeds, Site, Vector
from flwr_decentral.core.algorithm import Topology
from flwr_decentral.ops import Ops, choose


def make_site(
    *,
    topology: Topology,
    initial: Vector | Mapping[str, NDArray[Any]],
    node: int = 0,
    seed: int = 0,
    ops: Ops | None = None,
) -> Site:
    """Make the site of one node, to step a machine by hand.

    Parameters
    ----------
    topology : networkx.Graph
        The graph, on nodes 0 to n-1.
    initial : ndarray of float32, or mapping of str to ndarray
        The initial model: one flat vector, or a model's tensors by name.
    node : int (default: 0)
        Whose site it is.
    seed : int (default: 0)
        The run seed.
    ops : Ops, optional
        The vector arithmetic; by default what ``FLWR_DECENTRAL_OPS`` names.

    Examples
    --------
    >>> import numpy as np
    >>> site = make_site(topology=nx.path_graph(3), initial=np.zeros(4, np.float32), node=1)
    >>> site.neighbors, site.layout.size
    ((0, 2), 4)
    """
    if sorted(topology) != list(range(len(topology))):
        raise ConfigurationError(
            "nodes must be numbered from 0; networkx.convert_node_labels_to_integers does so"
        )
    tensors = initial if isinstance(initial, Mapping) else {"model": initial}
    layout = Layout.of(tensors)
    vector, _ = layout.flatten(tensors)
    vector.flags.writeable = False
    return Site(
        node=node,
        topology=nx.freeze(nx.Graph(topology)),
        layout=layout,
        initial=vector,
        seeds=Seeds(seed).of(node),
        ops=ops or choose(),
    )
