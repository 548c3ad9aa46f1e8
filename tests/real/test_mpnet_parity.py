"""Models of MPNet's form that transformers drew at random, read by us and written, and their vocabulary."""

import json
from pathlib import Path

import numpy as np
import pytest

import bert
from bert.commands.pretrain import main as pretrain
from bert.interchange import families
from bert.model.positions import MAX_RELATIVE_DISTANCE, buckets_by_distance
from tests.conftest import SMALL_RUN
from tests.helpers import english
from tests.real.hf_models import (
    AUTO,
    HOSTILE,
    PIECES,
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

SENTENCES = [
    "The capital is small.",
    "Anna has a cat and a house",
    "what a day, isn't it",
    "a <mask> of the <unk> [CLS]",
]
PAIRS = list(zip(SENTENCES, ["a", "the house is", "it", "no day"], strict=True))
IDS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}


def drawn_mpnet(folder: Path, architecture: str, **settings):
    """A random MPNet with 150 positions, more than the distance beyond which all distances share a bucket."""
    reference = drawn(folder, architecture, "mpnet", **{**IDS, "max_position_embeddings": 152, **settings})
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *english(PIECES - 5), "<mask>"]
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in tokens), encoding="utf-8")
    return reference


def long_rows(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    ids = np.tile(batch["input_ids"], 5)[..., :150]
    return {"input_ids": ids, "token_type_ids": np.zeros_like(ids), "attention_mask": np.ones_like(ids)}


@pytest.mark.parametrize("architecture", families.MPNET.classes)
def test_mpnet_in_and_out(architecture: str, tmp_path: Path) -> None:
    reference = drawn_mpnet(tmp_path / "theirs", architecture)
    with torch.no_grad():  # so that a wrong bucket shows
        reference.get_parameter(
            f"{'' if architecture == 'Bert' else 'mpnet.'}encoder.relative_attention_bias.weight"
        ).mul_(20)
    reference.save_pretrained(tmp_path / "theirs")
    model = bert.load(tmp_path / "theirs")
    config = model.config
    assert (model.architecture, config.relative_attention_buckets, config.position_offset) == (architecture, 32, 2)
    assert (config.type_vocab_size, config.max_position_embeddings) == (0, 150)
    batches = [inputs(architecture, padded, segments=1, first=2) for padded in (False, True)]
    batches.append(long_rows(batches[0]))
    batches += [real_inputs(tmp_path / "theirs", model, texts, architecture) for texts in (SENTENCES, PAIRS)]
    for batch in batches:
        given = {name: batch[name] for name in ("input_ids", "attention_mask")}
        assert_alike(our_answers(model, batch), answers(reference, given), batch["attention_mask"])
    assert_export(model, reference, AUTO[architecture], tmp_path / "ours")


@pytest.mark.parametrize("buckets", [4, 32, 64])
def test_buckets_are_those_of_transformers(buckets: int) -> None:
    distances = torch.arange(-300, 301)
    theirs = transformers.models.mpnet.modeling_mpnet.MPNetEncoder.relative_position_bucket(-distances, buckets).numpy()
    ours = buckets_by_distance(buckets, MAX_RELATIVE_DISTANCE)[np.minimum(np.abs(distances), 128)]
    ours = ours + (distances.numpy() < 0) * (buckets // 2)
    np.testing.assert_array_equal(ours, theirs)


def test_its_vocabulary_in_and_out(tmp_path: Path) -> None:
    """From vocab.txt alone, from transformers' tokenizer.json, and from our export."""
    drawn_mpnet(tmp_path / "plain", "Bert")
    model = bert.load(tmp_path / "plain")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "plain")
    assert type(theirs).__name__ == "MPNetTokenizer"
    theirs.save_pretrained(tmp_path / "json")
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "json" / name).write_bytes((tmp_path / "plain" / name).read_bytes())
    said: list[str] = []
    model.save(tmp_path / "out", log=said.append)
    assert said[0].endswith("token ids equal")
    assert json.loads((tmp_path / "out/tokenizer_config.json").read_text())["tokenizer_class"] == "MPNetTokenizer"
    texts = [*SENTENCES, *HOSTILE]
    pairs = list(zip(texts, reversed(texts), strict=True))
    for folder in ("plain", "json", "out"):
        ours = bert.load(tmp_path / folder).tokenizer
        again = transformers.AutoTokenizer.from_pretrained(tmp_path / folder)
        assert [encoding.ids for encoding in ours.encode_batch(texts)] == again(texts)["input_ids"], folder
        expected = again(*map(list, zip(*pairs, strict=True)))["input_ids"]
        assert [encoding.ids for encoding in ours.encode_batch(pairs)] == expected, folder


def test_a_sentence_transformers_folder(tmp_path: Path) -> None:
    """In the layout of all-mpnet-base-v2: the class of an MLM is declared, a bare encoder is stored."""
    reference = drawn_mpnet(tmp_path / "model", "Bert")
    content = json.loads((tmp_path / "model/config.json").read_text())
    (tmp_path / "model/config.json").write_text(json.dumps({**content, "architectures": ["MPNetForMaskedLM"]}))
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    listed = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{name}"}
        for number, (path, name) in enumerate(modules)
    ]
    (tmp_path / "model/1_Pooling").mkdir()
    for name, data in {
        "modules.json": listed,
        "sentence_bert_config.json": {"max_seq_length": 100, "do_lower_case": False},
        "1_Pooling/config.json": {"word_embedding_dimension": 96, "pooling_mode_mean_tokens": True},
    }.items():
        (tmp_path / "model" / name).write_text(json.dumps(data))
    model = bert.load(tmp_path / "model")
    assert (model.architecture, model.pooling.mode, model.pooling.normalize) == ("Bert", "mean", True)
    texts = [*SENTENCES, "the house of the day " * 60]
    batch = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")(
        texts, padding=True, truncation=True, max_length=100, return_tensors="pt"
    )
    with torch.no_grad():
        states = reference(**batch).last_hidden_state
    mask = batch["attention_mask"][:, :, None]
    means = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1)).numpy()
    np.testing.assert_allclose(model.embed(texts), means, atol=1e-4)
    model.save(tmp_path / "out")
    assert json.loads((tmp_path / "out/modules.json").read_text())[2]["type"].endswith("Normalize")
    np.testing.assert_array_equal(bert.load(tmp_path / "out").embed(texts), model.embed(texts))
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    for folder in ("model", "out"):
        theirs = library.SentenceTransformer(str(tmp_path / folder), device="cpu")
        np.testing.assert_allclose(theirs.encode(texts), model.embed(texts), atol=1e-5)


def test_a_permuted_run_of_ours_is_an_mpnet(corpus: Path, tmp_path: Path) -> None:
    """Trains with the vocabulary layout, positions and buckets of MPNet."""
    arguments = [f"--data.train={corpus}", f"--output_dir={tmp_path / 'run'}", *SMALL_RUN, "--training.steps=2"]
    arguments += ["--training.objective=plm", "--data.input_format=full_sentences", "--model.type_vocab_size=0"]
    arguments += ["--tokenizer.kind=byte_level", "--tokenizer.vocab_size=330", "--model.position_offset=2"]
    assert pretrain([*arguments, "--model.relative_attention_buckets=32"]) == 0
    said: list[str] = []
    bert.load(tmp_path / "run").save(tmp_path / "out", log=said.append)
    assert "of transformers', token ids equal" in said[0]
    again, found = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert type(again).__name__ == "MPNetForMaskedLM"
    assert not any(found.values()), found
