"""Hugging Face folders: what is written reads back bit for bit, in whatever form others wrote it, or not at all."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import traverse_util
from safetensors.numpy import load_file
from tokenizers import Tokenizer, normalizers

import bert
from bert.commands.export import main as export
from bert.commands.finetune import main as finetune
from bert.commands.pretrain import main as pretrain
from bert.config import ModelConfig
from bert.data.encoding import tokenize
from bert.errors import UserError
from bert.interchange import families, modules
from bert.model import names
from bert.model.pooling import Pooling
from bert.tokenizer.library import lowercases
from tests.conftest import SMALL_RUN
from tests.interchange.hf_folders import (
    CONFIG,
    DISTILBERT,
    ELECTRA,
    GPT2,
    MODERNBERT,
    ROBERTA,
    assert_same,
    edit,
    rewrite,
    shard,
)


@pytest.mark.medium
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", names.ARCHITECTURES)
def test_the_table_names_every_parameter(architecture: str, tied: bool, made) -> None:
    sizes = GPT2 if architecture == "BertForCausalLM" else CONFIG
    model = made(architecture, dataclasses.replace(sizes, tie_word_embeddings=tied))
    module: nn.Module = modules.build_module(model)
    ids = jnp.zeros((1, 2, 8) if architecture == "BertForMultipleChoice" else (1, 8), jnp.int32)
    inputs = (ids, ids) if names.has_decoder(architecture) else (ids,)
    tree = jax.eval_shape(lambda: module.init(jax.random.key(0), *inputs))["params"]
    tree = {"bert": tree} if architecture == "Bert" else tree
    expected = {path: leaf.shape for path, leaf in traverse_util.flatten_dict(tree, sep="/").items()}
    actual = {path: array.shape for path, array in traverse_util.flatten_dict(model.params, sep="/").items()}
    assert actual == expected
    for family in families.FAMILIES:
        fixed = {key: limit.value for key, limit in family.limits.items()}
        values = {key: getattr(sizes, key) for key in ("causal", "position_embedding_type", "embedding_norm")}
        if architecture not in family.classes or any(fixed.get(key, value) != value for key, value in values.items()):
            continue
        if architecture == "Bert" and names.POOLER not in family.names.modules:
            continue
        table = family.names.tensors(2, architecture, 2)
        paths = [path for tensor in table for path in tensor.paths]
        assert len({tensor.name for tensor in table}) == len(table)
        assert len(set(paths)) == len(paths)
        absent = {"bert/embeddings/segment/embedding"} if "type_vocab_size" in family.limits else set()
        assert set(paths) >= set(expected) - absent


def test_an_untied_language_model_in_and_out(made, tmp_path: Path) -> None:
    model = made("BertForCausalLM", dataclasses.replace(GPT2, tie_word_embeddings=False))
    model.save(tmp_path / "one")
    again = bert.load(tmp_path / "one")
    assert again.config == model.config
    assert_same(again.params, model.params)


def with_old_norms(tensors: dict) -> dict:
    def old(name: str) -> str:
        return re.sub(r"LayerNorm\.bias$", "LayerNorm.beta", re.sub(r"LayerNorm\.weight$", "LayerNorm.gamma", name))

    return {old(name): array for name, array in tensors.items()}


def with_buffers_and_copies(tensors: dict) -> dict:
    copies = {
        "bert.embeddings.position_ids": np.arange(16)[None],
        "cls.predictions.decoder.weight": tensors["bert.embeddings.word_embeddings.weight"],
        "cls.predictions.decoder.bias": tensors["cls.predictions.bias"],
    }
    return {**tensors, **copies}


@pytest.mark.parametrize("change", [with_old_norms, with_buffers_and_copies])
def test_old_names_buffers_and_tied_copies(change, made, tmp_path: Path) -> None:
    model = made("BertForPreTraining")
    model.save(tmp_path / "model")
    rewrite(tmp_path / "model", change)
    said: list[str] = []
    again = bert.load(tmp_path / "model", said.append)
    assert_same(again.params, model.params)
    assert again.config.tie_word_embeddings
    assert not [line for line in said if "not loaded" in line]  # a buffer is no loss


def test_a_bare_encoder_with_and_without_its_prefix(made, tmp_path: Path) -> None:
    model = made()
    model.save(tmp_path / "model")
    assert "embeddings.LayerNorm.weight" in load_file(tmp_path / "model" / "model.safetensors")
    rewrite(tmp_path / "model", lambda tensors: {f"bert.{name}": array for name, array in tensors.items()})
    assert_same(bert.load(tmp_path / "model").params, model.params)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_is_read_as_float32(dtype, made, tmp_path: Path) -> None:
    model = made("BertForMaskedLM")
    model.save(tmp_path / "model")
    rewrite(tmp_path / "model", lambda tensors: {name: array.astype(dtype) for name, array in tensors.items()})
    expected = jax.tree.map(lambda array: array.astype(dtype).astype(np.float32), model.params)
    assert_same(bert.load(tmp_path / "model").params, expected)


def test_shards(made, tmp_path: Path) -> None:
    model = made("BertForQuestionAnswering")
    model.save(tmp_path / "model")
    shard(tmp_path / "model")
    assert_same(bert.load(tmp_path / "model").params, model.params)


@pytest.mark.parametrize(
    ("architecture", "config", "word", "decoder"),
    [
        ("BertForMaskedLM", CONFIG, "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
        ("BertForMaskedLM", MODERNBERT, "model.embeddings.tok_embeddings.weight", "decoder.weight"),
    ],
)
def test_a_shared_tensor_may_have_the_decoders_name(
    architecture: str, config: ModelConfig, word: str, decoder: str, made, tmp_path: Path
) -> None:
    """safetensors' save_model keeps the first of its names."""
    model = made(architecture, config)
    model.save(tmp_path / "model")
    rewrite(tmp_path / "model", lambda tensors: {(decoder if n == word else n): array for n, array in tensors.items()})
    again = bert.load(tmp_path / "model")
    assert_same(again.params, model.params)
    assert again.config.tie_word_embeddings


@pytest.mark.parametrize(
    "config",
    [CONFIG, dataclasses.replace(ROBERTA, position_offset=1), DISTILBERT],
    ids=["bert", "roberta", "distilbert"],
)
@pytest.mark.parametrize(
    "architecture", ["SequenceClassification", "TokenClassification", "QuestionAnswering", "MaskedLM"]
)
def test_tensors_name_the_class_that_config_json_lacks(architecture: str, config, made, tmp_path: Path) -> None:
    model = made(f"BertFor{architecture}", config)
    model.save(tmp_path / "model")
    edit(tmp_path / "model", architectures=None)
    said: list[str] = []
    again = bert.load(tmp_path / "model", said.append)
    assert again.architecture == f"BertFor{architecture}"
    assert_same(again.params, model.params)
    assert (architecture == "MaskedLM") != any("architectures is missing" in line for line in said)


def test_tags_name_a_classifier_of_tokens_with_a_pooler(made, tmp_path: Path) -> None:
    """transformers up to version 3 wrote one."""
    made("BertForSequenceClassification").save(tmp_path / "model")
    edit(tmp_path / "model", architectures=None, id2label={"0": "O", "1": "B-PER", "2": "I-PER"})
    assert bert.load(tmp_path / "model").architecture == "BertForTokenClassification"


@pytest.mark.parametrize("prefix", ["module.", "model.encoder."])
def test_a_prefix_of_all_names_is_named(prefix: str, made, tmp_path: Path) -> None:
    made("BertForMaskedLM").save(tmp_path / "model")
    rewrite(tmp_path / "model", lambda tensors: {f"{prefix}{name}": array for name, array in tensors.items()})
    with pytest.raises(UserError, match=f"begin with '{prefix}'"):
        bert.load(tmp_path / "model")


def test_float64_is_read_as_float32(made, tmp_path: Path) -> None:
    model = made("BertForMaskedLM")
    model.save(tmp_path / "model")
    rewrite(tmp_path / "model", lambda tensors: {name: array.astype(np.float64) for name, array in tensors.items()})
    said: list[str] = []
    assert_same(bert.load(tmp_path / "model", said.append).params, model.params)
    assert any("float64 is converted to float32" in line for line in said)


def test_a_key_that_a_class_does_not_read_is_passed_over(made, tmp_path: Path) -> None:
    """Published ModernBERTs have position_embedding_type sans_pos. For BERT, any value except absolute is an error."""
    made("BertForMaskedLM", MODERNBERT).save(tmp_path / "modern")
    edit(tmp_path / "modern", position_embedding_type="sans_pos")
    assert bert.load(tmp_path / "modern").config.position_embedding_type == "rotary"
    made("BertForMaskedLM").save(tmp_path / "plain")
    edit(tmp_path / "plain", position_embedding_type="relative_key")
    with pytest.raises(UserError, match="position_embedding_type is 'relative_key', and only 'absolute'"):
        bert.load(tmp_path / "plain")


@pytest.mark.medium
@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_tokenizer_makes_segments_for_a_model_of_two_alone(count: int, made, tmp_path: Path) -> None:
    """transformers' would number the second text of a pair 1, for which a table of one row has no place."""
    made("BertForSequenceClassification", dataclasses.replace(CONFIG, type_vocab_size=count)).save(tmp_path / "out")
    content = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert ("model_input_names" not in content) == (count == 2)


def test_a_tokenizer_without_a_class_of_its_own_declares_its_types(made, tmp_path: Path) -> None:
    """transformers' generic class makes none by default."""
    model = made("BertForSequenceClassification")
    tokenizer = Tokenizer.from_str(model.tokenizer.to_str())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), tokenizer.normalizer])
    model.replace(tokenizer=tokenizer).save(tmp_path / "out")
    content = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert content["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert content["model_input_names"] == ["input_ids", "token_type_ids", "attention_mask"]
    [segment_a_length] = tokenize(bert.load(tmp_path / "out").tokenizer, [("a", "b")], 8).segment_a_lengths
    assert segment_a_length == 3


def test_pairs_have_one_type_where_the_tokenizer_gives_none(made, tmp_path: Path) -> None:
    made("BertForSequenceClassification").save(tmp_path / "out")
    file = tmp_path / "out" / "tokenizer_config.json"
    names_of_inputs = {"model_input_names": ["input_ids", "attention_mask"]}
    file.write_text(json.dumps({**json.loads(file.read_text()), **names_of_inputs}))
    model = bert.load(tmp_path / "out")
    model.save(tmp_path / "again")
    assert names_of_inputs.items() <= json.loads((tmp_path / "again" / "tokenizer_config.json").read_text()).items()
    for read in (model, bert.load(tmp_path / "again")):
        rows = tokenize(read.tokenizer, [("a", "b")], 8)
        assert rows.segment_a_lengths.tolist() == rows.lengths.tolist(), "all of type 0"


def test_a_decoder_that_differs_is_untied(made, tmp_path: Path) -> None:
    made("BertForMaskedLM").save(tmp_path / "model")
    rewrite(
        tmp_path / "model",
        lambda tensors: {
            **tensors,
            "cls.predictions.decoder.weight": tensors["bert.embeddings.word_embeddings.weight"] + 1,
            "cls.predictions.decoder.bias": tensors["cls.predictions.bias"] + 1,
        },
    )
    said: list[str] = []
    model = bert.load(tmp_path / "model", said.append)
    assert not model.config.tie_word_embeddings
    assert any("stays untied" in line for line in said)
    assert any(line.startswith("not loaded from") and line.endswith(": cls.predictions.bias") for line in said)
    word, head = model.params["bert"]["embeddings"]["word"]["embedding"], model.params["predictions"]
    np.testing.assert_array_equal(head["decoder"], word + 1)
    model.save(tmp_path / "again")
    assert_same(bert.load(tmp_path / "again").params, model.params)


def test_positions_are_counted_from_the_padding_of_the_tokenizer(made, tmp_path: Path) -> None:
    made("BertForMaskedLM", dataclasses.replace(ROBERTA, position_offset=1)).save(tmp_path)
    edit(tmp_path, pad_token_id=3)
    with pytest.raises(UserError, match=r"padding id 3, .* is 0"):
        bert.load(tmp_path)


@pytest.mark.medium
def test_parts_that_are_not_there_start_afresh(made, tmp_path: Path) -> None:
    made("BertForSequenceClassification").save(tmp_path / "model")
    rewrite(
        tmp_path / "model",
        lambda tensors: {n: a for n, a in tensors.items() if "pooler" not in n and "classifier" not in n},
    )
    said: list[str] = []
    model = bert.load(tmp_path / "model", said.append)
    assert said[-1].endswith("randomly initialized: bert/pooler, classifier")
    assert (model.architecture, model.labels) == ("Bert", ())
    encoded = model.encode(["a b", "c"])
    assert encoded.pooled_output is None
    assert encoded.embeddings.shape == (2, 12)
    with pytest.raises(UserError, match="bert finetune --init"):
        model.predict(["a"])
    with pytest.raises(UserError, match="no masked-LM head"):
        model.fill_mask("[MASK]")


@pytest.mark.medium
def test_masks_are_filled_without_pooler_or_nsp_head(made, tmp_path: Path) -> None:
    made("BertForMaskedLM").save(tmp_path / "model")
    [guesses] = bert.load(tmp_path / "model").fill_mask("a [MASK] b", top_k=3)
    assert [guess.probability for guess in guesses] == sorted((guess.probability for guess in guesses), reverse=True)


@pytest.mark.medium
@pytest.mark.parametrize("architecture", ["Bert", "BertForSequenceClassification", "BertForTokenClassification"])
def test_the_maximum_length_of_the_tokenizer_is_applied_and_kept(architecture: str, made, tmp_path: Path) -> None:
    model, long_text = made(architecture), "a b c d e f a b c d"
    model.save(tmp_path / "model")
    file = tmp_path / "model" / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_max_length": 5}))
    again = bert.load(tmp_path / "model")
    again.save(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "tokenizer_config.json").read_text())["model_max_length"] == 5
    if architecture == "Bert":
        assert again.longest_text == 5
        np.testing.assert_allclose(again.embed(long_text), model.embed("a b c"), atol=1e-6)
    else:
        assert again.data.max_length == 5 == bert.load(tmp_path / "again").data.max_length
    if architecture == "BertForSequenceClassification":
        [cut], [short] = again.predict([long_text]), again.predict(["a b c"])
        assert cut == short


@pytest.mark.medium
def test_pooling_is_what_the_folder_declares(made, tmp_path: Path) -> None:
    texts = ["a b c", "d", "e f"]
    for mode in ("mean", "cls", "max"):
        model = made(pooling=Pooling(mode, normalize=True, max_length=4))
        model.save(tmp_path / mode)
        again = bert.load(tmp_path / mode)
        assert again.pooling == model.pooling
        encoded = again.encode(texts)
        assert encoded.attention_mask.shape == (3, 4)
        rows = [row[: mask.sum()] for row, mask in zip(encoded.last_hidden_state, encoded.attention_mask, strict=True)]
        pooled = {"mean": lambda row: row.mean(0), "cls": lambda row: row[0], "max": lambda row: row.max(0)}[mode]
        expected = np.stack([pooled(row) / np.linalg.norm(pooled(row)) for row in rows])
        np.testing.assert_allclose(encoded.embeddings, expected, atol=1e-5)
    (tmp_path / "mean" / "sentence_bert_config.json").unlink()
    assert bert.load(tmp_path / "mean").pooling == Pooling("mean", normalize=True, max_length=4), "of the tokenizer"
    tokenizer_config = tmp_path / "mean" / "tokenizer_config.json"
    for length, expected in ((5, 5), (10**30, None), (16, None)):
        content = json.loads(tokenizer_config.read_text()) | {"model_max_length": length}
        tokenizer_config.write_text(json.dumps(content))
        pooling = bert.load(tmp_path / "mean").pooling
        assert pooling is not None and pooling.max_length == expected, "what today's folders have in its place"
    (tmp_path / "mean" / "sentence_xlm-roberta_config.json").write_text('{"max_seq_length": 6, "do_lower_case": true}')
    model = bert.load(tmp_path / "mean")
    assert model.pooling == Pooling("mean", normalize=True, max_length=6) and lowercases(model.tokenizer)
    (tmp_path / "mean" / "config_sentence_transformers.json").write_text('{"model_type": "CrossEncoder"}')
    with pytest.raises(
        UserError, match="lists Transformer, Pooling, Normalize: a cross-encoder needs Transformer alone"
    ):
        bert.load(tmp_path / "mean")
    modules = json.loads((tmp_path / "mean" / "modules.json").read_text())
    (tmp_path / "mean" / "modules.json").write_text(json.dumps(modules[:1]))
    assert bert.load(tmp_path / "mean").pooling is None, "a cross-encoder has none"
    declared = tmp_path / "max" / "1_Pooling" / "config.json"
    declared.write_text('{"pooling_mode_median": true}')
    with pytest.raises(UserError, match="pooling mode is median"):
        bert.load(tmp_path / "max")
    (tmp_path / "cls" / "modules.json").write_text('[{"type": "x.Transformer", "path": "../mean"}]')
    with pytest.raises(UserError, match=r"'../mean', which may be outside"):
        bert.load(tmp_path / "cls")
    (tmp_path / "cls" / "modules.json").write_text('[{"type": "x.Transformer"}, {"type": "x.Dense"}]')
    with pytest.raises(UserError, match="lists Transformer, Dense"):
        bert.load(tmp_path / "cls")


@pytest.mark.slow
def test_training_starts_from_a_folder(pretrained: Path, corpus: Path, sst2: Path, tmp_path: Path, capsys) -> None:
    source = tmp_path / "source"
    assert export([str(pretrained), str(source)]) == 0
    again = [f"--data.train={corpus}", *SMALL_RUN]
    capsys.readouterr()
    assert pretrain([*again, f"--init={source}", f"--output_dir={tmp_path / 'whole'}"]) == 0
    text = capsys.readouterr().out
    assert f"from {source}: bert, predictions, seq_relationship (" in text
    assert "is randomly initialized" not in text
    assert (tmp_path / "whole" / "vocab.txt").read_bytes() == (source / "vocab.txt").read_bytes()

    bare = tmp_path / "bare"
    shutil.copytree(source, bare)
    rewrite(bare, lambda tensors: {n: a for n, a in tensors.items() if not n.startswith(("cls.", "bert.pooler"))})
    edit(bare, architectures=["BertModel"])
    assert pretrain([*again, f"--init={bare}", f"--output_dir={tmp_path / 'headless'}"]) == 0
    text = capsys.readouterr().out
    assert "randomly initialized: bert/pooler, predictions, seq_relationship" in text
    arguments = [f"--data.dir={sst2}", f"--output_dir={tmp_path / 'sst2'}", "--data.max_length=32"]
    arguments += ["--data.buckets=32", "--training.batch_size=8", "--training.epochs=1"]
    assert finetune(["--config=sst2", f"--init={source}", *arguments]) == 0
    text = capsys.readouterr().out
    assert f"from {source}: bert (" in text
    assert "randomly initialized: classifier\nnot loaded: predictions, seq_relationship" in text


def test_a_projection_that_the_sizes_do_not_have_is_one_sentence(made, tmp_path: Path) -> None:
    made("BertForMaskedLM", dataclasses.replace(ELECTRA, embedding_size=None)).save(tmp_path / "model")
    more = {"electra.embeddings_project.weight": np.zeros((12, 12), np.float32)}
    rewrite(tmp_path / "model", lambda tensors: {**tensors, **more})
    with pytest.raises(UserError, match=r"holds electra.embeddings_project.weight"):
        bert.load(tmp_path / "model")
