"""Folders that are damaged, contradict themselves, or would do harm: one sentence each, and nothing is written."""

import json
import sys
import types
import zipfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import bert
from bert.commands.export import main as export
from bert.commands.finetune import main as finetune
from bert.commands.pretrain import main as pretrain
from bert.errors import UserError
from bert.interchange.families.base import KEYS
from bert.interchange.readers import hf
from bert.tokenizer.hf_settings import ADDED, SETTINGS
from tests.interchange.hf_folders import edit, rewrite, shard

INDEX = "model.safetensors.index.json"


def truncated(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-20])


def truncated_shard(folder: Path) -> None:
    shard(folder)
    first = folder / "model-00001-of-00002.safetensors"
    first.write_bytes(first.read_bytes()[:-20])


def index(folder: Path, place: object) -> None:
    """Shards whose index lists all tensors under ``place``."""
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(shard(folder), place)}))


def zipped_pickle(folder: Path) -> None:
    """An archive as torch.save writes it, with a pickle that would run code."""
    with zipfile.ZipFile(folder / "model.safetensors", "w") as archive:
        archive.writestr("archive/data.pkl", b"cos\nsystem\n(S'exit 1'\ntR.")


def without_a_tensor(folder: Path) -> None:
    places = shard(folder)
    first = folder / "model-00001-of-00002.safetensors"
    tensors = load_file(first)
    tensors.pop(next(name for name, place in places.items() if place == first.name))
    save_file(tensors, first)


def with_entry(folder: Path, name: str, shape: list[int]) -> None:
    """Adds a tensor without elements to the header of the weights."""
    data = (folder / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [len(data) - start] * 2}
    header = json.dumps({**json.loads(data[8:start]), name: entry}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data[start:])


def without_a_shard(folder: Path) -> None:
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def narrower(tensors: dict) -> dict:
    return {**tensors, "bert.pooler.dense.bias": tensors["bert.pooler.dense.bias"][:-1]}


MALFORMED = {
    "truncated": (truncated, "model.safetensors is not a whole safetensors file"),
    "empty": (
        lambda f: (f / "model.safetensors").write_bytes(b""),
        "model.safetensors is not a whole safetensors file",
    ),
    "not safetensors": (
        lambda f: (f / "model.safetensors").write_bytes(bytes(range(200))),
        "model.safetensors is not a whole safetensors file",
    ),
    "2**124 elements": (
        lambda f: with_entry(f, "x", [2**62, 2**62, 0]),
        "model.safetensors is not a whole safetensors",
    ),
    "100 dimensions": (lambda f: with_entry(f, "x", [0] * 100), "model.safetensors is not a whole safetensors file"),
    "half a name": (lambda f: with_entry(f, "\ud800", [0]), "model.safetensors is not a whole safetensors file"),
    "a pickle": (lambda f: (f / "model.safetensors").write_bytes(b"\x80\x04K\x01."), "a pickle, which can run code"),
    "a zipped pickle": (zipped_pickle, "a pickle, which can run code"),
    "climbing": (lambda f: index(f, "../x.safetensors"), "'../x.safetensors', which may be outside of the folder"),
    "missing shard": (without_a_shard, "lists model-00002-of-00002.safetensors"),
    "truncated shard": (truncated_shard, "model-00001-of-00002.safetensors is not a whole safetensors file"),
    "tensor in no shard": (without_a_tensor, "which model.safetensors.index.json lists"),
    "absolute": (lambda f: index(f, "/etc/passwd"), "'/etc/passwd', which may be outside of the folder"),
    "climbing in the middle": (lambda f: index(f, "a/../../x"), "'a/../../x', which may be outside of the folder"),
    "backslashes": (lambda f: index(f, "..\\\\x"), "which may be outside of the folder"),
    "the folder above": (lambda f: index(f, ".."), "'..', which may be outside of the folder"),
    "no map": (lambda f: [shard(f), (f / INDEX).write_text("[]")], "has no weight_map"),
    "map of numbers": (lambda f: index(f, 3), "has no weight_map"),
    "half an index": (lambda f: [shard(f), (f / INDEX).write_text('{"weight_map"')], "is not valid JSON"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "holds no weights"),
    "shape": (lambda f: rewrite(f, narrower), "bert.pooler.dense.bias is [11], but config.json makes it [12]"),
    "small table": (lambda f: edit(f, vocab_size=22), "needs 23 rows, but the model's embedding has 22"),
    "vocabulary": (lambda f: edit(f, vocab_size=24), "word_embeddings.weight is [23, 12], but config.json makes"),
    "layers": (lambda f: edit(f, num_hidden_layers=1), "of 1 layers lacks"),
    "more layers": (lambda f: edit(f, num_hidden_layers=3), "lacks bert.encoder.layer.2.attention.self.query.weight"),
    "unexplained": (
        lambda f: rewrite(f, lambda t: {**t, "bert.x": t["classifier.bias"]}),
        "holds bert.x, which a Bert",
    ),
    "half a head": (
        lambda f: rewrite(f, lambda t: {n: a for n, a in t.items() if n != "classifier.bias"}),
        "lacks classifier.bias",
    ),
    "integers": (
        lambda f: rewrite(f, lambda t: {n: a.astype(np.int8) for n, a in t.items()}),
        "is int8: convert it",
    ),
    **{
        f"no {key}": (lambda f, key=key: edit(f, **{key: None}), f"config.json lacks {key}: copy it again")
        for key in KEYS.values()
        if key not in hf.OPTIONAL
    },
    "dropout": (lambda f: edit(f, classifier_dropout="0.1"), "classifier_dropout is '0.1': set it to a number"),
    "a word": (lambda f: edit(f, hidden_size="wide"), "hidden_size is 'wide'"),
    "heads": (lambda f: edit(f, num_attention_heads=5), "not divisible by num_attention_heads"),
    "activation": (lambda f: edit(f, hidden_act="mish"), "hidden_act is 'mish'"),
    "model type": (lambda f: edit(f, model_type="t5"), "model_type is 't5'"),
    "architecture": (lambda f: edit(f, architectures=["BertLMHeadModel"]), "'BertLMHeadModel'"),
    "decoder": (lambda f: edit(f, is_decoder=True), "is_decoder is True"),
    "positions": (lambda f: edit(f, position_embedding_type="relative_key"), "is 'relative_key', and only 'absolute'"),
    "decoder without a name": (lambda f: edit(f, is_decoder=True, architectures=None), "is_decoder is True"),
    "epsilon": (lambda f: edit(f, layer_norm_eps=-1), "layer_norm_eps is -1: it must be above 0"),
    "no number": (lambda f: edit(f, layer_norm_eps=float("nan")), "layer_norm_eps is nan: it must be above 0"),
    "deviation": (lambda f: edit(f, initializer_range=-1), "initializer_range is -1: it must be at least 0"),
    "tied": (lambda f: edit(f, tie_word_embeddings="false"), "tie_word_embeddings is 'false'"),
    "problem": (lambda f: edit(f, problem_type="rubbish"), "problem_type is 'rubbish': set it to one of regression"),
    "thresholds": (
        lambda f: edit(f, problem_type="multi_label_classification", label_thresholds=[0.5]),
        "label_thresholds is [0.5]: set it to a number from 0 to 1 for each of the 3 labels",
    ),
    "number of texts": (lambda f: edit(f, texts_per_input=3), "texts_per_input is 3: set it to 1, or to 2 for pairs"),
    "endless vocabulary": (lambda f: edit(f, vocab_size=10**15), "vocab_size is 1000000000000000: copy the file"),
    "endless layers": (lambda f: edit(f, num_hidden_layers=10**6), "too few for the 1,000,000 layers of config.json"),
    "a layer too many": (lambda f: edit(f, num_hidden_layers=3), "lacks bert.encoder.layer.2.attention.self.query"),
    "deep json": (lambda f: (f / "config.json").write_text("[" * 10**5), "config.json is not valid JSON"),
    "settings of the tokenizer": (
        lambda f: (f / SETTINGS).write_text("[]"),
        f"{SETTINGS} is not a JSON object: fix it",
    ),
    "casing": (lambda f: (f / SETTINGS).write_text('{"do_lower_case": "no"}'), "do_lower_case is 'no', set it to"),
    "added tokens": (lambda f: (f / ADDED).write_text('{"[X]": 99}'), "added token '[X]' has the id 99, but its"),
    "added token": (lambda f: (f / ADDED).write_text('{"[X]": "a"}'), "the number of '[X]' is 'a': copy the file"),
    "added table": (
        lambda f: (f / SETTINGS).write_text('{"added_tokens_decoder": {"7": "[X]"}}'),
        "added_tokens_decoder is not a table of numbered tokens",
    ),
    "another tokenizer": (
        lambda f: [
            (f / "tokenizer.json").unlink(),
            (f / SETTINGS).write_text('{"tokenizer_class": "BertJapaneseTokenizer"}'),
        ],
        "a BertJapaneseTokenizer, which reads vocab.txt differently",
    ),
    "labels": (lambda f: edit(f, id2label={"0": "a", "2": "b"}), "does not number its labels"),
    "twins": (lambda f: edit(f, id2label={"0": "a", "1": "a", "2": "b"}), "two labels with the same name"),
    **{
        f"{key} {value!r:.20}": (lambda f, key=key, value=value: edit(f, **{key: value}), f"config.json: {key} is")
        for key in ("hidden_size", "vocab_size", "num_hidden_layers", "max_position_embeddings", "type_vocab_size")
        for value in (2**31 - 1, 2**63, 10**400, -1, 2.5, True, [1], {"a": 1})
    },
    **{
        f"{value!r:.20} labels": (
            lambda f, value=value: edit(f, id2label=None, num_labels=value),
            "config.json: num_labels is",
        )
        for value in (10**7, 10**9, 2**63, 10**400, -1, 0, 2.0, True, "3", [3], {"a": 3})
    },
    "many labels": (lambda f: edit(f, id2label=None, num_labels=2**14), "but config.json makes it [16384"),
    "nested label": (lambda f: edit(f, id2label={"0": "a", "1": ["b"], "2": "c"}), "id2label holds ['b']"),
    "half a pair": (lambda f: edit(f, id2label={"0": "\ud800", "1": "b", "2": "c"}), "half of a surrogate pair"),
    "long shard": (lambda f: index(f, "x" * 300), "File name too long"),
    "large epsilon": (lambda f: edit(f, layer_norm_eps=10**400), "layer_norm_eps is 1000"),
    "json": (lambda f: (f / "config.json").write_text("{"), "config.json is not valid JSON"),
    "no config": (lambda f: (f / "config.json").unlink(), "holds neither a run (config.yaml) nor a model"),
    "no tokenizer": (
        lambda f: [(f / name).unlink() for name in ("tokenizer.json", "vocab.txt")],
        "holds neither tokenizer.json nor vocab.txt",
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_folders_are_one_sentence(case: str, made, tmp_path: Path, fails) -> None:
    spoil, sentence = MALFORMED[case]
    made("BertForSequenceClassification").save(tmp_path / "model")
    spoil(tmp_path / "model")
    assert sentence in fails(export, str(tmp_path / "model"), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_training_from_a_malformed_folder_claims_nothing(made, tmp_path: Path, corpus: Path, sst2: Path, fails) -> None:
    made("BertForSequenceClassification").save(tmp_path / "model")
    truncated(tmp_path / "model")
    init, out = f"--init={tmp_path / 'model'}", tmp_path / "out"
    for main, data in ((pretrain, [f"--data.train={corpus}"]), (finetune, ["--config=sst2", f"--data.dir={sst2}"])):
        assert "is not a whole safetensors file" in fails(main, init, *data, f"--output_dir={out}")
        assert [path.name for path in out.iterdir()] == [".lock"]


def test_a_pickle_needs_a_loader_that_runs_no_code(made, tmp_path: Path, monkeypatch) -> None:
    made().save(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model" / "pytorch_model.bin")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UserError, match="which can run code when read: install PyTorch"):
        bert.load(tmp_path / "model")


@pytest.mark.parametrize("version", ["2.5.1+cu124", "2.0.0", "1.13.1"])
def test_a_loader_that_is_known_to_run_code_is_not_used(made, tmp_path: Path, monkeypatch, version: str) -> None:
    made("BertForMaskedLM").save(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model" / "pytorch_model.bin")
    torch = types.SimpleNamespace(__version__=version, load=lambda *arguments, **settings: pytest.fail("it was read"))
    monkeypatch.setitem(sys.modules, "torch", torch)
    with pytest.raises(UserError, match=r"can run code \(CVE-2025-32434\): use PyTorch 2.6 or later") as caught:
        bert.load(tmp_path / "model")
    assert f"PyTorch {version}" in str(caught.value)
