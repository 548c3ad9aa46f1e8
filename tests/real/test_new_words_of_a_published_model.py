"""all-MiniLM-L6-v2 trains further with words that it lacks."""

import json

import numpy as np
import pytest

import bert
from bert.commands.corpus import tokenizer_command as extend
from bert.commands.pretrain import main as pretrain
from bert.tokenizer.vocabulary import load_tokenizer

pytestmark = pytest.mark.real


def test_a_published_model_goes_on_with_new_words(shared, tmp_path, capsys) -> None:
    """A thousand words of English Wikipedia, and two steps of masked words too small to move a row."""
    folder = shared / "models/all-MiniLM-L6-v2"
    text = (shared / "data/pretrain/enwiki/valid.txt").read_text(encoding="utf-8")[:100_000]
    (tmp_path / "corpus.txt").write_text(text, encoding="utf-8")
    data, longer = f"--data.train={tmp_path / 'corpus.txt'}", tmp_path / "longer"
    assert extend([data, f"--output={longer}", f"--tokenizer.path={folder}", "--extend=1010"]) == 0
    source, tokenizer = bert.load(folder), load_tokenizer(longer)
    new = sorted(tokenizer.get_vocab().keys() - source.tokenizer.get_vocab().keys(), key=tokenizer.token_to_id)
    capsys.readouterr()
    arguments = [data, f"--init={folder}", f"--tokenizer.path={longer}", f"--output_dir={tmp_path / 'run'}"]
    arguments += ["--data.input_format=full_sentences", "--data.sequence_length=32"]
    arguments += ["--data.max_predictions_per_sequence=5", "--data.eval_fraction=0.02", "--training.batch_size=4"]
    arguments += ["--training.steps=2", "--training.checkpoint_every=2", "--optimizer.learning_rate=1e-12"]
    arguments += ["--optimizer.warmup_steps=0", "--transfer=null"]
    assert pretrain(arguments) == 0  # the default recipe's sizes give way to the model's
    said = capsys.readouterr().out
    assert f"{len(new):,} new rows seeded from the mean of their old tokens" in said
    assert "randomly initialized: predictions" in said
    before, after = (
        model.params["bert"]["embeddings"]["word"]["embedding"] for model in (source, bert.load(tmp_path / "run"))
    )
    numbers = [tokenizer.token_to_id(word) for word in new]
    assert min(numbers) < 999, "the [unused] slots come first"
    assert len(after) == max(len(before), max(numbers) + 1)
    old = np.setdiff1d(np.arange(len(before)), numbers)
    np.testing.assert_allclose(after[old], before[old], rtol=0, atol=1e-9)
    for word, number in zip(new, numbers, strict=True):
        tokens = source.tokenizer.encode(word, add_special_tokens=False).ids
        np.testing.assert_allclose(after[number], before[tokens].mean(axis=0), rtol=0, atol=1e-7)
    assert np.isfinite(json.loads((tmp_path / "run" / "results.json").read_text())["eval"]["mlm_loss"])
