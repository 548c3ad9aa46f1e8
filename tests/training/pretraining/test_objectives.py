"""The table of training.objective."""

import shutil
import typing
from pathlib import Path

import numpy as np
import pytest
import yaml

import bert
from bert.commands.pretrain import main
from bert.config.training import ObjectiveName
from bert.training.pretraining.objectives import OBJECTIVES, fill_some_masks
from tests.conftest import SMALL_RUN
from tests.helpers import lines_of


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
