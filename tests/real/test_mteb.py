"""Models run by mteb on tasks that need no download: its scores equal our own similarities and searches."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import spearmanr

import bert
from bert.commands.benchmark import benchmark_command
from bert.inference import load
from bert.metrics import retrieval
from bert.model.pooling import Pooling
from bert.model.pretraining import BertForPreTraining
from tests.tiny_models import CONFIG, model_of

pytestmark = pytest.mark.real

FIRST = ["ba ko", "ri", "tu lo mi", "a b c d", "sa"]
SECOND = ["ko ba", "ri ri", "ne", "a b d", "du du du"]
GRADES = [4.0, 5.0, 0.5, 3.0, 1.0]
FACTS = {
    "description": "A few made-up words.", "reference": None, "dataset": {"path": "none", "revision": "1"},
    "category": "t2t", "eval_splits": ["test"], "eval_langs": ["eng-Latn"], "date": ("2026-01-01", "2026-01-02"),
    "dialect": [], "domains": [], "task_subtypes": [], "license": "not specified", "annotations_creators": "derived",
    "modalities": ["text"], "sample_creation": "created", "bibtex_citation": "",
}  # fmt: skip


@pytest.fixture(scope="module")
def library() -> Any:
    return pytest.importorskip("mteb", reason="mteb is not installed")


@pytest.fixture
def model(tmp_path: Path) -> bert.Pretrained:
    pooling = Pooling(normalize=True, query_prompt="find ", document_prompt="page ")
    return dataclasses.replace(model_of(tmp_path, BertForPreTraining(CONFIG), None), pooling=pooling)


def words_task() -> Any:
    """A task of word pairs with grades."""
    from datasets import Dataset, DatasetDict
    from mteb.abstasks.sts import AbsTaskSTS
    from mteb.abstasks.task_metadata import TaskMetadata

    class Words(AbsTaskSTS):
        metadata = TaskMetadata(type="STS", name="Words", main_score="cosine_spearman", **FACTS)

        def load_data(self, **settings: Any) -> None:
            rows = {"sentence1": FIRST, "sentence2": SECOND, "score": GRADES}
            self.dataset, self.data_loaded = DatasetDict({"test": Dataset.from_dict(rows)}), True

    return Words()


def evaluated(library: Any, task: Any, encoder: Any) -> dict[str, float]:
    found = library.evaluate(encoder, task, cache=None, co2_tracker=False, show_progress_bar=False)
    assert found.model_name == encoder.mteb_model_meta.name
    [scores] = found.task_results[0].scores["test"]
    return scores


def test_similarities_are_ours(library: Any, model: bert.Pretrained) -> None:
    scores = evaluated(library, words_task(), bert.MtebEncoder(model))
    cosines = np.diagonal(model.similarity(FIRST, SECOND))
    assert scores["cosine_spearman"] == pytest.approx(spearmanr(cosines, GRADES).statistic, abs=1e-6)
    assert scores["pearson"] == pytest.approx(np.corrcoef(cosines, GRADES)[0, 1], abs=1e-4)


def test_a_search_has_our_prompts_and_our_scores(library: Any, model: bert.Pretrained) -> None:
    from datasets import Dataset
    from mteb.abstasks.retrieval import AbsTaskRetrieval
    from mteb.abstasks.task_metadata import TaskMetadata

    class Pages(AbsTaskRetrieval):
        metadata = TaskMetadata(type="Retrieval", name="Pages", main_score="ndcg_at_10", **FACTS)

        def load_data(self, **settings: Any) -> None:
            queries = [{"id": f"q{place}", "text": text} for place, text in enumerate(FIRST)]
            corpus = [{"id": f"d{place}", "text": text, "title": ""} for place, text in enumerate(SECOND)]
            split = {"queries": Dataset.from_list(queries), "corpus": Dataset.from_list(corpus), "top_ranked": None}
            split["relevant_docs"] = {f"q{place}": {f"d{place}": 1} for place in range(len(FIRST))}
            self.dataset, self.data_loaded = {"default": {"test": split}}, True

    encoder = bert.MtebEncoder(model)
    scores = evaluated(library, Pages(), encoder)
    found = model.search(FIRST, SECOND)
    ranks = np.array([1 + row.tolist().index(place) for place, row in enumerate(found.indices)])
    own = retrieval.retrieval_scores(ranks, np.arange(len(FIRST)), np.arange(len(FIRST)))
    for name in ("ndcg_at_10", "mrr_at_10"):
        assert scores[name] == pytest.approx(own[name], abs=1e-5)
    without = dataclasses.replace(model, pooling=Pooling(normalize=True))
    assert not np.array_equal(found.scores, without.search(FIRST, SECOND).scores)


def test_results_are_filed_by_name_and_weights(library: Any, model: bert.Pretrained) -> None:
    meta = bert.MtebEncoder(model).mteb_model_meta
    assert (meta.name, meta.embed_dim, meta.max_tokens) == ("bert-jax/made", 8, 16)
    assert bert.MtebEncoder(model, "me/mine").mteb_model_meta.name == "me/mine"
    assert bert.MtebEncoder(model).mteb_model_meta.revision == meta.revision
    unnormalized = dataclasses.replace(model, pooling=Pooling())
    assert bert.MtebEncoder(unnormalized).mteb_model_meta.revision != meta.revision
    model.params["bert"]["pooler"]["bias"] += 1
    assert bert.MtebEncoder(model).mteb_model_meta.revision != meta.revision


def test_the_command_prints_the_scores_and_keeps_them(
    library: Any, model: bert.Pretrained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def tasks_named(tasks: list[str]) -> list[Any]:
        return [{"Words": words_task}[name]() for name in tasks]  # a KeyError for other names, as in mteb

    monkeypatch.setattr(library, "get_tasks", tasks_named)
    monkeypatch.setattr(load, "load", lambda path, log: model)
    arguments = ["mteb", str(tmp_path), "--tasks=Words", "--output_dir", str(tmp_path / "scores")]
    assert benchmark_command(arguments) == 0
    cosines = np.diagonal(model.similarity(FIRST, SECOND))
    expected = 100 * spearmanr(cosines, GRADES).statistic
    assert capsys.readouterr().out.splitlines()[-1].split() == ["Words", f"{expected:.1f}"]
    assert list((tmp_path / "scores").rglob("Words.json"))
    with pytest.raises(bert.UserError, match="--tasks: Wrods"):
        benchmark_command(["mteb", str(tmp_path), "--tasks=Wrods"])
