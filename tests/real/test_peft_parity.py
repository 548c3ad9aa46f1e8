"""Adapters of PEFT, read here, give the outputs of PEFT's models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bert

pytestmark = pytest.mark.real

torch = pytest.importorskip("torch", reason="needs the extra `torch`")
transformers = pytest.importorskip("transformers", reason="needs the extra `torch`")

TEXTS = ["a man plays the guitar", "someone makes music", "the shares fell"]
KINDS = {
    "SEQ_CLS": ("AutoModelForSequenceClassification", {"target_modules": ["query", "value", "dense"]}),
    "TOKEN_CLS": (
        "AutoModelForTokenClassification",
        {"target_modules": ["key"], "use_rslora": True, "bias": "lora_only"},
    ),
    "QUESTION_ANS": (
        "AutoModelForQuestionAnswering",
        {"target_modules": ["query", "value"], "rank_pattern": {"query": 3}},
    ),
    "FEATURE_EXTRACTION": ("AutoModel", {"target_modules": ["query", "dense"], "bias": "all"}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_gives_the_outputs_of_peft(kind: str, shared: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    torch.manual_seed(0)
    source = shared / "models" / "all-MiniLM-L6-v2"
    name, settings = KINDS[kind]
    labels = {"num_labels": 3} if kind.endswith("CLS") else {}
    base = getattr(transformers, name).from_pretrained(source, **labels)
    model = peft.get_peft_model(base, peft.LoraConfig(task_type=kind, r=4, lora_alpha=8, **settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    model.peft_config["default"].base_model_name_or_path = str(source)
    model.save_pretrained(tmp_path / "adapter")
    ours = bert.load(tmp_path / "adapter")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    inputs = tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        expected = model(**inputs)
    mask = inputs["attention_mask"].numpy().astype(bool)
    found: Any = ours.module.apply(
        {"params": ours.params["bert"] if kind == "FEATURE_EXTRACTION" else ours.params},
        *(inputs[key].numpy() for key in ("input_ids", "token_type_ids", "attention_mask")),
    )
    if kind == "FEATURE_EXTRACTION":
        pairs = [(found.last_hidden_state, expected.last_hidden_state)]
    elif kind == "QUESTION_ANS":
        pairs = [(found[..., 0], expected.start_logits), (found[..., 1], expected.end_logits)]
    else:
        pairs = [(found, expected.logits)]
    for mine, theirs in pairs:
        rows = slice(None) if kind == "SEQ_CLS" else mask
        np.testing.assert_allclose(np.asarray(mine)[rows], theirs.numpy()[rows], atol=1e-4)
