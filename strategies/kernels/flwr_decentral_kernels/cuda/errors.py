"""What goes wrong on a GPU."""

from __future__ import annotations

from flwr_decentral.core.errors import RuntimeFault


class KernelError(RuntimeFault):
    """Report that the CUDA driver or compiler has failed, with its own name for the error."""


class DeviceMismatch(ValueError):  # noqa: N818 - named as torch users know it
    """Refuse vectors that lie on other devices than they have to."""
