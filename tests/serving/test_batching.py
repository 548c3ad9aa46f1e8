"""The queue of a model: batches, order, failures, cancellation and its limit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from bert.serving.batching import MAX_BATCH_TOKENS, BatchQueue, QueueFull


class Doubler:
    """Doubles numbers, and records the batches. Waits for ``release`` if it was cleared."""

    def __init__(self) -> None:
        self.batches = list[list[int]]()
        self.started, self.release = threading.Event(), threading.Event()
        self.release.set()

    def __call__(self, inputs: Sequence[int]) -> list[int]:
        self.started.set()
        self.release.wait(10)
        self.batches.append(list(inputs))
        if 13 in inputs:
            raise ValueError("13")
        return [2 * each for each in inputs]


def run(*jobs: tuple[Any, list[int], int], max_requests: int = 99) -> tuple[list[Any], list[list[int]]]:
    """The result or error of each request (key, inputs, tokens), all sent while another is computed; the batches."""

    async def main() -> list[Any]:
        queue = BatchQueue(max_requests)
        worker = asyncio.create_task(queue.work())
        double.release.clear()
        first = asyncio.create_task(queue.submit("first", double, [0], 1))
        assert await asyncio.to_thread(double.started.wait, 10)
        tasks = [asyncio.create_task(queue.submit(key, double, inputs, tokens)) for key, inputs, tokens in jobs]
        await asyncio.sleep(0)
        double.release.set()
        results = await asyncio.gather(first, *tasks, return_exceptions=True)
        worker.cancel()
        return results[1:]

    double = Doubler()
    return asyncio.run(main()), double.batches[1:]


def test_waiting_requests_share_a_batch() -> None:
    results, batches = run(("a", [1, 2], 5), ("a", [3], 5), ("a", [4], 5))
    assert results == [[2, 4], [6], [8]]
    assert batches == [[1, 2, 3, 4]]


def test_requests_of_another_key_are_a_batch_of_their_own() -> None:
    results, batches = run(("a", [1], 5), ("b", [2], 5), ("a", [3], 5))
    assert results == [[2], [4], [6]]
    assert batches == [[1, 3], [2]]


def test_a_batch_has_a_maximum_of_tokens() -> None:
    many = MAX_BATCH_TOKENS - 1
    results, batches = run(("a", [1], many), ("a", [2], many), ("a", [3], 1), ("a", [4], 2 * many))
    assert results == [[2], [4], [6], [8]]
    assert batches == [[1, 3], [2], [4]]


def test_only_the_faulty_request_of_a_batch_fails() -> None:
    results, _ = run(("a", [1], 5), ("a", [13], 5), ("a", [3], 5))
    assert results[0] == [2] and results[2] == [6]
    assert isinstance(results[1], ValueError)


def test_a_full_queue_rejects_requests() -> None:
    results, batches = run(("a", [1], 5), ("a", [2], 5), ("a", [3], 5), max_requests=2)
    assert results[:2] == [[2], [4]] and isinstance(results[2], QueueFull)
    assert batches == [[1, 2]]


def test_a_cancelled_request_is_not_computed() -> None:
    async def main() -> list[Any]:
        queue = BatchQueue(9)
        tasks = [asyncio.create_task(queue.submit("a", double, [number], 1)) for number in (1, 2)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        worker = asyncio.create_task(queue.work())
        results = await asyncio.gather(*tasks, return_exceptions=True)
        worker.cancel()
        return results

    double = Doubler()
    cancelled, result = asyncio.run(main())
    assert isinstance(cancelled, asyncio.CancelledError) and result == [4]
    assert double.batches == [[2]]


@pytest.mark.parametrize("count", [1, 50])
def test_every_request_gets_its_results(count: int) -> None:
    results, batches = run(*(("ab"[n % 2], list(range(100, 100 + n)), n) for n in range(1, count + 1)))
    assert results == [[2 * each for each in range(100, 100 + n)] for n in range(1, count + 1)]
    assert len(batches) <= 2
