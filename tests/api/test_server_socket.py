"""The listening socket of the server."""

from __future__ import annotations

import socket

from timebell.api import server


def test_nagle_is_disabled_on_accepted_connections() -> None:
    with (
        server.bind("127.0.0.1", 0) as listening,
        socket.create_connection(listening.getsockname(), timeout=20),
    ):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
