"""`bert inspect`: on runs in every state, on a folder of Hugging Face's, in words and as JSON."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import bert
from bert.analysis.inspection import summarize
from bert.analysis.memory import batch_shapes
from bert.commands.reports import inspect_command as main
from bert.config import DataConfig, ModelConfig, PretrainConfig, TrainingConfig
from bert.interchange.writers import hf
from bert.model.pooling import Pooling
from bert.training.flops import row_sizes
from bert.training.loop import count_parameters
from tests.interchange.hf_folders import EXAMPLES, edit, random_model


@pytest.fixture
def copy(pretrained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pretrained, tmp_path / "run"))


def facts_of(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict:
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_pretraining_run(pretrained, bucket, capsys) -> None:
    facts = facts_of(capsys, pretrained)
    model = bert.load(pretrained)
    assert facts["parameters"] == count_parameters(model.params) == sum(part["parameters"] for part in facts["parts"])
    assert {part["part"] for part in facts["parts"]} >= {"embeddings/word", "layers/attention", "predictions"}
    assert (facts["kind"], facts["architecture"], facts["step"]) == ("pretraining run", "BertForPreTraining", 6)
    flops = facts["flops_per_token"]
    assert (flops["sequence_length"], flops["predictions"]) == (32, 5)
    assert flops["training"] == pytest.approx(3 * flops["forward"])
    assert facts["vocabulary"]["tokens"] == facts["vocabulary"]["rows"] == model.config.vocab_size
    assert facts["initial_weights"] == "random weights"
    bucket.put(str(pretrained), "/b/run", recursive=True)
    for other in (f"{pretrained}@6", "memory://b/run"):
        assert {**facts_of(capsys, other), "source": str(pretrained)} == facts


def test_a_fine_tuning_run(finetuned, pretrained, capsys) -> None:
    facts = facts_of(capsys, finetuned)
    assert facts["task"] == "sst2"
    assert facts["initial_weights"] == f"{pretrained} (pretraining run)"
    results = json.loads((finetuned / "results.json").read_text())
    assert facts["step"] == results["best_step"]
    assert facts["flops_per_token"]["predictions"] == 0


def test_a_run_of_replaced_token_detection(detected, tmp_path, capsys) -> None:
    facts = facts_of(capsys, detected)
    assert facts["architecture"] == "BertForReplacedTokenDetection"
    flops = {part["part"]: part["flops_per_token"] for part in facts["parts"]}
    assert flops["discriminator_predictions"] == 2 * (16 * 16 + 16)
    sizes = bert.load(detected).generator.config
    layer = 8 * 8**2 + 4 * 32 * 8 + 4 * 8 * 32
    assert (sizes.hidden_size, sizes.embedding_width) == (8, 8)
    assert flops["generator"] == layer + (2 * 8**2 + 2 * 8 * sizes.vocab_size) * 5 / 32
    planned = shutil.copytree(detected, tmp_path / "run")
    shutil.rmtree(planned / "checkpoints")
    again = facts_of(capsys, planned)
    assert (again["architecture"], again["parts"]) == (facts["architecture"], facts["parts"])


def test_a_packed_row_has_a_place_for_each_prediction_of_its_examples() -> None:
    data = DataConfig(sequence_length=512, max_predictions_per_sequence=20, packing=True, max_sequences_per_pack=8)
    config = PretrainConfig(model=ModelConfig(64, 16, 1, 2, 32), data=data, training=TrainingConfig(batch_size=8))
    assert row_sizes(config.model, config, None) == (512, batch_shapes(config)["masked_lm_ids"].shape[-1]) == (512, 79)


def test_words(pretrained, finetuned, capsys) -> None:
    for run in (pretrained, finetuned):
        assert main([str(run)]) == 0
        text = capsys.readouterr().out
        for part in ("layers/attention", "FLOPs per token", "vocabulary: WordPiece", "weights:"):
            assert part in text
        assert max(map(len, text.splitlines())) < 200
    assert main([str(pretrained), "--length", "16"]) == 0
    assert "T = 16" in capsys.readouterr().out


@pytest.mark.medium
def test_a_model_of_others(pretrained, tmp_path, capsys) -> None:
    model = bert.load(pretrained)
    model.save(tmp_path / "hf")
    facts = facts_of(capsys, tmp_path / "hf")
    assert facts["kind"] == "published model"
    assert facts["parameters"] == count_parameters(model.params)
    assert "initial_weights" not in facts
    assert any("model.safetensors" in line for line in facts["read"])


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """The folder of a model with random weights."""
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqr"]))
    random_model(vocabulary, "BertForSequenceClassification").save(tmp_path / "hf")
    return tmp_path / "hf"


def test_a_model_without_weights_is_shown_by_its_config_alone(published, capsys, fails) -> None:
    expected = facts_of(capsys, published)
    (published / "model.safetensors").unlink()
    facts = facts_of(capsys, published)
    same = ("parameters", "architecture", "flops_per_token", "vocabulary", "model")
    assert {key: facts[key] for key in same} == {key: expected[key] for key in same}
    assert any("a BertForSequenceClassification would be read" in line for line in facts["read"])
    assert any(line.startswith("needs 0.00 GB") for line in facts["read"])
    for key, value, error in (
        ("problem_type", "multi_label", "problem_type is 'multi_label'"),
        ("classifier_dropout", 1.5, "classifier_dropout is 1.5"),
        ("model_type", "big_bird", "model_type is 'big_bird'"),
    ):
        before = json.loads((published / "config.json").read_text()).get(key)
        edit(published, **{key: value})
        assert error in fails(main, str(published))
        edit(published, **{key: before})


@pytest.mark.medium
@pytest.mark.parametrize("family", sorted(EXAMPLES.keys() - {"mpnet", "encoder-decoder"}))
def test_an_encoder_of_each_family_is_shown_by_its_config_alone(family, tmp_path, monkeypatch) -> None:
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqr"]))
    monkeypatch.setattr(hf, "logits_difference", lambda model, folder: None)  # compared in tests/real
    random_model(vocabulary, config=EXAMPLES[family]).save(tmp_path / "hf")
    expected = summarize(tmp_path / "hf")
    (tmp_path / "hf" / "model.safetensors").unlink()
    facts = summarize(tmp_path / "hf")
    same = ("parameters", "vocabulary", "model")
    assert {key: facts[key] for key in same} == {key: expected[key] for key in same}


@pytest.mark.medium
def test_the_model_of_queries_is_checked_before_its_weights_are_downloaded(published, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(hf, "logits_difference", lambda model, folder: None)  # compared in tests/real
    vocabulary = tmp_path / "vocab.txt"
    sides = [
        random_model(vocabulary, config=EXAMPLES[family]).replace(pooling=Pooling("mean"))
        for family in ("bert", "electra")
    ]
    sides[0].replace(query_model=sides[1]).save(tmp_path / "router")
    for file in (tmp_path / "router").rglob("*.safetensors"):
        file.unlink()
    assert any("query/config.json: a ElectraModel would" in line for line in summarize(tmp_path / "router")["read"])
    edit(tmp_path / "router" / "query", model_type="big_bird")
    with pytest.raises(bert.UserError, match=r"query/config.json: model_type is 'big_bird'"):
        summarize(tmp_path / "router")


def test_a_hub_name_is_inspected_before_its_weights_are_downloaded(published, capsys, monkeypatch) -> None:
    (published / "model.safetensors").unlink()
    asked: list[tuple[str, bool]] = []

    def download(name: str, weights: bool = True) -> Path:
        asked.append((name, weights))
        return published

    monkeypatch.setattr("bert.analysis.inspection.download", download)
    assert facts_of(capsys, "some/model")["kind"] == "published model"
    assert asked == [("some/model", False)]


def test_a_run_without_a_checkpoint_is_shown_as_planned(copy, capsys) -> None:
    whole = summarize(copy)
    shutil.rmtree(copy / "checkpoints")
    facts = facts_of(capsys, copy)
    assert facts["parts"] == whole["parts"]
    assert facts["step"] is None
    assert main([str(copy)]) == 0
    assert "no checkpoint yet" in capsys.readouterr().out


def test_a_fine_tuning_run_without_a_checkpoint(finetuned, tmp_path, capsys) -> None:
    copy = shutil.copytree(finetuned, tmp_path / "run")
    shutil.rmtree(copy / "checkpoints")
    assert facts_of(capsys, copy)["parts"] == summarize(finetuned)["parts"]


def flip(checkpoint: Path) -> None:
    file = max((path for path in checkpoint.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_damaged_checkpoints(copy, capsys, fails) -> None:
    flip(copy / "checkpoints" / "6")
    facts = facts_of(capsys, copy)
    assert facts["step"] == 3
    assert any("checkpoints/6 is damaged" in line for line in facts["read"])
    flip(copy / "checkpoints" / "3")
    assert "no other checkpoint" in fails(main, str(copy))


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("config.yaml", ": [", "it is not the config.yaml of a run"),
        ("tokenizer.json", "{", "not a complete tokenizer.json"),
    ],
)
def test_damaged_files_are_one_sentence(copy, fails, name, content, sentence) -> None:
    (copy / name).write_text(content)
    assert sentence in fails(main, str(copy))


def test_nothing_there_is_one_sentence(tmp_path, pretrained, fails) -> None:
    assert "does not exist" in fails(main, str(tmp_path / "absent"))
    assert "config.yaml" in fails(main, str(tmp_path))
    assert "the model reads 1 to 32 tokens" in fails(main, str(pretrained), "--length", "33")
