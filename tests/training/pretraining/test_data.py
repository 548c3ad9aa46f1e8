"""What a pretraining run says of its data before it reads them."""

from pathlib import Path

import pytest

from bert.config import DataConfig
from bert.data.corpus.documents import corpus_files
from bert.training.pretraining.data import _warn_of_trained_files


@pytest.mark.parametrize("streaming", [False, True])
def test_a_held_out_file_that_is_trained_on_is_told(streaming: bool, tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt", "held.txt"):
        (tmp_path / name).write_text("One. Two.\n\nThree. Four.\n")
    said: list[str] = []
    for train, held_out in (("*.txt", "held.txt"), ("a.txt", "held.txt"), ("*.txt", "../*/[ab].txt")):
        data = DataConfig(train=[str(tmp_path / train)], streaming=streaming)
        _warn_of_trained_files(corpus_files(str(tmp_path / held_out)), data, said.append)
    first, second = said
    assert first == (
        f"warning: {tmp_path / 'held.txt'} is in data.train as well: held-out scores are of text that was trained on"
    )
    assert "a.txt and 1 more of data.eval are in data.train as well" in second
