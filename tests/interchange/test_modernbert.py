"""ModernBERT's folders: their format, the settings of older versions, and the settings that are rejected."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import bert
from bert.errors import UserError
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
    model.save(tmp_path / "out", say=said.append)
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


REFUSED = {
    "mlp_bias": (True, "attention_bias False, mlp_bias True, classifier_bias False are one setting here"),
    "classifier_activation": ("silu", "are one setting here .hidden_act.: name another model"),
    "mlp_dropout": (0.3, "embedding_dropout 0.1, mlp_dropout 0.3 are one setting here"),
    "classifier_pooling": ("max", "classifier_pooling is 'max': one of cls, mean is read"),
    "norm_bias": ("no", "norm_bias is 'no': set it to true or false"),
    "rope_scaling": ({"type": "linear"}, "rope_scaling is .*, and only None is read: name another model"),
    "rope_parameters": (
        {FULL: {"rope_type": "yarn", "rope_theta": 1e4}},
        "rope_parameters.full_attention.rope_type is 'yarn', and only 'default' is read",
    ),
    "local_attention": ("far", "local_attention is 'far': set it to a number from 1 on"),
    "layer_types": (
        [SLIDING, FULL, SLIDING, FULL],
        "at other layers than the first and every n-th: name another",
    ),
    "hidden_activation": ("mish", "hidden_activation is 'mish': one of"),
    "num_hidden_layers": (3, "layer_types does not list 3 times"),
    "architectures": (["ModernBertForCausalLM"], "the architecture is 'ModernBertForCausalLM': one of"),
    "num_attention_heads": (8, "turns pairs of features, and a head has 3"),
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_is_not_expressed_is_refused(key: str, folder: Path) -> None:
    value, message = REFUSED[key]
    edit(folder, **{key: value})
    with pytest.raises(UserError, match=message):
        bert.load(folder)


@pytest.mark.parametrize(
    "tensor", ["model.layers.1.attn_norm.weight", "model.layers.0.mlp.Wi.weight", "head.norm.weight"]
)
def test_a_missing_tensor_is_named(tensor: str, folder: Path) -> None:
    rewrite(folder, lambda tensors: {name: x for name, x in tensors.items() if name != tensor})
    with pytest.raises(UserError, match=f"lacks {tensor}: copy it again"):
        bert.load(folder)


@pytest.mark.parametrize("tensor", ["model.layers.0.attn_norm.weight", "model.layers.1.mlp.Wi.bias"])
def test_a_tensor_too_many_is_named(tensor: str, folder: Path) -> None:
    rewrite(folder, lambda tensors: {**tensors, tensor: np.ones(24 if "norm" in tensor else 40, np.float32)})
    with pytest.raises(UserError, match=f"holds {tensor}, which config.json has no place for"):
        bert.load(folder)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gated_feed_forward": False}, "gated_feed_forward false, .*as its feed-forward layers are gated"),
        ({"norm_type": "rms"}, "norm_type rms, .*as it has LayerNorm"),
        ({"first_layer_norm": True}, "first_layer_norm true, .*as its first layer has no LayerNorm before attention"),
        ({"type_vocab_size": 2}, "type_vocab_size 2, .*as it has no segments"),
        ({"embedding_size": 8}, "embedding_size 8, .*as its embeddings have hidden_size features"),
    ],
)
def test_other_rotary_models_are_exported_as_stablehlo_alone(changes, reason: str, made, tmp_path: Path) -> None:
    model = made("BertForMaskedLM", dataclasses.replace(MODERNBERT, **changes))
    with pytest.raises(UserError, match=rf"{reason}: export it as stablehlo$"):
        model.save(tmp_path / "out")


def test_a_model_without_a_head_over_rows_needs_no_pooler_of_modernberts(made, tmp_path: Path) -> None:
    model = made("BertForMaskedLM", dataclasses.replace(MODERNBERT, pooler_type="dense"))
    model.save(tmp_path / "out")
    assert bert.load(tmp_path / "out").config.pooler_type == "transform"
