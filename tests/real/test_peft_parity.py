"""Adapters of PEFT, read and written here, give the outputs of PEFT's models."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import traverse_util

import bert
from bert.config import LoraConfig
from bert.interchange import families
from bert.interchange.modules import build_module
from bert.interchange.writers.peft import Adapters, export
from bert.model.linear import FrozenWeights
from bert.training.finetuning.initialization import trained_params
from tests.real.family_cases import CASES, GPT2
from tests.real.hf_models import ARGUMENTS, drawn

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


EXPORTED = [
    ("bert, gelu", "BertForSequenceClassification", ("query", "value")),
    ("bert, gelu", "BertForTokenClassification", ("query", "key", "value", "output")),
    ("bert, gelu", "BertForQuestionAnswering", ("query",)),
    ("roberta", "BertForSequenceClassification", ("query", "value")),
    ("distilbert, gelu", "BertForSequenceClassification", ("query", "output")),
    ("deberta", "BertForSequenceClassification", ("query", "value")),
    ("modernbert", "BertForTokenClassification", ("query", "value", "output")),  # one module of query, key and value
    ("gpt2", "BertForCausalLM", ("query", "value")),  # transposed weights
]


def random_adapters(model: bert.Pretrained, projections: tuple[str, ...], base: str) -> tuple[Adapters, Any]:
    """Returns adapters as after training, of rank 4 and alpha 6, and the parameters with them."""
    config = LoraConfig(rank=4, alpha=6.0, projections=list(projections))
    trained = traverse_util.flatten_dict(jax.device_get(trained_params(model.params, config, seed=0)))
    random = np.random.default_rng(0)
    moved = {path: array + 0.1 * random.normal(size=array.shape).astype(np.float32) for path, array in trained.items()}
    tree = traverse_util.unflatten_dict(moved)
    frozen = FrozenWeights(model.params, config.scale)
    return Adapters(frozen, tree, 4, 6.0, base), frozen.merge(tree)


@pytest.mark.parametrize(("case", "architecture", "projections"), EXPORTED)
def test_an_exported_adapter_gives_our_outputs_in_peft(
    case: str, architecture: str, projections: tuple[str, ...], tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    family, settings = (families.GPT2, GPT2) if case == "gpt2" else (CASES[case].family, CASES[case].settings)
    reference = drawn(tmp_path / "base", architecture, family.model_type, **settings)
    base = bert.load(tmp_path / "base")
    adapters, params = random_adapters(base, projections, str(tmp_path / "base"))
    model = dataclasses.replace(base, params=params)
    export(model, tmp_path / "adapter", lambda text: None, adapters)
    adapted = peft.PeftModel.from_pretrained(reference, tmp_path / "adapter").eval()
    columns = ("input_ids", "attention_mask")
    random = np.random.default_rng(1)
    ids = random.integers(5, reference.config.vocab_size, (4, 20))
    batch = {"input_ids": ids, "token_type_ids": np.zeros_like(ids), "attention_mask": np.ones_like(ids)}
    with torch.no_grad():
        outputs = adapted(**{name: torch.tensor(batch[name]) for name in columns})
    theirs = (
        torch.stack([outputs.start_logits, outputs.end_logits], -1) if "start_logits" in outputs else outputs.logits
    )
    unchanged, mine, again = (
        np.asarray(build_module(each).apply({"params": each.params}, *(batch[name] for name in ARGUMENTS)))
        for each in (base, model, bert.load(tmp_path / "base", adapter=tmp_path / "adapter"))
    )
    np.testing.assert_allclose(mine, theirs.numpy(), atol=2e-4)
    np.testing.assert_allclose(again, mine, atol=1e-5)
    assert np.abs(unchanged - mine).max() > 0.01


def test_projections_that_files_join_head_by_head_are_rejected(tmp_path: Path) -> None:
    case = CASES["deberta v1, as published"]
    drawn(tmp_path / "base", "BertForTokenClassification", case.family.model_type, **case.settings)
    base = bert.load(tmp_path / "base")
    adapters, params = random_adapters(base, ("query",), str(tmp_path / "base"))
    with pytest.raises(bert.UserError, match=r"DeBERTa's files have no separate .*in_proj.query, .*: export it as hf"):
        export(dataclasses.replace(base, params=params), tmp_path / "adapter", lambda text: None, adapters)


@pytest.mark.parametrize("module", ["in_proj", "pos_q_proj"])
def test_an_adapter_of_a_deberta_is_read(module: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    case = CASES["deberta v1, as published"]
    reference = drawn(tmp_path / "base", "BertForTokenClassification", case.family.model_type, **case.settings)
    config = peft.LoraConfig(r=4, target_modules=[module], task_type="TOKEN_CLS", init_lora_weights=False)
    adapted = peft.get_peft_model(reference, config).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    ids = np.random.default_rng(1).integers(5, reference.config.vocab_size, (4, 20))
    batch = {"input_ids": ids, "token_type_ids": np.zeros_like(ids), "attention_mask": np.ones_like(ids)}
    with torch.no_grad():
        expected = adapted(input_ids=torch.tensor(ids), attention_mask=torch.ones(4, 20)).logits.numpy()
    model, base = bert.load(tmp_path / "base", adapter=tmp_path / "adapter"), bert.load(tmp_path / "base")
    ours, unchanged = (
        np.asarray(build_module(each).apply({"params": each.params}, *(batch[name] for name in ARGUMENTS)))
        for each in (model, base)
    )
    np.testing.assert_allclose(ours, expected, atol=2e-4)
    assert np.abs(unchanged - ours).max() > 0.01


def test_several_adapters_share_the_base_model(shared: Path, tmp_path: Path) -> None:
    """Two adapters of one loaded model give the outputs of PEFT with each of them."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    source = shared / "models" / "all-MiniLM-L6-v2"
    base = bert.load(source)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    inputs = tokenizer(TEXTS, padding=True, return_tensors="pt")
    loaded = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        plain = transformers.AutoModelForSequenceClassification.from_pretrained(source, num_labels=3)
        theirs = peft.get_peft_model(plain, peft.LoraConfig(task_type="SEQ_CLS", r=4, lora_alpha=8)).eval()
        with torch.no_grad():
            for parameter in theirs.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.05 * torch.randn_like(parameter))
            expected = theirs(**inputs).logits.numpy()
        theirs.save_pretrained(tmp_path / str(seed))
        loaded.append((bert.load(base, adapter=tmp_path / str(seed)), expected))
    for model, expected in loaded:
        found = model.apply(*(inputs[name].numpy() for name in ("input_ids", "token_type_ids", "attention_mask")))
        np.testing.assert_allclose(np.asarray(found), expected, atol=1e-4)
    arrays = [array for model, _ in loaded for array in jax.tree.leaves(model.params)]
    total = sum(
        array.nbytes for array in {id(array): array for array in (*arrays, *jax.tree.leaves(base.params))}.values()
    )
    whole = sum(array.nbytes for array in jax.tree.leaves(base.params))
    assert total < 1.2 * whole
