"""Real data: $BERT_SHARED, or the folder shared next to the clone."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of PyTorch, before its import: there is a process for each core already


@pytest.fixture(scope="session")
def shared() -> Path:
    folder = Path(os.environ.get("BERT_SHARED") or Path(__file__).parents[3] / "shared")
    if not (folder / "data").is_dir():
        pytest.skip(f"{folder} does not exist: set BERT_SHARED to the folder of the real data")
    return folder


@pytest.fixture(scope="session")
def mrpc_texts(shared) -> tuple[list[str], list[tuple[str, str]]]:
    """The beginnings of eight of MRPC's sentences, and of eight pairs."""
    lines = (shared / "data/glue/MRPC/dev.tsv").read_text("utf-8-sig").splitlines()[1:9]
    pairs = [
        tuple(" ".join(text.split()[: 3 + number % 4]) for text in line.split("\t")[3:])
        for number, line in enumerate(lines)
    ]
    return [first for first, _ in pairs], pairs
