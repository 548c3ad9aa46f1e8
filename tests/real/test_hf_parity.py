"""Models that transformers drew at random and wrote, read by us; ours written, and read by transformers."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from sklearn.metrics import roc_auc_score
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

import bert
from bert.commands.pretrain import main as pretrain
from bert.errors import UserError
from bert.interchange import families
from bert.interchange.bundle import build_module
from bert.model.dropout import Dropout
from bert.tokenizer.vocabulary import load_tokenizer
from tests.conftest import SMALL_RUN
from tests.real.hf_models import (
    ARGUMENTS,
    AUTO,
    LABELS,
    PIECES,
    answers,
    assert_alike,
    assert_export,
    drawn,
    inputs,
    our_answers,
    real_inputs,
)

pytestmark = pytest.mark.real

torch = pytest.importorskip("torch", reason="needs the extra `torch`")
transformers = pytest.importorskip("transformers", reason="needs the extra `torch`")


@pytest.fixture(scope="session")
def byte_level():
    """Writes a small byte-level vocabulary of RoBERTa's form into a folder."""
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trainer = trainers.BpeTrainer(
        vocab_size=PIECES, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    words.train_from_iterator(Path(__file__).read_text().splitlines(), trainer)
    vocab = words.get_vocab()

    def write(folder) -> None:
        words.model.save(str(folder))
        load_tokenizer(folder).save(str(folder / "tokenizer.json"))
        for name in ("vocab.json", "merges.txt"):
            (folder / name).unlink()
        assert json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"] == vocab

    return write


@pytest.mark.parametrize("architecture", families.BERT.classes)
def test_every_architecture_in_and_out(architecture: str, tmp_path, mrpc_texts) -> None:
    acts = ("relu", "gelu_new", "gelu")
    for act in acts:
        folder = tmp_path / act
        reference = drawn(folder, architecture, hidden_act=act)
        model = bert.load(folder)
        assert model.architecture == architecture
        for padded in (False, True):
            batch = inputs(architecture, padded)
            assert_alike(our_answers(model, batch), answers(reference, batch), batch["attention_mask"])
        for texts in mrpc_texts:
            batch = real_inputs(folder, model, texts, architecture)
            assert (batch["input_ids"] == model.tokenizer.token_to_id("[UNK]")).mean() < 0.1
            assert_alike(our_answers(model, batch), answers(reference, batch), batch["attention_mask"])
        assert batch["token_type_ids"].any(), "the pairs have a second segment"
        assert_export(model, reference, AUTO[architecture], tmp_path / f"ours-{act}")


def test_an_untied_decoder_stays_untied(tmp_path) -> None:
    reference = drawn(tmp_path / "theirs", "BertForMaskedLM", tie_word_embeddings=False)
    model = bert.load(tmp_path / "theirs")
    batch = inputs("BertForMaskedLM", padded=True)
    assert_alike(our_answers(model, batch), answers(reference, batch), batch["attention_mask"])
    with torch.no_grad():  # one of the two is without use: the decoder adds its own
        reference.cls.predictions.bias.copy_(reference.cls.predictions.decoder.bias)
    reference.save_pretrained(tmp_path / "theirs")
    assert_export(model, reference, "AutoModelForMaskedLM", tmp_path / "ours")


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
        with pytest.raises(UserError, match=r"not a file of (named )?tensors alone|convert it to float32"):
            bert.load(tmp_path)
    assert "this must not run" not in "".join(capsys.readouterr())


class Unsafe:
    def __reduce__(self):
        return print, ("this must not run",)


@pytest.mark.parametrize("architecture", families.ROBERTA.classes)
def test_roberta_in_and_out(architecture: str, tmp_path, byte_level, mrpc_texts) -> None:
    ids = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
    variants = {"gelu": 1}  # transformers' MLM head of RoBERTa knows no other activation
    if architecture != "BertForMaskedLM":
        variants |= {"relu": 3, "gelu_new": 1}
    for act, segments in variants.items():
        folder = tmp_path / act
        settings = {**ids, "hidden_act": act, "type_vocab_size": segments}
        reference = drawn(folder, architecture, "roberta", **settings)
        byte_level(folder)
        model = bert.load(folder)
        assert model.architecture == architecture
        assert (model.config.position_offset, model.config.max_position_embeddings) == (2, 38)
        for padded in (False, True):
            batch = inputs(architecture, padded, segments=segments, first=2)
            assert_alike(our_answers(model, batch), answers(reference, batch), batch["attention_mask"])
        for texts in mrpc_texts:
            batch = real_inputs(folder, model, texts, architecture)
            assert_alike(our_answers(model, batch), answers(reference, batch), batch["attention_mask"])
        assert_export(model, reference, AUTO[architecture], tmp_path / f"ours-{act}")


@pytest.mark.parametrize("architecture", families.ELECTRA.classes)
@pytest.mark.parametrize("width", [40, 96])
def test_electra_in_and_out(architecture: str, width: int, tmp_path, mrpc_texts) -> None:
    """Covers narrow and full-width embeddings. The MLM head of transformers' ELECTRA supports only gelu."""
    for act in ("gelu",) if architecture == "BertForMaskedLM" else ("gelu", "relu"):
        folder = tmp_path / act
        reference = drawn(folder, architecture, "electra", hidden_act=act, embedding_size=width)
        model = bert.load(folder)
        narrow = None if width == 96 else width
        assert (model.architecture, model.config.embedding_size, model.config.pooler_act) == (
            architecture,
            narrow,
            "gelu",
        )
        for padded in (False, True):
            batch = inputs(architecture, padded)
            assert_alike(our_answers(model, batch), answers(reference, batch), batch["attention_mask"])
        for texts in mrpc_texts:
            batch = real_inputs(folder, model, texts, architecture)
            assert_alike(our_answers(model, batch), answers(reference, batch), batch["attention_mask"])
        assert_export(model, reference, AUTO[architecture], tmp_path / f"ours-{act}")


@pytest.mark.parametrize("architecture", families.DISTILBERT.classes)
def test_distilbert_in_and_out(architecture: str, tmp_path, mrpc_texts) -> None:
    for act in ("gelu", "relu"):
        folder = tmp_path / act
        sizes = {
            "dim": 96,
            "n_layers": 5,
            "n_heads": 3,
            "hidden_dim": 200,
            "activation": act,
            "seq_classif_dropout": 0.3,
        }
        reference = drawn(folder, architecture, "distilbert", **sizes)
        model = bert.load(folder)
        assert (model.architecture, model.config.type_vocab_size, model.config.pooler_act) == (architecture, 0, "relu")
        rows = architecture.endswith(("SequenceClassification", "MultipleChoice"))
        assert model.classifier_dropout == (0.3 if rows else None)
        batches = [inputs(architecture, padded) for padded in (False, True)]
        batches += [real_inputs(folder, model, texts, architecture) for texts in mrpc_texts]
        for batch in batches:
            given = {name: batch[name] for name in ("input_ids", "attention_mask")}
            assert_alike(our_answers(model, batch), answers(reference, given), batch["attention_mask"])
        assert_export(model, reference, AUTO[architecture], tmp_path / f"ours-{act}")


@pytest.mark.parametrize("architecture", families.ROBERTA_PRELAYERNORM.classes)
def test_roberta_prelayernorm_in_and_out(architecture: str, tmp_path, byte_level, mrpc_texts) -> None:
    folder = tmp_path / "theirs"
    settings = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "type_vocab_size": 1}
    reference = drawn(folder, architecture, "roberta-prelayernorm", **settings)
    (folder / "vocab.txt").unlink()
    byte_level(folder)
    model = bert.load(folder)
    assert (model.architecture, model.config.position_offset, model.config.pre_layer_norm) == (architecture, 2, True)
    batches = [inputs(architecture, padded, segments=1, first=2) for padded in (False, True)]
    batches += [real_inputs(folder, model, texts, architecture) for texts in mrpc_texts]
    for batch in batches:
        ours, theirs = our_answers(model, batch), answers(reference, batch)
        # transformers' last hidden state of its list is that before the final LayerNorm
        last = model.config.num_hidden_layers
        assert_alike(ours[:last] + ours[last + 1 :], theirs[:last] + theirs[last + 1 :], batch["attention_mask"])
    assert_export(model, reference, AUTO[architecture], tmp_path / "ours")


@pytest.mark.parametrize(("positions", "kind"), [("learned", "wordpiece"), ("sinusoidal", "byte_level")])
def test_pre_ln_runs_load_in_transformers(positions: str, kind: str, corpus, tmp_path) -> None:
    """Positions start at row 0, so the export adds rows of zeros in front, up to the row of [PAD]."""
    arguments = [f"--data.train={corpus}", *SMALL_RUN, f"--model.position_embedding_type={positions}"]
    arguments += ["--data.input_format=full_sentences", "--model.pre_layer_norm=true", f"--tokenizer.kind={kind}"]
    arguments += ["--tokenizer.vocab_size=330"]
    assert pretrain([*arguments, f"--output_dir={tmp_path / 'run'}"]) == 0
    said: list[str] = []
    bert.load(tmp_path / "run").save(tmp_path / "out", log=said.append)
    assert "logits within" in said[0] and said[0].endswith("token ids equal")
    again, found = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert type(again).__name__ == "RobertaPreLayerNormForMaskedLM"
    assert not any(found.values()), found


def test_both_models_of_a_run_of_replaced_tokens_load_in_transformers(detected, tmp_path) -> None:
    model = bert.load(detected)
    for part, auto, name in (
        (model, "AutoModelForPreTraining", "ElectraForPreTraining"),
        (model.generator, "AutoModelForMaskedLM", "ElectraForMaskedLM"),
    ):
        said: list[str] = []
        part.save(tmp_path / auto, log=said.append)
        assert "logits within" in said[0]
        again, found = getattr(transformers, auto).from_pretrained(tmp_path / auto, output_loading_info=True)
        assert type(again).__name__ == name
        assert not any(found.values()), found
    text = "Ba [MASK] ko."
    theirs = transformers.pipeline("fill-mask", str(tmp_path / "AutoModelForMaskedLM"), top_k=5)(text)
    [ours] = model.fill_mask(text)
    assert [guess.token_id for guess in ours] == [guess["token"] for guess in theirs]
    assert [guess.probability for guess in ours] == pytest.approx([guess["score"] for guess in theirs], abs=1e-5)


def test_runs_of_ours_load_in_the_auto_classes_and_answer_alike(pretrained, finetuned, tmp_path) -> None:
    for run, auto in ((pretrained, "AutoModelForPreTraining"), (finetuned, "AutoModelForSequenceClassification")):
        said: list[str] = []
        out = tmp_path / auto
        bert.load(run).save(out, log=said.append)
        assert said[0].endswith("token ids equal")
        _, found = getattr(transformers, auto).from_pretrained(out, output_loading_info=True)
        assert not any(found.values()), found
    texts = ["ba ri", "ko ri tu", "ne"]
    theirs = transformers.pipeline("text-classification", str(out), top_k=None)(texts)
    for ours, scores in zip(bert.load(finetuned).predict(texts), theirs, strict=True):
        assert {score["label"]: score["score"] for score in scores} == pytest.approx(ours.probabilities, abs=1e-5)
        assert scores[0]["label"] == ours.label


@pytest.mark.parametrize("family", ["bert", "roberta", "electra"])
def test_a_classifier_drops_in_training_where_transformers_does(family: str, tmp_path, byte_level) -> None:
    """Our masks in place of torch's: the same logits, so dropout stands in the same places at the same rate."""
    settings = {"classifier_dropout": 0.4, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if family == "roberta":
        settings |= {"type_vocab_size": 1, "pad_token_id": 1}
    reference = drawn(tmp_path / "model", "BertForSequenceClassification", family, **settings).train()
    if family == "roberta":
        byte_level(tmp_path / "model")
    model = bert.load(tmp_path / "model")
    assert model.classifier_dropout == 0.4
    batch = inputs(model.architecture, padded=True, segments=model.config.type_vocab_size, first=2)
    arguments = [batch[name] for name in ARGUMENTS]
    dropout = Dropout.for_step(0, 0, np.arange(4))
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


def test_robertas_tokenizer_in_and_out(tmp_path, byte_level, shared) -> None:
    texts = [line.split("\t")[0] for line in (shared / "data/glue/SST-2/dev.tsv").read_text().splitlines()[1:101]]
    texts += [" a <mask> with spaces  before it", "naïve — 你好", ""]
    drawn(tmp_path / "json", "Bert", "roberta", type_vocab_size=1, pad_token_id=1)
    byte_level(tmp_path / "json")
    model = bert.load(tmp_path / "json")
    model.save(tmp_path / "out")
    plain = tmp_path / "plain"
    drawn(plain, "Bert", "roberta", type_vocab_size=1, pad_token_id=1)
    for name in ("vocab.json", "merges.txt"):
        (plain / name).write_bytes((tmp_path / "out" / name).read_bytes())
    pairs = list(zip(texts, reversed(texts), strict=True))
    for inputs_ in (texts, pairs):
        expected = [encoding.ids for encoding in model.tokenizer.encode_batch(inputs_)]
        assert [encoding.ids for encoding in bert.load(plain).tokenizer.encode_batch(inputs_)] == expected
        for folder in (tmp_path / "json", tmp_path / "out"):
            theirs = transformers.AutoTokenizer.from_pretrained(folder)
            columns = (inputs_,) if isinstance(inputs_[0], str) else tuple(map(list, zip(*inputs_, strict=True)))
            assert theirs(*columns)["input_ids"] == expected


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


@pytest.mark.parametrize("offset", [0, 2])
def test_a_run_with_a_byte_level_vocabulary_of_its_own(offset: int, corpus, tmp_path) -> None:
    """Exports as BERT and as RoBERTa. The export compares ids and logits with transformers."""
    arguments = [*SMALL_RUN, "--tokenizer.kind=byte_level", "--tokenizer.vocab_size=330", "--training.steps=2"]
    arguments += [
        "--data.input_format=full_sentences",
        f"--model.position_offset={offset}",
        "--model.type_vocab_size=1",
    ]
    arguments += [f"--model.layer_norm_eps={1e-5}", f"--data.train={corpus}", f"--output_dir={tmp_path / 'run'}"]
    assert pretrain(arguments) == 0
    said: list[str] = []
    model = bert.load(tmp_path / "run")
    model.save(tmp_path / "out", log=said.append)
    assert "of transformers', token ids equal" in said[0]
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "out")
    assert theirs.config.model_type == ("roberta" if offset else "bert")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "ba kori <mask> tunelo 😀 \u00e9"
    assert tokenizer(text)["input_ids"] == model.tokenizer.encode(text).ids
    answers = transformers.pipeline("fill-mask", model=theirs, tokenizer=tokenizer)(text, top_k=3)
    [guesses] = model.fill_mask(text, top_k=3)
    assert [answer["token"] for answer in answers] == [guess.token_id for guess in guesses]
    assert [answer["token_str"] for answer in answers] == [guess.token for guess in guesses]


@pytest.mark.parametrize("family", ["bert", "distilbert"])
def test_a_classifier_of_transformers_is_continued_by_the_names_of_its_labels(family: str, tmp_path) -> None:
    """Its labels are in no alphabetical order, and in another order in the data: at a rate of 1e-9 nothing changes."""
    drawn(tmp_path / "theirs", "BertForSequenceClassification", family)
    texts = ["the house is small", "they said that it was there before", "in the year", "and so on"]
    rows = [{"text": text, "label": LABELS[number % 3]} for number, text in enumerate(texts * 4)]

    def scores_of(folder: Path) -> list[dict[str, float]]:
        model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
        answers = transformers.pipeline("text-classification", model=model, tokenizer=tokenizer, top_k=None)(texts)
        return [{answer["label"]: answer["score"] for answer in of_text} for of_text in answers]

    before, source = scores_of(tmp_path / "theirs"), tmp_path / "theirs"
    for name, order in {"sorted": None, "other": ["right", "neither", "wrong"]}.items():
        overrides = {"training.epochs": 1, "training.batch_size": 8, "optimizer.learning_rate": 1e-9, "seed": 7}
        overrides |= {"data.max_length": 32, "data.labels": order}
        run = bert.finetune(
            "classification", init=source, train=rows, dev=rows, output_dir=tmp_path / name, overrides=overrides
        )
        for ours, theirs in zip(run.model.predict(texts), before, strict=True):
            assert list(ours.probabilities) == (order or sorted(LABELS))
            assert ours.probabilities == pytest.approx(theirs, abs=1e-5)
        source = tmp_path / f"{name}-exported"
        run.model.save(source)
        assert list(bert.load(source).labels) == (order or sorted(LABELS))
        for ours, theirs in zip(scores_of(source), before, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-5)
