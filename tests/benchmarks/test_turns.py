"""Comparisons in turns: what is measured is kept, what failed is tried again, and settings are not mixed."""

import argparse
import json
from pathlib import Path

import pytest

from benchmarks import turns


def given(output: Path, rounds: int = 2, **settings: int) -> argparse.Namespace:
    return argparse.Namespace(output=output, rounds=rounds, sides=["a"], worker=None, **settings)


def counted(folder: Path, name: str) -> list[str]:
    """A side that fails the first time and then prints how often it has run."""
    log = str(folder / name)
    code = f"f = open({log!r}, 'a+'); print(file=f); f.seek(0); n = len(f.readlines())"
    return ["-c", f"{code}; assert n > 1; print('{{\"seconds\": %d}}' % n)"]


def test_failures_are_tried_again_and_measurements_are_not(tmp_path: Path, capsys) -> None:
    sides = {name: counted(tmp_path, name) for name in ("a", "b")}
    results = turns.in_turns(sides, given(tmp_path / "out.json"))
    assert "error" in results["sides"]["a"][0]
    assert results["sides"]["a"][1] == {"seconds": 2}
    assert "| a | 1 | 2 |" in turns.table(results, ("seconds",))
    assert "AssertionError" in turns.table(results, ("seconds",))
    again = turns.in_turns(sides, given(tmp_path / "out.json"))
    assert again["sides"] == {name: [{"seconds": 3}, {"seconds": 2}] for name in sides}
    assert json.loads((tmp_path / "out.json").read_text()) == again
    assert turns.in_turns(sides, given(tmp_path / "out.json")) == again
    assert turns.table(again, ("seconds",), "a").splitlines()[-1] == "| b | 2 | 2.5 | 1.00 |"


@pytest.mark.parametrize("change", ["size", "pages"])
def test_measurements_of_other_settings_are_refused(tmp_path: Path, monkeypatch, change: str) -> None:
    sides = {"a": ["-c", "print('{\"seconds\": 1}')"]}
    turns.in_turns(sides, given(tmp_path / "out.json", 1, width=256))
    if change == "pages":
        monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=0")
    with pytest.raises(SystemExit, match=r"other settings.*--output"):
        turns.in_turns(sides, given(tmp_path / "out.json", 1, width=256 if change == "pages" else 384))
