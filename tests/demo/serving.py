"""Helpers for tests that serve a page."""

import socket


def free_port() -> int:
    """An unused port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
