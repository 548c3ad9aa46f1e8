"""ModernBERT against transformers: every class in and out, hidden states, logits, and token ids of hostile text."""

import jax
import numpy as np
import pytest
from safetensors import safe_open
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

import bert
from bert.interchange import families
from tests.helpers import REPOSITORY
from tests.real.hf_models import HOSTILE, LABELS, answers, assert_alike, our_answers, real_inputs

pytestmark = pytest.mark.real

torch = pytest.importorskip("torch", reason="needs the extra `torch`")
transformers = pytest.importorskip("transformers", reason="needs the extra `torch`")

SPECIAL = ["<|padding|>", "<|endoftext|>", "[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"]
SIZES = {
    "hidden_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 3,
    "intermediate_size": 200,
    "max_position_embeddings": 48,
    "local_attention": 8,
    "initializer_range": 0.1,
}


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    """A vocabulary of the published form: NFC, bytes, BERT's special tokens, and runs of spaces as added tokens."""
    words = Tokenizer(models.BPE())
    words.normalizer, words.decoder = normalizers.NFC(), decoders.ByteLevel()
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=alphabet, show_progress=False, special_tokens=SPECIAL
    )
    words.train_from_iterator((REPOSITORY / "README.md").read_text(encoding="utf-8").splitlines(), trainer)
    words.add_tokens(["   ", "  ", "|||IP_ADDRESS|||"])
    ends = [(name, words.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=ends
    )
    return words


def drawn(folder, words: Tokenizer, architecture: str, **settings):
    """A model of odd sizes with every parameter random, saved by transformers."""
    torch.manual_seed(0)
    ids = {role: words.token_to_id(name) for role, name in (("cls", "[CLS]"), ("sep", "[SEP]"), ("pad", "[PAD]"))}
    if architecture in ("BertForSequenceClassification", "BertForTokenClassification"):
        settings |= {"id2label": dict(enumerate(LABELS)), "label2id": {label: i for i, label in enumerate(LABELS)}}
    config = transformers.ModernBertConfig(
        vocab_size=words.get_vocab_size(), bos_token_id=ids["cls"], eos_token_id=ids["sep"],
        **{f"{role}_token_id": number for role, number in ids.items()}, **{**SIZES, **settings},
    )  # fmt: skip
    config._attn_implementation = "eager"
    model = getattr(transformers, families.MODERNBERT.classes[architecture])(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    names = {f"{role}_token": f"[{role.upper()}]" for role in ("cls", "sep", "pad", "mask", "unk")}
    inputs = ["input_ids", "attention_mask"]
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, model_input_names=inputs, **names).save_pretrained(
        folder
    )
    return model


def batch_of(architecture: str, vocabulary: int, padded: bool) -> dict[str, np.ndarray]:
    random, shape = np.random.default_rng(1), (2, 3, 41) if architecture == "BertForMultipleChoice" else (4, 41)
    mask = np.ones(shape, int)
    if padded:
        mask[1, ..., 26:] = mask[-1, ..., 5:] = 0
    return {"input_ids": random.integers(0, vocabulary, shape), "attention_mask": mask}


OF_BOTH_HEADS = ("BertForMaskedLM", "BertForSequenceClassification")
"""Classes with the head of the MLM, and with the pooler: the others differ in their last layer alone."""

VARIANTS = {
    "as published": {},
    "mean, biases": {
        **dict.fromkeys(("attention_bias", "mlp_bias", "norm_bias", "classifier_bias"), True),
        "classifier_pooling": "mean",
    },
    "all global, no bias": {"global_attn_every_n_layers": 1, "decoder_bias": False, "tie_word_embeddings": False},
    "all local, swiglu": {
        "layer_types": ["sliding_attention"] * 5,
        "hidden_activation": "silu",
        "classifier_activation": "silu",
        "classifier_pooling": "mean",
    },
    "other bases, odd window": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 77.0},
        },
        "local_attention": 11,
        "global_attn_every_n_layers": 2,
    },
}


CASES = [
    *((architecture, "as published") for architecture in families.MODERNBERT.classes),
    *((architecture, variant) for architecture in OF_BOTH_HEADS for variant in list(VARIANTS)[1:]),
]


@pytest.mark.parametrize(("architecture", "variant"), CASES)
def test_modernbert_in_and_out(architecture: str, variant: str, tmp_path, words) -> None:
    reference = drawn(tmp_path / "theirs", words, architecture, **VARIANTS[variant])
    model = bert.load(tmp_path / "theirs")
    assert model.architecture == architecture
    worst = 0.0
    for padded in (False, True):
        batch = batch_of(architecture, words.get_vocab_size(), padded)
        ours, theirs = (
            our_answers(model, {**batch, "token_type_ids": 0 * batch["input_ids"]}),
            answers(reference, batch),
        )
        assert_alike(ours, theirs, batch["attention_mask"])
        real = batch["attention_mask"].reshape(-1, 41).astype(bool)
        for mine, other in zip(ours, theirs, strict=True):
            apart = np.abs(np.asarray(mine) - other)
            worst = max(worst, float((apart[real] if apart.shape[:2] == real.shape else apart).max()))
    print(f"{architecture}, {variant}: within {worst:.1e} of transformers'")
    assert worst < 2e-5

    said: list[str] = []
    model.save(tmp_path / "ours", log=said.append)
    assert "logits within" in said[0] and "token ids equal" in said[0]
    again = type(reference).from_pretrained(tmp_path / "ours").eval()
    for name, tensor in reference.state_dict().items():
        if name == "decoder.bias" and not reference.config.decoder_bias:
            continue
        assert torch.equal(again.state_dict()[name], tensor), name
    with safe_open(tmp_path / "ours/model.safetensors", "np") as ours:
        assert {*ours.keys()} - {"decoder.bias"} <= set(reference.state_dict())
    jax.tree.map(np.testing.assert_array_equal, bert.load(tmp_path / "ours").params, model.params)


def test_tokens_of_hostile_text_and_pairs_are_theirs(tmp_path, words) -> None:
    drawn(tmp_path / "theirs", words, "BertForMaskedLM", num_hidden_layers=1)
    model = bert.load(tmp_path / "theirs")
    model.save(tmp_path / "ours")
    again = bert.load(tmp_path / "ours")
    texts = [*HOSTILE, "a   b  c |||IP_ADDRESS||| [MASK] [SEP]"]
    for folder in ("theirs", "ours"):
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / folder)
        assert set(theirs(texts)) == {"input_ids", "attention_mask"}
        for first, second in zip(texts, reversed(texts), strict=True):
            for read in (model, again):
                assert read.tokenizer.encode(first).ids == theirs(first)["input_ids"], repr(first)
                if second:  # an empty one is no pair to transformers
                    assert read.tokenizer.encode(first, second).ids == theirs(first, second)["input_ids"], repr(first)


def test_real_text_is_filled_in_alike(tmp_path, words) -> None:
    reference = drawn(tmp_path, words, "BertForMaskedLM")
    model = bert.load(tmp_path)
    lines = [
        line[:90] for line in (REPOSITORY / "README.md").read_text(encoding="utf-8").splitlines() if len(line) > 20
    ][:8]
    batch = real_inputs(tmp_path, model, lines, "BertForMaskedLM")
    given = {name: batch[name] for name in ("input_ids", "attention_mask")}
    assert_alike(our_answers(model, batch), answers(reference, given), batch["attention_mask"])
    theirs = transformers.pipeline("fill-mask", str(tmp_path), top_k=5)("The [MASK] is read.")
    [ours] = model.fill_mask("The [MASK] is read.")
    assert [guess.token_id for guess in ours] == [guess["token"] for guess in theirs]
