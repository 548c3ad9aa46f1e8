"""`bert inspect`: on runs in every state, on a folder of Hugging Face's, in words and as JSON."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import bert
from bert.analysis.inspection import summarize
from bert.commands.inspect import main
from bert.training.loop import count_parameters


@pytest.fixture
def copy(pretrained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pretrained, tmp_path / "run"))


def facts_of(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict:
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_pretraining_run(pretrained, capsys) -> None:
    facts = facts_of(capsys, pretrained)
    model = bert.load(pretrained)
    assert facts["parameters"] == count_parameters(model.params) == sum(part["parameters"] for part in facts["parts"])
    assert {part["part"] for part in facts["parts"]} >= {"embeddings/word", "layers/attention", "predictions"}
    assert (facts["kind"], facts["architecture"], facts["step"]) == ("pretraining run", "BertForPreTraining", 6)
    flops = facts["flops_per_token"]
    assert (flops["sequence_length"], flops["predictions"]) == (32, 5)
    assert flops["training"] == pytest.approx(3 * flops["forward"])
    assert facts["vocabulary"]["pieces"] == facts["vocabulary"]["rows"] == model.config.vocab_size
    assert facts["origin"] == ["random weights"]
    assert facts["checkpoints"]["steps"] == [3, 6]
    assert (facts["training"]["last_step"], facts["training"]["steps"]) == (6, 6)
    lines = [json.loads(line) for line in (pretrained / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["loss"] for line in lines if line["split"] == "eval"}
    [course] = [item for item in facts["training"]["metrics"] if (item["split"], item["name"]) == ("eval", "loss")]
    best = min(losses, key=losses.get)
    assert course["first"] == {"step": 3, "value": losses[3]}
    assert course["last"] == {"step": 6, "value": losses[6]}
    assert course["best"] == {"step": best, "value": losses[best]}
    results = json.loads((pretrained / "results.json").read_text())
    assert facts["scores"]["eval"] == results["eval"]
    assert facts["scores"]["unigram"] == results["baselines"]["unigram"]
    assert facts["training"]["seconds"] == results["seconds"]


def test_a_fine_tuning_run_tells_its_origins(finetuned, pretrained, capsys) -> None:
    facts = facts_of(capsys, finetuned)
    assert facts["task"] == "sst2"
    assert facts["origin"] == [f"{pretrained} (pretraining run)", "random weights"]
    results = json.loads((finetuned / "results.json").read_text())
    assert facts["scores"]["dev"] == results["dev"]
    assert facts["scores"]["majority_class"] == results["majority_class"]
    assert facts["step"] == results["best_step"] == facts["checkpoints"]["kept_as_best"]
    assert facts["flops_per_token"]["predictions"] == 0


def test_words(pretrained, finetuned, capsys) -> None:
    for run in (pretrained, finetuned):
        assert main([str(run)]) == 0
        text = capsys.readouterr().out
        for part in ("layers: attention", "FLOPs a token", "vocabulary: WordPiece", "from random weights", "scores:"):
            assert part in text
        assert max(map(len, text.splitlines())) < 200
    assert main([str(pretrained), "--length", "16"]) == 0
    assert "T = 16 tokens a row, P = 2 predictions" in capsys.readouterr().out


def test_a_model_of_others(pretrained, tmp_path, capsys) -> None:
    model = bert.load(pretrained)
    model.save(tmp_path / "hf")
    facts = facts_of(capsys, tmp_path / "hf")
    assert facts["kind"] == "published model"
    assert facts["parameters"] == count_parameters(model.params)
    assert "training" not in facts
    assert any("model.safetensors" in line for line in facts["read"])


def test_a_run_without_a_checkpoint_is_shown_as_planned(copy, capsys) -> None:
    whole = summarize(copy)
    shutil.rmtree(copy / "checkpoints")
    (copy / "results.json").unlink()
    (copy / "metrics.jsonl").unlink()
    facts = facts_of(capsys, copy)
    assert facts["parts"] == whole["parts"]
    assert facts["step"] is None
    assert facts["checkpoints"]["steps"] == facts["training"]["metrics"] == []
    assert facts["scores"] == {}
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
    assert "no other checkpoint is left" in fails(main, str(copy))


def test_a_half_line_of_metrics_is_passed_over(copy, capsys) -> None:
    with (copy / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "spl')
    assert facts_of(capsys, copy)["training"]["last_step"] == 6


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("results.json", "{", "results.json is damaged: remove it"),
        ("results.json", "[]", "results.json is damaged: remove it"),
        ("config.yaml", ": [", "it is not the config.yaml of a run"),
        ("tokenizer.json", "{", "not a whole tokenizer.json"),
    ],
)
def test_damaged_files_are_one_sentence(copy, fails, name, content, sentence) -> None:
    (copy / name).write_text(content)
    assert sentence in fails(main, str(copy))


def test_nothing_there_is_one_sentence(tmp_path, pretrained, fails) -> None:
    assert "does not exist" in fails(main, str(tmp_path / "absent"))
    assert "holds no run" in fails(main, str(tmp_path))
    assert "the model reads 1 to 32 tokens" in fails(main, str(pretrained), "--length", "33")
