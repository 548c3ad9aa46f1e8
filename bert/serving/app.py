"""The endpoints of `bert serve`, as a FastAPI application.

They are compatible with OpenAI's clients (``/v1/embeddings``) and with text-embeddings-inference (``/embed``,
``/rerank``, ``/predict``).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import math
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import Depends, FastAPI, Header, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException as StarletteHTTPException

import bert
from bert.config.model import WINDOW_MODES
from bert.data.encoding import tokenize
from bert.data.inputs import as_text_or_pair
from bert.data.long_texts import UNCUT
from bert.errors import UserError, first_line
from bert.inference.embeddings import lengths_to_embed
from bert.inference.pretrained import Pretrained
from bert.interchange.task_adapters import find_task
from bert.model.late_interaction import Role
from bert.serving.batching import BatchQueue, QueueFull
from bert.tasks.sequence_classification import Label, Labels, Score

MAX_TEXTS = 2048
"""Maximum number of texts of a request."""

MAX_TOKENS = 262_144
"""Maximum number of tokens of a request."""

LATER = {"Retry-After": "1"}
"""Header of responses to requests that may succeed later."""

Text = Annotated[str, Field(min_length=1)]
"""A text; empty ones have no meaning."""


class OpenAIEmbeddings(BaseModel):
    """Body of ``/v1/embeddings``."""

    model: str | None = None
    input: Text | list[Text]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    task: str | None = None


class TEIRequest(BaseModel):
    """Fields of all requests of text-embeddings-inference. Long texts are cut, unless truncate is false."""

    model: str | None = None
    truncate: bool | None = None
    truncation_direction: Literal["Right", "right"] = "Right"


class Embed(TEIRequest):
    """Body of ``/embed``."""

    inputs: Text | list[Text]
    normalize: bool | None = None
    dimensions: int | None = None
    prompt_name: Literal["query", "document"] | None = None
    task: str | None = None


class Rerank(TEIRequest):
    """Body of ``/rerank``."""

    query: Text
    texts: list[Text]
    raw_scores: bool = False
    return_text: bool = False


class Predict(TEIRequest):
    """Body of ``/predict``. An input is a text, the texts of a pair as a list, or the fields of a row as an object."""

    inputs: Any
    raw_scores: Literal[False] = False


Lengths = Callable[[Sequence[Any]], tuple[np.ndarray, int]]
"""Maps inputs to the numbers of tokens of their texts, and the maximum number that the model reads of a text."""


@dataclass(frozen=True)
class Served:
    """A model with its queue."""

    name: str
    model: Pretrained
    queue: BatchQueue

    @property
    def has_windows(self) -> bool:
        """Whether longer texts are read through windows."""
        return self.model.data.long_texts in WINDOW_MODES or (self.model.task is not None and self.model.task.windows)


class Metrics:
    """Prometheus metrics of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        names = ("path", "status")
        self.requests = Counter("bert_requests", "Requests by path and status.", names, registry=self.registry)
        self.seconds = Histogram("bert_request_seconds", "Seconds per request.", ["path"], registry=self.registry)
        self.texts = Histogram(
            "bert_batch_texts",
            "Inputs per batch.",
            ["model"],
            registry=self.registry,
            buckets=[2**n for n in range(12)],
        )
        self.tokens = Counter("bert_tokens", "Tokens of all batches.", ["model"], registry=self.registry)
        self.waiting = Gauge("bert_queue_requests", "Waiting requests.", ["model"], registry=self.registry)

    def batch_of(self, name: str) -> Callable[[int, int], None]:
        """Returns the function that records a batch of a model."""

        def record(texts: int, tokens: int) -> None:
            self.texts.labels(name).observe(texts)
            self.tokens.labels(name).inc(tokens)

        return record


def make_app(
    models: Mapping[str, Pretrained], *, max_queue: int = 512, timeout: float = 60.0, token: str | None = None
) -> FastAPI:
    """Returns the application.

    Args:
        models: models by name. Requests that name no model use the first one.
        max_queue: maximum number of waiting requests per model; more get 429.
        timeout: seconds after which a request gets 503.
        token: bearer token that all endpoints except ``/health`` require; None for none.
    """
    metrics = Metrics()
    served: dict[str, Served] = {}

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        for name, model in models.items():
            served[name] = Served(name, model, BatchQueue(max_queue, metrics.batch_of(name)))
        workers = [asyncio.create_task(each.queue.work()) for each in served.values()]
        yield
        for worker in workers:
            worker.cancel()

    def check_token(authorization: Annotated[str, Header()] = "") -> None:
        if token is not None and not secrets.compare_digest(authorization.encode(), f"Bearer {token}".encode()):
            raise HTTPException(401, "the request has no valid bearer token", {"WWW-Authenticate": "Bearer"})

    app = FastAPI(title="bert-jax", version=bert.__version__, lifespan=lifespan)
    _add_error_handlers(app)
    app.middleware("http")(partial(_observe, metrics))
    run = partial(_run, timeout=timeout)
    protected = [Depends(check_token)]

    def find(name: str | None) -> Served:
        if name is not None and name not in served:
            raise HTTPException(404, f"there is no model of this name: use {', '.join(served)}")
        return served[name or next(iter(served))]

    @app.get("/health")
    def health() -> dict[str, str]:
        """Reports that the server accepts requests."""
        return {"status": "ok"}

    @app.get("/metrics", dependencies=protected)
    def read_metrics() -> Response:
        """Returns the metrics in the format of Prometheus."""
        for each in served.values():
            metrics.waiting.labels(each.name).set(len(each.queue))
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models", dependencies=protected)
    def list_models() -> dict[str, Any]:
        """Lists the models."""
        return {"object": "list", "data": [{"id": name, "object": "model", "owned_by": "local"} for name in served]}

    @app.post("/v1/embeddings", dependencies=protected)
    async def openai_embeddings(body: OpenAIEmbeddings) -> dict[str, Any]:
        """Embeds texts, like OpenAI's endpoint. ``task`` names one of the model's adapters, as in Jina's API."""
        entry = find(body.model)
        texts = _as_texts(body.input)
        _check_dimensions(entry.model, body.dimensions)
        if entry.model.pooling_or_default.has_token_vectors:
            raise HTTPException(422, f"{entry.name} has an embedding per token: use /embed")
        vectors, tokens = await run(entry, *_embedding(entry.model, None, body.task), texts)
        vectors = [_shortened(vector, body.dimensions) for vector in vectors]
        encode = _base64 if body.encoding_format == "base64" else _as_list
        data = [{"object": "embedding", "index": i, "embedding": encode(vector)} for i, vector in enumerate(vectors)]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "model": entry.name, "data": data, "usage": usage}

    @app.post("/embed", dependencies=protected)
    async def embed(body: Embed) -> list[list[float]] | list[list[list[float]]]:
        """Embeds texts, like text-embeddings-inference. A model of late interaction returns a list per token.

        Vectors are scaled to length 1 unless ``normalize`` is false, except for weights of words and vectors of tokens.
        """
        entry = find(body.model)
        _check_dimensions(entry.model, body.dimensions)
        if body.dimensions is not None and entry.model.pooling_or_default.has_token_vectors:
            raise HTTPException(422, f"{entry.name} has an embedding per token: leave out dimensions")
        if body.normalize is False and entry.model.pooling is not None and entry.model.pooling.normalize:
            raise HTTPException(
                422, "normalize is false, but the model scales its embeddings to length 1: leave it out"
            )
        embedding = _embedding(entry.model, body.prompt_name, body.task)
        vectors, _ = await run(entry, *embedding, _as_texts(body.inputs), whole=body.truncate is False)
        pooling = entry.model.pooling_or_default
        default = not pooling.has_word_weights and not pooling.has_token_vectors
        scale = _normalized if (default if body.normalize is None else body.normalize) else np.asarray
        return [scale(vector[..., : body.dimensions]).tolist() for vector in vectors]

    @app.post("/rerank", dependencies=protected)
    async def rerank(body: Rerank) -> list[dict[str, Any]]:
        """Scores texts for a query with a cross-encoder, best first, like text-embeddings-inference."""
        entry = find(body.model)
        task, activation = entry.model.require_pair_scores("1").without_limits(), entry.model.score_activation
        if body.raw_scores:
            task = task.without_activation()
        compute = partial(entry.model.answers, task, batch_size=32)
        pairs = [(body.query, text) for text in body.texts]
        key, lengths = ("rerank", body.raw_scores), partial(_lengths_of_inputs, entry.model)
        answers, _ = await run(entry, key, compute, lengths, pairs, whole=body.truncate is False)
        scores = [task.pair_score(answer, "1") for answer in answers]
        has_logits = activation is None or activation.endswith(".Identity")
        if not body.raw_scores and not task.exclusive_labels and has_logits:
            scores = [_sigmoid(score) for score in scores]
        order = sorted(range(len(scores)), key=lambda number: -scores[number])
        texts = [{"text": text} if body.return_text else {} for text in body.texts]
        return [{"index": number, "score": scores[number], **texts[number]} for number in order]

    @app.post("/predict", dependencies=protected)
    async def predict(body: Predict) -> Any:
        """Answers inputs. Classifiers return labels and scores like text-embeddings-inference, other models the fields
        of ``predict``.
        """
        entry = find(body.model)
        task = entry.model.require_task()
        if {len(texts) for texts in task.table_columns} == {1, 2} and _are_two_texts(body.inputs):
            raise HTTPException(422, "inputs is a pair, or two texts: pass [[text, text]] or [[text], [text]]")
        is_one, inputs = _as_inputs(body.inputs, task, _reads_pairs(entry.model))
        task.examples_from_inputs(inputs)  # raises UserError for an invalid input
        compute, lengths = entry.model.predict, partial(_lengths_of_inputs, entry.model)
        answers, _ = await run(entry, "predict", compute, lengths, inputs, whole=body.truncate is False)
        fields = [_fields(answer, entry.model.labels) for answer in answers]
        return fields[0] if is_one else fields

    return app


async def _run(
    entry: Served,
    key: Any,
    compute: Callable[[Sequence[Any]], Any],
    lengths: Lengths,
    inputs: list[Any],
    timeout: float,
    whole: bool = False,
) -> tuple[Sequence[Any], int]:
    """Computes the results of a request in the model's queue, and returns them with the number of tokens.

    Args:
        whole: whether texts that are too long are an error.
    """
    if not inputs:
        return [], 0
    if len(inputs) > MAX_TEXTS:
        raise HTTPException(422, f"the request has {len(inputs):,} inputs: pass at most {MAX_TEXTS:,}")
    counts, limit = await asyncio.to_thread(lengths, inputs)
    tokens, longest = int(np.minimum(counts, limit).sum()), int(counts.max())
    if whole and longest > limit and not entry.has_windows:
        reads = f"{entry.name} reads {limit:,}"
        raise HTTPException(413, f"truncate is false and a text has {longest:,} tokens, but {reads}: shorten it")
    if tokens > MAX_TOKENS:
        raise HTTPException(422, f"the request has {tokens:,} tokens: pass at most {MAX_TOKENS:,}")
    try:
        return await asyncio.wait_for(entry.queue.submit(key, compute, inputs, tokens), timeout), tokens
    except QueueFull:
        raise HTTPException(429, "too many requests are waiting: try again later", LATER) from None
    except TimeoutError:
        raise HTTPException(503, f"no result within {timeout:g} seconds: try again later", LATER) from None


def _embedding(
    model: Pretrained, prompt: Role | None, task: str | None
) -> tuple[Any, Callable[[Sequence[Any]], Any], Lengths]:
    """Returns the key, the function and the lengths of a batch of embeddings.

    Raises:
        UserError: the model has no adapter for the task.
    """
    if task is not None:
        task = find_task(model.task_adapters, task, model.source)
    options: dict[str, Any] = {"prompt": prompt, "task": task}
    return ("embed", prompt, task), partial(model.embed, **options), partial(lengths_to_embed, model, **options)


def _lengths_of_inputs(model: Pretrained, inputs: Sequence[Any]) -> tuple[np.ndarray, int]:
    """Returns the `Lengths` of valid inputs of the model's task."""
    rows = _words if model.architecture == "BertForTokenClassification" else _rows
    texts = [as_text_or_pair(text, number) for number, given in enumerate(inputs, 1) for text in rows(given)]
    return tokenize(model.tokenizer, texts, UNCUT).lengths, min(model.row_length, model.data.max_length)


def _words(given: str | Sequence[str]) -> list[str]:
    return [given if isinstance(given, str) else " ".join(given)]


def _rows(given: Any) -> list[Any]:
    """Returns the text, the pair of texts, or the pairs of a question and each of its choices."""
    if isinstance(given, str):
        return [given]
    first, *others = given
    choices = others[0] if others and not isinstance(others[0], str) else others
    return [(first, choice) for choice in choices]


def _check_dimensions(model: Pretrained, dimensions: int | None) -> None:
    if dimensions is not None and not 1 <= dimensions <= model.embedding_size:
        raise HTTPException(422, f"dimensions must be from 1 to {model.embedding_size}")


def _as_texts(given: str | list[str]) -> list[str]:
    return [given] if isinstance(given, str) else given


def _are_two_texts(given: Any) -> bool:
    return isinstance(given, list) and len(given) == 2 and all(isinstance(text, str) for text in given)


def _reads_pairs(model: Pretrained) -> bool:
    return model.texts_per_input == 2 or model.architecture in ("BertForQuestionAnswering", "BertForMultipleChoice")


def _as_inputs(given: Any, task: Any, reads_pairs: bool) -> tuple[bool, list[Any]]:
    """Returns whether a request has a single input, and its inputs for `Pretrained.predict`.

    A list of two texts is a pair for a task that reads pairs, and two inputs otherwise.
    """
    is_pair = reads_pairs and isinstance(given, list) and all(isinstance(text, str) for text in given)
    is_one = isinstance(given, str | dict) or is_pair
    inputs = [given] if is_one else given
    if not isinstance(inputs, list):
        raise HTTPException(422, "inputs is no text, list or object: pass one of these")
    return is_one, [_as_input(each, task) for each in inputs]


def _as_input(given: Any, task: Any) -> Any:
    if isinstance(given, dict):
        try:
            return task.input_of_row(given)
        except ValueError as error:
            raise HTTPException(422, first_line(error)) from None
    if isinstance(given, list) and len(given) == 1 and isinstance(given[0], str):
        return given[0]
    return tuple(given) if isinstance(given, list) else given


def _fields(answer: Any, labels: Sequence[str]) -> Any:
    """Returns an answer as JSON."""
    if isinstance(answer, Label | Labels):
        scores = sorted(answer.probabilities.items(), key=lambda item: -item[1])
        return [{"label": label, "score": score} for label, score in scores]
    if isinstance(answer, Score):
        return [{"label": labels[0] if labels else "LABEL_0", "score": answer.score}]
    return answer._asdict()


def _shortened(vector: np.ndarray, size: int | None) -> np.ndarray:
    """Returns the first features, scaled to the length 1 as OpenAI does."""
    return vector if size is None else _normalized(vector[:size])


def _normalized(vector: np.ndarray) -> np.ndarray:
    """Scales a vector, or the vector of each token, to the length 1."""
    scaled: np.ndarray = vector / np.maximum(np.linalg.norm(vector, axis=-1, keepdims=True), 1e-12)
    return scaled


def _as_list(vector: np.ndarray) -> list[float]:
    return [float(value) for value in vector]


def _base64(vector: np.ndarray) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


def _sigmoid(score: float) -> float:
    return 1 / (1 + math.exp(-score)) if score >= 0 else math.exp(score) / (1 + math.exp(score))


async def _observe(metrics: Metrics, request: Request, call_next: Callable[[Request], Any]) -> Response:
    """Records the status and the time of a request, by the path of its endpoint."""
    start = time.perf_counter()
    status = 500  # unless there is a response
    try:
        response: Response = await call_next(request)
        status = response.status_code
        return response
    finally:
        route = request.scope.get("route")
        path = getattr(route, "path", "other")  # never a path that a client chose
        metrics.requests.labels(path, str(status)).inc()
        metrics.seconds.labels(path).observe(time.perf_counter() - start)


def _add_error_handlers(app: FastAPI) -> None:
    """Makes all errors objects with one sentence, in OpenAI's form."""

    def respond(status: int, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
        kind = "invalid_request_error" if status < 500 else "server_error"
        content = {"error": {"message": message, "type": kind, "code": status}}
        return JSONResponse(content, status, dict(headers or {}))

    @app.exception_handler(StarletteHTTPException)  # also of paths that do not exist
    async def http_error(request: Request, error: StarletteHTTPException) -> JSONResponse:
        return respond(error.status_code, str(error.detail), error.headers)

    @app.exception_handler(Exception)
    async def failure(request: Request, error: Exception) -> JSONResponse:
        return respond(500, "the server failed, see its log")

    @app.exception_handler(UserError)
    async def user_error(request: Request, error: UserError) -> JSONResponse:
        return respond(422, str(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        return respond(422, f"{place}: {first['msg']}")
