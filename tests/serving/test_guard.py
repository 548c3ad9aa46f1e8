"""The server rejects other hosts, large bodies and uploads before Gradio reads them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bert.commands.serve import _named
from bert.serving.guard import MAX_BODY, RequestGuard, hosts_of, is_local

JSON = ((b"content-type", b"application/json"),)


def status_of(
    host: str | None = "localhost:7860",
    path: str = "/gradio_api/call/predict",
    headers: Sequence[tuple[bytes, bytes]] = JSON,
    body: Sequence[bytes] = (b"{}",),
    listens: str = "127.0.0.1",
    allowed: tuple[str, ...] = (),
    kind: str = "http",
) -> int | str:
    """The status of a request; 200 if the application got the whole body."""
    sent: list[Any] = []
    parts = [{"type": "http.request", "body": part, "more_body": True} for part in body]
    parts.append({"type": "http.request", "body": b"", "more_body": False})
    read = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        got = b""
        while kind == "http":
            message = await receive()
            got += message["body"]
            if not message["more_body"]:
                break
        assert kind != "http" or got == b"".join(body)
        await send({"type": "http.response.start", "status": 200})

    async def receive() -> Any:
        nonlocal read
        read += 1
        return parts.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    named = [] if host is None else [(b"host", host.encode("latin-1"))]
    scope = {"type": kind, "path": path, "headers": [*named, *headers]}
    guard = RequestGuard(app, hosts_of(listens, allowed), any_address=not is_local(listens))
    asyncio.run(guard(scope, receive, send))
    assert read <= MAX_BODY // max(len(body[0]) if body else 1, 1) + 2, "no more is read than allowed"
    return sent[0].get("status", sent[0]["type"])


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:7860", "127.0.0.1:7860", "[::1]:7860", "[::1]", "localhost.:7860"]
)
def test_local_names_are_served(host: str) -> None:
    assert status_of(host) == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:7860", "localhost.evil.example", "127.0.0.1.evil.example", "", None,
             "10.0.0.1", "evil.example#localhost", "localhost@evil.example", "[::1].evil.example", "\xff"],
)  # fmt: skip
def test_other_names_are_rejected(host: str | None) -> None:
    assert status_of(host) == 421
    assert status_of(host, kind="websocket") == "websocket.close"


def test_two_hosts_are_none() -> None:
    assert status_of("localhost", headers=[*JSON, (b"host", b"evil.example")]) == 421


def test_a_server_that_is_open_has_addresses_and_names_that_are_given() -> None:
    for host in ("10.0.0.1:7860", "[fe80::1]:7860", "0.0.0.0:7860"):
        assert status_of(host, listens="0.0.0.0") == 200
    assert status_of("demo.example", listens="0.0.0.0") == 421
    assert status_of("demo.example", listens="demo.example") == 200
    assert status_of("Demo.Example:443", allowed=("demo.example",)) == 200


def test_large_bodies_are_rejected_before_they_are_read() -> None:
    half = b"x" * (MAX_BODY // 2)
    assert status_of(body=[half, half]) == 200
    assert status_of(body=[half, half, b"x"]) == 413
    assert status_of(body=[half] * 400) == 413
    for length in (str(MAX_BODY + 1), "200000000", "9" * 5000, "-1", "x"):
        assert status_of(headers=[*JSON, (b"content-length", length.encode())], body=[]) == 413


def test_uploads_are_rejected() -> None:
    for path in ("/upload", "/gradio_api/upload", "/gradio_api/upload/", "/gradio_api/process_recording"):
        assert status_of(path=path) == 403
    form = [(b"Content-Type", b"Multipart/form-data; boundary=x")]
    assert status_of(path="/gradio_api/component_server", headers=form) == 403
    assert status_of(path="/login", headers=form) == 200


def test_a_model_may_have_the_name_of_a_published_one(tmp_path: Path) -> None:
    model = str(tmp_path / "run")
    Path(model).mkdir()
    for name in ("encoder", "all-MiniLM-L6-v2", "text-embedding-3.5"):
        assert _named(f"{name}={model}") == (name, model)
    assert _named(model) == ("run", model)
    (tmp_path / "a=b").mkdir()
    assert _named(str(tmp_path / "a=b")) == ("a=b", str(tmp_path / "a=b"))
