"""Adapters of PEFT, read and written here, give the outputs of PEFT's models."""

from __future__ import annotations

import dataclasses
import json
import shutil
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
from tests.interchange.hf_folders import as_first_published, publish_adapters
from tests.real.family_cases import CASES, GPT2
from tests.real.hf_models import ARGUMENTS, HOSTILE, drawn

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


def train(model: Any, deviation: float) -> None:
    """Moves the trained parameters from their initial values at random."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(deviation * torch.randn_like(parameter))


def assert_equal_logits(ours: Any, theirs: Any) -> None:
    ids = np.arange(12).reshape(2, 6)
    with torch.no_grad():
        expected = theirs(torch.tensor(ids)).logits.numpy()
    found = ours.module.apply({"params": ours.params}, ids)
    found = found[0] if isinstance(found, tuple) else found
    np.testing.assert_allclose(np.asarray(found)[..., : expected.shape[-1]], expected, atol=1e-4)


def test_one_adapter_of_layers_with_inputs_first_and_outputs_first(tmp_path: Path) -> None:
    """PEFT saves one ``fan_in_fan_out`` for GPT-2's Conv1D and the decoder."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    torch.manual_seed(0)
    base = drawn(tmp_path / "base", "BertForCausalLM", "gpt2", **{**GPT2, "tie_word_embeddings": False})
    lora = peft.LoraConfig(r=4, target_modules=r".*attn\.c_(proj|attn)|lm_head")
    model = peft.get_peft_model(base, lora).eval()
    train(model, 0.1)
    model.save_pretrained(tmp_path / "adapter")
    assert not json.loads((tmp_path / "adapter/adapter_config.json").read_text())["fan_in_fan_out"]
    assert_equal_logits(bert.load(tmp_path / "base", adapter=tmp_path / "adapter"), model)


@pytest.mark.parametrize("name", ["qwen3", "bert"])
def test_a_tied_decoder_keeps_its_matrix_if_the_word_embeddings_are_replaced(name: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    torch.manual_seed(0)
    architecture = "BertForCausalLM" if name == "qwen3" else "BertForMaskedLM"
    settings = CASES[name].settings if name in CASES else {}
    base = drawn(tmp_path / "base", architecture, name, **{**settings, "tie_word_embeddings": True})
    words = {"qwen3": "embed_tokens", "bert": "word_embeddings"}[name]
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "query"], modules_to_save=[words])
    model = peft.get_peft_model(base, lora).eval()
    train(model, 0.1)
    model.save_pretrained(tmp_path / "adapter")
    assert_equal_logits(bert.load(tmp_path / "base", adapter=tmp_path / "adapter"), model)


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_gives_the_outputs_of_peft(kind: str, shared: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    torch.manual_seed(0)
    source = shared / "models" / "all-MiniLM-L6-v2"
    name, settings = KINDS[kind]
    labels = {"num_labels": 3} if kind.endswith("CLS") else {}
    base = getattr(transformers, name).from_pretrained(source, **labels)
    model = peft.get_peft_model(base, peft.LoraConfig(task_type=kind, r=4, lora_alpha=8, **settings)).eval()
    train(model, 0.05)
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
    # Files fuse what the class has as separate modules.
    ("gte", "BertForSequenceClassification", ("query", "value", "output")),
    ("jina_embeddings_v3", "BertForSequenceClassification", ("query", "key", "output")),
    ("nomic_bert", "BertForSequenceClassification", ("value", "output")),
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


def assert_reads_adapter(adapted: Any, folder: Path) -> None:
    """Compares the logits of PEFT's model of the folder ``base`` with `bert.load`, with and without its adapter."""
    adapted.save_pretrained(folder / "adapter")
    ids = np.random.default_rng(1).integers(5, 400, (4, 20))
    batch = {"input_ids": ids, "token_type_ids": np.zeros_like(ids), "attention_mask": np.ones_like(ids)}
    with torch.no_grad():
        expected = adapted(input_ids=torch.tensor(ids), attention_mask=torch.ones(4, 20)).logits.numpy()
    model, base = bert.load(folder / "base", adapter=folder / "adapter"), bert.load(folder / "base")
    ours, unchanged = (
        np.asarray(build_module(each).apply({"params": each.params}, *(batch[name] for name in ARGUMENTS)))
        for each in (model, base)
    )
    np.testing.assert_allclose(ours, expected, atol=2e-4)
    assert np.abs(unchanged - ours).max() > 0.01


@pytest.mark.parametrize("module", ["in_proj", "pos_q_proj"])
def test_an_adapter_of_a_deberta_is_read(module: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    case = CASES["deberta v1, as published"]
    reference = drawn(tmp_path / "base", "BertForTokenClassification", case.family.model_type, **case.settings)
    config = peft.LoraConfig(r=4, target_modules=[module], task_type="TOKEN_CLS", init_lora_weights=False)
    adapted = peft.get_peft_model(reference, config).eval()
    assert_reads_adapter(adapted, tmp_path)


FUSED = {
    "gte": ["q_proj", "v_proj", "o_proj", "up_proj", "gate_proj", "down_proj"],
    "jina_embeddings_v3": ["q_proj", "k_proj", "o_proj", "fc1", "fc2", "word_embeddings"],
    "nomic_bert": ["q_proj", "v_proj", "o_proj", "up_proj", "gate_proj", "down_proj"],
}


@pytest.mark.parametrize("family", FUSED)
def test_an_adapter_of_modules_that_files_fuse_is_read(family: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    reference = drawn(tmp_path / "base", "BertForSequenceClassification", family, **CASES[family].settings)
    config = peft.LoraConfig(r=4, target_modules=FUSED[family], task_type="SEQ_CLS", init_lora_weights=False)
    adapted = peft.get_peft_model(reference, config).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_embedding_" in name:
                parameter.mul_(0.1)
    assert_reads_adapter(adapted, tmp_path)


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


ADAPTED = ["q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2", "dense", "word_embeddings", "token_type_embeddings"]
"""Targets of the published adapters of Jina embeddings v3."""

PROMPTS = {
    "retrieval.query": "Represent the query for retrieving evidence documents: ",
    "retrieval.passage": "Represent the document for retrieval: ",
    "separation": "",
    "classification": "",
    "text-matching": "",
}
"""The published tasks, with the prompt of each."""


def jina_with_adapters(folder: Path) -> tuple[dict[str, Any], dict[str, dict[str, np.ndarray]]]:
    """Writes a random Jina embeddings v3 with an adapter for each task. Returns PEFT's models, and the factors."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    drawn(folder, "Bert", "jina_embeddings_v3", **CASES["jina_embeddings_v3"].settings)
    references, factors = {}, {}
    for task in PROMPTS:
        base = transformers.AutoModel.from_pretrained(folder)
        model = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=1, target_modules=ADAPTED)).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.copy_(0.3 * torch.randn_like(parameter))
        for layer in model.base_model.model.layers:  # the first published files have one A for all three
            for other in (layer.self_attn.k_proj, layer.self_attn.v_proj):
                other.lora_A.default.weight.data = layer.self_attn.q_proj.lora_A.default.weight.data
        state = peft.get_peft_model_state_dict(model)
        factors[task] = {name.removeprefix("base_model.model."): array.numpy() for name, array in state.items()}
        references[task] = model
    publish_adapters(folder, factors, PROMPTS)
    return references, factors


def test_adapters_of_tasks_give_the_outputs_of_peft(tmp_path: Path) -> None:
    """In both published forms, and after export: hidden states and means of all tasks, with the task's prompt."""
    references, factors = jina_with_adapters(tmp_path / "jina")
    model = bert.load(tmp_path / "jina")
    model.save(tmp_path / "saved")
    shutil.copytree(tmp_path / "jina", tmp_path / "first")
    as_first_published(tmp_path / "first", factors)
    others = [bert.load(tmp_path / name) for name in ("first", "saved")]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "jina")
    for task, reference in references.items():
        texts = [PROMPTS[task] + text for text in HOSTILE]
        inputs = tokenizer(texts, padding=True, truncation=True, max_length=40, return_tensors="pt")
        with torch.no_grad():
            states = reference(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        expected, mask = states.last_hidden_state.numpy(), inputs["attention_mask"].numpy()[:, :, None]
        embeddings = (expected * mask).sum(1) / mask.sum(1)
        for ours in (model, *others):
            found = ours.for_task(task).encode(texts)
            np.testing.assert_allclose(found.last_hidden_state, expected * mask, atol=1e-4)
            np.testing.assert_allclose(found.pooled_output, states.pooler_output.numpy(), atol=1e-4)
            np.testing.assert_allclose(ours.embed(HOSTILE, task=task), embeddings, atol=1e-4)
        assert np.abs(model.embed(HOSTILE) - embeddings).max() > 0.1


def test_exported_adapters_of_tasks_are_read_by_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    references, factors = jina_with_adapters(tmp_path / "jina")
    as_first_published(tmp_path / "jina", factors)
    bert.load(tmp_path / "jina").save(tmp_path / "saved")
    # transformers checks the version of peft and needs nothing of a later one for this.
    monkeypatch.setattr("transformers.integrations.peft.check_peft_version", lambda **_: None)
    theirs = transformers.AutoModel.from_pretrained(tmp_path / "saved").eval()
    ids = torch.tensor(np.random.default_rng(1).integers(5, theirs.config.vocab_size, (4, 20)))
    for task, reference in references.items():
        name = task.replace(".", "_").replace("-", "_")
        loading = theirs.load_adapter(str(tmp_path / "saved"), name, adapter_kwargs={"subfolder": name})
        assert not loading.unexpected_keys
        assert not [key for key in loading.missing_keys if f".{name}." in key]
        theirs.set_adapter(name)
        with torch.no_grad():
            found, expected = (model(input_ids=ids).last_hidden_state for model in (theirs, reference))
        np.testing.assert_allclose(found.numpy(), expected.numpy(), atol=1e-5)
