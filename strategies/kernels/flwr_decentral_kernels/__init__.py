"""Compiled vector arithmetic for flwr-decentral: on the CPU, and on NVIDIA GPUs.

``FLWR_DECENTRAL_OPS=native`` or ``FLWR_DECENTRAL_OPS=cuda`` chooses it, and ``flwr-decentral
doctor`` says what of it can be used here. All backends give the bits of the numpy reference.
"""

from .native import Native

__all__ = ["Native"]
