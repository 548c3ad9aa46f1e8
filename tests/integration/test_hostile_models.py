"""Any change to the files of a model's folder: a model that answers, or one sentence. Never a stack trace."""

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

import bert
from bert.errors import UserError
from tests.helpers import thoroughly
from tests.interchange.bundle_writer import HEADS, weights, write_folder
from tests.interchange.hf_folders import CONFIG, random_model, shard

EXAMPLES = int(os.environ.get("BERT_FUZZ_EXAMPLES", "300"))
"""Changes of each folder; the same ones at every run unless the variable sets their number."""

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghi", *(f"##{letter}" for letter in "abcdefghi")]
TEXTS = ["a bad cab", "\u0e01 \U0001f600 e\u0301", "[MASK] " * 40, ""]

NUMBERS = [0, -1, 1, 7, 2**31 - 1, 2**31, 2**63, 10**30, 0.5, -0.5, 1e308, float("nan"), float("inf")]
STRINGS = ["", "x", "gelu", "bert", "roberta", "BertModel", "\ud800", "\0", "../..", "[CLS]", "##", "a" * 5_000]
VALUES = [None, True, False, *NUMBERS, *STRINGS, [], {}, [1], [[]], {"0": "x"}, {"x": 0}, {"type": "BPE"}]
RAW = [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b"9" * 5_000]
RAW.append(b"version https://git-lfs.github.com/spec/v1\n")


def places_of(value: Any, prefix: tuple = ()) -> list[tuple]:
    """The path of every value inside a JSON value, itself included."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [prefix, *(place for key, item in items for place in places_of(item, (*prefix, key)))]


def replaced(value: Any, place: tuple, new: Any) -> Any:
    """The value with something else at a place; ``...`` removes it."""
    if not place:
        return None if new is ... else new
    copy = value.copy()
    if len(place) == 1 and new is ...:
        del copy[place[0]]
    else:
        copy[place[0]] = replaced(value[place[0]], place[1:], new)
    return copy


def changed_json(draw: Callable, content: bytes) -> bytes:
    """JSON with one to three values replaced, removed or added."""
    value = json.loads(content)
    for _ in range(draw(st.integers(1, 3))):
        places = places_of(value)
        place = places[draw(st.integers(0, len(places) - 1))]
        value = replaced(value, place, draw(st.sampled_from([*VALUES, ...])))
        if isinstance(value, dict) and draw(st.integers(0, 3)) == 0:
            value = {**value, draw(st.sampled_from(["num_labels", "id2label", "x", "model_type"])): draw(
                st.sampled_from(VALUES))}  # fmt: skip
    return json.dumps(value).encode("utf-8", "surrogatepass")


def changed_bytes(draw: Callable, content: bytes) -> bytes:
    """Bytes that are cut, flipped, inserted or repeated; half of the changes are near the start, where headers are."""
    size = len(content)
    at = draw(st.integers(0, min(size, 200) if draw(st.booleans()) else size))
    kind = draw(st.sampled_from(["cut", "flip", "insert", "repeat", "raw"]))
    if kind == "cut":
        return content[:at]
    if kind == "flip":
        return content[:at] + bytes([content[at] ^ draw(st.integers(1, 255))]) + content[at + 1 :] if at < size else b""
    if kind == "insert":
        return content[:at] + draw(st.binary(min_size=1, max_size=4)) + content[at:]
    return content[:at] + content[max(0, at - 30) :] if kind == "repeat" else draw(st.sampled_from(RAW))


def changed_safetensors(draw: Callable, content: bytes) -> bytes:
    """A safetensors file whose header is changed as JSON, with its right length."""
    (length,) = struct.unpack("<Q", content[:8])
    header = changed_json(draw, content[8 : 8 + length])
    return struct.pack("<Q", len(header)) + header + content[8 + length :]


def changed(draw: Callable, file: Path) -> bytes:
    content = file.read_bytes()
    if draw(st.integers(0, 3)):
        if file.suffix == ".json":
            return changed_json(draw, content)
        if file.suffix == ".safetensors":
            return changed_safetensors(draw, content)
    return changed_bytes(draw, content)


def random_folder(folder: Path, architecture: str) -> Path:
    (folder / "words.txt").write_text("\n".join(WORDS) + "\n")
    random_model(folder / "words.txt", architecture).save(folder / "out", format="hf")
    return folder / "out"


def classifier(folder: Path) -> None:
    random_folder(folder, "BertForSequenceClassification")


def tagger(folder: Path) -> None:
    shard(random_folder(folder, "BertForTokenClassification"))


def questions(folder: Path) -> None:
    random_folder(folder, "BertForQuestionAnswering")


def sentences(folder: Path) -> None:
    out = random_folder(folder, "Bert")
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    entries = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{name}"}
        for number, (path, name) in enumerate(modules)
    ]
    (out / "modules.json").write_text(json.dumps(entries))
    (out / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": CONFIG.hidden_size, "pooling_mode_mean_tokens": True}
    (out / "1_Pooling/config.json").write_text(json.dumps(pooling))
    (out / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": "a "}}))
    (out / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 8, "do_lower_case": False}))


def google(folder: Path) -> None:
    write_folder(folder / "out", weights(*HEADS["classification"]))


def byte_level(folder: Path) -> None:
    """A RoBERTa folder with merges, vocab.json and tokenizer.json."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trainer = trainers.BpeTrainer(
        vocab_size=270, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(["a bad cab dab"] * 3, trainer)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    tokenizer.save(str(folder / "tokenizer.json"))
    from dataclasses import replace

    from tests.interchange.hf_folders import ROBERTA

    config = replace(ROBERTA, vocab_size=tokenizer.get_vocab_size())
    random_model(folder / "tokenizer.json", config=config).save(folder / "out", format="hf")


FOLDERS = {
    made.__name__: made for made in (classifier, tagger, questions, sentences, google, byte_level)
}  # fmt: skip


def answer(folder: Path) -> None:
    """Loads the folder and asks the model what its kind answers."""
    model = bert.load(folder)
    if model.task is None:
        vectors = model.embed(TEXTS)
        assert np.isfinite(vectors).all()
    else:
        texts = TEXTS[:3]
        inputs = [(text, text) for text in texts] if len(model.task.input_columns) == 2 else texts
        answers = model.predict(inputs)
        assert len(answers) == len(inputs)
        json.dumps(answers, allow_nan=False, default=vars).encode()


@pytest.mark.slow
@pytest.mark.parametrize("kind", FOLDERS)
def test_a_changed_folder_answers_or_is_one_sentence(tmp_path: Path, kind: str) -> None:
    FOLDERS[kind](tmp_path)
    original = tmp_path / "out"
    answer(original)
    files = sorted(
        path.relative_to(original) for path in original.rglob("*") if path.is_file() and path.suffix != ".md"
    )
    copy = tmp_path / "copy"
    shutil.copytree(original, copy)

    @settings(thoroughly(EXAMPLES), derandomize="BERT_FUZZ_EXAMPLES" not in os.environ)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(files))
        (copy / name).write_bytes(changed(data.draw, original / name))
        try:
            answer(copy)
        except UserError as error:
            assert "\n" not in str(error)
            assert len(str(error)) < 2_000
            str(error).encode("utf-8")
        finally:
            shutil.copyfile(original / name, copy / name)

    run()
