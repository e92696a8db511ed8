"""Client weights: what a node gives to the models of its neighbors.

When node i ends a round, x_i becomes sum_j w_ij X_j, and no other model changes. So one event does
not keep the mean of all models. But if node i is the one that ends a round with probability p_i,
its *influence*, then the expected matrix has the entry p_i w_ij beside the diagonal, and it keeps
the mean if it is symmetric:

    p_i w_ij = p_j w_ji,        sum over j of w_ij <= 1.

Here

    p_i w_ij = min( p_i / (d_i + 1), p_j / (d_j + 1) )

with the degrees d. Both ends of an edge find the same number, knowing of each other the degree and
the influence alone, and no node gives away more than d_i / (d_i + 1). For equal influences these
are the weights of Metropolis and Hastings; on a regular graph, 1 / (d + 1) each.
"""

from __future__ import annotations

from collections.abc import Mapping


def client_weight(degree: int, peer_degree: int, influence: float = 1.0) -> float:
    """Weigh the model of a neighbor.

    Parameters
    ----------
    degree, peer_degree : int
        How many neighbors this node has, and how many the other.
    influence : float (default: 1.0)
        The influence of the other node in units of this node's: p_j / p_i.

    Examples
    --------
    >>> client_weight(3, 1), client_weight(1, 3)
    (0.25, 0.25)
    >>> 2 * client_weight(3, 3, influence=0.5) == client_weight(3, 3, influence=2.0)
    True
    """
    return min(1 / (degree + 1), influence / (peer_degree + 1))


def complete(weights: Mapping[int, float], heard: set[int], *, boost: bool) -> dict[int, float]:
    """Settle what becomes of the weight of neighbors of whom there is no model.

    Parameters
    ----------
    weights : mapping of int to float
        The weight of each neighbor.
    heard : set of int
        Those of whom there is a model.
    boost : bool
        Raise all weights that are left, the node's own included, by the same factor, so that they
        add up to 1; else the node's own model gets the rest.

    Returns
    -------
    dict of int to float
        The weights of those who were heard, ascending; the rest to 1 is the node's own.

    Examples
    --------
    >>> complete({1: 0.25, 2: 0.25, 3: 0.1}, {1}, boost=False)
    {1: 0.25}
    >>> {j: round(w, 4) for j, w in complete({1: 0.25, 2: 0.25, 3: 0.1}, {1}, boost=True).items()}
    {1: 0.3846}
    """
    silent = sum(weight for peer, weight in weights.items() if peer not in heard) if boost else 0.0
    return {peer: weights[peer] / (1 - silent) for peer in sorted(heard)}
