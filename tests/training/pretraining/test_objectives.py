"""The table of training.objective."""

import shutil
import typing
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml

import bert
from bert.commands.pretrain import main
from bert.config.training import ObjectiveName
from bert.training.pretraining.objectives import OBJECTIVES, fill_some_masks
from tests.conftest import NEXT, PERMUTED, REPLACED, SMALL_RUN
from tests.helpers import assert_same_but_for_rounding, lines_of, state_of


def test_the_configuration_names_the_entries_of_the_table() -> None:
    assert typing.get_args(ObjectiveName) == tuple(OBJECTIVES)


def test_an_unknown_prediction_is_one_sentence(fails) -> None:
    assert "--training.objective last: use one of mlm" in fails(main, "--training.objective=last")


@pytest.mark.medium
def test_a_run_begun_before_the_key_was_there_resumes(pretrained: Path, corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(pretrained, run)
    shutil.rmtree(run / "checkpoints" / "6")
    (run / "results.json").unlink()
    config = yaml.safe_load((run / "config.yaml").read_text())
    del config["training"]["objective"]
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert main([f"--data.train={corpus}", f"--output_dir={run}", *SMALL_RUN]) == 0
    assert lines_of(run) == lines_of(pretrained)


@pytest.mark.medium
def test_a_sample_begins_with_a_whole_word(pretrained: Path) -> None:
    """Rows may begin within a word, the rest of which would be read as other tokens."""
    model = bert.load(pretrained)
    vocab = model.tokenizer.get_vocab()
    word = next(token for token in sorted(vocab) if token.isalpha() and len(token) > 2)
    rest = next(id for token, id in sorted(vocab.items()) if token.startswith("##"))

    class Rows:
        """One row: [CLS], the rest of a word, 16 words and [SEP]."""

        def __len__(self) -> int:
            return 1

        def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
            ids = np.array([[vocab["[CLS]"], rest, *[vocab[word]] * 16, vocab["[SEP]"]]])
            return {"input_ids": ids, "segment_a_length": np.array([ids.shape[1]])}

    [sample] = fill_some_masks(model, Rows())
    assert sample["text"] == " ".join([word] * 8 + ["[MASK]"] + [word] * 7)
    assert sample["truth"] == word


@pytest.mark.medium
def test_samples_are_whole_sentences_of_the_first_rows_that_have_one(pretrained: Path) -> None:
    """Guesses are words, and the model does not influence the choice."""
    model = bert.load(pretrained)
    vocab = model.tokenizer.get_vocab()
    word, other = [token for token in sorted(vocab) if token.isalpha() and len(token) > 1][:2]
    without, short = [word] * 17, [word, ".", *[word] * 8, ".", *[word] * 6]
    sentence = [*[word] * 3, ".", *[word] * 5, other, *[word] * 4, ".", *[word] * 2]

    class Rows:
        """Rows of 17 tokens between [CLS] and [SEP]."""

        rows = (without, short, sentence, without, sentence, without)

        def __len__(self) -> int:
            return len(self.rows)

        def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
            ids = [[vocab["[CLS]"], *map(vocab.get, self.rows[index]), vocab["[SEP]"]] for index in indices]
            return {"input_ids": np.array(ids), "segment_a_length": np.array([19] * len(ids))}

    samples = fill_some_masks(model, Rows())
    whole = " ".join([word] * 5 + ["[MASK]"] + [word] * 4) + "."
    fallback = " ".join([word] * 8 + ["[MASK]"] + [word] * 8)
    assert [sample["text"] for sample in samples] == [whole, whole, fallback]
    assert [sample["truth"] for sample in samples] == [other, other, word]
    for sample in samples:
        tokens = [guess["token"] for guess in sample["guesses"]]
        [ranked] = model.fill_mask(sample["text"], top_k=len(vocab))
        assert tokens == [guess.token for guess in ranked[:50] if guess.token.isalpha()][:3]


RUNS = {"continued": NEXT, "permuted": PERMUTED, "detected": REPLACED}
"""Options of the runs with other objectives, by fixture."""
MICRO_BATCHES = "--training.gradient_accumulation_steps=4"
MESH = ("--training.mesh=1x2x1", "--training.remat=full")
CUDNN = ("--training.attention_implementation=cudnn", "--training.dtype=bfloat16")


@pytest.fixture
def train(corpus: Path, tmp_path: Path):
    """Runs or resumes a run in a folder, and returns the folder."""

    def run(*options: str) -> Path:
        assert main([f"--data.train={corpus}", f"--output_dir={tmp_path / 'run'}", *SMALL_RUN, *options]) == 0
        return tmp_path / "run"

    return run


@pytest.mark.medium
@pytest.mark.parametrize("fixture", ["continued", "detected", pytest.param("permuted", marks=pytest.mark.slow)])
def test_a_run_resumes_bit_for_bit(fixture: str, request, tmp_path: Path, train) -> None:
    whole = request.getfixturevalue(fixture)
    run = shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(run / "checkpoints" / "6")
    (run / "results.json").unlink()
    train(*RUNS[fixture])
    assert lines_of(run) == lines_of(whole)
    jax.tree.map(np.testing.assert_array_equal, state_of(run), state_of(whole))


@pytest.mark.medium
@pytest.mark.parametrize(
    ("fixture", "changes"),
    [
        ("continued", (MICRO_BATCHES,)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (
            ("continued", MESH),
            ("permuted", (MICRO_BATCHES,)),
            ("permuted", MESH[:1]),
            ("detected", (MICRO_BATCHES,)),
            ("detected", MESH),
        )),
    ],
)  # fmt: skip
def test_a_run_over_devices_or_micro_batches_ends_the_same(fixture, changes, request, train, monkeypatch) -> None:
    whole = request.getfixturevalue(fixture)
    monkeypatch.setenv("BERT_NUM_DEVICES", "2")
    assert_same_but_for_rounding(train(*RUNS[fixture], *changes), whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("objective", "options"),
    [
        (NEXT, ["--model.prediction_transform=true", "--model.prediction_bias=true", "--model.embedding_size=8"]),
        (NEXT, ["--training.preset=fast"]),
        (NEXT, ["--training.scan_layers=true", "--training.pad_vocab_to_multiple_of=64"]),
        (NEXT, ["--data.input_format=full_sentences", "--model.tie_word_embeddings=false",
                "--model.pre_layer_norm=false"]),
        (PERMUTED, ["--data.input_format=doc_sentences", "--data.packing=true",
                    "--model.relative_attention_buckets=8"]),
        (PERMUTED, ["--training.preset=fast", "--data.whole_word_masking=true"]),
        (PERMUTED, ["--training.scan_layers=true", "--data.input_format=blocks",
                    "--model.position_embedding_type=rotary"]),
        (REPLACED, ["--data.input_format=doc_sentences", "--data.packing=true"]),
        (REPLACED, ["--training.preset=fast"]),
        (REPLACED, ["--model.embedding_size=null", "--model.pre_layer_norm=true", "--model.tie_word_embeddings=false"]),
        (REPLACED, ["--training.scan_layers=true", "--training.pad_vocab_to_multiple_of=64",
                    "--data.whole_word_masking=true"]),
    ],
)  # fmt: skip
def test_other_options_train_as_well(train, objective: list[str], options: list[str]) -> None:
    assert all(np.isfinite(line["loss"]) for line in lines_of(train(*objective, *options)))


@pytest.mark.parametrize(
    ("objective", "options", "words"),
    [
        (NEXT, ["--model.causal=false"], "model.causal is false, training.objective is clm"),
        (NEXT, ["--training.objective=mlm"], "model.causal is true, training.objective is mlm"),
        (NEXT, ["--training.objective=rtd"], "model.causal is true, training.objective is rtd"),
        (NEXT, ["--data.input_format=nsp"], "data.input_format is nsp, training.objective is clm"),
        (NEXT, ["--data.packing=true"], "data.packing is true, data.input_format is blocks"),
        (NEXT, ["--data.whole_word_masking=true"], "data.whole_word_masking is true, training.objective"),
        (NEXT, ["--data.max_predictions_per_sequence=5"], "data.max_predictions_per_sequence is 5, training.objective"),
        (NEXT, ["--training.label_smoothing=1"], "training.label_smoothing is 1.0"),
        (NEXT, ["--data.language=german"], "data.language"),
        ([], ["--training.label_smoothing=0.1"], "training.label_smoothing is 0.1, training.objective is mlm"),
        (PERMUTED, ["--data.input_format=nsp"], "data.input_format is nsp, training.objective is plm"),
        (PERMUTED, ["--model.halting=0.01"], "model.halting is 0.01, training.objective is plm"),
        (PERMUTED, ["--model.causal=true"], "model.causal is true, training.objective is plm"),
        (PERMUTED, [*CUDNN, "--model.attention_probs_dropout_prob=0"],
         "training.objective is plm, training.attention_implementation cudnn"),
        (REPLACED, ["--data.input_format=nsp"], "data.input_format is nsp, training.objective is rtd"),
        (REPLACED, ["--electra.generator_hidden_size=0"], "electra.generator_hidden_size is 0.0"),
        (REPLACED, ["--electra.generator_hidden_size=1.5"], "electra.generator_hidden_size is 1.5"),
        (REPLACED, ["--electra.generator_hidden_size=0.01"], "generator_hidden_size is 0.01, model.hidden_size is 16"),
        (REPLACED, ["--model.prediction_transform=false", "--model.embedding_size=16"],
         "model.prediction_transform is false, training.objective is rtd"),
        (REPLACED, ["--model.position_embedding_type=rotary", "--electra.generator_hidden_size=0.19"],
         "heads of 3 features, model.position_embedding_type is rotary"),
        (REPLACED, ["--model.position_embedding_type=rotary", "--model.rotary_scaling=ntk",
                    "--model.rotary_scaling_factor=2", "--electra.generator_hidden_size=0.125"],
         "heads that rotate 2 features, but ntk needs 4"),
        (REPLACED, ["--electra.disc_weight=0"], "electra.disc_weight is 0.0"),
        (REPLACED, ["--electra.disc_weight=nan"], "electra.disc_weight is nan"),
        (REPLACED, ["--electra.generator=0.5"], "--electra.generator"),
        (REPLACED, ["--training.objective=mlm"], "electra.generator_hidden_size is 0.5, training.objective is mlm"),
    ],
)  # fmt: skip
def test_settings_that_cannot_work_are_one_sentence(corpus, tmp_path, fails, objective, options, words) -> None:
    settings = [f"--data.train={corpus}", f"--output_dir={tmp_path / 'run'}", *SMALL_RUN, *objective, *options]
    error = fails(main, *settings)
    assert all(part in error for part in words.split(", "))
