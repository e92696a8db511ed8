"""All-reduce: every round, all nodes end with the exact average of all trained models.

No decentralized algorithm keeps its nodes closer together, so this is the ceiling of a comparison:
what training on all data would achieve, and what it costs in bytes and time on the links that there
are. It is no single paper's algorithm. The reduction of a vector in pieces, each of which is summed
up and spread by another node, is that of Rabenseifner (ICCS 2004) and, on a ring, of Patarasu and
Yuan (J. Parallel Distrib. Comput. 2009), who prove that 2 D (n-1) / n per node is the least.

A round
-------
The model is cut into as many chunks as there are nodes. Node c owns chunk c.

1. *Train*.
2. *Reduce*. Each chunk travels to its owner along a tree of shortest paths: a node adds up its own
   values and the sums of its children, and tells its parent.
3. *Spread*. The owner divides by the number of models in the sum. Its mean travels back along the
   tree. A node with the means of all chunks trains on from them.

A mean is computed once, by one node, so all nodes have the same bits. Terms are added in ascending
order of the nodes that they come from. On a complete graph, whose trees are stars, that is the
order of a plain loop over all models.

Why trees of shortest paths, one for each chunk
-----------------------------------------------
They need nothing of the topology but that it is connected. On a ring every tree is the ring, cut
open opposite its owner: each node sends 2 D (n-1) / n, exactly what a ring all-reduce sends, in
half as many hops. On a complete graph it is the same, in two hops. On a star the hub relays
everything, as any hub must. In total it is 2 D (n-1) on every graph, and no all-reduce can do with
less. A single spanning tree would send no more in total, but all of it over few nodes.

Loss, and nodes that come and go
--------------------------------
See :mod:`flwr_decentral_allreduce.machine`: what is lost is asked for again, and a round takes
place among the nodes that are there.
"""

from .algorithm import AllReduce
from .machine import AllReduceMachine

__all__ = ["AllReduce", "AllReduceMachine"]
