"""Decentralized federated learning for Flower: clients gossip, no server holds the model."""

from importlib.metadata import version

__version__ = version("flwr-decentral")
