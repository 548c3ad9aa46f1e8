"""The queue of one model: collects concurrent requests into batches, which one thread computes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

MAX_BATCH_TOKENS = 16_384
"""Maximum number of tokens of a batch, except for a single larger request."""

WAIT_SECONDS = 0.002
"""Time for which an idle queue waits for further requests before it computes the first one."""


class QueueFull(Exception):
    """The queue accepts no further requests for now."""


Compute = Callable[[Sequence[Any]], Sequence[Any]]
"""Maps inputs to one result per input, in order."""


class Job(NamedTuple):
    """A request in the queue.

    Attributes:
        key: requests with equal keys may share a batch.
        compute: computes the batch.
        inputs: the request's inputs.
        tokens: their number of tokens.
        future: receives the results.
    """

    key: Hashable
    compute: Compute
    inputs: Sequence[Any]
    tokens: int
    future: asyncio.Future[Sequence[Any]]


class BatchQueue:
    """First in, first out, except that a batch includes later requests with the key of its first one.

    Args:
        max_requests: maximum number of waiting requests.
        on_batch: called with the number of inputs and of tokens of each batch.
    """

    def __init__(self, max_requests: int, on_batch: Callable[[int, int], None] = lambda inputs, tokens: None) -> None:
        self._max_requests, self._on_batch = max_requests, on_batch
        self._jobs = deque[Job]()
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1)

    def __len__(self) -> int:
        return len(self._jobs)

    async def submit(self, key: Hashable, compute: Compute, inputs: Sequence[Any], tokens: int) -> Sequence[Any]:
        """Waits for the results of a request. A cancelled request leaves the queue without being computed.

        Raises:
            QueueFull: too many requests are waiting.
        """
        if len(self._jobs) >= self._max_requests:
            raise QueueFull
        job = Job(key, compute, inputs, tokens, asyncio.get_running_loop().create_future())
        self._jobs.append(job)
        self._arrived.set()
        return await job.future

    async def work(self) -> None:
        """Computes batches until it is cancelled."""
        while True:
            await self._arrived.wait()
            if len(self._jobs) == 1:
                await asyncio.sleep(WAIT_SECONDS)
            batch = self._take()
            if not self._jobs:
                self._arrived.clear()
            if batch:
                await self._compute(batch)

    def _take(self) -> list[Job]:
        """Removes and returns the next batch; [] if all requests were cancelled."""
        batch, rest, tokens = list[Job](), deque[Job](), 0
        while self._jobs:
            job = self._jobs.popleft()
            if job.future.done():
                continue
            if batch and (job.key != batch[0].key or tokens + job.tokens > MAX_BATCH_TOKENS):
                rest.append(job)
            else:
                batch.append(job)
                tokens += job.tokens
        self._jobs = rest
        return batch

    async def _compute(self, batch: list[Job]) -> None:
        """Computes a batch. If it fails, its requests are computed one by one, so that only the faulty one fails."""
        inputs = [each for job in batch for each in job.inputs]
        try:
            results = await asyncio.get_running_loop().run_in_executor(self._thread, batch[0].compute, inputs)
        except Exception as error:  # belongs to one request, which reports it
            if len(batch) == 1:
                _set(batch[0].future, error=error)
            else:
                for job in batch:
                    await self._compute([job])
            return
        self._on_batch(len(inputs), sum(job.tokens for job in batch))
        start = 0
        for job in batch:
            _set(job.future, results[start : start + len(job.inputs)])
            start += len(job.inputs)


def _set(future: asyncio.Future[Any], result: Any = None, error: Exception | None = None) -> None:
    """Sets the result of a future, unless its request was cancelled."""
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
