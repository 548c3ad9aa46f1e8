"""The API of the page under load and with odd requests: each gets its own answer, or one sentence."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bert.demo.abilities import abilities_of
from bert.demo.page import build, serve
from tests.demo.serving import free_port

gradio_client = pytest.importorskip("gradio_client", reason="needs the extra demo")
pytest.importorskip("gradio", reason="needs the extra demo")
httpx = pytest.importorskip("httpx")

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def address(models) -> Iterator[str]:
    page = build(models["tagging"])
    yield serve(page, "127.0.0.1", free_port())
    page.close(verbose=False)


@pytest.fixture
def ask(address: str) -> Any:
    """Sends what is given as data, and returns the event and its data."""

    def send(data: Any, name: str = "tag") -> tuple[str, Any]:
        url = f"{address}gradio_api/call/{name}"
        content = data if isinstance(data, bytes) else json.dumps({"data": data})
        posted = httpx.post(url, content=content, headers={"Content-Type": "application/json"}, timeout=60)
        if posted.status_code != 200:
            return f"status {posted.status_code}", posted.text
        event, data = re.fullmatch(
            r".*event: (\w+)\ndata: (.*?)\s*",
            httpx.get(f"{url}/{posted.json()['event_id']}", timeout=60).text,
            re.DOTALL,
        ).groups()
        return event, json.loads(data)

    return send


def test_two_hundred_requests_at_once_have_each_their_answer(models, address, monkeypatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from demo import measure

    told = asyncio.run(measure(address, abilities_of(models["tagging"])[0]))
    print(told)
    assert re.match(r"tag: 200 requests with 200 different answers, 0 lost, 0 mixed up; .*p50 \d+ ms, p99 \d+ ms", told)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a" * 1_000_000, "the text has 1,000,000 characters, and this page reads 20,000: pass a shorter text"),
        ("", "the text is empty: write at least one word"),
        (None, "the text is empty: write at least one word"),
        ("\x00\x07\x1b\r\n", "the text is empty: write at least one word"),
    ],
    ids=["long", "empty", "null", "control"],
)
def test_a_text_that_is_refused_gets_one_sentence(ask, capfd, text, sentence: str) -> None:
    event, data = ask([text])
    assert (event, data["error"]) == ("error", sentence)
    assert "Traceback" not in "".join(capfd.readouterr())


def test_odd_texts_are_answered(ask) -> None:
    for text in ("a\x00b\x07 c", "<script>alert(1)</script>", "${a} {{b}}", "日本\u202e"):
        event, [parts] = ask([text])
        assert event == "complete" and "".join(part["token"] for part in parts) == text
    event, [parts] = ask(b'{"data": ["a \\ud83d b"]}')
    assert event == "complete" and "".join(part["token"] for part in parts) == "a ? b"


def test_what_is_no_request_harms_no_other(ask) -> None:
    for wrong in (b"no JSON", b'{"data": 3}', b'{"data": []}'):
        assert ask(wrong)[0] != "complete"
    assert ask(["a"], "nothing")[0] != "complete"
    assert ask([{"a": 1}])[0] == "complete", "read as its text"
    assert ask(["a b"])[0] == "complete"


def test_the_client_of_the_guide_is_answered(models, monkeypatch, capsys) -> None:
    text = (ROOT / "docs" / "use.md").read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n(from gradio_client.*?)```", text, re.DOTALL)
    page = build(models["encoder"])
    address = serve(page, "127.0.0.1", free_port())
    exec(code.replace("http://127.0.0.1:7860/", address))
    page.close(verbose=False)
    [shown] = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("Loaded")]
    expected = models["encoder"].similarity("A man plays the guitar.", "Someone makes music.")
    assert float(shown) == pytest.approx(expected.item(), abs=1e-4)


def test_nothing_is_uploaded_or_read_beside_the_queue(address) -> None:
    assert httpx.post(f"{address}gradio_api/upload", files={"files": b"x" * 100}).status_code >= 400
    assert httpx.post(f"{address}gradio_api/run/tag", json={"data": ["a"]}).status_code >= 400
    assert httpx.get(f"{address}gradio_api/file={ROOT / 'pyproject.toml'}").status_code >= 400
    assert httpx.get(f"{address}monitoring/summary").status_code >= 400


def test_the_command_serves_until_it_is_interrupted(finetuned, tmp_path) -> None:
    """Serves with an unreachable proxy, and writes no file to the home or working directory."""
    port = free_port()
    home, temporary = tmp_path / "home", tmp_path / "temporary"
    home.mkdir()
    temporary.mkdir()
    proxies = dict.fromkeys(("HTTP_PROXY", "http_proxy"), "http://127.0.0.1:9")
    folders = {"HOME": str(home), "TMPDIR": str(temporary), "PYTHONPATH": str(ROOT)}
    environment = {**os.environ, **folders, **proxies}
    command = [sys.executable, "-m", "bert", "demo", str(finetuned), "--port", str(port), "--host", "0.0.0.0"]
    server = subprocess.Popen(command, stdout=-1, stderr=-1, text=True, env=environment, cwd=home)
    try:
        assert server.stdout.readline() == f"{finetuned} is at http://localhost:{port}/ (Ctrl-C ends it)\n"
        client = gradio_client.Client(f"http://127.0.0.1:{port}/", verbose=False)
        assert set(client.predict("ba ri", api_name="/predict")) == {"label", "confidences"}
        second = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
        assert second.stderr == f"error: port {port} of 0.0.0.0 is in use: set another --port\n"
        server.send_signal(signal.SIGINT)
        error = server.communicate(timeout=30)[1]
        assert server.returncode == 130
    finally:
        server.kill()
    assert error.startswith(f"warning: everybody who reaches port {port} of 0.0.0.0 can use the model")
    assert error.splitlines()[1:] == ["interrupted"]
    assert not [path for path in home.rglob("*") if path.is_file()]


def test_other_hosts_large_bodies_and_uploads_are_rejected(address: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path))
    json_type = {"Content-Type": "application/json"}
    for url in (address, f"{address}config"):
        assert httpx.get(url).status_code == 200
        assert httpx.get(url, headers={"Host": "evil.example"}).status_code == 421
    url = f"{address}gradio_api/call/tag"
    assert httpx.post(url, content=b" " * (1 << 21), headers=json_type).status_code == 413
    assert httpx.post(url, content=(b" " * (1 << 16) for _ in range(64)), headers=json_type).status_code == 413
    for content in (b"", b"a"):
        assert httpx.post(f"{address}gradio_api/upload", files={"files": ("name.txt", content)}).status_code == 403
    assert not list(tmp_path.rglob("*.txt"))


def test_a_visitor_logs_in(models) -> None:
    page = build(models["mlm"])
    address = serve(page, "127.0.0.1", free_port(), ("me", "secret"))
    try:
        assert httpx.get(f"{address}config").status_code == 401
        assert httpx.post(f"{address}login", data={"username": "me", "password": "no"}).status_code == 400
        with httpx.Client() as client:
            form = {name: (None, value) for name, value in {"username": "me", "password": "secret"}.items()}
            assert client.post(f"{address}login", files=form).status_code == 200
            assert client.get(f"{address}config").status_code == 200
    finally:
        page.close(verbose=False)
