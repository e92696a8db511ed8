"""The Flower face: a strategy for the ServerApp and a mod for the ClientApp.

This package is the only one that imports flwr.
"""

from .app import ClientApp
from .mod import decentral_mod
from .strategy import Decentral, DecentralResult, decentral

__all__ = ["ClientApp", "Decentral", "DecentralResult", "decentral", "decentral_mod"]
