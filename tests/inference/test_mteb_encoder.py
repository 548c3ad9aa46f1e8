"""`bert.MtebEncoder` without mteb: texts in the order of the batches, the prompts, and sentences on what is wrong."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import bert
from bert.model.pooling import Pooling
from bert.model.pretraining import BertForPreTraining
from tests.tiny_models import CONFIG, model_of


@pytest.fixture
def model(tmp_path: Path) -> bert.Pretrained:
    pooling = Pooling(query_prompt="find ", document_prompt="page ")
    return dataclasses.replace(model_of(tmp_path, BertForPreTraining(CONFIG), None), pooling=pooling)


@pytest.mark.medium
def test_batches_become_one_array_of_embeddings(model: bert.Pretrained, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: SimpleNamespace())
    encoder, batches = bert.MtebEncoder(model), [{"text": ["ba", "ko ri"]}, {"text": ["tu"]}]
    for prompt in (None, "query", "document"):
        embeddings = encoder.encode(
            batches, task_metadata=None, hf_split="test", hf_subset="default", batch_size=4,
            prompt_type=None if prompt is None else SimpleNamespace(value=prompt),
        )  # fmt: skip
        np.testing.assert_array_equal(embeddings, model.embed(["ba", "ko ri", "tu"], 4, prompt))


def test_what_is_wrong_is_one_sentence(model: bert.Pretrained, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(bert.UserError, match=r"mteb is not installed.*'mteb>=2'"):
        bert.MtebEncoder(model)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: SimpleNamespace())
    with pytest.raises(bert.UserError, match="name is 'mine': pass organization/model"):
        bert.MtebEncoder(model, "mine")
