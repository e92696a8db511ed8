"""Ports of this machine for servers that are about to be started."""

from __future__ import annotations

import socket  # noqa: TID251 - a port is the system's to give


def free_ports(count: int) -> list[int]:
    """Find different TCP ports of 127.0.0.1 that nobody listens at."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports
