"""Hugging Face folders: what is written reads back bit for bit, in whatever form others wrote it, or not at all."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import flax.linen as nn
import huggingface_hub.constants
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import yaml
from flax import traverse_util
from safetensors.numpy import load_file

import bert
from bert.commands.export import main as export
from bert.commands.finetune import main as finetune
from bert.commands.predict import main as predict
from bert.commands.pretrain import main as pretrain
from bert.config import ModelConfig
from bert.errors import UserError
from bert.interchange import bundle, families, names
from bert.interchange.pooling import Pooling
from bert.interchange.writers.model_card import model_card
from tests.conftest import SMALL_RUN
from tests.interchange.hf_folders import CONFIG, ELECTRA, ROBERTA, edit, rewrite, shard


def assert_same(params, others) -> None:
    assert jax.tree.structure(params) == jax.tree.structure(others)
    jax.tree.map(np.testing.assert_array_equal, params, others)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", names.ARCHITECTURES)
def test_the_table_names_every_parameter(architecture: str, tied: bool, made) -> None:
    config = ModelConfig(**{**vars(CONFIG), "tie_word_embeddings": tied})
    model = made(architecture, config)
    module: nn.Module = bundle.build_module(model)
    ids = jnp.zeros((1, 2, 8) if architecture == "BertForMultipleChoice" else (1, 8), jnp.int32)
    tree = jax.eval_shape(lambda: module.init(jax.random.key(0), ids))["params"]
    tree = {"bert": tree} if architecture == "Bert" else tree
    expected = {path: leaf.shape for path, leaf in traverse_util.flatten_dict(tree, sep="/").items()}
    found = {path: array.shape for path, array in traverse_util.flatten_dict(model.params, sep="/").items()}
    assert found == expected
    for family in families.FAMILIES:
        if architecture not in family.classes or (architecture, family) == ("Bert", families.ELECTRA):
            continue  # ELECTRA has no pooler
        table = family.names.tensors(2, architecture)
        assert len({tensor.theirs for tensor in table}) == len({tensor.ours for tensor in table}) == len(table)
        assert {tensor.ours for tensor in table} >= set(expected)


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        *((name, CONFIG) for name in families.BERT.classes),
        *((name, dataclasses.replace(ROBERTA, position_offset=1)) for name in families.ROBERTA.classes),
        *((name, ELECTRA) for name in families.ELECTRA.classes),
    ],
)
def test_round_trips_are_bit_identical(architecture: str, config: ModelConfig, made, tmp_path: Path) -> None:
    model = made(architecture, config)
    said: list[str] = []
    model.save(tmp_path / "one", say=said.append)
    assert said[0].startswith(f"verified: {len(jax.tree.leaves(model.params))} tensors read back identical")
    again = bert.load(tmp_path / "one", said.append)
    assert (again.config, again.architecture, again.labels) == (config, architecture, model.labels)
    assert_same(again.params, model.params)
    again.save(tmp_path / "two")
    for name in ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


def with_old_norms(tensors: dict) -> dict:
    def old(name: str) -> str:
        return re.sub(r"LayerNorm\.bias$", "LayerNorm.beta", re.sub(r"LayerNorm\.weight$", "LayerNorm.gamma", name))

    return {old(name): array for name, array in tensors.items()}


def with_buffers_and_copies(tensors: dict) -> dict:
    copies = {
        "bert.embeddings.position_ids": np.arange(16)[None],
        "cls.predictions.decoder.weight": tensors["bert.embeddings.word_embeddings.weight"],
        "cls.predictions.decoder.bias": tensors["cls.predictions.bias"],
    }
    return {**tensors, **copies}


@pytest.mark.parametrize("change", [with_old_norms, with_buffers_and_copies])
def test_old_names_buffers_and_tied_copies(change, made, tmp_path: Path) -> None:
    model = made("BertForPreTraining")
    model.save(tmp_path / "model")
    rewrite(tmp_path / "model", change)
    said: list[str] = []
    again = bert.load(tmp_path / "model", said.append)
    assert_same(again.params, model.params)
    assert again.config.tie_word_embeddings
    assert not [line for line in said if "not loaded" in line]  # a buffer is no loss


def test_a_bare_encoder_with_and_without_its_prefix(made, tmp_path: Path) -> None:
    model = made()
    model.save(tmp_path / "model")
    assert "embeddings.LayerNorm.weight" in load_file(tmp_path / "model" / "model.safetensors")
    rewrite(tmp_path / "model", lambda tensors: {f"bert.{name}": array for name, array in tensors.items()})
    assert_same(bert.load(tmp_path / "model").params, model.params)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_is_read_as_float32(dtype, made, tmp_path: Path) -> None:
    model = made("BertForMaskedLM")
    model.save(tmp_path / "model")
    rewrite(tmp_path / "model", lambda tensors: {name: array.astype(dtype) for name, array in tensors.items()})
    expected = jax.tree.map(lambda array: array.astype(dtype).astype(np.float32), model.params)
    assert_same(bert.load(tmp_path / "model").params, expected)


def test_shards(made, tmp_path: Path) -> None:
    model = made("BertForQuestionAnswering")
    model.save(tmp_path / "model")
    shard(tmp_path / "model")
    assert_same(bert.load(tmp_path / "model").params, model.params)


def test_a_decoder_that_differs_is_untied(made, tmp_path: Path) -> None:
    made("BertForMaskedLM").save(tmp_path / "model")
    rewrite(
        tmp_path / "model",
        lambda tensors: {
            **tensors,
            "cls.predictions.decoder.weight": tensors["bert.embeddings.word_embeddings.weight"] + 1,
            "cls.predictions.decoder.bias": tensors["cls.predictions.bias"] + 1,
        },
    )
    said: list[str] = []
    model = bert.load(tmp_path / "model", said.append)
    assert not model.config.tie_word_embeddings
    assert any("stays untied" in line for line in said)
    assert any(line.startswith("not loaded from") and line.endswith(": cls.predictions.bias") for line in said)
    word, head = model.params["bert"]["embeddings"]["word"]["embedding"], model.params["predictions"]
    np.testing.assert_array_equal(head["decoder"], word + 1)
    model.save(tmp_path / "again")
    assert_same(bert.load(tmp_path / "again").params, model.params)


def test_parts_that_are_not_there_start_afresh(made, tmp_path: Path) -> None:
    made("BertForSequenceClassification").save(tmp_path / "model")
    rewrite(
        tmp_path / "model",
        lambda tensors: {n: a for n, a in tensors.items() if "pooler" not in n and "classifier" not in n},
    )
    said: list[str] = []
    model = bert.load(tmp_path / "model", said.append)
    assert said[-1].endswith("randomly initialized: bert/pooler, classifier")
    assert (model.architecture, model.labels) == ("Bert", ())
    encoded = model.encode(["a b", "c"])
    assert encoded.pooled_output is None
    assert encoded.embeddings.shape == (2, 12)
    with pytest.raises(UserError, match="not fine-tuned for a task: fine-tune it first with bert finetune --init"):
        model.predict(["a"])
    with pytest.raises(UserError, match="no masked-LM head"):
        model.fill_mask("[MASK]")


def test_masks_are_filled_without_pooler_or_nsp_head(made, tmp_path: Path) -> None:
    made("BertForMaskedLM").save(tmp_path / "model")
    [guesses] = bert.load(tmp_path / "model").fill_mask("a [MASK] b", top_k=3)
    assert [guess.probability for guess in guesses] == sorted((guess.probability for guess in guesses), reverse=True)


def test_pooling_is_what_the_folder_declares(made, tmp_path: Path) -> None:
    texts = ["a b c", "d", "e f"]
    for mode in ("mean", "cls", "max"):
        model = made(pooling=Pooling(mode, normalize=True, max_length=4))
        model.save(tmp_path / mode)
        again = bert.load(tmp_path / mode)
        assert again.pooling == model.pooling
        encoded = again.encode(texts)
        assert encoded.attention_mask.shape == (3, 4)
        rows = [row[: mask.sum()] for row, mask in zip(encoded.last_hidden_state, encoded.attention_mask, strict=True)]
        pooled = {"mean": lambda row: row.mean(0), "cls": lambda row: row[0], "max": lambda row: row.max(0)}[mode]
        expected = np.stack([pooled(row) / np.linalg.norm(pooled(row)) for row in rows])
        np.testing.assert_allclose(encoded.embeddings, expected, atol=1e-5)
    declared = tmp_path / "max" / "1_Pooling" / "config.json"
    declared.write_text('{"pooling_mode_lasttoken": true}')
    with pytest.raises(UserError, match="pools by last"):
        bert.load(tmp_path / "max")
    (tmp_path / "cls" / "modules.json").write_text('[{"type": "x.Transformer", "path": "../mean"}]')
    with pytest.raises(UserError, match="may lie outside of its folder"):
        bert.load(tmp_path / "cls")
    (tmp_path / "cls" / "modules.json").write_text('[{"type": "x.Transformer"}, {"type": "x.Dense"}]')
    with pytest.raises(UserError, match="lists Transformer, Dense"):
        bert.load(tmp_path / "cls")


def test_a_run_is_exported_with_its_recipe_scores_and_labels(finetuned: Path, tmp_path: Path, capsys, fails) -> None:
    out = tmp_path / "out"
    out.mkdir()
    assert export([str(finetuned), str(out)]) == 0
    assert "tensors read back identical" in capsys.readouterr().out
    card = (out / "README.md").read_text()
    results = json.loads((finetuned / "results.json").read_text())
    assert f"| dev.accuracy | {results['dev']['accuracy']:.6g} |" in card
    recipe = yaml.safe_load(card.split("```yaml\n")[1].split("```")[0])
    config = yaml.safe_load((finetuned / "config.yaml").read_text())
    assert (recipe["task"], recipe["optimizer"], recipe["model"]) == ("sst2", config["optimizer"], config["model"])
    assert recipe["training"]["batch_size"] == config["training"]["batch_size"]
    assert {"output_dir", "init"} & set(recipe) == set()
    assert {"dir", "train", "dev", "test"} & set(recipe["data"]) == set()
    for file in out.rglob("*"):
        for place in (finetuned.parent, config["init"], config["data"]["dir"], Path.home() / "x", Path.cwd()):
            assert not file.is_file() or str(place).encode() not in file.read_bytes(), f"{file} has {place}"
    content = json.loads((out / "config.json").read_text())
    assert content["architectures"] == ["BertForSequenceClassification"]
    assert content["id2label"] == {"0": "negative", "1": "positive"}
    texts = ["ba ri tu", "ko ri"]
    ours, theirs = (bert.load(folder).predict(texts) for folder in (finetuned, out))
    assert ours == theirs
    (tmp_path / "texts.txt").write_text("ba ri\nba\tko\n")
    assert predict([str(out), str(tmp_path / "texts.txt")]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [set(line) - {"label", "probabilities"} for line in lines] == [{"text"}, {"text_a", "text_b"}]
    assert set(lines[0]["probabilities"]) == {"negative", "positive"}
    before = (out / "config.json").read_bytes()
    assert "exists already and is not an empty folder" in fails(export, str(finetuned), str(out))
    assert (out / "config.json").read_bytes() == before
    edit(out, problem_type="multi_label_classification")
    with pytest.raises(UserError, match="fine-tuned for multi_label_classification"):
        bert.load(out).predict(texts)


def test_a_card_names_what_is_on_the_hub_and_nothing_else(made, tmp_path: Path, monkeypatch) -> None:
    cached = tmp_path / "cache" / "models--someone--some-bert" / "snapshots" / "abc"
    cached.mkdir(parents=True)
    (cached / "config.json").write_text("{}")
    (cached.parent.parent / "refs").mkdir()
    (cached.parent.parent / "refs" / "main").write_text("abc")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    run = tmp_path / "run"
    run.mkdir()
    model = dataclasses.replace(made("BertForSequenceClassification"), source=str(run))
    for init, place, front in (
        (
            "someone/some-bert",
            "hub:nyu-mll/glue:sst2",
            {"base_model": "someone/some-bert", "datasets": ["nyu-mll/glue"]},
        ),
        ("alice/secret", "/home/alice/data", {}),
    ):
        data = {"dir": place, "train": f"{place}/t.tsv", "max_length": 9, "num_workers": 3}
        content = {"task": "sst2", "output_dir": str(run), "init": init, "data": data, "training": {"remat": "full"}}
        (run / "config.yaml").write_text(yaml.safe_dump(content))
        (run / "results.json").write_text(json.dumps({"init": init, "task": "sst2", "dev": {"accuracy": 0.5}}))
        card = model_card(model, "BertForSequenceClassification")
        fields = yaml.safe_load(card.split("---")[1])
        assert fields == {
            "library_name": "transformers",
            "tags": ["bert", "jax", "bert-jax"],
            "pipeline_tag": "text-classification",
            **front,
        }
        recipe = yaml.safe_load(card.split("```yaml\n")[1].split("```")[0])
        public = {"init": init, "data": {"dir": place, "train": data["train"], "max_length": 9}} if front else {}
        assert recipe == {"task": "sst2", "data": {"max_length": 9}, "training": {}, **public}
        assert "| dev.accuracy | 0.5 |" in card
        assert not re.search("alice|secret", card)


@pytest.mark.slow
def test_training_starts_from_a_folder(pretrained: Path, corpus: Path, sst2: Path, tmp_path: Path, capsys) -> None:
    source = tmp_path / "source"
    assert export([str(pretrained), str(source)]) == 0
    again = [f"--data.train={corpus}", *SMALL_RUN]
    capsys.readouterr()
    assert pretrain([*again, f"--init={source}", f"--output_dir={tmp_path / 'whole'}"]) == 0
    text = capsys.readouterr().out
    assert f"from {source}: bert, predictions, seq_relationship (" in text
    assert "is randomly initialized" not in text
    assert (tmp_path / "whole" / "vocab.txt").read_bytes() == (source / "vocab.txt").read_bytes()

    bare = tmp_path / "bare"
    shutil.copytree(source, bare)
    rewrite(bare, lambda tensors: {n: a for n, a in tensors.items() if not n.startswith(("cls.", "bert.pooler"))})
    edit(bare, architectures=["BertModel"])
    assert pretrain([*again, f"--init={bare}", f"--output_dir={tmp_path / 'headless'}"]) == 0
    text = capsys.readouterr().out
    assert "randomly initialized: bert/pooler, predictions, seq_relationship" in text
    arguments = [f"--data.dir={sst2}", f"--output_dir={tmp_path / 'sst2'}", "--data.max_length=32"]
    arguments += ["--data.buckets=32", "--training.batch_size=8", "--training.epochs=1"]
    assert finetune(["--config=sst2", f"--init={source}", *arguments]) == 0
    text = capsys.readouterr().out
    assert f"from {source}: bert (" in text
    assert "randomly initialized: classifier\nnot loaded: predictions, seq_relationship" in text


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"pre_layer_norm": True}, "tiny has model.pre_layer_norm true, which transformers' BERT cannot express"),
        ({"embedding_norm": False}, "tiny has model.embedding_norm false, which transformers' BERT cannot express"),
        (
            {"prediction_transform": False},
            "tiny has model.prediction_transform false, which transformers' BERT cannot express, as its MLM head has",
        ),
        ({"pooler_act": "gelu"}, "tiny has model.pooler_act gelu, which transformers' BERT cannot express"),
        ({"embedding_size": 6}, "tiny has model.embedding_size 6, which transformers' BERT cannot express, as its"),
    ],
)
def test_what_transformers_cannot_express_is_not_exported(make, tmp_path: Path, sizes: dict, said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)) as error:
        make("BertForPreTraining", **sizes).save(tmp_path / "out")
    assert "stablehlo or onnx" in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("architecture", "sizes"),
    [
        ("BertForPreTraining", {"residual_init": "scaled"}),
        ("BertForSequenceClassification", {"prediction_transform": False}),
    ],
)
def test_what_makes_no_difference_after_training_is_exported(make, tmp_path: Path, architecture: str, sizes) -> None:
    model = make(architecture, **sizes)
    model.save(tmp_path / "out")
    assert_same(bert.load(tmp_path / "out").params, model.params)


def test_roberta_whose_padding_id_is_not_before_its_positions_is_not_exported(make, tmp_path: Path) -> None:
    """transformers takes every token with the id ``position_offset - 1`` for padding when it counts positions."""
    with pytest.raises(UserError, match=r"tiny has model.position_offset 2, .* the padding id, which is 0: export"):
        make("BertForMaskedLM", position_offset=2).save(tmp_path / "out")


def test_fixed_positions_are_exported_as_the_table_that_they_are(make, tmp_path: Path) -> None:
    model = make("BertForPreTraining", position_embedding_type="sinusoidal", embedding_size=24)
    model.save(tmp_path / "out")
    again = bert.load(tmp_path / "out")
    assert (again.config.position_embedding_type, again.config.embedding_size) == ("learned", None)
    ids = np.arange(5, 17)[None]
    ours, theirs = (bundle.build_module(m).apply({"params": m.params}, ids) for m in (model, again))
    np.testing.assert_allclose(ours.prediction_logits, theirs.prediction_logits, atol=1e-5)


def test_narrow_embeddings_are_exported_as_electra(make, tmp_path: Path) -> None:
    model = make("BertForMaskedLM", embedding_size=6)
    model.save(tmp_path / "out")
    content = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (content["architectures"], content["model_type"], content["embedding_size"]) == (
        ["ElectraForMaskedLM"],
        "electra",
        6,
    )
    assert_same(bert.load(tmp_path / "out").params, model.params)
    with pytest.raises(UserError, match=r"tiny has model.pooler_act tanh, which transformers' ELECTRA cannot express"):
        make("BertForSequenceClassification", embedding_size=6).save(tmp_path / "tanh")


def test_a_run_of_replaced_tokens_is_exported_in_two_parts(detected, tmp_path: Path, fails, pretrained) -> None:
    assert export([str(detected), str(tmp_path / "discriminator")]) == 0
    assert export([str(detected), str(tmp_path / "generator"), "--generator"]) == 0
    model = bert.load(detected)
    discriminator, generator = (bert.load(tmp_path / name) for name in ("discriminator", "generator"))
    assert (discriminator.architecture, generator.architecture) == ("BertForReplacedTokenDetection", "BertForMaskedLM")
    assert_same(discriminator.params, {name: tree for name, tree in model.params.items() if name != "generator"})
    assert_same(generator.params, model.generator.params)
    assert "has no generator: use a pretraining run with data.prediction replaced" in fails(
        export, str(pretrained), str(tmp_path / "none"), "--generator"
    )


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"embedding_size": None}, "lacks embedding_size"),
        ({"embedding_size": "8"}, "embedding_size is '8'"),
        ({"embedding_size": 9}, "is [23, 8], but config.json makes it [23, 9]"),
        (
            {"embedding_size": 12},
            "electra.embeddings.word_embeddings.weight is [23, 8], but config.json makes it [23, 12]",
        ),
        ({"summary_type": "mean"}, "summary_type is 'mean', and only 'first' is read"),
        ({"summary_activation": "tanh"}, "summary_activation is 'tanh', and only 'gelu' is read"),
        ({"hidden_size": 10}, "hidden_size"),
    ],
)
def test_hostile_settings_of_electra_are_one_sentence(made, tmp_path: Path, values: dict, said: str) -> None:
    made("BertForMultipleChoice", ELECTRA).save(tmp_path / "model")
    edit(tmp_path / "model", **values)
    with pytest.raises(UserError) as error:
        bert.load(tmp_path / "model")
    assert said in str(error.value)


def test_a_projection_that_the_sizes_do_not_have_is_one_sentence(made, tmp_path: Path) -> None:
    made("BertForMaskedLM", dataclasses.replace(ELECTRA, embedding_size=None)).save(tmp_path / "model")
    more = {"electra.embeddings_project.weight": np.zeros((12, 12), np.float32)}
    rewrite(tmp_path / "model", lambda tensors: {**tensors, **more})
    with pytest.raises(UserError, match=r"holds electra.embeddings_project.weight, which config.json has no place for"):
        bert.load(tmp_path / "model")
