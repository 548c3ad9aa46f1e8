"""Load-tests `bert serve` and sentence-transformers behind FastAPI on the loopback, in turns, with locust:

    pip install 'bert-jax[serve,onnx]' locust sentence-transformers
    PYTHONPATH=. python benchmarks/serve.py MODEL --output serve.json

MODEL is a sentence-transformers folder, such as all-MiniLM-L6-v2. Each client sends one text of 3 to 40 words after
the other to /embed. The table has requests per second, the median and the 95th and 99th percentile of the latency in
milliseconds, the failed requests, and the server's resident memory before and after.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

SIDES = ("onnxruntime", "jax", "sentence-transformers")
FIELDS = {"Requests/s": "per_second", "50%": "p50", "95%": "p95", "99%": "p99", "Failure Count": "failed"}
TEXTS = "BENCHMARK_TEXTS"
"""Environment variable with the file of texts, for the clients."""


def main() -> None:
    """Measures all sides with each number of clients or, as a worker, serves the peer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--output", type=Path, default=Path("serve.json"))
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--seconds", type=int, default=15)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--peer", type=int, metavar="PORT", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.peer:
        serve_peer(given.model, given.peer)
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "texts.json")
        file.write_text(json.dumps(texts(given.model)))
        os.environ[TEXTS] = str(file)
        for side in given.sides:
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            server = start(side, given.model, port)
            for clients in given.clients:
                rows.append({"side": side, "clients": clients, **measure(server, port, clients, given.seconds, folder)})
                print(json.dumps(rows[-1]), flush=True)
                given.output.write_text(json.dumps(rows, indent=1))
            server.send_signal(signal.SIGTERM)
            server.wait(60)


def texts(model: Path) -> list[str]:
    """Makes 5,000 texts from whole words of the vocabulary."""
    from tokenizers import Tokenizer

    tokens = Tokenizer.from_file(str(model / "tokenizer.json")).get_vocab()
    words = sorted(token for token in tokens if token.isascii() and token.isalpha() and len(token) > 2)
    generator = np.random.default_rng(0)
    lengths = np.clip(generator.lognormal(2.3, 0.6, 5000).astype(int), 3, 40)
    return [" ".join(generator.choice(words, length)) for length in lengths]


def start(side: str, model: Path, port: int) -> subprocess.Popen[bytes]:
    """Starts the server of a side, and waits until it accepts requests."""
    ours = ["-m", "bert", "serve", f"m={model}", f"--port={port}", f"--engine={side}", "--max_queue=1024"]
    command = [__file__, str(model), "--peer", str(port)] if side == "sentence-transformers" else ours
    server = subprocess.Popen([sys.executable, *command])
    while server.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            return server
        except OSError:
            time.sleep(0.5)
    sys.exit(f"the server of {side} ended with {server.returncode}")


def measure(server: subprocess.Popen[bytes], port: int, clients: int, seconds: int, folder: str) -> dict[str, Any]:
    """Runs the clients, and returns the statistics."""
    before = resident_megabytes(server.pid)
    command = [sys.executable, "-m", "locust", "-f", __file__, "--headless", "--only-summary", "--loglevel=ERROR"]
    command += [f"--host=http://127.0.0.1:{port}", f"-u{clients}", f"-r{clients}", f"-t{seconds}s"]
    subprocess.run([*command, f"--csv={folder}/load"], check=False, capture_output=True)
    with Path(folder, "load_stats.csv").open() as file:
        total = list(csv.DictReader(file))[-1]
    found = {name: round(float(total[field]), 1) for field, name in FIELDS.items()}
    return {**found, "megabytes": [before, resident_megabytes(server.pid)]}


def resident_megabytes(process: int) -> int:
    """Returns the resident memory of a process."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6)


def serve_peer(model: Path, port: int) -> None:
    """Serves sentence-transformers behind the same framework: each request is computed in a thread of its pool."""
    import uvicorn
    from fastapi import FastAPI
    from sentence_transformers import SentenceTransformer

    loaded, app = SentenceTransformer(str(model), device="cpu"), FastAPI()

    @app.get("/health")
    def health() -> str:
        return "ok"

    @app.post("/embed")
    def embed(body: dict[str, Any]) -> list[list[float]]:
        return loaded.encode([body["inputs"]], show_progress_bar=False).tolist()

    uvicorn.run(app, port=port, log_level="warning")


if __name__ == "__main__":
    main()
elif TEXTS in os.environ:
    from locust import FastHttpUser, task

    FOUND, RANDOM = json.loads(Path(os.environ[TEXTS]).read_text()), random.Random(0)

    class Client(FastHttpUser):  # type: ignore[misc]
        """Sends one text after the other."""

        @task  # type: ignore[untyped-decorator]
        def embed(self) -> None:
            """Embeds a random text."""
            self.client.post("/embed", json={"inputs": RANDOM.choice(FOUND)})
