"""Models that transformers drew at random and wrote, read by us; ours written, and read by transformers."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors import safe_open
from sklearn.metrics import roc_auc_score
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

import bert
from bert.config import UserError
from bert.interchange.hf_export import module_of
from bert.interchange.names import ARCHITECTURES, published_name
from bert.model import Bert
from bert.tokenizer import load_tokenizer

pytestmark = pytest.mark.real

torch = pytest.importorskip("torch", reason="needs the extra `torch`")
transformers = pytest.importorskip("transformers", reason="needs the extra `torch`")

PIECES = 1013
WORDS = [f"w{number}" for number in range(PIECES - 5)]
AUTO = {
    "Bert": "AutoModel",
    "BertForPreTraining": "AutoModelForPreTraining",
    "BertForMaskedLM": "AutoModelForMaskedLM",
    "BertForNextSentencePrediction": "AutoModelForNextSentencePrediction",
    "BertForSequenceClassification": "AutoModelForSequenceClassification",
    "BertForTokenClassification": "AutoModelForTokenClassification",
    "BertForQuestionAnswering": "AutoModelForQuestionAnswering",
    "BertForMultipleChoice": "AutoModelForMultipleChoice",
}
BERT_ONLY = ("BertForPreTraining", "BertForNextSentencePrediction")
LABELS = ("wrong", "right", "neither")


def drawn(folder, architecture: str, family: str = "bert", **settings):
    """A model of odd sizes with every parameter random, saved to the folder by transformers."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": PIECES,
        "hidden_size": 96,
        "num_hidden_layers": 5,
        "num_attention_heads": 3,
        "intermediate_size": 200,
        "max_position_embeddings": 40,
        "type_vocab_size": 3,
        "initializer_range": 0.1,
    }
    if architecture in ("BertForSequenceClassification", "BertForTokenClassification"):
        sizes["id2label"] = dict(enumerate(LABELS))
        sizes["label2id"] = {label: number for number, label in enumerate(LABELS)}
    config_class = {"bert": transformers.BertConfig, "roberta": transformers.RobertaConfig}[family]
    config = config_class(**{**sizes, **settings})
    model = getattr(transformers, published_name(architecture, family))(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and LayerNorm as well: fresh ones are zeros and ones
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    model.path = folder / "model.safetensors"
    if family == "bert":
        pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
        (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces))
    return model


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


def inputs(architecture: str, padded: bool, segments: int = 3, first: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    shape = (2, 3, 33) if architecture == "BertForMultipleChoice" else (4, 33)
    mask = np.ones(shape, int)
    if padded:
        mask[1, ..., 20:] = mask[-1, ..., 5:] = 0
    ids = random.integers(first, PIECES, shape)
    ids[mask == 0] = max(first - 1, 0)
    return {"input_ids": ids, "token_type_ids": random.integers(0, segments, shape), "attention_mask": mask}


def answers(reference, batch: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Every hidden state, then the outputs, of transformers' model."""
    with torch.no_grad():
        output = reference(
            **{name: torch.tensor(array) for name, array in batch.items()},
            output_hidden_states=True,
        )
    names = ("pooler_output", "prediction_logits", "seq_relationship_logits", "logits", "start_logits", "end_logits")
    found = [getattr(output, name, None) for name in names]
    return [array.numpy() for array in (*output.hidden_states, *(a for a in found if a is not None))]


def our_answers(model: bert.Pretrained, batch: dict[str, np.ndarray]) -> list[np.ndarray]:
    args = [batch["input_ids"], batch["token_type_ids"], batch["attention_mask"]]
    flat = [array.reshape(-1, array.shape[-1]) for array in args]
    encoder = Bert(model.config, add_pooling_layer="pooler" in model.params["bert"])
    encoded = encoder.apply({"params": model.params["bert"]}, *flat, intermediates=True)
    if model.architecture == "Bert":
        heads = [] if encoded.pooled_output is None else [encoded.pooled_output]
    else:
        output = module_of(model).apply({"params": model.params}, *args)
        heads = jax.tree.leaves(output)
        if model.architecture == "BertForQuestionAnswering":
            heads = [output[..., 0], output[..., 1]]
    return [*encoded.hidden_states, *heads]


def assert_alike(ours: list, theirs: list, mask: np.ndarray) -> None:
    assert len(ours) == len(theirs)
    flat = mask.reshape(-1, mask.shape[-1]).astype(bool)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.shape == other.shape
        if mine.shape[:2] == flat.shape:  # nothing is promised about padding
            mine, other = mine[flat], other[flat]
        np.testing.assert_allclose(mine, other, atol=1e-4)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_in_and_out(architecture: str, tmp_path) -> None:
    acts = ("relu", "gelu_new", "gelu")
    for act in acts:
        folder = tmp_path / act
        reference = drawn(folder, architecture, hidden_act=act)
        model = bert.load(folder)
        assert model.architecture == architecture
        for padded in (False, True):
            batch = inputs(architecture, padded)
            assert_alike(our_answers(model, batch), answers(reference, batch), batch["attention_mask"])
    assert_export(model, reference, AUTO[architecture], tmp_path / "ours")


def assert_export(model: bert.Pretrained, reference, auto: str, folder) -> None:
    """The export loads in an Auto class of transformers as the model it came from, tensors and labels."""
    said: list[str] = []
    model.save(folder, say=said.append)
    assert "logits within" in said[0]
    again = getattr(transformers, auto).from_pretrained(folder).eval()
    assert type(again) is type(reference)
    expected = reference.state_dict()
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    if model.labels:
        assert model.labels == LABELS
        assert again.config.id2label == dict(enumerate(LABELS))
    with safe_open(folder / "model.safetensors", "np") as ours, safe_open(reference.path, "np") as theirs:
        assert sorted(ours.keys()) == sorted(theirs.keys())
        assert ours.metadata() == {"format": "pt"}
        for name in ours.keys():  # noqa: SIM118
            np.testing.assert_array_equal(ours.get_tensor(name), theirs.get_tensor(name))


def test_an_untied_decoder_stays_untied(tmp_path) -> None:
    reference = drawn(tmp_path / "theirs", "BertForMaskedLM", tie_word_embeddings=False)
    model = bert.load(tmp_path / "theirs")
    batch = inputs("BertForMaskedLM", padded=True)
    assert_alike(our_answers(model, batch), answers(reference, batch), batch["attention_mask"])
    with torch.no_grad():  # one of the two is without use: the decoder adds its own
        reference.cls.predictions.bias.copy_(reference.cls.predictions.decoder.bias)
    reference.save_pretrained(tmp_path / "theirs")
    assert_export(model, reference, "AutoModelForMaskedLM", tmp_path / "ours")


def test_a_pickle_is_read_as_tensors_alone(tmp_path) -> None:
    reference = drawn(tmp_path, "BertForPreTraining")
    expected = bert.load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(reference.half().state_dict(), tmp_path / "pytorch_model.bin")
    model = bert.load(tmp_path)
    jax.tree.map(lambda ours, other: np.testing.assert_allclose(ours, other, atol=1e-3), model.params, expected.params)
    torch.save({"a": Unsafe()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="not a file of tensors alone"):
        bert.load(tmp_path)


class Unsafe:
    def __reduce__(self):
        return print, ("this must not run",)


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name not in BERT_ONLY])
def test_roberta_in_and_out(architecture: str, tmp_path, byte_level) -> None:
    settings = {"type_vocab_size": 1, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
    reference = drawn(tmp_path / "theirs", architecture, "roberta", **settings)
    byte_level(tmp_path / "theirs")
    model = bert.load(tmp_path / "theirs")
    assert model.architecture == architecture
    assert (model.config.position_offset, model.config.max_position_embeddings) == (2, 38)
    for padded in (False, True):
        batch = inputs(architecture, padded, segments=1, first=2)
        assert_alike(our_answers(model, batch), answers(reference, batch), batch["attention_mask"])
    assert_export(model, reference, AUTO[architecture], tmp_path / "ours")


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

    labels = [int(row[0]) for row in rows]
    similarity = np.prod([model.encode([row[i] for row in rows]).embeddings for i in (3, 4)], axis=0).sum(-1)
    first, second = (pooled([row[i] for row in rows])[1] for i in (3, 4))
    cosine = (first * second).sum(-1) / np.linalg.norm(first, axis=-1) / np.linalg.norm(second, axis=-1)
    assert round(roc_auc_score(labels, similarity), 4) == round(roc_auc_score(labels, cosine), 4)
    assert roc_auc_score(labels, similarity) > 0.7
