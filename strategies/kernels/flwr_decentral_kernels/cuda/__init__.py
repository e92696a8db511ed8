"""The ops backend ``cuda``: vector arithmetic on an NVIDIA GPU, with the bits of the reference."""

from .backend import Cuda
from .errors import DeviceMismatch, KernelError

__all__ = ["Cuda", "DeviceMismatch", "KernelError"]
