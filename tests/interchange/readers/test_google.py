"""Folders of google-research/bert, in the layout that its scripts write."""

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

import bert
from bert.config import ModelConfig
from bert.errors import UserError
from bert.inference.load import load_vocabulary
from bert.interchange.families import GOOGLE_NAMES
from bert.interchange.readers.google import is_google, read_config, read_params, read_tokenizer
from bert.model.heads import BertForSequenceClassification
from bert.model.pretraining import BertForPreTraining
from tests.interchange.bundle_writer import BFLOAT16, CONFIG, HEADS, PIECES, RATES, SIZES, weights, write_folder


def error_of(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        read_params(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_every_tensor_finds_its_place(tmp_path: Path, heads: tuple[str, ...]) -> None:
    tensors = weights(*heads)
    said: list[str] = []
    config, params = read_params(write_folder(tmp_path, tensors), said.append)
    assert config == CONFIG
    assert set(params) == {"bert", *heads}
    flat = traverse_util.flatten_dict(params, sep="/")
    assert len(flat) == len(tensors)
    known = {
        tensor.paths[0]: tensor
        for head in ("BertForSequenceClassification", "BertForQuestionAnswering")
        for tensor in GOOGLE_NAMES.tensors(config.num_hidden_layers, head)
    }
    for path, array in flat.items():
        tensor = known[path]
        assert array.dtype == np.float32 and array.flags.c_contiguous
        np.testing.assert_array_equal(array.T if tensor.transposed else array, tensors[tensor.name])
    count = sum(array.size for array in tensors.values())
    assert said == [
        f"read {tmp_path / 'bert_model.ckpt'}: {', '.join(('bert', *heads))} ({len(tensors)} tensors, "
        f"{count:,} parameters)"
    ]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("model", "heads"),
    [
        (BertForPreTraining(CONFIG), HEADS["pretraining"]),
        (BertForSequenceClassification(CONFIG, 4), HEADS["classification"]),
    ],
)
def test_the_tree_is_the_models_own(tmp_path: Path, model, heads: tuple[str, ...]) -> None:
    _, params = read_params(write_folder(tmp_path, weights(*heads)))
    expected = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]
    assert jax.tree.map(np.shape, params) == jax.tree.map(np.shape, expected)


def test_the_optimizer_is_left_out_by_name(tmp_path: Path) -> None:
    tensors = weights("predictions")
    slots = {f"{name}/{slot}": array for name, array in tensors.items() for slot in ("adam_m", "adam_v")}
    said: list[str] = []
    _, params = read_params(
        write_folder(tmp_path, {**tensors, **slots, "global_step": np.array(7, np.int64)}), said.append
    )
    assert set(params) == {"bert", "predictions"}
    assert said[1].startswith(f"not loaded from {tmp_path / 'bert_model.ckpt'}: {2 * len(tensors) + 1} tensors of the ")


@pytest.mark.parametrize(
    "name",
    [
        "bert/pooler/dense/bias/RMSProp_1",
        "bert/pooler/dense/bias/LARSOptimizer",
        "loss_scale",
        "good_steps",
        "signal_early_stopping/STOP",
        "new_scale",
        "bert/pooler/dense/bias/Momentum",
    ],
)
def test_variables_of_the_training_program_are_left_out(tmp_path: Path, name: str) -> None:
    value = np.zeros(3 if "/bias/" in name else (), np.float32)
    _, params = read_params(write_folder(tmp_path, {**weights("predictions"), name: value}))
    assert set(params) == {"bert", "predictions"}


@pytest.mark.parametrize("name", ["bert/scale", "cls/scale", "output_bias"])
def test_a_scalar_among_the_weights_is_an_error(tmp_path: Path, name: str) -> None:
    write_folder(tmp_path, {**weights(), name: np.float32(1)})
    assert name in error_of(tmp_path)


@pytest.mark.parametrize("name", ["bert/pooler/dense/adam", "adam_m", "my_global_step", "bert/adam_m/kernel", "Adam"])
def test_only_whole_names_are_the_optimizers(tmp_path: Path, name: str) -> None:
    write_folder(tmp_path, {**weights(), name: np.zeros(2, np.float32)})
    assert f"holds unknown tensors, {name}: " in error_of(tmp_path)


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16, np.float64])
def test_other_precisions_become_float32(tmp_path: Path, dtype) -> None:
    tensors = {name: array.astype(dtype) for name, array in weights().items()}
    _, params = read_params(write_folder(tmp_path, tensors))
    word = params["bert"]["embeddings"]["word"]["embedding"]
    assert word.dtype == np.float32
    np.testing.assert_array_equal(word, tensors["bert/embeddings/word_embeddings"].astype(np.float32))


@pytest.mark.medium
def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    tensors = weights("predictions")
    write_folder(tmp_path, {**tensors, "bert/embeddings/extra": np.zeros(2, np.float32)})
    assert "bert_model.ckpt.index holds unknown tensors, bert/embeddings/extra: " in error_of(tmp_path)
    write_folder(tmp_path, tensors, num_hidden_layers=10)
    message = error_of(tmp_path)
    assert "bert/encoder/layer_10/attention/output/LayerNorm/beta" in message and "and 11 more" in message
    write_folder(tmp_path, tensors, num_hidden_layers=12)
    assert "lacks bert/encoder/layer_11/attention/output/LayerNorm/beta" in error_of(tmp_path)
    write_folder(tmp_path, tensors, num_hidden_layers=10**6)
    assert "tensors, too few for the 1,000,000 layers of bert_config.json" in error_of(tmp_path)
    write_folder(tmp_path, {name: array for name, array in tensors.items() if "pooler/dense/bias" not in name})
    assert "lacks bert/pooler/dense/bias: " in error_of(tmp_path)
    write_folder(tmp_path, {name: array for name, array in tensors.items() if name != "cls/predictions/output_bias"})
    assert "lacks cls/predictions/output_bias: " in error_of(tmp_path)
    write_folder(tmp_path, tensors, vocab_size=24)
    message = error_of(tmp_path)
    assert "bert/embeddings/word_embeddings [23, 6] instead of [24, 6]" in message
    assert "cls/predictions/output_bias [23] instead of [24]" in message
    write_folder(tmp_path, {**weights("qa_outputs"), "cls/squad/output_weights": np.zeros((6, 2), np.float32)})
    assert "cls/squad/output_weights [6, 2] instead of [2, 6]" in error_of(tmp_path)
    write_folder(tmp_path, {**weights("classifier"), "output_bias": np.zeros(5, np.float32)})
    assert "output_weights [4, 6] instead of [5, 6]" in error_of(tmp_path)
    write_folder(tmp_path, {**tensors, "bert/pooler/dense/bias": np.zeros(6, np.int32)})
    assert "bert/pooler/dense/bias holds whole numbers" in error_of(tmp_path)
    write_folder(tmp_path, {"model/layer-1/bias/.ATTRIBUTES/VARIABLE_VALUE": np.zeros(6, np.float32)})
    assert "is an object graph of TensorFlow 2" in error_of(tmp_path)


@pytest.mark.parametrize(
    ("act", "ours"),
    [("gelu", "gelu_tanh"), ("GELU", "gelu_tanh"), (None, "gelu_tanh"), ("relu", "relu"), ("tanh", "tanh")],
)
def test_gelu_is_the_tanh_form(tmp_path: Path, act: str | None, ours: str) -> None:
    write_folder(tmp_path, {}, hidden_act=act)
    assert read_config(tmp_path / "bert_config.json").hidden_act == ours


def test_rates_may_be_left_out_and_other_keys_are_said(tmp_path: Path) -> None:
    """The multilingual configuration's words on a pooler are known to have no effect."""
    left_out = dict.fromkeys(RATES)
    write_folder(tmp_path, {}, **left_out, directionality="bidi", pooler_fc_size=768, embedding_size=128)
    said: list[str] = []
    config = read_config(tmp_path / "bert_config.json", said.append)
    assert config == ModelConfig(**SIZES, hidden_act="gelu_tanh", pooler_dropout=False)
    assert said == [f"not loaded from {tmp_path / 'bert_config.json'}: embedding_size"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": None, "hidden_size": None}, "lacks hidden_size, vocab_size"),
        ({"vocab_size": "23"}, "vocab_size is '23', which is not a whole number"),
        ({"vocab_size": 23.0}, "vocab_size is 23.0, which is not a whole number"),
        ({"type_vocab_size": True}, "type_vocab_size is True"),
        ({"vocab_size": 0}, "has sizes below 1, vocab_size"),
        ({"hidden_dropout_prob": "0.1"}, "hidden_dropout_prob is '0.1', which is not a number"),
        ({"hidden_dropout_prob": 1.5}, "hidden_dropout_prob is 1.5"),
        ({"num_attention_heads": 4}, "not divisible by model.num_attention_heads (4)"),
        ({"hidden_act": "swish"}, "hidden_act is 'swish'"),
        ({"hidden_act": 3}, "hidden_act is 3"),
    ],
)
def test_a_malformed_configuration_is_one_sentence(tmp_path: Path, changes: dict, message: str) -> None:
    found = error_of(write_folder(tmp_path, weights(), **changes))
    assert message in found and str(tmp_path / "bert_config.json") in found


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"\xff"], ids=["empty", "cut short", "list", "not UTF-8"])
def test_a_configuration_that_is_none(tmp_path: Path, text: bytes) -> None:
    write_folder(tmp_path, weights())
    (tmp_path / "bert_config.json").write_bytes(text)
    assert "bert_config.json is not" in error_of(tmp_path)


def test_a_folder_of_googles_is_known_by_its_files(tmp_path: Path) -> None:
    assert not is_google(tmp_path)
    write_folder(tmp_path, weights())
    assert is_google(tmp_path)
    (tmp_path / "bert_config.json").unlink()
    assert is_google(tmp_path)
    assert "bert_config.json does not exist" in error_of(tmp_path)


def test_the_checkpoint_may_have_another_name(tmp_path: Path) -> None:
    """google-research/bert names checkpoints by step. If there are several, TensorFlow's note names the newest one."""
    write_folder(tmp_path, weights(), "model.ckpt-100")
    _, params = read_params(tmp_path)
    write_folder(tmp_path, {name: 2 * array for name, array in weights().items()}, "model.ckpt-200")
    assert "holds 2 checkpoints" in error_of(tmp_path)
    note = 'model_checkpoint_path: "{}"\nall_model_checkpoint_paths: "model.ckpt-100"\n'
    (tmp_path / "checkpoint").write_text(note.format("model.ckpt-200"))
    _, newer = read_params(tmp_path)
    np.testing.assert_array_equal(newer["bert"]["pooler"]["kernel"], 2 * params["bert"]["pooler"]["kernel"])
    (tmp_path / "checkpoint").write_text(note.format("/elsewhere/model.ckpt-100"))
    _, older = read_params(tmp_path)
    np.testing.assert_array_equal(older["bert"]["pooler"]["kernel"], params["bert"]["pooler"]["kernel"])
    for file in tmp_path.glob("*.index"):
        file.unlink()
    assert "holds no checkpoint" in error_of(tmp_path)


def test_missing_and_old_files(tmp_path: Path) -> None:
    write_folder(tmp_path, weights())
    (tmp_path / "bert_model.ckpt.index").rename(tmp_path / "index")
    assert "bert_model.ckpt.index does not exist" in error_of(tmp_path)
    for file in tmp_path.glob("bert_model.ckpt.*"):
        file.unlink()
    (tmp_path / "bert_model.ckpt").write_bytes(b"V1")
    assert "old format (V1)" in error_of(tmp_path)


@pytest.mark.parametrize(
    ("folder", "tokens", "lowercase", "why"),
    [
        ("uncased_L-2_H-6_A-2", [*PIECES, "The"], True, 'name contains "uncased"'),
        ("multi_cased_L-2_H-6_A-2", PIECES, False, 'name contains "cased"'),
        ("chinese_L-2_H-6_A-2", PIECES, True, "no token"),
        ("biobert", [*PIECES, "##É"], False, "'##É'"),
    ],
)
def test_lower_casing_is_told_by_the_name_or_the_tokens(
    tmp_path: Path, folder: str, tokens: list[str], lowercase: bool, why: str
) -> None:
    said: list[str] = []
    tokenizer = read_tokenizer(write_folder(tmp_path / folder, {}, tokens=tokens), CONFIG, said.append)
    assert tokenizer.encode("THES 中").tokens[1:-1] == (["the", "##s", "中"] if lowercase else ["[UNK]", "中"])
    assert said[0].startswith("text is lower-cased" if lowercase else "text is not lower-cased") and why in said[0]


def test_a_tokenizer_configuration_knows_better(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "uncased", {})
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    said: list[str] = []
    assert read_tokenizer(folder, CONFIG, said.append).encode("THE").tokens[1:-1] == ["[UNK]"]
    assert said == []


def test_a_vocabulary_must_fit_the_embedding(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {}, tokens=PIECES + [f"token{i}" for i in range(20)])
    with pytest.raises(UserError, match="needs 30 rows"):
        read_tokenizer(folder, CONFIG)
    shutil.copy(folder / "bert_config.json", folder / "vocab.txt")
    with pytest.raises(UserError, match="lacks"):
        read_tokenizer(folder, CONFIG)


@pytest.mark.medium
def test_a_folder_of_googles_is_loaded_and_a_classifier_answers(tmp_path: Path) -> None:
    said: list[str] = []
    model = bert.load(write_folder(tmp_path, weights("classifier")), said.append)
    assert model.labels == ("LABEL_0", "LABEL_1", "LABEL_2", "LABEL_3")
    [answer] = model.predict(["the café"])
    assert sum(answer.probabilities.values()) == pytest.approx(1)
    assert any("lower-cased" in line for line in said)
    assert load_vocabulary(tmp_path).to_str() == model.tokenizer.to_str()


@pytest.mark.medium
def test_masks_are_filled_with_googles_head(tmp_path: Path) -> None:
    model = bert.load(write_folder(tmp_path, weights("predictions", "seq_relationship")))
    [[best]] = model.fill_mask("the [MASK]", top_k=1)
    assert best.token in PIECES
