"""`bert serve` with a published model, called by clients of OpenAI, LangChain, LlamaIndex and curl."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import numpy as np
import pytest

import bert
from tests.helpers import REPOSITORY
from tests.processes import free_port, launch

pytest.importorskip("fastapi", reason="needs the extra `serve`")
pytest.importorskip("prometheus_client", reason="needs the extra `serve`")
pytest.importorskip("onnxruntime", reason="needs the extra `onnx`")
pytestmark = pytest.mark.real

TEXTS = ["A man plays the guitar.", "ünïcödé, 中文", "The shares fell by 2%. " * 30]


def post(url: str, body: Any, **headers: str) -> tuple[int, Any]:
    """The status and the content of a response."""
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=120) as reply:
            return reply.status, json.load(reply)
    except HTTPError as error:
        return error.code, error.read().decode()


def started(shared: Path, **environment: str) -> tuple[subprocess.Popen[str], str]:
    """A server of MiniLM that accepts requests, and its URL."""
    model = shared / "models" / "all-MiniLM-L6-v2"
    return accepting("serve", f"mini={model}", "--engine=onnxruntime", **environment)


def accepting(*command: str, **environment: str) -> tuple[subprocess.Popen[str], str]:
    """The server of a command that accepts requests, and its URL."""
    port = free_port()
    process = launch("-m", "bert", *command, f"--port={port}", **environment)
    for _ in range(600):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            return process, f"http://127.0.0.1:{port}"
        except OSError:
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.2)
    raise AssertionError("the server does not start")


def connected(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


@pytest.fixture(scope="module")
def url(shared: Path) -> Iterator[str]:
    process, url = started(shared)
    yield url
    process.terminate()
    process.wait(30)


@pytest.fixture(scope="module")
def expected(shared: Path) -> np.ndarray:
    return bert.load(shared / "models" / "all-MiniLM-L6-v2").embed(TEXTS)


def test_the_client_of_openai(url: str, expected: np.ndarray) -> None:
    openai = pytest.importorskip("openai", reason="openai is not installed")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    reply = client.embeddings.create(model="mini", input=TEXTS)
    np.testing.assert_allclose([each.embedding for each in reply.data], expected, atol=1e-5)
    assert [each.id for each in client.models.list()] == ["mini"]
    with pytest.raises(openai.NotFoundError, match="no model of this name"):
        client.embeddings.create(model="other", input="a")


def test_the_embeddings_of_langchain(url: str, expected: np.ndarray) -> None:
    library = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    options = {"base_url": f"{url}/v1", "api_key": "none", "check_embedding_ctx_length": False}
    embeddings = library.OpenAIEmbeddings(model="mini", **options)
    np.testing.assert_allclose(embeddings.embed_documents(TEXTS), expected, atol=1e-5)
    np.testing.assert_allclose(embeddings.embed_query(TEXTS[0]), expected[0], atol=1e-5)


def test_the_embeddings_of_llama_index(url: str, expected: np.ndarray) -> None:
    library = pytest.importorskip("llama_index.embeddings.openai_like", reason="llama-index is not installed")
    embeddings = library.OpenAILikeEmbedding(model_name="mini", api_base=f"{url}/v1", api_key="none")
    np.testing.assert_allclose(embeddings.get_text_embedding_batch(TEXTS), expected, atol=1e-5)


def test_curl(url: str, expected: np.ndarray) -> None:
    body = json.dumps({"inputs": TEXTS})
    command = ["curl", "-s", f"{url}/embed", "-H", "Content-Type: application/json", "-d", body]
    reply = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    np.testing.assert_allclose(json.loads(reply), expected, atol=1e-5)


def test_the_commands_of_the_guide(shared: Path, finetuned: Path) -> None:
    """Folders take the place of the names of the two models."""
    text = (REPOSITORY / "docs" / "serve.md").read_text(encoding="utf-8")
    serve, requests = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    for name, folder in (
        ("sentence-transformers/all-MiniLM-L6-v2", shared / "models" / "all-MiniLM-L6-v2"),
        ("runs/sst2", finetuned),
    ):
        assert name in serve
        serve = serve.replace(name, str(folder))
    process, url = accepting(*shlex.split(serve)[1:])
    try:
        replies = []
        for request in requests.splitlines():
            command = shlex.split(request.replace("localhost:8080", url.removeprefix("http://")))
            replies.append(json.loads(subprocess.run([*command, "-sf"], capture_output=True, check=True).stdout))
    finally:
        process.terminate()
        process.wait(30)
    vectors, answers = replies
    model = bert.load(shared / "models" / "all-MiniLM-L6-v2")
    np.testing.assert_allclose(vectors, model.embed(["one text", "another text"]), atol=1e-5)
    [prediction] = bert.load(finetuned).predict(["a dull film"])
    assert answers[0]["label"] == prediction.label


def test_requests_that_are_rejected(url: str) -> None:
    assert post(f"{url}/embed", {"inputs": "a"}, Host="other.example")[0] == 421
    with connected(url) as client:
        client.sendall(b"POST /embed HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2000000\r\n\r\n")
        assert client.recv(1024).startswith(b"HTTP/1.1 413")
    assert post(f"{url}/embed", {"inputs": ["a"] * 3000})[0] == 422
    assert post(f"{url}/nothing", {})[0] == 404


def test_a_client_that_sends_nothing_does_not_block_others(url: str) -> None:
    slow = [connected(url) for _ in range(50)]
    for each in slow:
        each.sendall(b"POST /embed HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
    start = time.monotonic()
    assert post(f"{url}/embed", {"inputs": "a"})[0] == 200
    assert time.monotonic() - start < 5
    for each in slow:
        each.close()


def test_concurrent_requests_share_batches(url: str, expected: np.ndarray) -> None:
    with ThreadPoolExecutor(16) as threads:
        replies = list(threads.map(lambda text: post(f"{url}/embed", {"inputs": text})[1][0], TEXTS * 20))
    np.testing.assert_allclose(replies, np.tile(expected, (20, 1)), atol=1e-5)


def test_a_signal_completes_accepted_requests(shared: Path) -> None:
    process, url = started(shared, BERT_SERVE_TOKEN="secret")
    assert post(f"{url}/embed", {"inputs": "a"})[0] == 401
    headers = {"Authorization": "Bearer secret"}
    with ThreadPoolExecutor(1) as threads:
        reply = threads.submit(post, f"{url}/embed", {"inputs": TEXTS * 20}, **headers)
        time.sleep(0.2)
        assert not reply.done()
        os.kill(process.pid, signal.SIGTERM)
        status, vectors = reply.result()
    assert status == 200 and len(vectors) == 60
    assert process.wait(30) in (0, -signal.SIGTERM)
    with pytest.raises(OSError):
        post(f"{url}/embed", {"inputs": "a"}, **headers)
