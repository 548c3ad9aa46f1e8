"""Folders written for transformers: what they hold, and what cannot be written."""

import dataclasses
import json
import re
from pathlib import Path

import huggingface_hub.constants
import jax
import numpy as np
import pytest
import yaml

import bert
from bert.commands.export import main as export
from bert.commands.predictions import predict_command as predict
from bert.errors import UserError
from bert.interchange import modules
from bert.interchange.writers.hf_files import model_card
from tests.interchange.hf_folders import assert_same, edit


@pytest.mark.medium
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
    actual, expected = (bert.load(folder).predict(texts) for folder in (finetuned, out))
    assert actual == expected
    (tmp_path / "texts.txt").write_text("ba ri\nba\tko\n")

    def answers(model: Path) -> list[dict]:
        assert predict([str(model), str(tmp_path / "texts.txt")]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    inputs = {"label", "probabilities"}
    assert [set(line) - inputs for line in answers(out)] == [{"text"}, {"text"}]  # it is known to read single texts
    with pytest.raises(UserError, match=r"input 1 is \('ba', 'ko'\), .* a single text: pass a string"):
        bert.load(out).predict([("ba", "ko")])
    edit(out, texts_per_input=None)
    lines = answers(out)
    assert [set(line) - inputs for line in lines] == [{"text"}, {"text_a", "text_b"}]
    assert set(lines[0]["probabilities"]) == {"negative", "positive"}
    before = (out / "config.json").read_bytes()
    assert "exists already and is not an empty folder" in fails(export, str(finetuned), str(out))
    assert (out / "config.json").read_bytes() == before
    edit(out, problem_type="multi_label_classification", label_thresholds=[0.0, 1.0])
    assert [answer.labels for answer in bert.load(out).predict(texts)] == [["negative"], ["negative"]]
    edit(out, problem_type="regression")
    with pytest.raises(UserError, match="fine-tuned for regression"):
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


@pytest.mark.medium
@pytest.mark.parametrize("architecture", ["BertForPreTraining", "BertForTokenClassification"])
def test_positions_and_biases_that_a_model_lacks_are_written_as_zeros(make, tmp_path: Path, architecture: str) -> None:
    model = make(architecture, position_embedding_type="none", use_bias=False, norm_bias=False)
    model.save(tmp_path / "out")
    again = bert.load(tmp_path / "out")
    assert (again.config.position_embedding_type, again.config.use_bias, again.config.norm_bias) == (
        "learned",
        True,
        True,
    )
    assert not again.params["bert"]["embeddings"]["position"]["embedding"].any()
    ids = np.arange(5, 17)[None]
    actual, expected = (jax.jit(modules.build_module(m).apply)({"params": m.params}, ids) for m in (model, again))
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-5), actual, expected)


@pytest.mark.parametrize(
    ("architecture", "sizes"),
    [
        ("BertForPreTraining", {"residual_init": "scaled"}),
        ("BertForSequenceClassification", {"prediction_transform": False}),
        ("BertForSequenceClassification", {"prediction_softcap": 5.0}),
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


@pytest.mark.medium
def test_fixed_positions_are_exported_as_the_table_that_they_are(make, tmp_path: Path) -> None:
    model = make("BertForPreTraining", position_embedding_type="sinusoidal", embedding_size=24)
    model.save(tmp_path / "out")
    again = bert.load(tmp_path / "out")
    assert (again.config.position_embedding_type, again.config.embedding_size) == ("learned", None)
    ids = np.arange(5, 17)[None]
    actual, expected = (jax.jit(modules.build_module(m).apply)({"params": m.params}, ids) for m in (model, again))
    np.testing.assert_allclose(actual.prediction_logits, expected.prediction_logits, atol=1e-5)


@pytest.mark.medium
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


@pytest.mark.medium
def test_a_run_of_replaced_tokens_is_exported_in_two_parts(detected, tmp_path: Path, fails, pretrained) -> None:
    assert export([str(detected), str(tmp_path / "discriminator")]) == 0
    assert export([str(detected), str(tmp_path / "generator"), "--generator"]) == 0
    model = bert.load(detected)
    discriminator, generator = (bert.load(tmp_path / name) for name in ("discriminator", "generator"))
    assert (discriminator.architecture, generator.architecture) == ("BertForReplacedTokenDetection", "BertForMaskedLM")
    assert_same(discriminator.params, {name: tree for name, tree in model.params.items() if name != "generator"})
    assert_same(generator.params, model.generator.params)
    assert "has no generator: use a pretraining run with training.objective rtd" in fails(
        export, str(pretrained), str(tmp_path / "none"), "--generator"
    )
