"""GPT-2 against transformers: folders both ways, logits, and token ids of hostile text."""

import json

import jax
import numpy as np
import pytest
from safetensors import safe_open
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

import bert
from bert.data.encoding import tokenize
from bert.interchange.bundle import build_module
from tests.helpers import REPOSITORY
from tests.interchange.hf_folders import edit
from tests.real.hf_models import HOSTILE

pytestmark = pytest.mark.real

torch = pytest.importorskip("torch", reason="needs the extra `torch`")
transformers = pytest.importorskip("transformers", reason="needs the extra `torch`")

VOCABULARY = 700


@pytest.fixture(scope="module")
def merges() -> Tokenizer:
    """A byte-level vocabulary of GPT-2's form: one special token, the last."""
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY - 1, initial_alphabet=alphabet, show_progress=False)
    words.train_from_iterator((REPOSITORY / "README.md").read_text(encoding="utf-8").splitlines(), trainer)
    words.add_special_tokens(["<|endoftext|>"])
    return words


def drawn(folder, merges: Tokenizer, model_class: str = "GPT2LMHeadModel", **settings):
    """A model of odd sizes with every parameter random, saved by transformers with vocab.json and merges.txt."""
    torch.manual_seed(0)
    end = merges.token_to_id("<|endoftext|>")
    sizes = {"n_positions": 40, "n_embd": 48, "n_layer": 3, "n_head": 3, "bos_token_id": end, "eos_token_id": end}
    config = transformers.GPT2Config(vocab_size=merges.get_vocab_size(), **{**sizes, **settings})
    model = getattr(transformers, model_class)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and LayerNorm as well: fresh ones are zeros and ones
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    files = merges.model.save(str(folder))
    assert sorted(path.rsplit("/", 1)[1] for path in files) == ["merges.txt", "vocab.json"]
    vocab = {token: number for token, number in merges.get_vocab().items() if number is not None}
    (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")  # with the special token, as GPT-2's
    transformers.GPT2Tokenizer.from_pretrained(folder).save_pretrained(folder)
    return model


def logits_of(reference, ids, mask) -> np.ndarray:
    with torch.no_grad():
        output = reference(input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask))
    return (output.logits if "logits" in output else output.last_hidden_state).numpy()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"n_inner": 100, "activation_function": "relu", "layer_norm_epsilon": 1e-3},
        {"tie_word_embeddings": False, "reorder_and_upcast_attn": True},
    ],
)
def test_gpt2_in_and_out(settings, tmp_path, merges) -> None:
    reference = drawn(tmp_path / "theirs", merges, **settings)
    model = bert.load(tmp_path / "theirs")
    assert model.architecture == "BertForCausalLM"
    random = np.random.default_rng(0)
    ids, mask = random.integers(0, VOCABULARY, (4, 33)), np.ones((4, 33), int)
    mask[1, 20:] = mask[3, 5:] = 0
    expected = logits_of(reference, ids, mask)
    found = build_module(model).apply({"params": model.params}, ids, None, mask)
    difference = np.abs(found - expected)[mask.astype(bool)].max()
    print(f"logits within {difference:.1e} of transformers'")
    assert difference < 1e-4

    said: list[str] = []
    model.save(tmp_path / "ours", log=said.append)
    assert "logits within" in said[0] and "token ids equal" in said[0]
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    np.testing.assert_array_equal(logits_of(again, ids, mask), expected)
    files = [safe_open(tmp_path / name / "model.safetensors", "np") for name in ("ours", "theirs")]
    assert sorted(files[0].keys()) == sorted(files[1].keys())
    for name in files[0].keys():  # noqa: SIM118
        np.testing.assert_array_equal(files[0].get_tensor(name), files[1].get_tensor(name))
    jax.tree.map(np.testing.assert_array_equal, bert.load(tmp_path / "ours").params, model.params)


@pytest.mark.parametrize("head", ["SequenceClassification", "TokenClassification", "QuestionAnswering"])
def test_heads_over_gpt2_in_and_out(head: str, tmp_path, merges) -> None:
    """transformers finds the last token of a row by the id of padding, which GPT-2 lacks: its end token fills rows."""
    end = merges.token_to_id("<|endoftext|>")
    reference = drawn(tmp_path / "theirs", merges, f"GPT2For{head}", pad_token_id=end, num_labels=3)
    model = bert.load(tmp_path / "theirs")
    assert model.architecture == f"BertFor{head}"
    ids, mask = np.random.default_rng(0).integers(0, end, (4, 33)), np.ones((4, 33), int)
    mask[1, 20:] = mask[3, 5:] = 0
    ids[mask == 0] = end
    with torch.no_grad():
        output = reference(input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask))
    found = build_module(model).apply({"params": model.params}, ids, None, mask)
    if head == "QuestionAnswering":
        expected = np.stack([output.start_logits.numpy(), output.end_logits.numpy()], axis=-1)
    else:
        expected = output.logits.numpy()
    real = slice(None) if head == "SequenceClassification" else mask.astype(bool)
    difference = np.abs(found[real] - expected[real]).max()
    print(f"{head}: within {difference:.1e} of transformers'")
    assert difference < 1e-4
    said: list[str] = []
    model.save(tmp_path / "ours", log=said.append)
    assert "logits within" in said[0]
    jax.tree.map(np.testing.assert_array_equal, bert.load(tmp_path / "ours").params, model.params)


def test_a_bare_gpt2_is_a_language_model_as_well(tmp_path, merges) -> None:
    """Its decoder is its word embeddings, so that nothing is missing."""
    reference = drawn(tmp_path / "theirs", merges, "GPT2Model")
    model = bert.load(tmp_path / "theirs")
    states = model.encode(["To be, or not to be", "that"])
    features = tokenize(model.tokenizer, ["To be, or not to be"], 40)
    expected = logits_of(reference, features.ids[None], np.ones((1, len(features.ids)), int))
    np.testing.assert_allclose(states.last_hidden_state[0, : len(features.ids)], expected[0], atol=1e-4)
    assert states.pooled_output is None
    model.save(tmp_path / "ours")
    assert type(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")).__name__ == "GPT2LMHeadModel"


@pytest.mark.parametrize("files", ["vocab.json and merges.txt", "tokenizer.json", "exported"])
def test_hostile_text_has_the_same_ids(files: str, tmp_path, merges) -> None:
    folder = tmp_path / "theirs"
    drawn(folder, merges, n_layer=1)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    if files == "vocab.json and merges.txt":
        (folder / "tokenizer.json").unlink()
        (folder / "tokenizer_config.json").unlink()
    model = bert.load(folder)
    if files == "exported":
        model.save(tmp_path / "ours")
        theirs, model = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours"), bert.load(tmp_path / "ours")
    for text in HOSTILE:
        assert model.tokenizer.encode(text).ids == theirs(text)["input_ids"], repr(text)
        assert model.tokenizer.decode(model.tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_what_our_model_lacks_is_refused(tmp_path, merges) -> None:
    drawn(tmp_path, merges, n_layer=1)
    for key, value in {"scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False}.items():
        edit(tmp_path, **{key: value})
        with pytest.raises(bert.UserError, match=f"{key} is {value}"):
            bert.load(tmp_path)
        edit(tmp_path, **{key: not value})
