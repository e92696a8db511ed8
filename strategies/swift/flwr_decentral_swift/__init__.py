"""SWIFT: each node averages with the newest model of every neighbor, and waits for none of them.

Paper
-----
Bornstein, Rabbani, Wang, Bedi, Huang: *SWIFT: Rapid Decentralized Federated Learning via Wait-Free
Model Communication*, ICLR 2023, arXiv:2210.14026, Algorithm 1.

Every node keeps the newest model X_j that it has got from each neighbor j; at first, the common
initial model. A round of node i:

1. *Send* x_i to all neighbors: the model that the round begins with, not yet trained or averaged.
2. *Train* from x_i, which adds u_i.
3. *Average*, in every s-th round (the paper's C_{s-1}): x_i <- w_ii x_i + sum_j w_ij X_j, and then
   x_i <- x_i + u_i.

Nothing is waited for. Of two models of one neighbor the one of the later round wins, whichever
arrives last. What is used is summed in ascending order of node indices, the node's own model in its
sorted place.

The weights are in :mod:`flwr_decentral_swift.weights`.

Differences from the paper and its code
---------------------------------------
- The weights. The paper's communication coefficient selection lets nodes of the same degree
  exchange proposals once, before either has taken the minimum over all of its neighbors. On
  irregular graphs that leaves w_ij and w_ji apart, so that the mean of all models drifts. The
  weights here are symmetric in expectation on every graph, for any influence, and the paper's own
  on regular graphs.
- ``influence="measured"`` is ours: the paper's experiments take all influences as equal. They are
  not where nodes differ in speed. Equal weights then let a slow node's model count for more, by
  as much as it trains less often, so that all nodes count alike in what is minimized. With the
  measured influence the mean of all models is kept, and all rounds count alike: the paper's
  sum of p_i f_i.
- A neighbor that goes down takes its model out of the averages. In the code, the last model of a
  dead neighbor is averaged for ever, and pulls the others back to it.
- ``missing="boost"`` divides by the sum of the weights that are left. The code multiplies by
  (heard + 1) / (degree + 1), which makes them add up to 1 only if all are equal.
- Models that are still queued when a newer one is ready are dropped, unless ``flush=False``.
- The first send, of the initial model that all nodes have, is left out.
- A round is any number of local steps of any optimizer, not one step of SGD.

:mod:`flwr_decentral_swift.divshare` has the variant that the DivShare paper compares with.
"""

from .algorithm import SWIFT, SWIFTMachine

__all__ = ["SWIFT", "SWIFTMachine"]
