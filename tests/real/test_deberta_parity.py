"""Models of DeBERTa-v3's form that transformers drew at random, read by us and written, and their vocabulary."""

import json
from pathlib import Path

import numpy as np
import pytest

import bert
from bert.commands.finetune import main as finetune
from bert.config import TokenizerConfig
from bert.interchange import families
from bert.model.positions import buckets_by_distance
from bert.tokenizer.unigram import TRAINED_SPECIAL_TOKENS
from bert.tokenizer.vocabulary import load_tokenizer, train_tokenizer
from tests.helpers import REPOSITORY
from tests.real.hf_models import (
    AUTO,
    HOSTILE,
    answers,
    assert_alike,
    assert_export,
    drawn,
    inputs,
    our_answers,
    real_inputs,
)

pytestmark = pytest.mark.real

torch = pytest.importorskip("torch", reason="needs the extra `torch`")
transformers = pytest.importorskip("transformers", reason="needs the extra `torch`")

SETTINGS = {
    **{"type_vocab_size": 0, "relative_attention": True, "position_buckets": 16, "norm_rel_ebd": "layer_norm"},
    **{"share_att_key": True, "pos_att_type": "p2c|c2p", "position_biased_input": False, "cls_dropout": 0.3},
    **{"num_hidden_layers": 2, "max_relative_positions": -1, "max_position_embeddings": 60},
}
TEXTS = ["The tokens of a row", "it trains", "Words, numbers: 3.14 and more of both.", "ein langer Text für alle"]
PAIRS = list(zip(TEXTS, reversed(TEXTS), strict=True))


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Unigram vocabulary in the published layout: BERT's special tokens first, except [MASK], which is last."""
    lines = (REPOSITORY / "README.md").read_text(encoding="utf-8").splitlines()
    trained = train_tokenizer(lines, TokenizerConfig(kind="unigram", vocab_size=500, lowercase=False))
    pairs = json.loads(trained.to_str())["model"]["vocab"]
    pieces = [(token, score) for token, score in pairs if token not in TRAINED_SPECIAL_TOKENS]
    special = [(token, 0.0) for token in ("[PAD]", "[CLS]", "[SEP]", "[UNK]")]
    folder = tmp_path_factory.mktemp("deberta")
    transformers.DebertaV2Tokenizer(vocab=[*special, *pieces, ("[MASK]", 0.0)]).save_pretrained(folder)
    return folder


def drawn_deberta(folder: Path, architecture: str, vocabulary: Path, **settings):
    reference = drawn(folder, architecture, "deberta-v2", **{**SETTINGS, **settings})
    (folder / "vocab.txt").unlink()
    for file in vocabulary.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return reference


@pytest.mark.parametrize("architecture", families.DEBERTA.classes)
def test_every_class_in_and_out(architecture: str, vocabulary: Path, tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    reference = drawn_deberta(folder, architecture, vocabulary)
    with torch.no_grad():  # so that a wrong bucket shows
        name = f"{'' if architecture == 'Bert' else 'deberta.'}encoder.LayerNorm.weight"
        reference.get_parameter(name).mul_(3)
    reference.save_pretrained(folder)
    model = bert.load(folder)
    config = model.config
    assert (model.architecture, config.position_embedding_type) == (architecture, "disentangled")
    assert (config.relative_attention_buckets, config.pooler_act, config.type_vocab_size) == (32, "gelu", 0)
    rows = architecture in ("BertForSequenceClassification", "BertForMultipleChoice")
    assert model.classifier_dropout == (0.3 if rows else None)
    batches = [inputs(architecture, True, segments=1, first=2), real_inputs(folder, model, PAIRS, architecture)]
    for batch in batches:
        assert_alike(our_answers(model, batch), answers(reference, batch), batch["attention_mask"])
    assert_export(model, reference, AUTO[architecture], tmp_path / "ours")


@pytest.mark.parametrize(("buckets", "length"), [(512, 512), (512, 1024), (32, 60), (64, 20), (8, 300)])
def test_buckets_are_those_of_transformers(buckets: int, length: int) -> None:
    rows = torch.zeros(1, length, 1)
    theirs = transformers.models.deberta_v2.modeling_deberta_v2.build_relative_position(
        rows, rows, bucket_size=buckets // 2, max_position=length
    )[0].numpy()
    ours = buckets_by_distance(buckets, length - 1, round_up=True)
    np.testing.assert_array_equal(ours, theirs[:, 0])
    np.testing.assert_array_equal(-ours, theirs[0])


def test_ids_of_hostile_text(vocabulary: Path, tmp_path: Path) -> None:
    (vocabulary / "config.json").write_text('{"model_type": "deberta-v2"}')
    ours, theirs = load_tokenizer(vocabulary), transformers.AutoTokenizer.from_pretrained(vocabulary)
    (vocabulary / "config.json").unlink()
    assert type(theirs).__name__ == "DebertaV2Tokenizer"
    for first, second in zip(HOSTILE, [*HOSTILE[:0:-1], "x"], strict=True):
        assert ours.encode(first).ids == theirs(first)["input_ids"]
        assert ours.encode(first, second).ids == theirs(first, second)["input_ids"]


@pytest.mark.slow
def test_fine_tuning_starts_from_it_and_is_exported(vocabulary: Path, sst2: Path, tmp_path: Path) -> None:
    drawn_deberta(tmp_path / "theirs", "BertForMaskedLM", vocabulary)
    arguments = [
        "--config=sst2",
        f"--init={tmp_path / 'theirs'}",
        f"--data.dir={sst2}",
        f"--output_dir={tmp_path / 'run'}",
    ]
    sizes = ["--data.max_length=32", "--data.buckets=32", "--training.batch_size=8", "--training.epochs=1"]
    assert finetune([*arguments, *sizes]) == 0
    said: list[str] = []
    bert.load(tmp_path / "run").save(tmp_path / "out", log=said.append)
    assert "logits within" in said[0] and said[0].endswith("token ids equal"), said[0]
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert type(again).__name__ == "DebertaV2ForSequenceClassification"
