"""Adapters of tasks, as Jina embeddings v3 has them: read from both published forms, added one at a time, and saved."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import bert
from bert.commands.export import main as export
from bert.commands.predictions import embed_command as embed
from bert.errors import UserError
from bert.interchange import hub
from bert.interchange.families import JINA_V3
from bert.interchange.task_adapters import read_task_adapters
from bert.tokenizer.vocabulary import save_tokenizer
from tests.interchange.hf_folders import CONFIG, as_first_published, assert_same, edit, publish_adapters

TASKS = ("retrieval.query", "retrieval.passage", "text-matching")
PROMPTS = {"retrieval.query": "a b ", "retrieval.passage": "c ", "text-matching": ""}
JINA = dataclasses.replace(CONFIG, hidden_act="gelu", type_vocab_size=1, position_embedding_type="rotary")
TEXTS = ["a b c", "", "d", "q r a b"]
LAYER = ("bert", "encoder", "layer_1")


def random_adapter(seed: int, width: int, inner: int, words: int) -> dict[str, np.ndarray]:
    """Factors of rank 4 of every matrix, with one A for queries, keys and values."""
    random = np.random.default_rng(seed)
    sizes = {"embeddings.word_embeddings": (words, width), "embeddings.token_type_embeddings": (1, width)}
    for layer in range(2):
        sizes |= {f"layers.{layer}.self_attn.{part}_proj": (width, width) for part in "qkvo"}
        sizes |= {f"layers.{layer}.mlp.fc1": (width, inner), f"layers.{layer}.mlp.fc2": (inner, width)}
    sizes["pooler.dense"] = (width, width)
    tensors = {}
    for module, (inputs, outputs) in sizes.items():
        kind, end = ("embedding_", "") if "embeddings" in module else ("", ".weight")
        tensors[f"{module}.lora_{kind}A{end}"] = random.normal(size=(4, inputs)).astype(np.float32)
        tensors[f"{module}.lora_{kind}B{end}"] = random.normal(size=(outputs, 4)).astype(np.float32)
    for layer in range(2):
        for part in "kv":
            name = f"layers.{layer}.self_attn.{part}_proj.lora_A.weight"
            tensors[name] = tensors[name.replace(f"{part}_proj", "q_proj")]
    return tensors


@pytest.fixture(scope="module")
def adapters() -> dict[str, dict[str, np.ndarray]]:
    sizes = (JINA.hidden_size, JINA.intermediate_size, JINA.known_vocab_size)
    return {task: random_adapter(seed, *sizes) for seed, task in enumerate(TASKS)}


@pytest.fixture
def folder(made, adapters, tmp_path: Path) -> Path:
    """A model with three adapters, as transformers' class reads it."""
    model, folder = made(config=JINA), tmp_path / "jina"
    folder.mkdir()
    arrays = {
        "/".join(key.key for key in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(model.params)
    }
    tensors = {
        tensor.name: tensor.join(arrays) for tensor in JINA_V3.names.tensors(2, "Bert") if tensor.paths[0] in arrays
    }
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, folder / "model.safetensors")
    sizes = {key: getattr(JINA, name) for name, key in JINA_V3.keys.items()}
    content = {**sizes, "model_type": "jina_embeddings_v3", "architectures": ["JinaEmbeddingsV3Model"]}
    (folder / "config.json").write_text(json.dumps({**content, "hidden_act": "gelu"}))
    save_tokenizer(model.tokenizer, folder)
    publish_adapters(folder, adapters, PROMPTS)
    return folder


@pytest.fixture
def jina(folder: Path) -> bert.Pretrained:
    return bert.load(folder)


def part_of(model: bert.Pretrained, *path: str) -> np.ndarray:
    tree = model.params
    for name in path:
        tree = tree[name]
    return np.asarray(tree)


@pytest.mark.medium
def test_a_task_adds_its_products_to_the_weights(jina: bert.Pretrained, adapters) -> None:
    for task in TASKS:
        own, model = adapters[task], jina.for_task(task)

        def product(module: str, kind: str = "", end: str = ".weight", own: dict = own) -> np.ndarray:
            return (own[f"{module}.lora_{kind}B{end}"] @ own[f"{module}.lora_{kind}A{end}"]).T / 4  # alpha 1, rank 4

        for path, expected in {
            (*LAYER, "attention", "query", "kernel"): product("layers.1.self_attn.q_proj"),
            (*LAYER, "attention", "value", "kernel"): product("layers.1.self_attn.v_proj"),
            (*LAYER, "attention", "output", "kernel"): product("layers.1.self_attn.o_proj"),
            (*LAYER, "intermediate", "kernel"): product("layers.1.mlp.fc1"),
            (*LAYER, "output", "kernel"): product("layers.1.mlp.fc2"),
            ("bert", "pooler", "kernel"): product("pooler.dense"),
            ("bert", "embeddings", "word", "embedding"): product("embeddings.word_embeddings", "embedding_", ""),
            ("bert", "embeddings", "segment", "embedding"): product(
                "embeddings.token_type_embeddings", "embedding_", ""
            ),
        }.items():
            np.testing.assert_allclose(part_of(model, *path) - part_of(jina, *path), expected, atol=1e-5)
        np.testing.assert_array_equal(
            part_of(model, *LAYER, "attention", "query", "bias"), part_of(jina, *LAYER, "attention", "query", "bias")
        )


def test_both_published_forms_are_the_same_model(jina: bert.Pretrained, adapters, folder: Path) -> None:
    as_first_published(folder, adapters)
    first = bert.load(folder)
    assert first.config == jina.config
    assert_same(first.params, jina.params)
    assert list(first.task_adapters) == list(jina.task_adapters) == list(TASKS)
    for task in TASKS:
        assert_same(jax.device_get(first.for_task(task).params), jax.device_get(jina.for_task(task).params))
        ours, theirs = (model.task_adapters[task] for model in (first, jina))
        assert ours.prompt == theirs.prompt
        assert ours.adapter.settings == theirs.adapter.settings
        assert {name.replace("encoder.", "") for name in ours.adapter.tensors} == {
            name.replace("encoder.", "") for name in theirs.adapter.tensors
        }


def test_names_of_transformers_class_are_read(jina: bert.Pretrained, adapters, folder: Path) -> None:
    """Also names that PEFT writes for an adapter that it trained, and as the adapter of a model that is loaded."""
    named = {f"base_model.model.{name}": np.ascontiguousarray(x) for name, x in adapters["text-matching"].items()}
    save_file(named, folder / "text_matching" / "adapter_model.safetensors")
    expected = jax.device_get(jina.for_task("text-matching").params)
    assert_same(jax.device_get(bert.load(folder).for_task("text-matching").params), expected)
    merged = bert.load(folder, adapter=folder / "text_matching")
    jax.tree.map(lambda own, other: np.testing.assert_allclose(own, other, atol=1e-5), merged.params, expected)
    assert not merged.task_adapters


@pytest.mark.medium
def test_embeddings_of_a_task_have_its_weights_and_its_prompt(jina: bert.Pretrained) -> None:
    base = jina.embed(TEXTS)
    for task in TASKS:
        vectors = jina.embed(TEXTS, task=task)
        prompted = [PROMPTS[task] + text for text in TEXTS]
        plain = dataclasses.replace(jina, params=jax.device_get(jina.for_task(task).params), task_adapters={})
        np.testing.assert_allclose(vectors, plain.embed(prompted), atol=1e-5)
        assert np.abs(vectors - base).max() > 0.1
        np.testing.assert_array_equal(jina.embed(TEXTS[0], task=task), vectors[0])
    np.testing.assert_array_equal(jina.embed(TEXTS), base)
    np.testing.assert_array_equal(jina.embed(TEXTS, task="text_matching"), vectors)  # the name of its folder


@pytest.mark.medium
def test_weights_are_rounded_after_the_adapter_is_added(jina: bert.Pretrained, folder: Path) -> None:
    merged = dataclasses.replace(jina, params=jax.device_get(jina.for_task("retrieval.query").params), task_adapters={})
    model = bert.load(folder, dtype="bfloat16")
    expected = dataclasses.replace(merged, dtype="bfloat16").embed(
        [PROMPTS["retrieval.query"] + text for text in TEXTS]
    )
    np.testing.assert_array_equal(model.embed(TEXTS, task="retrieval.query"), expected)
    assert np.abs(jina.embed(TEXTS, task="retrieval.query") - expected).max() > 1e-4


def test_adapters_in_another_precision_are_read_as_float32(jina: bert.Pretrained, folder: Path) -> None:
    file = folder / "text_matching" / "adapter_model.safetensors"
    half = {name: array.astype(np.float16) for name, array in load_file(file).items()}
    save_file(half, file)
    adapter = bert.load(folder).task_adapters["text-matching"].adapter
    assert {array.dtype.name for array in adapter.tensors.values()} == {"float32"}
    for name, array in adapter.tensors.items():
        np.testing.assert_array_equal(array, half[name])


@pytest.mark.medium
def test_searches_and_similarities_use_the_adapters_for_them(jina: bert.Pretrained) -> None:
    queries, documents = (jina.embed(TEXTS, task=f"retrieval.{name}") for name in ("query", "passage"))
    np.testing.assert_array_equal(jina.embed(TEXTS, prompt="query"), queries)
    np.testing.assert_array_equal(jina.embed(TEXTS, prompt="document"), documents)
    texts = ["a b c", "d", "q r a b"]
    scores = jina.for_task("retrieval.query").pooling_or_default.compare(queries[[0, 2, 3]], documents[[0, 2, 3]])
    found = jina.search(texts, texts, top_k=3)
    np.testing.assert_allclose(np.take_along_axis(scores, found.indices, 1), found.scores, atol=1e-5)
    matching = jina.embed(texts, task="text-matching")
    np.testing.assert_allclose(jina.similarity(texts, texts), jina.pooling_or_default.compare(matching, matching))
    rows = [{"query": "a b c", "positive": "d"}, {"query": "d", "positive": "q r a b"}]
    mined = jina.mine_negatives(rows, texts, num_negatives=1, top_k=3, relative_margin=0)
    assert mined[0]["score"][0] == pytest.approx(scores[0, 1], abs=1e-5)


def test_one_task_is_kept_and_all_share_their_programs(jina: bert.Pretrained) -> None:
    first = jina.for_task("retrieval.query")
    assert jina.for_task("retrieval.query") is first
    second = jina.for_task("retrieval.passage")
    assert list(vars(jina)["_of_last_task"]) == ["retrieval.passage"]
    assert second._compiled.encoder is first._compiled.encoder is jina._compiled.encoder


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (
            {"task": "clustering"},
            "task is 'clustering': pass one of retrieval.query, retrieval.passage, text-matching, or leave",
        ),
        ({"task": 3}, "task is 3: pass one of"),
        ({"task": "retrieval.query", "prompt": "query"}, "prompt is 'query', but the task retrieval.query has its own"),
    ],
)
def test_an_unknown_task_is_rejected(arguments: dict, match: str, jina: bert.Pretrained) -> None:
    with pytest.raises(UserError, match=match):
        jina.embed(TEXTS, **arguments)


def test_a_model_without_adapters_rejects_a_task(made) -> None:
    with pytest.raises(UserError, match="task is 'separation', but made has no adapters of tasks: remove task"):
        made().embed(TEXTS, task="separation")


@pytest.mark.medium
def test_commands_read_and_write_the_model_of_a_task(jina: bert.Pretrained, folder: Path, tmp_path: Path) -> None:
    texts = [text for text in TEXTS if text]
    (tmp_path / "texts.txt").write_text("\n".join(texts) + "\n")
    arguments = [str(folder), str(tmp_path / "texts.txt"), "--output"]
    for options, expected in (
        ({"task": "retrieval.query"}, jina.embed(texts, task="retrieval.query")),
        ({"prompt": "document"}, jina.embed(texts, task="retrieval.passage")),
        ({}, jina.embed(texts)),
    ):
        output = tmp_path / f"{len(options)}{''.join(options)}.npy"
        embed([*arguments, str(output), *(word for name in options for word in (f"--{name}", options[name]))])
        np.testing.assert_allclose(np.load(output), expected, atol=1e-5)
    with pytest.raises(UserError, match="task is 'separation': pass one of "):
        embed([*arguments, str(tmp_path / "none.npy"), "--task", "separation"])
    (tmp_path / "empty.txt").touch()
    with pytest.raises(UserError, match=r"empty.txt holds no text: write one on each line"):
        embed([str(folder), str(tmp_path / "empty.txt"), "--output", str(tmp_path / "none.npy")])
    with pytest.raises(UserError, match=r"out.txt does not end in .npy"):
        embed([*arguments, "out.txt"])
    export(
        [str(folder), str(tmp_path / "query"), "--format", "stablehlo", "--length", "8", "--task", "retrieval.query"]
    )
    function = jax.export.deserialize(bytearray((tmp_path / "query" / "model.jaxexport").read_bytes()))
    rows = jina.tokenize([PROMPTS["retrieval.query"] + "a b c"] * 2, max_length=8)
    inputs = {
        name: np.pad(rows[name], [(0, 0), (0, 8 - rows[name].shape[1])]) for name in ("input_ids", "attention_mask")
    }
    vectors = function.call(load_file(tmp_path / "query" / "model.safetensors"), inputs)["sentence_embedding"]
    np.testing.assert_allclose(vectors[0], jina.embed("a b c", task="retrieval.query"), atol=1e-5)


@pytest.mark.medium
def test_requests_to_the_server_may_name_a_task(jina: bert.Pretrained, made) -> None:
    pytest.importorskip("httpx", reason="needs httpx")
    pytest.importorskip("prometheus_client", reason="needs the extra `serve`")
    client_module = pytest.importorskip("fastapi.testclient", reason="needs the extra `serve`")
    from bert.serving.app import make_app

    texts = [text for text in TEXTS if text]
    with client_module.TestClient(make_app({"jina": jina, "plain": made()})) as client:
        for task in (None, *TASKS, None):
            expected = jina.embed(texts, task=task)
            named = {} if task is None else {"task": task}
            vectors = client.post("/embed", json={"inputs": texts, "normalize": False, **named}).json()
            np.testing.assert_allclose(vectors, expected, atol=1e-5)
            data = client.post("/v1/embeddings", json={"input": texts, **named}).json()["data"]
            np.testing.assert_allclose([each["embedding"] for each in data], expected, atol=1e-5)
        for path, field in (("/embed", "inputs"), ("/v1/embeddings", "input")):
            for body, words in (
                ({"task": "separation"}, "pass one of retrieval.query, retrieval.passage, text-matching"),
                ({"task": "separation", "model": "plain"}, "has no adapters of tasks: remove task"),
            ):
                reply = client.post(path, json={field: "a", **body})
                assert reply.status_code == 422
                assert words in reply.json()["error"]["message"]
        reply = client.post("/embed", json={"inputs": "a", "task": "text-matching", "prompt_name": "query"})
        assert reply.status_code == 422
        assert "the task text-matching has its own prompt" in reply.json()["error"]["message"]


def damage(file: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def test_what_does_not_fit_is_rejected_when_the_model_is_loaded(folder: Path) -> None:
    content = json.loads((folder / "config.json").read_text())
    for values, match in (
        ({"lora_adaptations": "retrieval.query"}, "lora_adaptations is 'retrieval.query': set it to a list"),
        ({"lora_adaptations": ["../text_matching"]}, "lora_adaptations is"),
        ({"lora_adaptations": ["text-matching", "text_matching"]}, "lora_adaptations is"),
        ({"task_instructions": {"separation": 3}}, "task_instructions is"),
    ):
        edit(folder, **{**content, **values})
        with pytest.raises(UserError, match=match):
            bert.load(folder)
    edit(folder, **content)
    file = folder / "text_matching" / "adapter_model.safetensors"
    name = "roberta.encoder.layers.0.self_attn.q_proj.lora_B.weight"
    damage(file, lambda tensors: tensors.update({name: np.ascontiguousarray(tensors[name][:-1])}))
    with pytest.raises(
        UserError, match=r"text_matching/.*q_proj is \[11, 12\], which the base model .* lacks or has in"
    ):
        bert.load(folder)
    damage(file, lambda tensors: tensors.update({name: np.zeros((12, 3), np.float32)}))
    with pytest.raises(UserError, match=r"the shapes of lora_A and lora_B of .*q_proj do not match"):
        bert.load(folder)


def test_damaged_stacks_of_adapters_are_rejected(folder: Path, adapters) -> None:
    as_first_published(folder, adapters)
    for values, match in (
        ({"lora_adaptations": ["retrieval.query"]}, "but the number of lora_adaptations in config.json is 1"),
        ({"lora_adaptations": None}, "lora_adaptations in config.json is 0"),
        ({"lora_adaptations": list(TASKS), "lora_alpha": None}, "lora_alpha is 'None'"),
    ):
        edit(folder, **values)
        with pytest.raises(UserError, match=match):
            bert.load(folder)


def test_missing_adapters_are_a_warning(folder: Path) -> None:
    shutil.rmtree(folder / "text_matching")
    lines: list[str] = []
    model = bert.load(folder, lines.append)
    assert f"{folder} lacks the adapters of text-matching, which config.json declares" in lines
    assert f"read {folder}: the adapters of retrieval.query, retrieval.passage" in lines
    with pytest.raises(UserError, match=r"'text-matching': pass one of retrieval.query, retrieval.passage, or leave"):
        model.embed(TEXTS, task="text-matching")
    assert "  adapters: retrieval.query, retrieval.passage" in repr(model)


def test_files_without_adapters_are_unchanged(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    plain, found = read_task_adapters(folder, {}, JINA_V3, stored, print)
    assert plain == stored
    assert not found


def test_the_files_of_adapters_are_fetched_from_the_hub(folder: Path) -> None:
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    patterns = [*hub.SETTINGS, *hub.WEIGHTS, *hub.ADAPTER_WEIGHTS]
    assert {file for file in files if any(fnmatch(file, pattern) for pattern in patterns)} == files


@pytest.mark.medium
def test_onnx_runtime_has_a_graph_for_each_task(
    jina: bert.Pretrained, folder: Path, tmp_path: Path, monkeypatch
) -> None:
    pytest.importorskip("onnx", reason="needs the extra `onnx`")
    pytest.importorskip("onnxruntime", reason="needs the extra `onnx`")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    for _ in range(2):  # the second time with graphs that are cached
        model = bert.load(folder, engine="onnxruntime")
        for task in ("retrieval.query", "text-matching"):
            np.testing.assert_allclose(model.embed(TEXTS, task=task), jina.embed(TEXTS, task=task), atol=1e-5)
    assert len(list((tmp_path / "caches" / "bert-jax" / "graphs").iterdir())) == 2
    lines: list[str] = []
    jina.save(tmp_path / "out", "onnx", log=lines.append)
    assert any(
        "the adapters of retrieval.query, retrieval.passage, text-matching are left out" in line for line in lines
    )


@pytest.mark.medium
def test_training_from_the_model_leaves_its_adapters_out_with_a_warning(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"query": text, "positive": text[::-1]} for text in ("a b c", "d e", "f", "g h", "i k l", "m n")]
    settings = {"training.steps": 1, "training.batch_size": 2, "data.max_length": 8}
    run = bert.finetune("embedding", init=folder, train=rows, output_dir=tmp_path / "run", overrides=settings)
    printed = capsys.readouterr()
    warning = f"not loaded from {folder}: the adapters of retrieval.query, retrieval.passage, text-matching"
    assert warning in printed.out + printed.err
    assert not run.model.task_adapters
