"""SentencePiece files, written here byte by byte: ids, scores, text steps, rows, and damaged files."""

import contextlib
import json
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from bert.data.encoding import row_template, tokenize
from bert.errors import UserError
from bert.tokenizer.hf_settings import TokenizerSettings
from bert.tokenizer.library import special_ids, vocabulary_kind
from bert.tokenizer.sentencepiece import build_sentencepiece
from bert.tokenizer.vocabulary import continues_word, literal_tokenizer, load_tokenizer, save_tokenizer
from tests.helpers import thoroughly

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
DEBERTA = [("[PAD]", 0.0, CONTROL), ("[CLS]", 0.0, CONTROL), ("[SEP]", 0.0, CONTROL), ("[UNK]", 0.0, UNKNOWN)]
ALBERT = [
    *[("<pad>", 0.0, CONTROL), ("<unk>", 0.0, UNKNOWN)],
    *[(name, 0.0, CONTROL) for name in ("[CLS]", "[SEP]", "[MASK]")],
]
TRAINED = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
WORDS = [("▁", -2.0, NORMAL), ("ab", -1.5, NORMAL), ("cd", -1.5, NORMAL), ("abc", -1.25, NORMAL)]
LETTERS = [(letter, -4.0, NORMAL) for letter in "abcdeéE19,"]
PIECES = [*DEBERTA, *WORDS, *LETTERS]


def varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first."""
    return bytes([value & 0x7F | 0x80]) + varint(value >> 7) if value > 0x7F else bytes([value])


def field(number: int, value: int | float | bytes) -> bytes:
    """A field of wire type 0, 5 or 2."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def message(fields: dict[int, int | float | bytes]) -> bytes:
    return b"".join(field(number, value) for number, value in fields.items())


def sentencepiece(pieces=PIECES, trainer=None, steps=None) -> bytes:
    """A file: pieces (1), trainer_spec (2), normalizer_spec (3), and a field that is not read."""
    parts = [field(1, message({1: text.encode(), 2: score, 3: kind})) for text, score, kind in pieces]
    return b"".join([*parts, field(2, message(trainer or {3: 1})), field(3, message(steps or {})), field(4, b"\x01")])


def charsmap(texts: bytes = b" \0", units: dict[int, int] | None = None) -> bytes:
    """A map with one key, the tab: unit 9 below the root, whose text starts where unit 9 ^ 256 points."""
    array = np.zeros(512, "<u4")
    for place, unit in {9: 256 << 10 | 1 << 8 | 9, 9 ^ 256: 1 << 31, **(units or {})}.items():
        array[place] = unit
    return struct.pack("<I", array.nbytes) + array.tobytes() + texts


def read(data: bytes, **settings) -> Tokenizer:
    return build_sentencepiece(data, Path("no/spm.model"), TokenizerSettings(**settings))


def tokens(tokenizer: Tokenizer, text: str) -> list[str]:
    return tokenizer.encode(text, add_special_tokens=False).tokens


def scores(tokenizer: Tokenizer) -> dict[str, float]:
    return dict(json.loads(tokenizer.to_str())["model"]["vocab"])


def test_deberta_keeps_the_numbers_and_gets_a_mask() -> None:
    tokenizer = read(sentencepiece())
    assert [tokenizer.id_to_token(number) for number in range(len(PIECES))] == [text for text, _, _ in PIECES]
    assert special_ids(tokenizer).by_role == {"pad": 0, "cls": 1, "sep": 2, "unk": 3, "mask": len(PIECES)}
    assert [scores(tokenizer)[text] for text, _, _ in WORDS] == [-2.0, -1.5, -1.5, -1.25]
    # P(ab) P(cd) > P(abc) P(d), by hand: -1.5 - 1.5 against -1.25 - 4.
    assert tokens(tokenizer, "abcd") == ["▁", "ab", "cd"]
    assert tokens(tokenizer, "abc abe") == ["▁", "abc", "▁", "ab", "e"]
    assert tokenizer.encode("a?? [MASK] b").ids == [1, 4, 8, 3, len(PIECES), 4, 9, 2]
    row = tokenizer.encode("a", "b")
    assert (row.tokens, row.type_ids) == (["[CLS]", "▁", "a", "[SEP]", "▁", "b", "[SEP]"], [0, 0, 0, 0, 1, 1, 1])
    assert row_template(tokenizer, pair=True).types_of_special == (0, 0, 1)
    assert tokenizer.decode(tokenizer.encode("abcd  ab E").ids) == "abcd ab E"
    assert vocabulary_kind(tokenizer) == "unigram" and not continues_word(tokenizer, "▁")


@pytest.mark.parametrize("camembert", [False, True])
def test_xlm_roberta_and_camembert_number_as_fairseq(camembert: bool, tmp_path: Path) -> None:
    (tmp_path / "sentencepiece.bpe.model").write_bytes(sentencepiece([*TRAINED, *WORDS, *LETTERS]))
    head = ["<s>", "<pad>", "</s>", "<unk>"]
    if camembert:
        (tmp_path / "config.json").write_text('{"model_type": "camembert"}')
        head = ["<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>", "<unk>NOTUSED", "<s>", "</s>"]
    tokenizer = load_tokenizer(tmp_path)
    size = len(head) + len(WORDS) + len(LETTERS)
    assert [tokenizer.id_to_token(number) for number in range(len(head))] == head
    assert tokenizer.token_to_id("▁") == len(head) and tokenizer.token_to_id("<mask>") == size
    assert (special_ids(tokenizer).pad, special_ids(tokenizer).unk, tokenizer.get_vocab_size()) == (1, 3, size + 1)
    row = tokenizer.encode("a", "b ?")
    assert row.tokens == ["<s>", "▁", "a", "</s>", "</s>", "▁", "b", "▁", "?", "</s>"]
    assert (row.ids[-2], set(row.type_ids)) == (3, {0})
    assert tokens(tokenizer, "<mask>") == ["<mask>"]


def test_albert_reads_as_its_settings_say() -> None:
    pieces = [*ALBERT, *WORDS, *LETTERS, ('"', -4.0, NORMAL), ("9,", -1.0, NORMAL), ("b,", -1.0, NORMAL)]
    plain = read(sentencepiece(pieces))
    assert special_ids(plain).by_role == {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}
    assert tokens(plain, "É ``b,'' 19,") == ["▁", "e", "▁", '"', "b,", '"', "▁", "1", "9", ","]
    kept = read(sentencepiece(pieces), do_lower_case=False, keep_accents=True)
    assert tokens(kept, "E é") == ["▁", "E", "▁", "é"]
    lower = read(sentencepiece(), do_lower_case=True)
    assert (tokens(lower, "E"), tokens(read(sentencepiece()), "E")) == (["▁", "e"], ["▁", "E"])


def test_rows_of_xlnet_end_with_cls_in_a_third_segment() -> None:
    special = [(name, 0.0, CONTROL) for name in ("<cls>", "<sep>", "<pad>", "<mask>", "<eod>", "<eop>")]
    tokenizer = read(sentencepiece([*TRAINED, *special, *WORDS, *LETTERS]))
    row = tokenizer.encode("a É", "b")
    assert row.tokens == ["▁", "a", "▁", "E", "<sep>", "▁", "b", "<sep>", "<cls>"]
    assert row.type_ids == [0, 0, 0, 0, 0, 1, 1, 1, 2]
    ids = special_ids(tokenizer)
    assert (ids.cls, ids.sep, ids.pad, ids.mask, ids.bos, ids.eos) == (3, 4, 5, 6, 1, 2)
    template = row_template(tokenizer, pair=True)
    assert template.has_third_type and template.segment_a_length(4, 2) == 5
    batch = tokenize(tokenizer, ["a", ("a", "b")], 16).batch(np.arange(2), 8, 2)
    assert batch["token_type_ids"].tolist() == [[0, 0, 0, 2, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1, 2, 0]]


def test_spaces_follow_the_file() -> None:
    assert tokens(read(sentencepiece()), "  a   b▁ ") == ["▁", "a", "▁", "b"]
    assert tokens(read(sentencepiece()), "   ") == []
    kept = read(sentencepiece(steps={3: 0, 4: 0}))
    assert tokens(kept, " a  b ") == ["▁", "a", "▁", "▁", "b", "▁"]
    assert tokens(kept, "a") == ["a"]
    assert tokens(read(sentencepiece(steps={4: 0})), " a") == ["▁", "▁", "a"]
    assert tokens(read(sentencepiece()), "▁a") == ["▁", "▁", "a"]
    across = [*DEBERTA, *WORDS, *LETTERS, ("▁a▁b", -0.5, NORMAL)]
    assert tokens(read(sentencepiece(across, {3: 1, 22: 0})), "a b") == ["▁a▁b"]
    assert tokens(read(sentencepiece(across)), "a b") == ["▁", "a", "▁", "b"]


def test_character_map() -> None:
    tokenizer = read(sentencepiece(steps={1: b"nmt_nfkc", 2: charsmap()}))
    assert tokens(tokenizer, "\ta\t\tb\t") == ["▁", "a", "▁", "b"]
    assert tokens(tokenizer, "e\u0301") == ["▁", "é"]
    own = read(sentencepiece(steps={1: b"user_defined", 2: charsmap(b"x\0b\0", {9 ^ 256: 1 << 31 | 2})}))
    assert tokens(own, "a\te\u0301") == ["▁", "ab", "e", "\u0301"]


def test_pieces_that_no_text_becomes() -> None:
    """Bytes for unknown characters alone; the text of a byte, an unused piece or a control is read letter by letter."""
    hidden = [("abcde", -0.1, UNUSED), ("<1>", 0.0, CONTROL), *((f"<0x{n:02X}>", 0.0, BYTE) for n in range(256))]
    letters = [(letter, -9.0, NORMAL) for letter in "<0x4>"]
    own = [("dea", -9.0, USER_DEFINED), ("b", -4.0, NORMAL)]
    pieces = [*DEBERTA, *WORDS, *[piece for piece in LETTERS if piece[0] != "b"], *hidden, *letters, *own]
    tokenizer = read(sentencepiece(pieces, {3: 1, 35: 1}))
    assert tokens(tokenizer, "abcde <0x41>") == ["▁", "ab", "cd", "e", "▁", *"<0x41>"]
    assert tokens(tokenizer, "ü☃") == ["▁", "<0xC3>", "<0xBC>", "<0xE2>", "<0x98>", "<0x83>"]
    assert tokenizer.decode(tokenizer.encode("a ü☃ b").ids) == "a ü☃ b"
    assert tokens(tokenizer, "cdea") == ["▁", "c", "dea"]
    always = read(sentencepiece([*PIECES, ("bc", 0.0, USER_DEFINED), ("bcd", 0.0, USER_DEFINED)]))
    assert tokens(always, "abcabcd") == ["▁", "a", "bc", "a", "bcd"]
    assert tokens(tokenizer, "a<1>") == ["▁", "a", "<1>"]  # a special token, which a corpus does not become:
    assert tokens(literal_tokenizer(tokenizer), "<1>[MASK]")[:4] == ["▁", "<", "1", ">"]
    assert special_ids(literal_tokenizer(tokenizer)) == special_ids(tokenizer)


def test_folders_and_files(tmp_path: Path) -> None:
    (tmp_path / "spm.model").write_bytes(sentencepiece())
    (tmp_path / "added_tokens.json").write_text(json.dumps({"[MASK]": len(PIECES), "<user>": len(PIECES) + 1}))
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": true}')
    tokenizer = load_tokenizer(tmp_path)
    assert tokens(tokenizer, "E<user>") == ["▁", "e", "<user>"]
    assert load_tokenizer(tmp_path / "spm.model").to_str() == tokenizer.to_str()
    save_tokenizer(tokenizer, tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").to_str() == tokenizer.to_str()
    (tmp_path / "tokenizer_config.json").write_text('{"split_by_punct": true}')
    with pytest.raises(UserError, match="split_by_punct is true"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "added_tokens.json").write_text('{"[MASK]": 7, "<user>": 7}')
    with pytest.raises(UserError, match="'<user>' has the id 7"):
        load_tokenizer(tmp_path)


def test_any_cut_is_refused() -> None:
    data = sentencepiece(steps={2: charsmap()})
    end = len(data) - len(field(4, b"\x01"))  # a cut from here on leaves out nothing that is read
    for cut in [*range(300), *range(end - 30, end)]:
        with pytest.raises(UserError, match=r"spm\.model is not a complete SentencePiece"):
            read(data[:cut])


NAN, INCOMPLETE = float("nan"), "is not a complete SentencePiece file"
REFUSED = {
    "text": (b"version https://git-lfs.github.com/spec/v1\n", INCOMPLETE),
    "another protocol buffer": (field(1, 5) + field(2, b"") + field(3, b""), INCOMPLETE),
    "huge length": (varint(1 << 3 | 2) + varint(1 << 60), INCOMPLETE),
    "endless integer": (b"\x08" + b"\xff" * 12, INCOMPLETE),
    "group": (b"\x0b", INCOMPLETE),
    "no UTF-8": (field(1, message({1: b"\xff"})) + sentencepiece(), INCOMPLETE),
    "empty piece": (sentencepiece([*PIECES, ("", -1.0, NORMAL)]), INCOMPLETE),
    "no number": (sentencepiece([*PIECES, ("x", NAN, NORMAL)]), INCOMPLETE),
    "score as bytes": (field(1, message({1: b"x", 2: b"1"})) + sentencepiece(), INCOMPLETE),
    "map without texts": (sentencepiece(steps={2: charsmap(b"")}), INCOMPLETE),
    "map of three bytes": (sentencepiece(steps={2: b"\x03\0\0\0abc"}), INCOMPLETE),
    "map that leads out": (sentencepiece(steps={2: charsmap(units={0: 512 << 10})}), INCOMPLETE),
    "map within a letter": (sentencepiece(steps={2: charsmap("é\0".encode(), {9 ^ 256: 1 << 31 | 1})}), INCOMPLETE),
    "no pieces": (sentencepiece([]), "holds no pieces: name a SentencePiece file of a model"),
    "BPE": (sentencepiece(trainer={3: 2}), "model of kind BPE, but only Unigram is read: put the"),
    "characters": (sentencepiece(trainer={3: 4}), "model of kind character, but only Unigram is read"),
    "suffix": (sentencepiece(trainer={24: 1}), "does not mark spaces at the beginning of words"),
    "spaces": (sentencepiece(steps={5: 0}), "does not mark spaces at the beginning of words"),
    "other special tokens": (sentencepiece(DEBERTA[1:]), "has the special tokens of none of ALBERT, DeBERTa, XLM-R"),
    "twice": (sentencepiece([*PIECES, PIECES[-1]]), "has a piece twice, or not one unknown piece: copy it again"),
    "two unknown": (sentencepiece([*PIECES, ("x", 0.0, UNKNOWN)]), "has a piece twice, or not one unknown piece"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_one_sentence_refuses(case: str) -> None:
    data, text = REFUSED[case]
    with pytest.raises(UserError, match=text) as error:
        read(data)
    assert "\n" not in str(error.value) and str(error.value).startswith("no/spm.model ")


@given(st.data())
@thoroughly(40)
def test_damage_is_read_or_refused(draw: st.DataObject) -> None:
    data = bytearray(sentencepiece(steps={2: charsmap()}))
    for _ in range(draw.draw(st.integers(1, 4))):
        data[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(0, 255))
    with contextlib.suppress(UserError):
        read(bytes(data)).encode("ab\tcd é ☃")
