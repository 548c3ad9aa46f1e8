"""ModernBERT's folders: names, settings, and the settings of older versions."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import bert
from bert.files import read_json
from bert.interchange import families
from tests.interchange.hf_folders import LABELS, MODERNBERT, assert_same, edit, rewrite

FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.fixture
def folder(made, tmp_path: Path) -> Path:
    made("BertForMaskedLM", MODERNBERT).save(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.medium
def test_names_and_settings_are_modernberts(folder: Path, made) -> None:
    tensors, content = load_file(folder / "model.safetensors"), read_json(folder / "config.json")
    block = {"attn_norm", "attn.Wqkv", "attn.Wo", "mlp_norm", "mlp.Wi", "mlp.Wo"}
    modules = {f"model.layers.{layer}.{name}" for layer in range(4) for name in block} - {"model.layers.0.attn_norm"}
    modules |= {
        "model.embeddings.tok_embeddings",
        "model.embeddings.norm",
        "model.final_norm",
        "head.dense",
        "head.norm",
    }
    assert set(tensors) == {f"{name}.weight" for name in modules} | {"decoder.bias"}
    assert (content["model_type"], content["architectures"]) == ("modernbert", ["ModernBertForMaskedLM"])
    assert content["layer_types"] == [FULL, SLIDING, SLIDING, FULL]
    assert (content["local_attention"], content["global_attn_every_n_layers"]) == (4, 3)
    assert content["rope_parameters"][SLIDING] == {"rope_type": "default", "rope_theta": 100.0}
    assert (content["global_rope_theta"], content["local_rope_theta"]) == (1000.0, 100.0)
    assert (content["hidden_activation"], content["classifier_activation"], content["norm_eps"]) == (
        "gelu",
        "gelu",
        1e-7,
    )
    assert {content[key] for key in ("attention_bias", "mlp_bias", "classifier_bias", "norm_bias")} == {False}
    assert (content["cls_token_id"], content["sep_token_id"], content["pad_token_id"]) == (2, 3, 0)
    assert json.loads((folder / "tokenizer_config.json").read_text())["model_input_names"] == [
        "input_ids",
        "attention_mask",
    ]

    layer = made("BertForMaskedLM", MODERNBERT).params["bert"]["encoder"]["layer_1"]
    joined = np.concatenate([layer[name]["kernel"] for name in ("intermediate", "gate")], axis=1)
    np.testing.assert_array_equal(tensors["model.layers.1.mlp.Wi.weight"], joined.T)
    assert tensors["model.layers.1.attn.Wqkv.weight"].shape == (72, 24)


VARIANTS = {
    "as published": {},
    "with biases": {"use_bias": True, "norm_bias": True},
    "all global": {"attention_window": None, "global_attention_every": None, "local_rotary_base": None},
    "all local": {"global_attention_every": None},
    "one global layer": {"global_attention_every": 7},
    "first token": {"pooler_input": "first"},
    "swiglu": {"hidden_act": "silu"},
    "untied": {"tie_word_embeddings": False},
}


@pytest.mark.medium
@pytest.mark.parametrize("architecture", families.MODERNBERT.classes)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_class_in_and_out(architecture: str, variant: str, made, tmp_path: Path) -> None:
    config = dataclasses.replace(MODERNBERT, **VARIANTS[variant])
    model = made(architecture, config)
    said: list[str] = []
    model.save(tmp_path / "out", log=said.append)
    assert "read back identical" in said[0]
    again = bert.load(tmp_path / "out")
    assert (again.architecture, again.config, again.labels) == (architecture, config, model.labels)
    assert_same(again.params, model.params)
    if architecture == "BertForTokenClassification":
        assert again.labels == LABELS


def as_version_4(content: dict) -> dict:
    """The settings of answerdotai/ModernBERT-base, as transformers 4 wrote them."""
    new = ("layer_types", "rope_parameters", "dtype")
    return dict.fromkeys(new) | {"torch_dtype": "float32", "reference_compile": True, "layer_norm_eps": 1e-5}


def test_older_forms_are_the_same_model(folder: Path, made) -> None:
    edit(folder, **as_version_4(read_json(folder / "config.json")))
    model = made("BertForMaskedLM", MODERNBERT)
    assert bert.load(folder).config == MODERNBERT
    rewrite(folder, lambda tensors: {**tensors, "decoder.weight": tensors["model.embeddings.tok_embeddings.weight"]})
    assert_same(bert.load(folder).params, model.params)
    edit(folder, local_rope_theta=None, global_attn_every_n_layers=1)
    assert bert.load(folder).config.attention_window is None


def test_a_bare_encoder_has_no_prefix(made, tmp_path: Path) -> None:
    made("Bert", MODERNBERT).save(tmp_path / "out")
    assert "layers.3.attn_norm.weight" in load_file(tmp_path / "out" / "model.safetensors")
    assert bert.load(tmp_path / "out").config == MODERNBERT


def test_settings_that_are_left_out_are_modernberts_own(folder: Path) -> None:
    keys = [
        "attention_bias",
        "mlp_bias",
        "classifier_bias",
        "norm_bias",
        "decoder_bias",
        "embedding_dropout",
        "mlp_dropout",
    ]
    keys += ["attention_dropout", "classifier_pooling", "layer_types", "rope_parameters", "local_attention", "norm_eps"]
    edit(folder, **dict.fromkeys([*keys, "global_rope_theta", "local_rope_theta", "global_attn_every_n_layers"]))
    config = bert.load(folder).config
    assert (config.rotary_base, config.local_rotary_base, config.layer_norm_eps) == (160_000, 10_000, 1e-5)
    assert (config.attention_window, config.global_attention_every, config.pooler_input) == (64, 3, "first")
    assert config.hidden_dropout_prob == config.attention_probs_dropout_prob == 0


def test_a_model_without_a_head_over_rows_needs_no_pooler_of_modernberts(made, tmp_path: Path) -> None:
    model = made("BertForMaskedLM", dataclasses.replace(MODERNBERT, pooler_type="dense"))
    model.save(tmp_path / "out")
    assert bert.load(tmp_path / "out").config.pooler_type == "transform"
