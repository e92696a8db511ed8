"""Flower's ClientApp with the mod built in, for those who would rather change one import."""

from __future__ import annotations

import flwr.clientapp
from flwr.clientapp.typing import Mod

from .mod import decentral_mod


class ClientApp(flwr.clientapp.ClientApp):
    """A Flower ClientApp whose functions all carry :func:`decentral_mod`.

    ``app = ClientApp()`` of this class is ``@app.train(mods=[decentral_mod])`` and the same for
    evaluate. Under another strategy it is Flower's ClientApp and nothing else.

    Parameters
    ----------
    mods : list of Mod, optional
        More mods. They run inside ours: once for each call of a function.
    """

    def __init__(self, mods: list[Mod] | None = None) -> None:
        super().__init__(mods=[decentral_mod, *(mods or [])])
