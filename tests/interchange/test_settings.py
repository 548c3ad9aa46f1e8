"""Settings stored next to the tensors: rates, labels and text processing are kept, applied or reported."""

import dataclasses
import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
from tokenizers import normalizers

import bert
from bert.commands.export import main as export
from bert.errors import UserError, WarningText
from bert.interchange import ExportError
from bert.interchange.readers import hf as hf_reader
from bert.interchange.writers import hf
from bert.model.pooling import Pooling
from bert.tasks.registry import published_task
from tests.interchange.hf_folders import ALBERT, CONFIG, DEBERTA, DEBERTA_V1, DISTILBERT, XLNET, edit


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (DISTILBERT, "seq_classif_dropout"),
        (ALBERT, "classifier_dropout_prob"),
        (DEBERTA, "cls_dropout"),
        (DEBERTA_V1, "cls_dropout"),
        (XLNET, "summary_last_dropout"),
    ],
)
def test_the_dropout_of_a_head_has_the_key_that_its_class_reads(config, key: str, made, tmp_path: Path) -> None:
    made("BertForSequenceClassification", config, classifier_dropout=0.3).save(tmp_path / "out")
    content = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (content[key], "classifier_dropout" in content) == (0.3, False)
    assert bert.load(tmp_path / "out").classifier_dropout == 0.3


@pytest.mark.parametrize("rate", [None, 0.0, 0.3])
def test_the_classifiers_dropout_goes_out_and_in(rate: float | None, made, tmp_path: Path) -> None:
    made("BertForSequenceClassification", classifier_dropout=rate).save(tmp_path / "one")
    content = json.loads((tmp_path / "one" / "config.json").read_text())
    assert content.get("classifier_dropout", "none") == ("none" if rate is None else rate)
    again = bert.load(tmp_path / "one")
    assert again.classifier_dropout == rate
    again.save(tmp_path / "two")
    assert (tmp_path / "two" / "config.json").read_bytes() == (tmp_path / "one" / "config.json").read_bytes()


def test_a_runs_own_rate_goes_out(finetuned: Path, tmp_path: Path) -> None:
    shutil.copytree(finetuned, tmp_path / "run")
    file = tmp_path / "run" / "config.yaml"
    text = file.read_text()
    assert "classifier_dropout: null" in text
    file.write_text(text.replace("classifier_dropout: null", "classifier_dropout: 0.2"))
    file.with_name("config.digest").unlink()
    assert export([str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["classifier_dropout"] == 0.2


@pytest.mark.medium
def test_texts_are_lower_cased_where_it_is_declared(make, tmp_path: Path) -> None:
    model = make("Bert")
    cased = type(model.tokenizer).from_str(model.tokenizer.to_str())
    cased.normalizer = normalizers.BertNormalizer(lowercase=False)
    model = dataclasses.replace(model, tokenizer=cased)
    texts, small = ["One TEXT", ("ONE", "Text")], ["one text", ("one", "text")]
    wanted = model.encode(small)
    assert np.abs(model.encode(texts).embeddings - wanted.embeddings).max() > 0.01
    model = dataclasses.replace(model, pooling=Pooling(lowercase=True))
    model.save(tmp_path / "out")
    again = bert.load(tmp_path / "out")
    assert again.pooling == Pooling(), "the exported tokenizer lower-cases"
    dataclasses.replace(model, pooling=Pooling(max_length=12)).save(tmp_path / "declared")
    settings = tmp_path / "declared" / "sentence_bert_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "do_lower_case": True}))
    declared = bert.load(tmp_path / "declared")
    assert declared.pooling == Pooling(max_length=12)
    for loaded in (model, again, declared):
        given = loaded.encode(texts)
        np.testing.assert_array_equal(given.attention_mask, wanted.attention_mask)
        np.testing.assert_array_equal(given.last_hidden_state, wanted.last_hidden_state)


@pytest.mark.medium
def test_how_texts_are_read_is_applied_reported_or_an_error(made, tmp_path: Path, caplog) -> None:
    made(pooling=Pooling(max_length=5)).save(tmp_path / "model")
    settings = tmp_path / "model" / "sentence_bert_config.json"
    texts = ["a b c d e f g h"]
    assert bert.load(tmp_path / "model").encode(texts).attention_mask.shape == (1, 5)

    settings.rename(tmp_path / "model" / "sentence_roberta_config.json")  # older versions name it by the family
    assert bert.load(tmp_path / "model").pooling == Pooling(max_length=5)

    said: list[str] = []
    settings.write_text('{"max_seq_length": 17}')
    (tmp_path / "model" / "config_sentence_transformers.json").write_text(
        '{"prompts": {"query": "q: "}, "default_prompt_name": "query", "similarity_fn_name": "dot", "new_key": 1}'
    )
    edit(tmp_path / "model" / "1_Pooling", layer=3)
    assert bert.load(tmp_path / "model", said.append).encode(texts * 2).attention_mask.shape == (2, 10)
    assert any("max_seq_length is 17, but the model reads 16" in line for line in said)
    assert any("config_sentence_transformers.json: new_key" in line for line in said)
    assert any("1_Pooling/config.json: layer" in line for line in said)
    with caplog.at_level(logging.WARNING, "bert"):
        bert.load(tmp_path / "model")
    assert [text for text in said if isinstance(text, WarningText)] == caplog.messages
    assert len(caplog.messages) == 3, "and what was read is not among them"

    for content, sentence in (
        ('{"max_seq_length": 0}', "max_seq_length is 0: set it"),
        ('{"max_seq_length": true}', "max_seq_length is True: set it"),
        ('{"do_lower_case": "yes"}', "do_lower_case is 'yes': set it"),
        ("[]", "sentence_bert_config.json is not a JSON object"),
    ):
        settings.write_text(content)
        with pytest.raises(UserError, match=sentence):
            bert.load(tmp_path / "model")


@pytest.mark.parametrize("theirs", ["gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_accurate", "gelu_python_tanh"])
def test_every_name_of_the_tanh_form_is_one(theirs: str) -> None:
    assert hf_reader.ACTIVATIONS[theirs] == "gelu_tanh"


def spoilt_tensor(monkeypatch) -> str:
    original = hf.write_tensors

    def write(file: Path, tensors: dict) -> None:
        name = next(iter(tensors))
        original(file, {**tensors, name: tensors[name] + 1})

    monkeypatch.setattr(hf, "write_tensors", write)
    return "does not read back as it was, bert/embeddings/word/embedding differ"


def lost_label(monkeypatch) -> str:
    original = hf.published_config
    monkeypatch.setattr(hf, "published_config", lambda model: {**original(model), "id2label": {"0": "x"}})
    return "classifier.weight is [3, 12], but config.json makes it [1, 12]"


def other_logits(monkeypatch) -> str:
    monkeypatch.setattr(hf, "logits_difference", lambda model, folder: float("nan"))
    return "transformers' logits differ by nan"


def unreadable(monkeypatch) -> str:
    def raises(model, folder) -> float:
        raise ValueError("Unrecognized model\nmore lines")

    monkeypatch.setattr(hf, "logits_difference", raises)
    return "transformers does not run its export (Unrecognized model)"


@pytest.mark.parametrize("spoil", [spoilt_tensor, lost_label, other_logits, unreadable])
def test_an_export_that_fails_its_check_is_one_sentence_and_gone(
    spoil, made, tmp_path: Path, monkeypatch, fails
) -> None:
    model = made("BertForSequenceClassification")
    monkeypatch.setattr("bert.inference.load.load", lambda source, log, **adapter: model)
    sentence = spoil(monkeypatch)
    assert sentence in fails(export, "made", str(tmp_path / "out"))
    assert list(tmp_path.iterdir()) == [], "neither the folder nor a draft of it"
    with pytest.raises(ExportError):
        model.save(tmp_path / "out")


def test_a_bare_vocabulary_with_capitals_is_lower_cased_and_said(made, tmp_path: Path) -> None:
    made().save(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "model" / name).unlink()
    vocabulary = tmp_path / "model" / "vocab.txt"
    vocabulary.write_text(vocabulary.read_text().replace("\nb\n", "\nB\n"))
    said: list[str] = []
    assert bert.load(tmp_path / "model", said.append).tokenizer.encode("A B").tokens[1:-1] == ["a", "[UNK]"]
    assert any("text is lower-cased, though the vocabulary has upper-case letters, as in 'B'" in line for line in said)
    (tmp_path / "model" / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    assert bert.load(tmp_path / "model").tokenizer.encode("A B").tokens[1:-1] == ["[UNK]", "B"]


@pytest.mark.medium
def test_a_model_of_one_segment_reads_pairs(made, tmp_path: Path) -> None:
    """Even where its tokenizer numbers two, as BERT's does."""
    model = made("BertForSequenceClassification", dataclasses.replace(CONFIG, type_vocab_size=1))
    model.save(tmp_path / "model")
    encoded = bert.load(tmp_path / "model").encode([("a b", "c d")])
    assert np.isfinite(encoded.last_hidden_state).all()


def test_an_export_without_a_part_of_its_architecture_is_none(made, tmp_path: Path) -> None:
    model = made("BertForPreTraining")
    del model.params["seq_relationship"]
    with pytest.raises(UserError, match="has no seq_relationship, which BertForPreTraining needs"):
        model.save(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_model_that_may_give_no_answer_keeps_its_threshold(made, tmp_path: Path) -> None:
    task = published_task("question_answering", "squad2", (), None, null_score_diff_threshold=-1.5)
    dataclasses.replace(made("BertForQuestionAnswering"), task=task, null_score_diff_threshold=-1.5).save(
        tmp_path / "one"
    )
    again = bert.load(tmp_path / "one")
    assert (again.task.may_be_impossible, again.task.null_score_diff_threshold) == (True, -1.5)
    again.save(tmp_path / "two")
    assert (tmp_path / "two" / "config.json").read_bytes() == (tmp_path / "one" / "config.json").read_bytes()
    made("BertForQuestionAnswering").save(tmp_path / "always")
    assert not bert.load(tmp_path / "always").task.may_be_impossible


@pytest.mark.parametrize("way", ["google", "longest_first", None])
def test_the_way_to_cut_pairs_is_kept_by_an_export_of_a_run(way, made, tmp_path: Path) -> None:
    model = dataclasses.replace(made("BertForSequenceClassification"), pair_truncation=way, step=7)
    model.save(tmp_path / "model")
    stored = json.loads((tmp_path / "model" / "config.json").read_text())
    assert stored.get("pair_truncation") == ("google" if way == "google" else None)
    loaded = bert.load(tmp_path / "model")
    assert loaded.data.pair_truncation == (way if way == "google" else None)
    loaded.save(tmp_path / "again")
    assert bert.load(tmp_path / "again").data.pair_truncation == loaded.data.pair_truncation
    stored["pair_truncation"] = "shortest"
    (tmp_path / "model" / "config.json").write_text(json.dumps(stored))
    with pytest.raises(UserError, match="pair_truncation is 'shortest'"):
        bert.load(tmp_path / "model")
