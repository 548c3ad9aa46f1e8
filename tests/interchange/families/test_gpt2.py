"""GPT-2's folders: names, settings, the formats of older versions, and concatenated arrays."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import bert
from bert.errors import UserError
from bert.files import read_json
from bert.interchange.names import Tensor
from tests.interchange.hf_folders import CONFIG, GPT2, assert_same, edit, rewrite


@pytest.fixture
def folder(made, tmp_path: Path) -> Path:
    made("BertForCausalLM", GPT2).save(tmp_path / "model")
    return tmp_path / "model"


def test_names_and_settings_are_gpt2s(folder: Path, made) -> None:
    tensors, content = load_file(folder / "model.safetensors"), read_json(folder / "config.json")
    block = {"ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"}
    modules = {f"transformer.h.{layer}.{name}" for layer in range(2) for name in block} | {"transformer.ln_f"}
    arrays = {f"{name}.{end}" for name in modules for end in ("weight", "bias")}
    assert set(tensors) == arrays | {"transformer.wte.weight", "transformer.wpe.weight"}
    assert (content["model_type"], content["architectures"]) == ("gpt2", ["GPT2LMHeadModel"])
    sizes = {key: content[key] for key in ("n_embd", "n_layer", "n_head", "n_inner", "n_positions", "vocab_size")}
    assert sizes == {"n_embd": 12, "n_layer": 2, "n_head": 3, "n_inner": 20, "n_positions": 16, "vocab_size": 23}
    assert (content["activation_function"], content["layer_norm_epsilon"]) == ("gelu_new", 1e-7)

    attention = made("BertForCausalLM", GPT2).params["bert"]["encoder"]["layer_1"]["attention"]
    joined = np.concatenate([attention[name]["kernel"] for name in ("query", "key", "value")], axis=1)
    np.testing.assert_array_equal(tensors["transformer.h.1.attn.c_attn.weight"], joined)
    np.testing.assert_array_equal(tensors["transformer.h.1.attn.c_proj.weight"], attention["output"]["kernel"])


def as_published(tensors: dict) -> dict:
    """Tensors as in the first releases: without a prefix, and with the constants of the mask."""
    constants = {f"h.{layer}.attn.bias": np.tri(16, dtype=bool)[None, None] for layer in range(2)}
    constants["h.0.attn.masked_bias"] = np.float32([-1e4])
    return {name.removeprefix("transformer."): array for name, array in tensors.items()} | constants


def with_a_tied_copy(tensors: dict) -> dict:
    return {**tensors, "lm_head.weight": tensors["transformer.wte.weight"]}


@pytest.mark.parametrize("change", [as_published, with_a_tied_copy])
def test_older_forms_are_the_same_model(change, folder: Path, made) -> None:
    rewrite(folder, change)
    edit(folder, architectures=["GPT2Model"] if change is as_published else ["GPT2LMHeadModel"])
    said: list[str] = []
    again = bert.load(folder, said.append)
    assert (again.architecture, again.config) == ("BertForCausalLM", GPT2)
    assert_same(again.params, made("BertForCausalLM", GPT2).params)
    assert not [line for line in said if "not loaded" in line or "randomly" in line]


def test_settings_that_are_left_out_are_gpt2s_own(folder: Path) -> None:
    keys = ("n_inner", "layer_norm_epsilon", "embd_pdrop", "tie_word_embeddings")
    wide = lambda tensors: {  # noqa: E731
        name: np.zeros([48 if size == 20 else size for size in array.shape], np.float32)
        for name, array in tensors.items()
    }
    rewrite(folder, wide)
    edit(folder, **dict.fromkeys(keys))
    config = bert.load(folder).config
    assert (config.intermediate_size, config.layer_norm_eps, config.tie_word_embeddings) == (48, 1e-5, True)


@pytest.mark.parametrize("shape", [(12, 35), (36,), (), (12, 36, 1)])
def test_a_joined_array_of_another_shape_is_refused(shape: tuple, folder: Path) -> None:
    name = "transformer.h.1.attn.c_attn.weight"
    rewrite(folder, lambda tensors: {**tensors, name: np.zeros(shape, np.float32)})
    with pytest.raises(UserError, match=r"c_attn.weight is \[.*\], but config.json makes it \[12, 36\]"):
        bert.load(folder)


def test_a_model_without_segments_or_bias_is_exported_as_bert_with_zeros(made, tmp_path: Path) -> None:
    """transformers' BERT always has both."""
    model = made("BertForMaskedLM", dataclasses.replace(CONFIG, type_vocab_size=0, prediction_bias=False))
    model.save(tmp_path / "out")
    again = bert.load(tmp_path / "out")
    assert (again.config.type_vocab_size, again.config.prediction_bias) == (1, True)
    np.testing.assert_array_equal(again.params["bert"]["embeddings"]["segment"]["embedding"], np.zeros((1, 12)))
    np.testing.assert_array_equal(again.params["predictions"]["bias"], np.zeros(23))


def test_arrays_that_a_file_joins_are_split_and_joined() -> None:
    tensor = Tensor(("a/kernel", "b/kernel"), "ab.weight", True)
    stored = np.arange(12.0).reshape(6, 2)  # [out, in], as PyTorch has it
    arrays = tensor.split(stored)
    np.testing.assert_array_equal(arrays["b/kernel"], stored[3:].T)
    assert all(array.dtype == np.float32 and array.flags.c_contiguous for array in arrays.values())
    np.testing.assert_array_equal(tensor.join(arrays), stored)


def test_a_left_to_right_model_fills_no_masks(folder: Path) -> None:
    with pytest.raises(UserError, match="has no masked-LM head"):
        bert.load(folder).fill_mask("a [MASK]")
