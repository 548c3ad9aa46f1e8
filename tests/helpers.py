"""Helpers that several test modules share."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import shutil
import signal
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import traverse_util
from hypothesis import HealthCheck, settings

from bert.commands.finetune import main
from bert.config import DataConfig, ModelConfig, PretrainConfig, TokenizerConfig, TrainingConfig
from bert.data.pretraining.dataset import open_rows
from bert.data.pretraining.masking import Masking
from bert.runs.checkpoint import Checkpointer
from bert.tokenizer.vocabulary import train_tokenizer
from tests.data.pretraining.conftest import T

PROSE = [
    "The river runs past old towns and quiet fields that people have long loved. Visitors bring maps in the spring.",
    "Most of them walk along the sandy banks to a wooden bridge. It was built before anyone wrote its history down.",
    "A mill stood here, and its wheel turned until the last owner left. Now swallows nest below the roof each summer.",
    "In winter the water freezes at the edges. Children test the ice with sticks, but nobody dares to cross it.",
    "Local guides tell two stories about the name. Neither has been proved, which makes both of them worth hearing.",
]
"""Paragraphs that pass all quality rules."""


def config_of(place, **changes):
    values = {"train": str(place / "corpus.txt"), "sequence_length": T, "one_sentence_per_line": True}
    return DataConfig(**{**values, "num_workers": 1, **changes})


def all_rows(paths):
    rows = open_rows(paths)
    return rows.take(np.arange(len(rows)))


def digest(example_set):
    files = sorted(file for file in example_set.folder.iterdir() if file.is_file())
    return [(file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in files]


MNLI_COLUMNS = (
    "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\tsentence2_parse"
    "\tsentence1\tsentence2"
)


FILLING = "\tp\tp\tg\t( a )\t( b )\t(ROOT a)\t(ROOT b)\t"


STSB_COLUMNS = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2"


# Of each task: the files, and what is read of each: first texts, second texts, labels or ids.
LAYOUTS = {
    "cola": {
        "train.tsv": ("gj04\t1\t\tThey ran.\ngj04\t0\t*\tThem ran.\n", ["They ran.", "Them ran."], None, [1, 0]),
        "dev.tsv": ("bc01\t1\t\tThe \"q\n", ['The "q'], None, [1]),
        "test.tsv": ("index\tsentence\n0\tBill ran.\n", ["Bill ran."], None, ["0"]),
    },
    "sst2": {
        "train.tsv": ("sentence\tlabel\nfine \t1\n", ["fine "], None, [1]),
        "dev.tsv": ("sentence\tlabel\nbad \t0\n", ["bad "], None, [0]),
        "test.tsv": ("index\tsentence\n0\tso so\n", ["so so"], None, ["0"]),
    },
    "mrpc": {
        "train.tsv": ("\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t7\t8\ta\tb\n", ["a"], ["b"], [1]),
        "dev.tsv": ("\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n0\t7\t8\tc\td\n", ["c"], ["d"], [0]),
        "test.tsv": ("\ufeffindex\t#1 ID\t#2 ID\t#1 String\t#2 String\n0\t7\t8\te\tf\n", ["e"], ["f"], ["0"]),
    },
    "stsb": {
        "train.tsv": (STSB_COLUMNS + "\tscore\n0\tg\tf\ty\t1\tn\tn\ta\tb\t3.800\n", ["a"], ["b"], [np.float32(3.8)]),
        "dev.tsv": (STSB_COLUMNS + "\tscore\n0\tg\tf\ty\t1\tn\tn\tc\td\t0.000\n", ["c"], ["d"], [0.0]),
        "test.tsv": (STSB_COLUMNS + "\n9\tg\tf\ty\t1\tn\tn\te\tf\n", ["e"], ["f"], ["9"]),
    },
    "qqp": {
        "train.tsv": ("id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n5\t1\t2\ta\tb\t1\n", ["a"], ["b"], [1]),
        "dev.tsv": ("id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n6\t1\t2\tc\td\t0\n", ["c"], ["d"], [0]),
        "test.tsv": ("id\tquestion1\tquestion2\n0\te\tf\n", ["e"], ["f"], ["0"]),
    },
    "mnli": {
        "train.tsv": (f"{MNLI_COLUMNS}\tlabel1\tgold_label\n0{FILLING}a\tb\tneutral\tneutral\n", ["a"], ["b"], [1]),
        "dev_matched.tsv": (
            MNLI_COLUMNS + "".join(f"\tlabel{n}" for n in range(1, 6)) + f"\tgold_label\n0{FILLING}c\td"
            "\tneutral\tneutral\tentailment\tneutral\tneutral\tcontradiction\n", ["c"], ["d"], [2]),
        "dev_mismatched.tsv": (
            "index\tsentence1\tsentence2\tgold_label\n0\tg\th\tentailment\n", ["g"], ["h"], [0]),
        "test_matched.tsv": (f"{MNLI_COLUMNS}\n0{FILLING}e\tf\n", ["e"], ["f"], ["0"]),
        "test_mismatched.tsv": (f"{MNLI_COLUMNS}\n3{FILLING}i\tj\n", ["i"], ["j"], ["3"]),
        "AX.tsv": ("index\tsentence1\tsentence2\n0\tk\tl\n", ["k"], ["l"], ["0"]),
    },
    "qnli": {
        "train.tsv": ("index\tquestion\tsentence\tlabel\n0\tq?\ts\tentailment\n", ["q?"], ["s"], [0]),
        "dev.tsv": ("index\tquestion\tsentence\tlabel\n0\tq?\ts\tnot_entailment\n", ["q?"], ["s"], [1]),
        "test.tsv": ("index\tquestion\tsentence\n0\tq?\ts\n", ["q?"], ["s"], ["0"]),
    },
    "rte": {
        "train.tsv": ("index\tsentence1\tsentence2\tlabel\n0\ta\tb\tnot_entailment\n", ["a"], ["b"], [1]),
        "dev.tsv": ("index\tsentence1\tsentence2\tlabel\n0\tc\td\tentailment\n", ["c"], ["d"], [0]),
        "test.tsv": ("index\tsentence1\tsentence2\n0\te\tf\n", ["e"], ["f"], ["0"]),
    },
    "wnli": {
        "train.tsv": ("index\tsentence1\tsentence2\tlabel\n0\ta\tb\t1\n", ["a"], ["b"], [1]),
        "dev.tsv": ("index\tsentence1\tsentence2\tlabel\n0\tc\td\t0\n", ["c"], ["d"], [0]),
        "test.tsv": ("index\tsentence1\tsentence2\n0\te\tf\n", ["e"], ["f"], ["0"]),
    },
}  # fmt: skip


def recipe(model: ModelConfig, length: int, **training: object) -> PretrainConfig:
    predictions = {16: 4, 128: 20, 512: 76}[length]
    data = dataclasses.replace(DataConfig(), sequence_length=length, max_predictions_per_sequence=predictions)
    return PretrainConfig(data=data, model=model, training=TrainingConfig(steps=1000, **training))


OPTIONS = {
    "pre-LN": {"pre_layer_norm": True},
    "fixed positions": {"position_embedding_type": "sinusoidal"},
    "untied decoder": {"tie_word_embeddings": False},
    "narrow embeddings": {"embedding_size": 8},
    "embeddings without LayerNorm": {"embedding_norm": False},
    "head without transform": {"prediction_transform": False},
    "scaled residuals": {"residual_init": "scaled"},
    "no segments": {"type_vocab_size": 0},
    "decoder without bias": {"prediction_bias": False},
    "rotary positions": {"position_embedding_type": "rotary"},
    "no positions": {"position_embedding_type": "none"},
    "gated feed-forward": {"gated_feed_forward": True},
    "no biases": {"use_bias": False, "norm_bias": False},
    "RMSNorm": {"norm_type": "rms"},
    "local attention": {"attention_window": 2},
    "global tokens": {"position_embedding_type": "learned", "attention_window": 2, "global_attention_sep_id": 9},
    "relative positions": {"relative_attention_buckets": 8},
    "disentangled attention": {"position_embedding_type": "disentangled", "relative_attention_buckets": 8},
    "linear disentangled attention": {
        **{"position_embedding_type": "deberta_v1", "relative_attention_buckets": 8},
        **{"disentangled_products": "position_to_content", "position_table": True},
    },
    "positions of Transformer-XL": {"position_embedding_type": "transformer_xl", "embedding_norm": False},
    "shared keys": {"num_key_value_heads": 1, "attention_softcap": 0.5, "position_embedding_type": "alibi"},
    "wide heads": {
        **{"attention_head_size": 12, "query_key_norm": True, "position_embedding_type": "rotary"},
        **{"rotary_fraction": 0.5, "rotary_scaling": "yarn", "rotary_scaling_factor": 4.0},
        **{"rotary_original_length": 64, "rotary_base": 50.0},
    },
    "sandwich": {
        **{"norm_type": "rms_plus_one", "sublayer_output_norm": True, "pre_layer_norm": True},
        **{"query_pre_attn_scalar": 5.0, "token_dropout_id": 4, "attention_window": 2},
        **{"global_attention_every": 2, "first_global_layer": 1},
    },
    "some biases": {
        **{"use_bias": False, "query_key_value_bias": True, "output_bias": True},
        **{"attention_output_bias": False, "intermediate_bias": False},
    },
    "pooler of the mean": {"pooler_type": "transform", "pooler_input": "mean"},
    "convolution": {"conv_kernel_size": 3},
    "capped logits": {"prediction_softcap": 8.0},
    "shared layers": {"layer_groups": 1},
    "step embeddings": {"step_embedding": True},
    "halting": {"halting": 0.01},
    "modern": {
        "position_embedding_type": "rotary",
        "rotary_base": 1000.0,
        "local_rotary_base": 100.0,
        "attention_window": 2,
        "global_attention_every": 2,
        "gated_feed_forward": True,
        "use_bias": False,
        "norm_type": "rms",
        "norm_bias": False,
        "pre_layer_norm": True,
        "first_layer_norm": False,
        "type_vocab_size": 0,
        "pooler_type": "transform",
        "pooler_input": "mean",
    },
    "all at once": {
        "scale_embeddings": True,
        "embedding_norm": False,
        "residual_init": "scaled",
        "pre_layer_norm": True,
        "position_embedding_type": "sinusoidal",
        "tie_word_embeddings": False,
        "embedding_size": 8,
    },
}


SINGLE = [option for option in OPTIONS if option != "all at once"]


MASKING = Masking(vocab_size=500, mask_id=4, special_ids=(0, 1, 2, 3, 4), max_predictions=5)


class NumberedRows:
    """Rows whose tokens identify them: row r starts with 5 + r % 400 and counts upwards."""

    def __init__(self, count: int, length: int = 32) -> None:
        self.count, self.length = count, length

    def __len__(self) -> int:
        return self.count

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        assert (indices < self.count).all()
        tokens = 5 + (indices[:, None] + np.arange(self.length)) % 400
        real = self.length - indices % 7
        tokens[np.arange(self.length) >= real[:, None]] = 0
        return {
            "input_ids": tokens.astype(np.uint16),
            "length": real,
            "segment_a_length": real // 2,
            "next_sentence_label": (indices % 2).astype(np.int8),
        }


def originals(batch: dict[str, np.ndarray]) -> np.ndarray:
    """The batch's tokens before masking, put back from its labels."""
    ids = batch["input_ids"].copy()
    rows, places = np.nonzero(batch["masked_lm_weights"])
    ids[rows, batch["masked_lm_positions"][rows, places]] = batch["masked_lm_ids"][rows, places]
    return ids


REPOSITORY = Path(__file__).parent.parent


def lines_of(run: Path) -> list[dict]:
    """metrics.jsonl without the timing fields."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in lines]


def results_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "results.json").read_text())


def state_of(run: Path) -> dict:
    with Checkpointer(run / "checkpoints", 3, lambda text: None) as checkpoints:
        return checkpoints.restore()[1]


def assert_resumes(command: Callable[[list[str]], int], arguments: list[str], whole: Path, again: Path) -> None:
    """Resumes a copy of a run of six steps without its last checkpoint, which gives the same state and metrics."""
    shutil.copytree(whole, again)
    shutil.rmtree(again / "checkpoints" / "6")
    (again / "results.json").unlink()
    assert command([*arguments, f"--output_dir={again}"]) == 0
    jax.tree.map(np.testing.assert_array_equal, state_of(again), state_of(whole))
    assert lines_of(again) == lines_of(whole)


def assert_same_sweep(folder: Path, uninterrupted: Path) -> None:
    actual, expected = (json.loads((path / "sweep.json").read_text()) for path in (folder, uninterrupted))
    for sweep in (actual, expected):
        for one in sweep["trials"]:
            del one["seconds"]
    assert actual == expected
    for one in actual["trials"]:
        path, other = folder / one["name"], uninterrupted / one["name"]
        assert lines_of(path) == lines_of(other)
        jax.tree.map(np.testing.assert_array_equal, state_of(path)["params"], state_of(other)["params"])


def assert_same_losses(run: Path, expected: Path, end: float = math.inf) -> None:
    """Compares logged values except for rounding, up to a step: rounding errors grow with the steps."""
    pairs = zip(*([line for line in lines_of(path) if line["step"] <= end] for path in (run, expected)), strict=True)
    for line, expected_line in pairs:
        assert line.pop("split") == expected_line.pop("split")
        assert line == pytest.approx(expected_line, rel=1e-5), expected_line["step"]


def assert_same_but_for_rounding(run: Path, uninterrupted: Path) -> None:
    """Compares logged values and parameters of two runs that differ only in the order of sums.

    Biases of keys are left out. They add the same number to all scores of a query, so that their gradient is 0, of
    which Adam scales the rounding errors to updates.
    """
    for actual, expected in zip(lines_of(run), lines_of(uninterrupted), strict=True):
        assert actual.pop("split") == expected.pop("split")
        assert actual == pytest.approx(expected, rel=1e-4)
    actual, expected = (traverse_util.flatten_dict(state_of(one)["params"]) for one in (run, uninterrupted))
    assert actual.keys() == expected.keys()
    for path in actual:
        if path[-2:] != ("key", "bias"):
            np.testing.assert_allclose(actual[path], expected[path], rtol=1e-4, atol=1e-5, err_msg="/".join(path))


FILLERS = ("ba", "ri", "tu", "lo", "mi")


NAMES = ("Xavi", "Xena", "Xerxes")


def interrupted_at(number: int, rows: type, monkeypatch: pytest.MonkeyPatch, train: Callable[[], int]) -> int:
    """Returns the status of a run that receives SIGTERM before a batch of ``rows``."""
    batch, calls = rows.batch, []

    def interrupt(self: Any, *arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == number:
            signal.raise_signal(signal.SIGTERM)
        return batch(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(rows, "batch", interrupt)
        return train()


def assert_interrupted_run_ends_the_same(
    train: Callable[[Path], int], folder: Path, uninterrupted: Path, rows: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupts a run at its twelfth batch, resumes it, and compares its losses, weights and predictions."""
    assert interrupted_at(12, rows, monkeypatch, lambda: train(folder)) == 143
    assert not (folder / "predictions").exists()
    assert train(folder) == 0
    assert lines_of(folder) == lines_of(uninterrupted)
    assert (folder / "predictions/dev.tsv").read_bytes() == (uninterrupted / "predictions/dev.tsv").read_bytes()
    jax.tree.map(np.testing.assert_array_equal, state_of(folder), state_of(uninterrupted))


def words(number: int, count: int) -> list[str]:
    return [FILLERS[(number * 3 + place * place) % len(FILLERS)] for place in range(count)]


def questions(count: int, impossible: bool) -> dict[str, Any]:
    """Questions about the name in a context. Every fourth takes two windows. If impossible, every third has none."""
    paragraphs = []
    for number in range(count):
        name, context = NAMES[number % 3], words(number, 6 if number % 4 else 34)
        has = not (impossible and number % 3 == 2)
        if has:
            context[(number * 5) % len(context)] = name
        text = " ".join(context)
        entry = {"id": f"q{number}", "question": "who ?", "answers": []}
        if has:
            entry["answers"] = [{"text": name, "answer_start": text.index(name)}]
        if impossible:
            entry["is_impossible"] = not has
        paragraphs.append({"context": text, "qas": [entry]})
    return {"version": "2.0" if impossible else "1.1", "data": [{"title": "t", "paragraphs": paragraphs}]}


def run(folder: Path, data: Path, *arguments: str, config: str = "sst2") -> int:
    sizes = [f"--data.dir={data}", f"--output_dir={folder}", "--data.max_length=32", "--data.buckets=32"]
    sizes.append("--training.batch_size=8")
    return main([f"--config={config}", *sizes, *arguments])


def made_files(folder: Path, **files: str) -> Path:
    """Files by their names, with _ for the dot."""
    for name, content in files.items():
        (folder / name.replace("_", ".")).write_text(content, encoding="utf-8")
    return folder


def thoroughly(examples: int) -> settings:
    """Few examples are the same at every run; many are new ones."""
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(
        max_examples=examples, derandomize=examples < 100, deadline=None, database=None, suppress_health_check=checks
    )


@lru_cache
def english(vocab_size: int) -> list[str]:
    """A vocabulary trained on the README, filled up with unused tokens to the given size."""
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    vocab = train_tokenizer(text.splitlines(), TokenizerConfig(vocab_size=vocab_size)).get_vocab()
    return [*sorted(vocab, key=vocab.get), *(f"[unused{number}]" for number in range(vocab_size - len(vocab)))]
