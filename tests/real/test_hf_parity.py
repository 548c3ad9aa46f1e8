"""Every class of every family: models that transformers drew and saved, read by us, and our exports read by it."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

import bert
from bert.data.encoding import tokenize
from bert.errors import UserError
from bert.interchange import families
from bert.interchange.modules import build_module
from bert.interchange.writers.signature import make_forward, parameters
from bert.model.dropout import Dropout
from bert.model.names import GLOBAL_TOKENS
from bert.model.positions import MAX_RELATIVE_DISTANCE, buckets_by_distance
from tests.interchange.hf_folders import edit
from tests.real.family_cases import CASES, GPT2, ROBERTA, Case
from tests.real.hf_models import (
    ARGUMENTS,
    HOSTILE,
    answers,
    assert_alike,
    assert_export,
    drawn,
    inputs,
    joined,
    our_answers,
    real_inputs,
    torch,
    transformers,
    with_separators,
)

pytestmark = pytest.mark.real


@pytest.mark.parametrize(
    ("name", "architecture"),
    [(name, one) for name, case in CASES.items() for one in case.architectures or case.family.classes],
)
def test_every_class_in_and_out(name: str, architecture: str, tmp_path: Path, mrpc_texts) -> None:
    """Hidden states and outputs equal transformers', of random rows and of real ones, and so do exported tensors."""
    case, folder = CASES[name], tmp_path / "theirs"
    reference = drawn(folder, architecture, case.family.model_type, case.adjust, **case.settings)
    model = bert.load(folder)
    assert model.architecture == architecture
    assert {field: getattr(model.config, field) for field in case.read} == case.read
    if case.classifier_dropout is not None:
        of_rows = architecture in ("BertForSequenceClassification", "BertForMultipleChoice")
        assert model.classifier_dropout == (case.classifier_dropout if of_rows else None)
    for batch in batches_of(case, model, folder, mrpc_texts):
        columns = {column: batch[column] for column in case.columns}
        theirs = answers(reference, columns, case.family.pads_left)
        ours = our_answers(model, batch)
        if not case.last_state:
            del ours[model.config.num_hidden_layers], theirs[model.config.num_hidden_layers]
        assert_alike(ours, theirs, batch["attention_mask"], case.tolerance)
    exported = (case.exported or case.family).classes[architecture]
    assert_export(model, reference, tmp_path / "ours", exported, case.unused)


def batches_of(case: Case, model: bert.Pretrained, folder: Path, texts: tuple[list, list]) -> list[dict]:
    """Returns a batch of random rows without and with padding, texts and pairs, and one of long rows if any."""
    words = {"words": case.settings["vocab_size"]} if "vocab_size" in case.settings else {}
    first, segments = case.read.get("position_offset", 0), max(model.config.type_vocab_size, 1)
    padding = case.settings.get("pad_token_id", 0)
    batches = [inputs(model.architecture, padded, segments, first, padding, **words) for padded in (False, True)]
    separator = model.config.global_attention_sep_id
    if separator is not None:
        batches = [with_separators(batch, separator) for batch in batches]
        texts = texts if GLOBAL_TOKENS.get(model.architecture) in (None, "first") else texts[1:]  # pairs alone
    # transformers' causal classifiers leave out the end token where it is the padding, too
    leaves_out_ends = model.config.causal and model.architecture == "BertForSequenceClassification"
    for some in texts if case.real_rows and not leaves_out_ends else ():
        batch = real_inputs(folder, model, some, model.architecture)
        if (unknown := model.tokenizer.token_to_id("[UNK]")) is not None:
            assert (batch["input_ids"] == unknown).mean() < 0.1
        batches.append(batch)
    if case.family is families.BERT:
        assert batch["token_type_ids"].any(), "the pairs have a second segment"
    if not case.long_rows:
        return [joined(batches)]
    return [joined(batches), long_batch(model, batches[0]["input_ids"], case.long_rows, padding)]


def long_batch(model: bert.Pretrained, ids: np.ndarray, length: int, padding: int) -> dict[str, np.ndarray]:
    """Returns repeated rows, of which the last ones are padded."""
    ids = np.tile(ids, -(-length // ids.shape[-1]))[..., :length]
    mask = np.ones_like(ids)
    mask[-1, ..., 2 * length // 3 :] = 0
    ids[mask == 0] = padding
    batch = {"input_ids": ids, "token_type_ids": np.zeros_like(ids), "attention_mask": mask}
    separator = model.config.global_attention_sep_id
    return batch if separator is None else with_separators(batch, separator)


def test_an_untied_decoder_stays_untied(tmp_path) -> None:
    reference = drawn(tmp_path / "theirs", "BertForMaskedLM", tie_word_embeddings=False)
    model = bert.load(tmp_path / "theirs")
    batch = inputs("BertForMaskedLM", padded=True)
    assert_alike(our_answers(model, batch), answers(reference, batch), batch["attention_mask"])
    with torch.no_grad():  # one of the two is without use: the decoder adds its own
        reference.cls.predictions.bias.copy_(reference.cls.predictions.decoder.bias)
    reference.save_pretrained(tmp_path / "theirs")
    assert_export(model, reference, tmp_path / "ours", "BertForMaskedLM")


def test_a_pickle_is_read_as_tensors_alone(tmp_path, capsys) -> None:
    reference = drawn(tmp_path, "BertForPreTraining")
    expected = bert.load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(reference.half().state_dict(), tmp_path / "pytorch_model.bin")
    model = bert.load(tmp_path)
    jax.tree.map(lambda ours, other: np.testing.assert_allclose(ours, other, atol=1e-3), model.params, expected.params)
    whole = dict(reference.float().named_parameters())  # as some have saved them: they carry gradients
    torch.save(whole, tmp_path / "pytorch_model.bin")
    jax.tree.map(np.testing.assert_array_equal, bert.load(tmp_path).params, model.params)
    half = len(whole) // 2
    shards = {"pytorch_model-1.bin": list(whole)[:half], "pytorch_model-2.bin": list(whole)[half:]}
    for name, tensors in shards.items():
        torch.save({tensor: whole[tensor] for tensor in tensors}, tmp_path / name)
    places = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    (tmp_path / "pytorch_model.bin").rename(tmp_path / "whole")
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
    jax.tree.map(np.testing.assert_array_equal, bert.load(tmp_path).params, model.params)

    for content in ({"a": Unsafe()}, {1: torch.zeros(2)}, {"a": torch.zeros(2, 2).to_sparse()}):
        torch.save(content, tmp_path / "pytorch_model.bin")
        with pytest.raises(UserError, match=r"more than tensors|dictionary of named tensors|convert it to float32"):
            bert.load(tmp_path)
    assert "this must not run" not in "".join(capsys.readouterr())


class Unsafe:
    def __reduce__(self):
        return print, ("this must not run",)


def test_a_bare_gpt2_is_a_language_model_as_well(tmp_path) -> None:
    """Its decoder is its word embeddings, so that nothing is missing."""
    reference = drawn(tmp_path / "theirs", "Bert", "gpt2", **GPT2)
    model = bert.load(tmp_path / "theirs")
    states = model.encode(["To be, or not to be", "that"])
    features = tokenize(model.tokenizer, ["To be, or not to be"], 40)
    with torch.no_grad():
        expected = reference(torch.tensor(features.ids[None], dtype=torch.long)).last_hidden_state.numpy()
    np.testing.assert_allclose(states.last_hidden_state[0, : len(features.ids)], expected[0], atol=1e-4)
    assert states.pooled_output is None
    model.save(tmp_path / "ours")
    assert type(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")).__name__ == "GPT2LMHeadModel"


@pytest.mark.parametrize("architecture", families.LONGFORMER.classes)
def test_long_rows_of_longformer_are_computed_in_blocks(architecture: str, tmp_path: Path) -> None:
    """Outputs of rows with fewer and with more global tokens than a block of 32 has, of which some are padded."""
    settings = CASES["longformer"].settings
    reference = drawn(tmp_path, architecture, "longformer", **settings)
    model = bert.load(tmp_path)
    assert model.config.local_block(150) == 32
    run = jax.jit(make_forward(model))
    long = long_batch(model, inputs(architecture, False, 1, 2, 1)["input_ids"], 150, 1)
    few = {**long, "input_ids": long["input_ids"].copy()}
    for ids, mask in zip(few["input_ids"].reshape(-1, 150), few["attention_mask"].reshape(-1, 150), strict=True):
        first = 7 if architecture == "BertForQuestionAnswering" else mask.sum() - 9
        ids[ids == 2] = 3
        ids[[first, first + 1, mask.sum() - 1]] = 2
    for batch in (long, few):
        arrays = {name: torch.tensor(batch[name]) for name in ("input_ids", "attention_mask")}
        with torch.no_grad():
            output = reference(**arrays)
        ours, mask = run(parameters(model), batch), batch["attention_mask"].astype(bool)
        assert ours.keys() <= output.keys()
        for name, mine in ours.items():
            other = output[name].numpy()
            per_token = mine.shape[: mask.ndim] == mask.shape
            mine, other = (x[mask] if per_token else x for x in (mine, other))
            np.testing.assert_allclose(mine, other, rtol=0, atol=1e-4)


@pytest.mark.parametrize("count", [0, 1, 5, 60])
def test_a_global_attention_mask_selects_the_same_tokens_of_longformer(count: int, tmp_path: Path) -> None:
    reference = drawn(tmp_path, "Bert", "longformer", **CASES["longformer"].settings)
    model = bert.load(tmp_path)
    batch = long_batch(model, inputs("Bert", False, 1, 2, 1)["input_ids"], 150, 1)
    rows = {name: batch[name] for name in ("input_ids", "attention_mask")}
    random = np.random.default_rng(0)
    flags = np.stack([random.permutation(np.arange(150) < count) for _ in rows["input_ids"]]).astype(np.int32)
    ours = model.apply(**rows, global_attention_mask=flags)
    with torch.no_grad():
        theirs = reference(**{n: torch.tensor(x) for n, x in rows.items()}, global_attention_mask=torch.tensor(flags))
    real = rows["attention_mask"].astype(bool)
    states = ours.last_hidden_state[real], theirs.last_hidden_state.numpy()[real]
    np.testing.assert_allclose(*states, rtol=0, atol=1e-4)


def test_longformer_reads_hostile_texts(tmp_path: Path) -> None:
    reference = drawn(tmp_path, "Bert", "longformer", **CASES["longformer"].settings)
    texts = [*HOSTILE, " ".join(HOSTILE)]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    batch = tokenizer(texts, padding=True, truncation=True, max_length=150, return_tensors="pt")
    encoded = bert.load(tmp_path).encode(texts)
    np.testing.assert_array_equal(encoded.attention_mask, batch["attention_mask"])
    assert encoded.attention_mask.sum(1).max() > 100
    with torch.no_grad():
        expected = reference(**batch)
    real = encoded.attention_mask.astype(bool)
    np.testing.assert_allclose(encoded.last_hidden_state[real], expected.last_hidden_state.numpy()[real], atol=1e-4)
    np.testing.assert_allclose(encoded.pooled_output, expected.pooler_output.numpy(), atol=1e-4)


def test_settings_that_our_gpt2_lacks_are_rejected(tmp_path) -> None:
    drawn(tmp_path, "BertForCausalLM", "gpt2", **GPT2, num_hidden_layers=1)
    for key, value in {"scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False}.items():
        edit(tmp_path, **{key: value})
        with pytest.raises(bert.UserError, match=f"{key} is {value}"):
            bert.load(tmp_path)
        edit(tmp_path, **{key: not value})


def test_a_modernbert_fills_masks_as_the_pipeline_does(tmp_path) -> None:
    drawn(tmp_path, "BertForMaskedLM", "modernbert", **CASES["modernbert"].settings)
    text = "The [MASK] is read."
    theirs = transformers.pipeline("fill-mask", str(tmp_path), top_k=5)(text)
    [ours] = bert.load(tmp_path).fill_mask(text)
    assert [guess.token_id for guess in ours] == [guess["token"] for guess in theirs]


@pytest.mark.parametrize(("buckets", "length"), [(512, 512), (512, 1024), (32, 60), (64, 20), (8, 300)])
def test_buckets_of_deberta_are_those_of_transformers(buckets: int, length: int) -> None:
    rows = torch.zeros(1, length, 1)
    theirs = transformers.models.deberta_v2.modeling_deberta_v2.build_relative_position(
        rows, rows, bucket_size=buckets // 2, max_position=length
    )[0].numpy()
    ours = buckets_by_distance(buckets, length - 1, round_up=True)
    np.testing.assert_array_equal(ours, theirs[:, 0])
    np.testing.assert_array_equal(-ours, theirs[0])


@pytest.mark.parametrize("buckets", [4, 32, 64])
def test_buckets_of_mpnet_are_those_of_transformers(buckets: int) -> None:
    distances = torch.arange(-300, 301)
    theirs = transformers.models.mpnet.modeling_mpnet.MPNetEncoder.relative_position_bucket(-distances, buckets).numpy()
    ours = buckets_by_distance(buckets, MAX_RELATIVE_DISTANCE)[np.minimum(np.abs(distances), 128)]
    ours = ours + (distances.numpy() < 0) * (buckets // 2)
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("family", ["bert", "roberta", "electra"])
def test_a_classifier_drops_in_training_where_transformers_does(family: str, tmp_path) -> None:
    """torch uses our masks, so equal logits show that dropout has the same places and rate."""
    settings = {"classifier_dropout": 0.4, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    settings |= ROBERTA if family == "roberta" else {}
    reference = drawn(tmp_path / "model", "BertForSequenceClassification", family, **settings).train()
    model = bert.load(tmp_path / "model")
    assert model.classifier_dropout == 0.4
    batch = inputs(model.architecture, padded=True, segments=model.config.type_vocab_size, first=2, padding=1)
    arguments = [batch[name] for name in ARGUMENTS]
    dropout = Dropout.for_step(0, 0, np.arange(len(arguments[0])))
    module = build_module(model).clone(classifier_dropout=model.classifier_dropout)
    ours = module.apply({"params": model.params}, *arguments, dropout=dropout)

    sites = ["classifier"] if family == "bert" else ["pooler", "classifier"]
    left = list(sites)

    class OurMasks(torch.nn.Module):
        def forward(self, x):
            return torch.tensor(np.array(dropout(x.numpy(), 0.4, left.pop(0))))

    head = reference if family == "bert" else reference.classifier
    assert head.dropout.p == 0.4
    head.dropout = OurMasks()
    with torch.no_grad():
        theirs = reference(**{name: torch.tensor(array) for name, array in batch.items()}).logits
    assert not left
    np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-4)
    assert np.abs(ours - module.apply({"params": model.params}, *arguments)).max() > 0.01


def test_a_sentence_transformer_on_real_sentences(shared) -> None:
    folder = shared / "models/all-MiniLM-L6-v2"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    reference = transformers.AutoModel.from_pretrained(folder).eval()
    model = bert.load(folder)
    rows = [line.split("\t") for line in (shared / "data/glue/MRPC/dev.tsv").read_text("utf-8-sig").splitlines()[1:]]
    sentences = [line.split("\t")[0] for line in (shared / "data/glue/SST-2/dev.tsv").read_text().splitlines()[1:101]]
    sentences += [row[3] for row in rows[:100]]

    def pooled(texts: list[str]) -> tuple[list[np.ndarray], np.ndarray]:
        hidden, means = [], []
        for start in range(0, len(texts), 64):
            some = texts[start : start + 64]
            batch = tokenizer(some, padding=True, truncation=True, max_length=256, return_tensors="pt")
            with torch.no_grad():
                states = reference(**batch).last_hidden_state
            mask = batch["attention_mask"][:, :, None]
            hidden += [row[:length] for row, length in zip(states.numpy(), mask.sum((1, 2)).tolist(), strict=True)]
            means.append(((states * mask).sum(1) / mask.sum(1)).numpy())
        return hidden, np.concatenate(means)

    ours = model.encode(sentences)
    theirs, _ = pooled(sentences)
    for row, expected, mask in zip(ours.last_hidden_state, theirs, ours.attention_mask, strict=True):
        assert mask.sum() == len(expected)
        np.testing.assert_allclose(row[: len(expected)], expected, atol=1e-4)

    pairs = [(row[3], row[4]) for row in rows[:50]]
    batch = tokenizer(*map(list, zip(*pairs, strict=True)), padding=True, return_tensors="pt")
    with torch.no_grad():
        expected = reference(**batch).last_hidden_state.numpy()
    encoded = model.encode(pairs)
    real = batch["attention_mask"].numpy().astype(bool)
    np.testing.assert_array_equal(encoded.attention_mask, real)
    assert batch["token_type_ids"].any()
    np.testing.assert_allclose(encoded.last_hidden_state[real], expected[real], atol=1e-4)
    given = {name: array.numpy() for name, array in batch.items()}
    assert_alike(our_answers(model, given), answers(reference, given), given["attention_mask"])  # every layer

    labels = [int(row[0]) for row in rows]
    similarity = np.prod([model.encode([row[i] for row in rows]).embeddings for i in (3, 4)], axis=0).sum(-1)
    first, second = (pooled([row[i] for row in rows])[1] for i in (3, 4))
    cosine = (first * second).sum(-1) / np.linalg.norm(first, axis=-1) / np.linalg.norm(second, axis=-1)
    assert round(roc_auc_score(labels, similarity), 4) == round(roc_auc_score(labels, cosine), 4)
    assert roc_auc_score(labels, similarity) > 0.7
