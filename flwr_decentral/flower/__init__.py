"""The Flower face: a strategy for the ServerApp and a mod for the ClientApp.

This package is the only one that imports flwr.
"""

from .mod import decentral_mod
from .strategy import Decentral, DecentralResult, decentral

__all__ = ["Decentral", "DecentralResult", "decentral", "decentral_mod"]
