"""Peer connections: the ports that ranks tell each other when they make a group."""

from __future__ import annotations

import socket

from rillflow.workers.peer_connections import PORTS, PeerConnections


def test_every_process_tells_the_same_number_of_ports_and_zero_is_none() -> None:
    """A port of the padding that another connection had would count that connection to the group."""
    with PeerConnections().growing() as nothing:
        pass
    assert nothing.listening == [0] * PORTS
    with PeerConnections().growing() as made:
        door = socket.create_server(("127.0.0.1", 0))
    with door:
        assert made.listening == [door.getsockname()[1], *[0] * (PORTS - 1)]
