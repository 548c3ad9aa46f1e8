"""PEFT's LoRA adapters: added to a base model that is here, or one sentence on why not."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import bert
from bert.errors import UserError
from bert.inference.load import load_vocabulary
from bert.interchange.sentence_transformers.writer import write_pooling_files
from bert.model.pooling import Pooling
from tests.interchange.hf_folders import CONFIG, LABELS, assert_same, edit

QUERY = "bert.encoder.layer.0.attention.self.query"


@pytest.fixture
def adapter(made, tmp_path: Path) -> Path:
    """An adapter of a classifier's query and dense layers, and a whole classifier, next to its base model."""
    made("BertForMaskedLM").save(tmp_path / "base")
    tensors = load_file(tmp_path / "base/model.safetensors")
    random = np.random.default_rng(3)

    def array(*shape: int) -> np.ndarray:
        return random.normal(size=shape).astype(np.float32)

    width = tensors[f"{QUERY}.weight"].shape[0]
    pooler = {"bert.pooler.dense.weight": array(width, width), "bert.pooler.dense.bias": array(width)}
    save_file({**tensors, **pooler}, tmp_path / "base/model.safetensors", {"format": "pt"})
    parts = {f"{QUERY}.lora_A.weight": array(2, width), f"{QUERY}.lora_B.weight": array(width, 2)}
    parts |= {"classifier.weight": array(len(LABELS), width), "classifier.bias": array(len(LABELS))}
    folder = tmp_path / "adapter"
    folder.mkdir()
    save_file({f"base_model.model.{name}": part for name, part in parts.items()}, folder / "adapter_model.safetensors")
    write(folder, base_model_name_or_path=str(tmp_path / "base"))
    return folder


def write(folder: Path, **values) -> None:
    content = {"peft_type": "LORA", "task_type": "SEQ_CLS", "r": 2, "lora_alpha": 6, "use_dora": False}
    file = folder / "adapter_config.json"
    content |= json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(content | values))


def test_an_adapter_is_added_to_its_base(adapter: Path) -> None:
    base, model = bert.load(adapter.parent / "base"), bert.load(adapter)
    assert (model.architecture, model.labels) == ("BertForSequenceClassification", ("LABEL_0", "LABEL_1", "LABEL_2"))
    saved = load_file(adapter / "adapter_model.safetensors")
    a, b = (saved[f"base_model.model.{QUERY}.lora_{side}.weight"] for side in "AB")
    actual, expected = (m.params["bert"]["encoder"]["layer_0"]["attention"]["query"]["kernel"] for m in (model, base))
    np.testing.assert_allclose(actual, expected + 3 * (b @ a).T, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(model.params["classifier"]["kernel"], saved["base_model.model.classifier.weight"].T)
    assert_same(model.params["bert"]["embeddings"], base.params["bert"]["embeddings"])
    write(adapter, use_rslora=True)
    scaled = bert.load(adapter).params["bert"]["encoder"]["layer_0"]["attention"]["query"]["kernel"]
    np.testing.assert_allclose(scaled, expected + 6 / 2**0.5 * (b @ a).T, rtol=1e-5, atol=1e-6)


def test_an_adapter_has_its_own_pooling_or_the_base_models(adapter: Path) -> None:
    base, of_base, own = adapter.parent / "base", Pooling("cls", query_prompt="a "), Pooling("max", normalize=True)
    write_pooling_files(of_base, CONFIG, base)
    assert bert.load(adapter).pooling is bert.load(base, adapter=adapter).pooling is None, "a classifier"
    edit(base, architectures=["BertModel"])
    tensors = load_file(base / "model.safetensors")
    encoder = {name.removeprefix("bert."): array for name, array in tensors.items() if name.startswith("bert.")}
    save_file(encoder, base / "model.safetensors", {"format": "pt"})
    saved = load_file(adapter / "adapter_model.safetensors")
    saved = {name: array for name, array in saved.items() if "lora" in name}
    save_file(saved, adapter / "adapter_model.safetensors")
    write(adapter, task_type="FEATURE_EXTRACTION")
    assert bert.load(adapter).pooling == bert.load(base, adapter=adapter).pooling == of_base
    write_pooling_files(own, CONFIG, adapter)
    assert bert.load(adapter).pooling == bert.load(base, adapter=adapter).pooling == own


def test_the_original_of_a_replaced_module_is_left_out(adapter: Path) -> None:
    saved = load_file(adapter / "adapter_model.safetensors")
    original = {"base_model.model.classifier.original_module.bias": np.full(len(LABELS), 9, np.float32)}
    save_file(saved | original, adapter / "adapter_model.safetensors")
    bias = saved["base_model.model.classifier.bias"]
    np.testing.assert_array_equal(bert.load(adapter).params["classifier"]["bias"], bias)


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3', and only LORA"),
        ({"use_dora": True}, "use_dora is True"),
        ({"alpha_pattern": {"query": 3}}, "alpha_pattern is"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4'"),
        ({"lora_alpha": None}, "lora_alpha is 'None'"),
        ({"base_model_name_or_path": "someone/model"}, "base_model_name_or_path is 'someone/model'"),
        ({"base_model_name_or_path": "x" * 5000}, "base_model_name_or_path is 'xxx"),
    ],
)
def test_an_adapter_that_is_not_read_is_an_error(adapter: Path, values, match: str) -> None:
    write(adapter, **values)
    with pytest.raises(UserError, match=match):
        bert.load(adapter)


def test_damaged_adapters_are_errors(adapter: Path) -> None:
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    for change, match in (
        ({f"base_model.model.{QUERY}.lora_B.weight": np.zeros((3, 5), np.float32)}, "lora_A and lora_B of"),
        ({f"base_model.model.{QUERY}.lora_magnitude_vector": np.zeros(3, np.float32)}, "lora_magnitude_vector, which"),
        (
            {f"base_model.model.other.lora_{side}.weight": np.zeros((2, 2), np.float32) for side in "AB"},
            "other is .* lacks",
        ),
    ):
        save_file({**tensors, **change}, file)
        with pytest.raises(UserError, match=match):
            bert.load(adapter)
    file.write_bytes(b"")
    with pytest.raises(UserError, match=r"adapter_model\.safetensors"):
        bert.load(adapter)
    file.unlink()
    with pytest.raises(UserError, match=r"adapter_model\.safetensors does not exist"):
        bert.load(adapter)


def test_the_vocabulary_is_the_base_models_without_one(adapter: Path) -> None:
    vocabulary = load_vocabulary(adapter).get_vocab()
    assert (
        vocabulary == bert.load(adapter).tokenizer.get_vocab() == load_vocabulary(adapter.parent / "base").get_vocab()
    )
