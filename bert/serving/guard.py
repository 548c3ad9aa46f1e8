"""Rejects requests before `bert demo` or `bert serve` reads them: unknown hosts, large or slow bodies, and uploads."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any

MAX_BODY = 1 << 20
"""Maximum size of a request in bytes. The longest texts need a few hundred thousand bytes as JSON."""

BODY_SECONDS = 30
"""Maximum time in which a client must send the body of a request."""

LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")
"""Names of this machine in a local browser."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class RequestGuard:
    """ASGI middleware that rejects requests before the application reads them.

    - Requests for an unknown host get 421, so that another site whose name resolves to this server cannot use the model
      (DNS rebinding).
    - Bodies over `MAX_BODY` get 413, by Content-Length or, if streamed, as soon as the limit is exceeded.
    - Bodies that do not arrive within `BODY_SECONDS` get 408.
    - Uploads and forms with files get 403, because no ability reads files and they would stay in the temporary folder.
    """

    def __init__(self, app: App, hosts: Collection[str], any_address: bool = False) -> None:
        """
        Args:
            hosts: allowed values of the Host header, without a port, in lower case.
            any_address: whether all IP addresses are also allowed. DNS rebinding cannot use them.
        """
        self._app, self._hosts, self._any_address = app, frozenset(hosts), any_address

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Handles one request."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = [(name.lower(), value) for name, value in scope["headers"]]
        if not self._allows([value for name, value in headers if name == b"host"]):
            await _reject(scope, send, 421, "this host name is not served: start the server with --allowed_host NAME")
        elif scope["type"] == "websocket":
            await self._app(scope, receive, send)
        elif _has_files(scope["path"], headers):
            await _reject(scope, send, 403, "this page reads no files")
        elif _content_length(headers) > MAX_BODY:
            await _reject(scope, send, 413, _TOO_LONG)
        else:
            await self._read_and_answer(scope, receive, send)

    async def _read_and_answer(self, scope: Message, receive: Receive, send: Send) -> None:
        try:
            messages = await asyncio.wait_for(_read_body(receive), BODY_SECONDS)
        except TimeoutError:
            await _reject(scope, send, 408, f"the request did not arrive within {BODY_SECONDS} seconds")
            return
        if messages is None:
            await _reject(scope, send, 413, _TOO_LONG)
            return

        async def replay() -> Message:
            return messages.pop(0) if messages else await receive()

        await self._app(scope, replay, send)

    def _allows(self, values: list[bytes]) -> bool:
        if len(values) != 1:
            return False
        host = re.sub(r":\d*$", "", values[0].decode("latin-1").strip().lower()).removesuffix(".")
        return host in self._hosts or (self._any_address and _is_address(host.strip("[]")))


_TOO_LONG = f"the request has more than {MAX_BODY:,} bytes: pass shorter texts"


def hosts_of(host: str, allowed: Collection[str] = ()) -> set[str]:
    """Returns the allowed values of the Host header for a server that listens on ``host``."""
    own = () if is_local(host) else (socket.gethostname(),)
    return {name.lower().removesuffix(".") for name in (*LOCAL_HOSTS, host, *own, *allowed)}


def is_local(host: str) -> bool:
    """Whether an address is reachable only from this machine."""
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _content_length(headers: list[tuple[bytes, bytes]]) -> int:
    """Returns the declared length; 0 without one, and more than `MAX_BODY` if it is invalid."""
    lengths = [value for name, value in headers if name == b"content-length"]
    return max((int(value) if value.isdigit() and len(value) < 20 else MAX_BODY + 1 for value in lengths), default=0)


def _has_files(path: str, headers: list[tuple[bytes, bytes]]) -> bool:
    """Whether a request uploads files. The login form does not."""
    endpoint = path.rstrip("/").rpartition("/")[2]
    forms = any(name == b"content-type" and value.strip().lower().startswith(b"multipart/") for name, value in headers)
    return endpoint in ("upload", "process_recording") or (forms and endpoint != "login")


async def _read_body(receive: Receive) -> list[Message] | None:
    """Returns the messages of a body; None if it exceeds `MAX_BODY`."""
    messages, size = list[Message](), 0
    while True:
        message = await receive()
        size += len(message.get("body", b""))
        if size > MAX_BODY:
            return None
        messages.append(message)
        if message["type"] != "http.request" or not message.get("more_body", False):
            return messages


async def _reject(scope: Message, send: Send, status: int, sentence: str) -> None:
    """Sends a response with one sentence, or closes a websocket."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": sentence})
        return
    body = f"{sentence}\n".encode()
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*headers, (b"connection", b"close")]})
    await send({"type": "http.response.body", "body": body})
