"""What the ServerApp side and the mod say to each other inside Flower's messages.

A message of ours carries a config record named :data:`CONTROL`. The mod takes it off before the
user's function sees the message. It holds numbers and names, never a parameter of the model.

=========  =========================================================================
``do``     what the mod does
=========  =========================================================================
hello      says who it is; the user's function is not called
host       serves many tasks, one after another, over the engine's local socket
train      runs the user's train function on the vector in the arena, once
evaluate   runs the user's evaluate function on the vector in the arena, once
=========  =========================================================================
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from flwr.app import ConfigRecord, RecordDict

from flwr_decentral.arena import ArenaRef

CONTROL: Final = "flwr-decentral"
"""Name of the record that carries our part of a message."""

PROTOCOL: Final = 1
"""Version of what is written here; both ends must have the same."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What stays the same for all tasks of a run.

    Attributes
    ----------
    arena : ArenaRef
        Where the vectors are.
    nodes : int
        Number of nodes, n.
    arrays_key, config_key : str
        How the user's functions call the model and the config in a message.
    address, token : str
        The engine's local socket; empty where there is none.
    patience : float
        Seconds after which a process that hears nothing of the engine gives up.
    """

    arena: ArenaRef
    nodes: int
    arrays_key: str
    config_key: str
    address: str = ""
    token: str = ""
    patience: float = 3600.0

    def control(self, do: str, **values: Any) -> ConfigRecord:
        """Make the control record of a message."""
        return ConfigRecord(
            {
                "do": do,
                "protocol": PROTOCOL,
                "arena-path": self.arena.path,
                "arena-token": self.arena.token,
                "nodes": self.nodes,
                "arrays-key": self.arrays_key,
                "config-key": self.config_key,
                "address": self.address,
                "token": self.token,
                "patience": self.patience,
                **values,
            }
        )

    @classmethod
    def of(cls, control: Mapping[str, Any]) -> Job:
        """Read the control record of a message."""
        return cls(
            arena=ArenaRef(control["arena-path"], control["arena-token"]),
            nodes=control["nodes"],
            arrays_key=control["arrays-key"],
            config_key=control["config-key"],
            address=control["address"],
            token=control["token"],
            patience=control["patience"],
        )


def reported_error(content: RecordDict) -> str:
    """Read the error that a reply reports, or the empty string."""
    records = content.config_records
    return str(records[CONTROL].get("error", "")) if CONTROL in records else ""


def dump_facts(facts: Mapping[str, Any]) -> str:
    """Write the answer to a hello."""
    return json.dumps(facts)


def load_facts(text: str) -> dict[str, Any]:
    """Read the answer to a hello."""
    facts: dict[str, Any] = json.loads(text)
    return facts
