"""The README's first example prints what the README shows."""

import re
from pathlib import Path

import pytest

import bert

pytestmark = pytest.mark.real

README = Path(__file__).parents[2] / "README.md"


def test_the_first_example_prints_what_the_readme_shows(shared: Path, capsys, monkeypatch) -> None:
    code, printed = re.search(
        r"```python\n(.*?)```\n\n```\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL
    ).groups()
    load = bert.load
    monkeypatch.setattr(bert, "load", lambda name: load(shared / "models" / Path(name).name, print_nothing))
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out == printed


def print_nothing(text: str) -> None: ...
