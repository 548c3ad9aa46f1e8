"""Vocabularies of every family: token ids of hostile text equal transformers', from each set of files."""

import json
from pathlib import Path

import pytest

import bert
from tests.real.family_cases import CASES
from tests.real.hf_models import HOSTILE, drawn, transformers
from tests.real.vocabularies import PIECES, UNIGRAM

pytestmark = pytest.mark.real

FAMILIES = ("roberta", "albert", "xlm-roberta", "camembert", "deberta", "deberta v1, as published")
FAMILIES += ("mpnet", "modernbert", "gpt2, as published")
PLAIN = {"roberta", "mpnet", "gpt2, as published"}
"""Families whose folders may have vocab.txt, or vocab.json and merges.txt, without tokenizer.json."""

CLASSES = {"deberta": "DebertaV2Tokenizer", "deberta v1, as published": "DebertaTokenizer", "mpnet": "MPNetTokenizer"}
TEXTS = [
    *HOSTILE,
    *(" a <mask> with spaces  before it", "naïve — 你好", "what a day, isn't it", "a <mask> of the <unk> [CLS]"),
    "a   b  c |||IP_ADDRESS||| [MASK] [SEP]",
]


def test_the_published_files_of_deberta(tmp_path: Path) -> None:
    """Reads pairs and masks like transformers 4; version 5 separates pairs twice, and keeps the space before a mask."""
    case = CASES["deberta v1, as published"]
    drawn(tmp_path, "Bert", case.family.model_type, **{**case.settings, "num_hidden_layers": 1})
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    theirs.backend_tokenizer.model.save(str(tmp_path))
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false, "vocab_type": "gpt2"}')
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert type(theirs).__name__ == "DebertaTokenizer"
    ours = bert.load(tmp_path).tokenizer
    for text in (text.replace(" [MASK]", "[MASK]") for text in TEXTS):
        assert ours.encode(text).ids == theirs(text)["input_ids"], text
    pair = ours.encode("a b", "c")
    separator = theirs.sep_token_id
    expected = [theirs.cls_token_id, *theirs("a b")["input_ids"][1:], *theirs("c")["input_ids"][1:]]
    assert pair.ids == expected and expected.count(separator) == 2
    assert pair.type_ids == [int(place > expected.index(separator)) for place in range(len(expected))]


@pytest.mark.parametrize("layout", ["saved", "exported", "plain"])
@pytest.mark.parametrize("name", FAMILIES)
def test_ids_of_hostile_text_and_pairs(name: str, layout: str, shared: Path, tmp_path: Path) -> None:
    if layout == "plain" and name not in PLAIN:
        pytest.skip("has no other files")
    case, folder = CASES[name], tmp_path / "theirs"
    architecture = "BertForCausalLM" if name.startswith("gpt2") else "BertForMaskedLM"
    drawn(folder, architecture, case.family.model_type, **{**case.settings, "num_hidden_layers": 1})
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    if layout == "saved":
        theirs.save_pretrained(folder)
    elif layout == "exported" or name == "roberta":
        bert.load(folder).save(tmp_path / "ours")
        folder = tmp_path / "ours"
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
    if layout == "plain":
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (folder / file).unlink(missing_ok=True)
    if name in CLASSES and layout != "exported":
        assert type(theirs).__name__ == CLASSES[name]
    if name == "mpnet" and layout == "exported":
        assert json.loads((folder / "tokenizer_config.json").read_text())["tokenizer_class"] == CLASSES[name]
    if name == "modernbert":
        assert set(theirs(TEXTS)) == {"input_ids", "attention_mask"}

    ours = bert.load(folder).tokenizer
    sentences = (shared / "data/glue/SST-2/dev.tsv").read_text(encoding="utf-8").splitlines()[1:101]
    texts = [*TEXTS, *(line.split("\t")[0] for line in sentences)]
    for first, second in zip(texts, [*texts[:0:-1], "x"], strict=True):
        assert ours.encode(first).ids == theirs(first)["input_ids"], first
        assert ours.encode(first, second).ids == theirs(first, second)["input_ids"], (first, second)
        if name.startswith("gpt2"):
            assert ours.decode(ours.encode(first).ids, skip_special_tokens=False) == first
    if case.family.model_type in UNIGRAM:
        assert len(ours.get_vocab()) <= PIECES
