"""Measures how long `bert demo` takes for 200 concurrent requests: PYTHONPATH=. python benchmarks/demo.py MODEL

Each request has a different text. It is first sent alone, and its answer must be the same among the others.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time

import httpx
import numpy as np

import bert
from bert.demo.abilities import Ability, abilities_of

REQUESTS = 200


def main() -> None:
    [model] = sys.argv[1:]
    ability = abilities_of(bert.load(model))[0]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "bert", "demo", model, "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None and server.stdout.readline(), "the server has not started"
            print(asyncio.run(measure(f"http://127.0.0.1:{port}", ability)))
        finally:
            server.terminate()


async def measure(address: str, ability: Ability, count: int = REQUESTS) -> str:
    """Sends requests sequentially and then concurrently, compares the answers, and describes the times."""
    url = f"{address.rstrip('/')}/gradio_api/call/{ability.name}"
    requests = [numbered_texts(ability, number) for number in range(count)]
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=600, limits=limits, trust_env=False) as client:
        alone = [await ask(client, url, texts) for texts in requests]
        start = time.perf_counter()
        together = await asyncio.gather(*(ask(client, url, texts) for texts in requests))
        seconds = time.perf_counter() - start
    lost = sum(answer is None for answer, _ in together)
    mixed_up = sum(answer != expected for (answer, _), (expected, _) in zip(together, alone, strict=True))
    different = len({json.dumps(answer) for answer, _ in alone})
    return (
        f"{ability.name}: {count} requests with {different} different answers, {lost} lost, {mixed_up} mixed up; "
        f"one by one {percentiles([taken for _, taken in alone])}; "
        f"at once {percentiles([taken for _, taken in together])}, all in {seconds:.2f} s"
    )


def numbered_texts(ability: Ability, number: int) -> list[str]:
    """Returns the texts of the first example, with two letters prepended to the first text."""
    first, *others = ability.examples[0]
    return [f"{chr(97 + number // 26 % 26)} {chr(97 + number % 26)} {first}", *others]


async def ask(client: httpx.AsyncClient, url: str, texts: list[str]) -> tuple[object, float]:
    """Returns the answer, or None for an error, and the duration in seconds."""
    start = time.perf_counter()
    posted = await client.post(url, json={"data": texts})
    answer = await client.get(f"{url}/{posted.json()['event_id']}")
    event, _, data = answer.text.strip().rpartition("\n")
    found = json.loads(data.removeprefix("data: ")) if event.endswith("complete") else None
    return found, time.perf_counter() - start


def percentiles(seconds: list[float]) -> str:
    median, slow = np.percentile(seconds, [50, 99]) * 1e3
    return f"p50 {median:.0f} ms, p99 {slow:.0f} ms"


if __name__ == "__main__":
    main()
