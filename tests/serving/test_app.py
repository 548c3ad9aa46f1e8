"""The endpoints of `bert serve`, called in the process."""

from __future__ import annotations

import base64
import dataclasses
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bert
from bert.model.encoder import Bert
from bert.model.heads import HEADS, BertForMultipleChoice, BertForSequenceClassification
from bert.model.late_interaction import LateInteraction
from bert.model.pooling import Pooling, find_activation
from bert.tasks.registry import published_task
from bert.tasks.reranker import RerankerTask
from tests.tiny_models import CONFIG, TASKS, model_of

pytest.importorskip("fastapi", reason="needs the extra `serve`")
pytest.importorskip("prometheus_client", reason="needs the extra `serve`")
pytest.importorskip("httpx", reason="needs httpx")

from fastapi.testclient import TestClient

from bert.serving import app as serving
from bert.serving import batching

WORDS = ["ba", "ko ri", "tu lo"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bert.Pretrained]:
    folder = tmp_path_factory.mktemp("models")
    encoder = model_of(folder, Bert(CONFIG), None)
    pooling = Pooling(normalize=True, query_prompt="ri ")
    found = {"encoder": dataclasses.replace(encoder, params={"bert": encoder.params}, pooling=pooling)}
    reranker = model_of(folder, BertForMultipleChoice(CONFIG), RerankerTask(), labels=("LABEL_0",))
    found["reranker"] = dataclasses.replace(reranker, architecture="BertForSequenceClassification")
    for kind in ("classification", "pairs", "squad", "tagging", "choices"):
        found[kind] = model_of(folder, HEADS[TASKS[kind].kind](CONFIG, TASKS[kind].num_labels), TASKS[kind])
    return found


@pytest.fixture
def client(models: dict[str, bert.Pretrained]) -> Iterator[TestClient]:
    with TestClient(serving.make_app(models)) as client:
        yield client


@pytest.mark.medium
def test_openai_embeddings(client: TestClient, models: dict[str, bert.Pretrained]) -> None:
    expected = models["encoder"].embed(WORDS)
    reply = client.post("/v1/embeddings", json={"model": "encoder", "input": WORDS}).json()
    assert [each["index"] for each in reply["data"]] == [0, 1, 2] and reply["model"] == "encoder"
    np.testing.assert_allclose([each["embedding"] for each in reply["data"]], expected, atol=1e-6)
    tokens = sum(len(models["encoder"].tokenizer.encode(text).ids) for text in WORDS)
    assert reply["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    options = {"encoding_format": "base64", "dimensions": 3}
    [each] = client.post("/v1/embeddings", json={"input": "ba", **options}).json()["data"]
    vector = np.frombuffer(base64.b64decode(each["embedding"]), "<f4")
    first = expected[0, :3]
    np.testing.assert_allclose(vector, first / np.linalg.norm(first), atol=1e-6)
    assert [each["id"] for each in client.get("/v1/models").json()["data"]] == list(models)


@pytest.mark.medium
def test_embed_of_text_embeddings_inference(client: TestClient, models: dict[str, bert.Pretrained]) -> None:
    model = models["encoder"]
    np.testing.assert_allclose(client.post("/embed", json={"inputs": WORDS}).json(), model.embed(WORDS), atol=1e-6)
    reply = client.post("/embed", json={"inputs": "ba", "prompt_name": "query", "truncate": False}).json()
    np.testing.assert_allclose(reply, model.embed(["ba"], prompt="query"), atol=1e-6)
    unscaled = dataclasses.replace(model, pooling=Pooling())
    with TestClient(serving.make_app({"unscaled": unscaled})) as client:
        for options, size, norm in (({}, 3, 1), ({"dimensions": 2}, 2, 1), ({"normalize": False}, 3, None)):
            vectors = unscaled.embed(WORDS)[:, : None if size == 3 else size]
            expected = vectors if norm is None else vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
            reply = client.post("/embed", json={"inputs": WORDS, **options}).json()
            np.testing.assert_allclose(reply, expected, atol=1e-6)


@pytest.mark.medium
def test_embeddings_of_tokens(models: dict[str, bert.Pretrained]) -> None:
    """A list per token; OpenAI's endpoint has one vector per text."""
    pooling = Pooling("tokens", query_prompt="ri ", similarity="maxsim")
    late = dataclasses.replace(models["encoder"], pooling=pooling)
    with TestClient(serving.make_app({"late": late})) as client:
        for normalize in (False, True):
            body = {"inputs": WORDS, "prompt_name": "query", "normalize": normalize}
            reply = client.post("/embed", json=body).json()
            for actual, expected in zip(reply, late.embed(WORDS, prompt="query"), strict=True):
                lengths = np.linalg.norm(expected, axis=1, keepdims=True) if normalize else 1
                np.testing.assert_allclose(actual, expected / lengths, atol=1e-6)
        refused = client.post("/v1/embeddings", json={"input": WORDS})
        assert refused.status_code == 422
        assert refused.json()["error"]["message"] == "late has an embedding per token: use /embed"


@pytest.mark.medium
def test_rerank(client: TestClient, models: dict[str, bert.Pretrained]) -> None:
    body = {"model": "reranker", "query": "ba", "texts": WORDS, "raw_scores": True}
    ranked = models["reranker"].rank("ba", WORDS)
    reply = client.post("/rerank", json=body).json()
    assert [each["index"] for each in reply] == [each.number for each in ranked]
    np.testing.assert_allclose([each["score"] for each in reply], [each.score for each in ranked], atol=1e-5)
    reply = client.post("/rerank", json={**body, "raw_scores": False, "return_text": True}).json()
    expected = [1 / (1 + np.exp(-each.score)) for each in ranked]
    np.testing.assert_allclose([each["score"] for each in reply], expected, atol=1e-6)
    assert [each["text"] for each in reply] == [WORDS[each.number] for each in ranked]


@pytest.mark.medium
@pytest.mark.parametrize("name", ["Sigmoid", "Identity", None])
def test_the_raw_score_has_no_activation(name: str | None, tmp_path: Path) -> None:
    activation = name and f"torch.nn.{name}"
    task = published_task(
        "sequence_classification", "x", ("relevance",), None, score_activation=find_activation(activation)
    )
    model = model_of(tmp_path, BertForSequenceClassification(CONFIG, 1), task, labels=("relevance",))
    model = dataclasses.replace(model, score_activation=activation)
    [whole] = model.replace(task=task.without_activation()).predict([("ba", "ko")])
    with TestClient(serving.make_app({"published": model})) as client:
        for raw, expected in ((True, whole.score), (False, 1 / (1 + np.exp(-whole.score)))):
            [reply] = client.post("/rerank", json={"query": "ba", "texts": ["ko"], "raw_scores": raw}).json()
            assert reply["score"] == pytest.approx(expected, abs=1e-6)
        [answer] = client.post("/predict", json={"inputs": [["ba", "ko"]]}).json()
        score = model.predict([("ba", "ko")])[0].score
        assert answer == [{"label": "relevance", "score": pytest.approx(score, abs=1e-6)}]
        message = client.post("/predict", json={"inputs": ["ba", "ko"]}).json()["error"]["message"]
        assert message == "inputs is a pair, or two texts: pass [[text, text]] or [[text], [text]]"


@pytest.mark.medium
def test_requests_for_both_kinds_of_scores_arrive_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are computed in separate batches."""
    monkeypatch.setattr(batching, "WAIT_SECONDS", 0.5)
    activation = "torch.nn.Sigmoid"
    task = published_task(
        "sequence_classification", "x", ("relevance",), None, score_activation=find_activation(activation)
    )
    model = model_of(tmp_path, BertForSequenceClassification(CONFIG, 1), task, labels=("relevance",))
    model = dataclasses.replace(model, score_activation=activation)
    with TestClient(serving.make_app({"model": model})) as client, ThreadPoolExecutor(2) as threads:
        bodies = [{"query": "ba", "texts": ["ko"], "raw_scores": raw} for raw in (True, False)]
        raw, scaled = (
            reply.json()[0]["score"] for reply in threads.map(lambda body: client.post("/rerank", json=body), bodies)
        )
    assert scaled == pytest.approx(1 / (1 + np.exp(-raw)), abs=1e-6)


@pytest.mark.medium
def test_a_text_that_would_be_cut_is_an_error_if_truncate_is_false(models: dict[str, bert.Pretrained]) -> None:
    """Counts what the model reads of a text, a text with a prompt, a pair and a question with choices."""
    late = dataclasses.replace(
        models["encoder"], pooling=Pooling("tokens", interaction=LateInteraction(query_length=8), similarity="maxsim")
    )
    shorter = dataclasses.replace(models["classification"].data, max_length=6)
    given = {**models, "late": late, "shorter": models["classification"].replace(data=shorter)}
    longest = CONFIG.max_position_embeddings
    requests = [
        ("/embed", longest - 2, lambda text: {"model": "encoder", "inputs": text}),
        ("/embed", longest - 4, lambda text: {"model": "encoder", "inputs": text, "prompt_name": "query"}),
        ("/embed", longest - 2, lambda text: {"model": "late", "inputs": text}),
        ("/embed", 6, lambda text: {"model": "late", "inputs": text, "prompt_name": "query"}),
        ("/rerank", longest - 4, lambda text: {"model": "reranker", "query": "a", "texts": [text]}),
        ("/predict", longest - 4, lambda text: {"model": "pairs", "inputs": [["a", text]]}),
        ("/predict", longest - 4, lambda text: {"model": "choices", "inputs": [["a", "b", text]]}),
        ("/predict", longest - 2, lambda text: {"model": "classification", "inputs": text}),
        ("/predict", 4, lambda text: {"model": "shorter", "inputs": text}),
    ]
    with TestClient(serving.make_app(given)) as client:
        for path, count, body in requests:
            for words, status in ((count, 200), (count + 1, 413)):
                reply = client.post(path, json={**body("a " * words), "truncate": False})
                assert reply.status_code == status, (path, body(""), words, reply.text)


@pytest.mark.medium
def test_predict(client: TestClient, models: dict[str, bert.Pretrained]) -> None:
    def post(model: str, inputs: Any) -> Any:
        return client.post("/predict", json={"model": model, "inputs": inputs}).json()

    expected = models["classification"].predict(WORDS)
    for scores, answer in zip(post("classification", WORDS), expected, strict=True):
        assert scores[0]["label"] == answer.label
        assert {each["label"]: each["score"] for each in scores} == pytest.approx(answer.probabilities, abs=1e-6)
    assert post("classification", "ba") == post("classification", [["ba"]])[0]
    assert post("classification", {"text": "ba"}) == post("classification", "ba")
    pair = post("squad", ["ba", "ko ri tu lo"])
    assert pair == post("squad", [{"question": "ba", "context": "ko ri tu lo"}])[0]
    long_context = {"question": "ba", "context": "ko ri tu lo " * 99}
    assert (
        "answer" in client.post("/predict", json={"model": "squad", "inputs": long_context, "truncate": False}).json()
    )
    assert pair["answer"] == models["squad"].predict([("ba", "ko ri tu lo")])[0].answer
    assert post("tagging", "ba ko")["entities"] == models["tagging"].predict("ba ko").entities


@pytest.mark.medium
def test_errors_are_one_sentence(client: TestClient) -> None:
    def error(path: str, body: Any) -> tuple[int, str]:
        reply = client.post(path, json=body)
        return reply.status_code, reply.json()["error"]["message"]

    for path, body, status, words in [
        ("/embed", {"inputs": ""}, 422, "inputs"),
        ("/embed", {"inputs": [1]}, 422, "inputs"),
        ("/embed", {"inputs": ["a"] * (serving.MAX_TEXTS + 1)}, 422, "2,049"),
        ("/embed", {"inputs": "a", "model": "other"}, 404, "encoder, reranker"),
        ("/embed", {"inputs": "a", "normalize": False}, 422, "normalize"),
        ("/embed", {"inputs": "a", "dimensions": 0}, 422, "dimensions"),
        ("/embed", {"inputs": "a " * 99, "truncate": False}, 413, "truncate is false and a text has"),
        ("/embed", {"inputs": "a", "truncation_direction": "Left"}, 422, "truncation_direction"),
        ("/predict", {"inputs": "a", "raw_scores": True, "model": "classification"}, 422, "raw_scores"),
        ("/v1/embeddings", {"input": "a", "dimensions": 9999}, 422, "dimensions"),
        ("/rerank", {"query": "a", "texts": ["b"]}, 422, "encoder without scores"),
        ("/predict", {"inputs": "a"}, 422, "not fine-tuned"),
        ("/predict", {"inputs": 3, "model": "classification"}, 422, "inputs"),
        *[
            ("/predict", {"inputs": inputs, "model": "classification"}, 422, "classification takes")
            for inputs in ([5], [None], ["ba", None], [["ba", 5]])
        ],
        ("/predict", {"inputs": {"other": "a"}, "model": "classification"}, 422, "text"),
        ("/predict", {"inputs": [[["a"]]], "model": "classification"}, 422, "classification takes"),
        ("/nowhere", {}, 404, "Not Found"),
        ("/health", {}, 405, "Method Not Allowed"),
    ]:
        found, message = error(path, body)
        assert found == status and words in message, message
    assert client.post("/embed", content=b"{").status_code == 422


def test_a_failure_of_the_server_is_counted(
    models: dict[str, bert.Pretrained], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(texts: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(serving, "_as_texts", fail)
    with TestClient(serving.make_app(models), raise_server_exceptions=False) as client:
        reply = client.post("/embed", json={"inputs": "a"})
        assert reply.status_code == 500 and reply.json()["error"]["type"] == "server_error"
        assert 'path="/embed",status="500"' in client.get("/metrics").text


def test_a_request_of_too_many_tokens(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "MAX_TOKENS", 3)
    reply = client.post("/embed", json={"inputs": WORDS})
    assert reply.status_code == 422 and "pass at most 3" in reply.json()["error"]["message"]


def test_a_token_is_required(models: dict[str, bert.Pretrained]) -> None:
    with TestClient(serving.make_app(models, token="secret")) as client:
        assert client.get("/health").status_code == 200
        for header in ({}, {"Authorization": "Bearer other"}, {"Authorization": "secret"}):
            for path in ("/metrics", "/v1/models"):
                assert client.get(path, headers=header).status_code == 401
            assert client.post("/embed", json={"inputs": "a"}, headers=header).status_code == 401
        assert client.get("/metrics", headers={"Authorization": "Bearer secret"}).status_code == 200


@dataclasses.dataclass
class Slow:
    """A model that computes when it is released."""

    model: bert.Pretrained
    started: threading.Event = dataclasses.field(default_factory=threading.Event)
    release: threading.Event = dataclasses.field(default_factory=threading.Event)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def embed(self, texts: list[str], **options: Any) -> np.ndarray:
        self.started.set()
        self.release.wait(60)
        return np.zeros((len(texts), 4), np.float32)


@pytest.fixture
def slow(models: dict[str, bert.Pretrained]) -> Slow:
    return Slow(models["encoder"])


def test_a_full_queue_is_429_and_the_metrics_count_it(slow: Slow) -> None:
    with TestClient(serving.make_app({"slow": slow}, max_queue=2)) as client:  # type: ignore[dict-item]
        with ThreadPoolExecutor(5) as threads:
            post = partial(threads.submit, client.post, "/embed", json={"inputs": "ba"})
            replies = [post()]
            assert slow.started.wait(60)  # computed while the others arrive: two of them fill the queue
            replies += [post() for _ in range(4)]
            ended = as_completed(replies, 60)
            assert [next(ended).result().status_code for _ in range(2)] == [429, 429]
            slow.release.set()
            assert [reply.result().status_code for reply in ended] == [200, 200, 200]
        text = client.get("/metrics").text
        assert 'bert_requests_total{path="/embed",status="429"} 2.0' in text
        assert 'bert_batch_texts_sum{model="slow"} 3.0' in text and 'bert_batch_texts_count{model="slow"} 2.0' in text


def test_a_request_that_waits_too_long_is_503(slow: Slow) -> None:
    with TestClient(serving.make_app({"slow": slow}, timeout=0.1)) as client:  # type: ignore[dict-item]
        reply = client.post("/embed", json={"inputs": "ba"})
        assert reply.status_code == 503 and reply.headers["Retry-After"] == "1"
        slow.release.set()
        assert client.post("/embed", json={"inputs": "ba"}).status_code == 200
