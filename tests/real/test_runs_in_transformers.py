"""Our runs, exported: transformers loads every tensor of them and gives the same answers."""

from pathlib import Path

import pytest

import bert
from bert.commands.finetune import main as finetune
from bert.commands.pretrain import main as pretrain
from tests.conftest import SMALL_RUN
from tests.real.family_cases import DEBERTA
from tests.real.hf_models import LABELS, drawn, transformers

pytestmark = pytest.mark.real

BYTES = {"tokenizer.kind": "byte_level"}
PRE_LN = {"model.pre_layer_norm": "true"}
ROWS_OF_ROBERTA = {**BYTES, "model.type_vocab_size": 1, "model.layer_norm_eps": 1e-5}
RUNS = {
    "pre-LN": ("RobertaPreLayerNormForMaskedLM", PRE_LN),
    "pre-LN, sinusoidal": (
        "RobertaPreLayerNormForMaskedLM",
        {**PRE_LN, **BYTES, "model.position_embedding_type": "sinusoidal"},
    ),
    "bytes, BERT": ("BertForMaskedLM", ROWS_OF_ROBERTA),
    "bytes, RoBERTa": ("RobertaForMaskedLM", {**ROWS_OF_ROBERTA, "model.position_offset": 2}),
    "permuted": (
        "MPNetForMaskedLM",
        {
            **{**BYTES, "training.objective": "plm", "model.type_vocab_size": 0, "model.position_offset": 2},
            "model.relative_attention_buckets": 32,
        },
    ),
}
"""The class of transformers that loads the export of a pretraining run with these options.

Positions of the pre-LN runs start at row 0, so their exports begin with rows of zeros, up to the row of [PAD].
"""


def export(model: bert.Pretrained, folder: Path) -> None:
    """Exports a model, which compares its logits and token ids with transformers'."""
    lines: list[str] = []
    model.save(folder, log=lines.append)
    assert "logits within" in lines[0] and lines[0].endswith("token ids equal"), lines[0]


def load_whole(auto: str, folder: Path, name: str):
    """Returns the model that transformers loads, which must lack no tensor and have none too many."""
    model, problems = getattr(transformers, auto).from_pretrained(folder, output_loading_info=True)
    assert type(model).__name__ == name
    assert not any(problems.values()), problems
    return model.eval()


@pytest.mark.parametrize("name", RUNS)
def test_pretraining_runs_are_models_of_transformers(name: str, corpus, tmp_path) -> None:
    expected, options = RUNS[name]
    given = {"tokenizer.vocab_size": 330, "data.input_format": "full_sentences", "training.steps": 2, **options}
    arguments = [f"--data.train={corpus}", f"--output_dir={tmp_path / 'run'}", *SMALL_RUN]
    assert pretrain([*arguments, *(f"--{key}={value}" for key, value in given.items())]) == 0
    model = bert.load(tmp_path / "run")
    export(model, tmp_path / "out")
    theirs = load_whole("AutoModelForMaskedLM", tmp_path / "out", expected)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = f"ba kori {tokenizer.mask_token} tunelo 😀 \u00e9"
    assert tokenizer(text)["input_ids"] == model.tokenizer.encode(text).ids
    answers = transformers.pipeline("fill-mask", model=theirs, tokenizer=tokenizer)(text, top_k=3)
    [guesses] = model.fill_mask(text, top_k=3)
    assert [answer["token"] for answer in answers] == [guess.token_id for guess in guesses]
    assert [answer["token_str"] for answer in answers] == [guess.token for guess in guesses]


def test_both_models_of_a_run_of_replaced_tokens_load_in_transformers(detected, tmp_path) -> None:
    model = bert.load(detected)
    for part, auto, name in (
        (model, "AutoModelForPreTraining", "ElectraForPreTraining"),
        (model.generator, "AutoModelForMaskedLM", "ElectraForMaskedLM"),
    ):
        export(part, tmp_path / auto)
        load_whole(auto, tmp_path / auto, name)
    text = "Ba [MASK] ko."
    theirs = transformers.pipeline("fill-mask", str(tmp_path / "AutoModelForMaskedLM"), top_k=5)(text)
    [ours] = model.fill_mask(text)
    assert [guess.token_id for guess in ours] == [guess["token"] for guess in theirs]
    assert [guess.probability for guess in ours] == pytest.approx([guess["score"] for guess in theirs], abs=1e-5)


def test_runs_of_ours_load_in_the_auto_classes_and_answer_alike(pretrained, finetuned, tmp_path) -> None:
    for run, auto, name in (
        (pretrained, "AutoModelForPreTraining", "BertForPreTraining"),
        (finetuned, "AutoModelForSequenceClassification", "BertForSequenceClassification"),
    ):
        out = tmp_path / auto
        export(bert.load(run), out)
        load_whole(auto, out, name)
    texts = ["ba ri", "ko ri tu", "ne"]
    theirs = transformers.pipeline("text-classification", str(out), top_k=None)(texts)
    for ours, scores in zip(bert.load(finetuned).predict(texts), theirs, strict=True):
        assert {score["label"]: score["score"] for score in scores} == pytest.approx(ours.probabilities, abs=1e-5)
        assert scores[0]["label"] == ours.label


@pytest.mark.slow
def test_fine_tuning_starts_from_a_deberta_and_is_exported(sst2: Path, tmp_path: Path) -> None:
    drawn(tmp_path / "theirs", "BertForMaskedLM", "deberta-v2", **DEBERTA)
    arguments = [f"--init={tmp_path / 'theirs'}", f"--data.dir={sst2}", f"--output_dir={tmp_path / 'run'}"]
    sizes = ["--data.max_length=32", "--data.buckets=32", "--training.batch_size=8", "--training.epochs=1"]
    assert finetune(["--config=sst2", *arguments, *sizes]) == 0
    export(bert.load(tmp_path / "run"), tmp_path / "out")
    load_whole("AutoModelForSequenceClassification", tmp_path / "out", "DebertaV2ForSequenceClassification")


@pytest.mark.parametrize("family", ["bert", "distilbert"])
def test_a_classifier_of_transformers_is_continued_by_the_names_of_its_labels(family: str, tmp_path) -> None:
    """Its labels are in no alphabetical order, and in another order in the data: at a rate of 1e-9 nothing changes."""
    drawn(tmp_path / "theirs", "BertForSequenceClassification", family)
    texts = ["the house is small", "they said that it was there before", "in the year", "and so on"]
    rows = [{"text": text, "label": LABELS[number % 3]} for number, text in enumerate(texts * 4)]

    def scores_of(folder: Path) -> list[dict[str, float]]:
        model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
        answers = transformers.pipeline("text-classification", model=model, tokenizer=tokenizer, top_k=None)(texts)
        return [{answer["label"]: answer["score"] for answer in of_text} for of_text in answers]

    before, source = scores_of(tmp_path / "theirs"), tmp_path / "theirs"
    for name, order in {"sorted": None, "other": ["right", "neither", "wrong"]}.items():
        overrides = {"training.epochs": 1, "training.batch_size": 8, "optimizer.learning_rate": 1e-9, "seed": 7}
        overrides |= {"data.max_length": 32, "data.labels": order}
        run = bert.finetune(
            "classification", init=source, train=rows, dev=rows, output_dir=tmp_path / name, overrides=overrides
        )
        for ours, theirs in zip(run.model.predict(texts), before, strict=True):
            assert list(ours.probabilities) == (order or sorted(LABELS))
            assert ours.probabilities == pytest.approx(theirs, abs=1e-5)
        source = tmp_path / f"{name}-exported"
        run.model.save(source)
        assert list(bert.load(source).labels) == (order or sorted(LABELS))
        for ours, theirs in zip(scores_of(source), before, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-5)
