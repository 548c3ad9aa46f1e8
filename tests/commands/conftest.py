"""Recipes for the tests of arguments."""

import pytest


@pytest.fixture
def recipes(tmp_path, monkeypatch):
    """A folder with three recipes, and an empty working directory."""
    folder = tmp_path / "configs"
    folder.mkdir()
    (folder / "tiny.yaml").write_text("data:\n  train: 'docstrings:'\ntraining:\n  steps: 1e3\n")
    (folder / "base.yaml").write_text("data: {train: x.txt}\nmodel: {hidden_size: 768}\ntraining: {steps: 1_000_000}\n")
    (folder / "sst2.yaml").write_text("task: sst2\n")
    monkeypatch.setattr("bert.config.recipe_folder", lambda: folder)
    monkeypatch.setattr("bert.config.sources.recipe_folder", lambda: folder)
    monkeypatch.chdir(tmp_path)
