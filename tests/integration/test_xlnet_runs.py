"""An XLNet folder is trained further on permuted tokens, resumed, fine-tuned and exported."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import bert
from bert.commands.pretrain import main as pretrain
from bert.config import DataConfig
from bert.data.pretraining.loader import make_masking, masked_batch
from bert.files import read_json
from bert.tokenizer.library import XLNET_TOKENS, xlnet_rows
from bert.tokenizer.vocabulary import load_tokenizer
from tests.conftest import PERMUTED, SMALL_RUN
from tests.helpers import lines_of, run
from tests.interchange.hf_folders import XLNET, assert_same, random_model

PIECES = ["<unk>", "<s>", "</s>", "<cls>", "<sep>", "<pad>", "<mask>", "<eod>", "<eop>"]


def write_vocabulary(file: Path) -> Path:
    """Writes the syllables of the corpus as a Unigram vocabulary with XLNet's special tokens and rows."""
    syllables = ["ba", "ko", "ri", "tu", "ne", "lo", "sa", "mi", *"abcdefghijklmnopqrstuvwxyz."]
    scored = [*((piece, 0.0) for piece in PIECES), *((f"▁{text}", -3.0) for text in syllables)]
    tokenizer = Tokenizer(models.Unigram([*scored, *((text, -4.0) for text in syllables)], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace("▁", prepend_scheme="always")
    tokenizer.add_special_tokens([AddedToken(piece) for piece in set(XLNET_TOKENS.values())])
    tokenizer.post_processor = xlnet_rows({piece: number for number, piece in enumerate(PIECES)})
    tokenizer.save(str(file))
    return file


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("xlnet")
    vocabulary = write_vocabulary(folder / "tokenizer.json")
    sizes = {"vocab_size": 79, "hidden_size": 16, "num_attention_heads": 2, "max_position_embeddings": 40}
    config = type(XLNET)(**{**vars(XLNET), **sizes})
    model = random_model(vocabulary, "BertForMaskedLM", config)
    model.save(folder / "model")
    return folder / "model"


def resumed(folder: Path, copy: Path, step: int) -> Path:
    """A copy of a finished run that was killed after its checkpoint at ``step``."""
    shutil.copytree(folder, copy)
    for later in (path for path in (copy / "checkpoints").iterdir() if path.name.isdecimal() and int(path.name) > step):
        shutil.rmtree(later)
    (copy / "results.json").unlink()
    return copy


def test_the_last_token_of_a_pretraining_row_has_segment_2(tmp_path: Path) -> None:
    masking = make_masking(DataConfig(), load_tokenizer(write_vocabulary(tmp_path / "tokenizer.json")), "plm")
    sep, cls, pad = (PIECES.index(piece) for piece in ("<sep>", "<cls>", "<pad>"))
    rows = {"input_ids": np.array([[9, 10, sep, cls, pad]]), "length": np.array([4]), "segment_a_length": np.array([4])}
    words = np.zeros((1, masking.uint64s_per_row(5)), np.uint64)
    assert masked_batch(rows, masking, words, 0)["token_type_ids"].tolist() == [[0, 0, 0, 2, 0]]


@pytest.mark.slow
def test_trained_resumed_fine_tuned_and_exported(published: Path, corpus: Path, sst2: Path, tmp_path: Path) -> None:
    settings = [option for option in SMALL_RUN if not option.startswith(("--model.", "--tokenizer."))]
    whole = tmp_path / "whole"
    arguments = [f"--data.train={corpus}", f"--init={published}", *settings, *PERMUTED]
    assert pretrain([*arguments, f"--output_dir={whole}"]) == 0
    assert json.loads((whole / "results.json").read_text())["eval"]["plm_loss"] > 0
    again = resumed(whole, tmp_path / "again", 3)
    assert pretrain([*arguments, f"--output_dir={again}"]) == 0
    assert_same(bert.load(again).params, bert.load(whole).params)
    assert lines_of(again) == lines_of(whole)
    bert.load(whole).save(tmp_path / "exported")
    content = read_json(tmp_path / "exported" / "config.json")
    assert (content["model_type"], content["architectures"]) == ("xlnet", ["XLNetLMHeadModel"])
    settings = read_json(tmp_path / "exported" / "tokenizer_config.json")
    assert settings["padding_side"] == "left"

    tuned = tmp_path / "tuned"
    assert run(tuned, sst2, f"--init={tmp_path / 'exported'}", "--training.epochs=1") == 0
    model = bert.load(tuned)
    dev = (tuned / "predictions" / "dev.tsv").read_text().splitlines()[1:]
    texts = [line.split("\t")[0] for line in (sst2 / "dev.tsv").read_text().splitlines()[1:]]
    numbers = {"negative": "0", "positive": "1"}
    assert [numbers[answer.label] for answer in model.predict(texts)] == [line.split("\t")[1] for line in dev]
    rows = model.tokenizer.encode("ba", "ko")
    assert rows.tokens[-2:] == ["<sep>", "<cls>"] and rows.type_ids[-1] == 2
