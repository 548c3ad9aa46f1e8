"""The encoder-decoder against transformers' EncoderDecoderModel of two BERTs: logits, and decoding token for token.

Fresh models hardly ever end a text, so that a test of theirs would prove nothing: here the end token is made likely.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert import BertForSequenceToSequence
from bert.config import Decoding, ModelConfig
from bert.inference.generation import Decoded, Prompts, beam_search, sample
from bert.inference.sampling import DecodingArrays
from bert.model.cache import make_cache
from bert.model.mask import Mask

pytestmark = pytest.mark.real

torch = pytest.importorskip("torch", reason="needs the extra `torch`")
transformers = pytest.importorskip("transformers", reason="needs the extra `torch`")

SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "max_position_embeddings": 48}
CONFIG = ModelConfig(67, 32, **SIZES)
PAD, START, END = 3, 1, 2  # transformers takes a padding id of 0 for none
ROWS, LENGTH, MOST = 12, 11, 15
END_BIASES = (0.0, 1.0, 2.0, 3.0)


def arrays(weights: dict[str, np.ndarray], name: str) -> dict:
    """A dense layer or LayerNorm of the file."""
    weight, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
    return {"scale": weight, "bias": bias} if weight.ndim == 1 else {"kernel": weight.T, "bias": bias}


def attention(weights: dict[str, np.ndarray], name: str) -> dict:
    parts = {part: arrays(weights, f"{name}.self.{part}") for part in ("query", "key", "value")}
    return {**parts, "output": arrays(weights, f"{name}.output.dense")}


def bert_params(weights: dict[str, np.ndarray], prefix: str) -> dict:
    """Embeddings and layers, of an encoder or of a decoder with cross-attention."""
    words, layers = f"{prefix}.embeddings", {}
    for number in range(SIZES["num_hidden_layers"]):
        name = f"{prefix}.encoder.layer.{number}"
        layer = layers[f"layer_{number}"] = {
            "attention": attention(weights, f"{name}.attention"),
            "attention_norm": arrays(weights, f"{name}.attention.output.LayerNorm"),
            "intermediate": arrays(weights, f"{name}.intermediate.dense"),
            "output": arrays(weights, f"{name}.output.dense"),
            "output_norm": arrays(weights, f"{name}.output.LayerNorm"),
        }
        if f"{name}.crossattention.self.query.weight" in weights:
            layer["cross_attention"] = attention(weights, f"{name}.crossattention")
            layer["cross_norm"] = arrays(weights, f"{name}.crossattention.output.LayerNorm")
    tables = {"word": "word_embeddings", "position": "position_embeddings", "segment": "token_type_embeddings"}
    embeddings = {ours: {"embedding": weights[f"{words}.{theirs}.weight"]} for ours, theirs in tables.items()}
    return {"embeddings": {**embeddings, "norm": arrays(weights, f"{words}.LayerNorm")}, "encoder": layers}


@functools.cache
def pair(end_bias: float) -> tuple:
    """A random model of transformers, and its weights as our parameters."""
    torch.manual_seed(3)
    sizes = {"vocab_size": 67, "hidden_size": 32, "initializer_range": 0.4, **SIZES}
    encoder = transformers.BertConfig(**sizes)
    decoder = transformers.BertConfig(**sizes, is_decoder=True, add_cross_attention=True)
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    model = transformers.EncoderDecoderModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        model.decoder.bert.embeddings.position_embeddings.weight *= 4  # else texts repeat one token
        model.decoder.cls.predictions.bias[END] += end_bias
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    head = "decoder.cls.predictions"
    params = {
        "bert": bert_params(weights, "encoder"),
        "decoder": bert_params(weights, "decoder.bert"),
        "predictions": {
            "transform": arrays(weights, f"{head}.transform.dense"),
            "norm": arrays(weights, f"{head}.transform.LayerNorm"),
            "bias": weights[f"{head}.bias"],
        },
    }
    return model, {"params": params}


def inputs() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sources of different lengths, their masks, and targets."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, LENGTH + 1, ROWS)
    mask = (np.arange(LENGTH) < lengths[:, None]).astype(np.int32)
    source = np.where(mask == 1, rng.integers(4, 67, (ROWS, LENGTH)), PAD).astype(np.int32)
    target = rng.integers(4, 67, (ROWS, 9)).astype(np.int32)
    target[:, 0] = START
    return source, mask, target


def test_logits() -> None:
    model, params = pair(0.0)
    source, mask, target = inputs()
    with torch.no_grad():
        expected = model(
            input_ids=torch.tensor(source, dtype=torch.long),
            attention_mask=torch.tensor(mask),
            decoder_input_ids=torch.tensor(target, dtype=torch.long),
        ).logits.numpy()
    logits = jax.jit(BertForSequenceToSequence(CONFIG).apply)(params, source, target, mask)
    print(f"largest difference {np.abs(logits - expected).max():.1e} of {np.abs(expected).max():.1f}")
    np.testing.assert_allclose(logits, expected, atol=1e-4)


@functools.partial(jax.jit, static_argnames="beams")
def decode(params: dict, settings: DecodingArrays, beams: int) -> Decoded:
    """Compiled once for all models."""
    ours = BertForSequenceToSequence(CONFIG)
    source, source_mask, _ = inputs()
    memory = ours.apply(params, source, source_mask, method="encode")
    start = jnp.full((ROWS, 1), START)
    cache, first = make_cache(CONFIG, ROWS, MOST + 1, jnp.float32), Mask(start=0, causal=True)
    _, cache = ours.apply(params, start, jnp.zeros((1, 1), jnp.int32), first, cache, memory, method="step")

    def step(tokens, position_ids, mask, cache):
        of_beams = jax.tree.map(lambda x: jnp.repeat(x, len(tokens) // ROWS, axis=0), memory.mask)
        return ours.apply(params, tokens, position_ids, mask, cache, memory.replace(mask=of_beams), method="step")

    prompts = Prompts(start, jnp.ones((ROWS, 1), jnp.int32), jnp.full(ROWS, MOST), jnp.zeros((ROWS, 2), jnp.int32))
    if beams == 1:
        return sample(step, cache, prompts, settings, MOST)
    return beam_search(step, cache, prompts, settings, MOST, beams)


@pytest.mark.parametrize(
    "settings",
    [
        {"beams": 1},
        {"beams": 2, "length_penalty": 0.0},
        {"beams": 4, "length_penalty": 1.0},
        {"beams": 4, "length_penalty": 2.0, "early_stopping": True},
        {"beams": 5, "length_penalty": 0.6, "early_stopping": False},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_greedy_decoding_and_beams_token_for_token(settings: dict) -> None:
    decoded = [compare(end_bias, settings) for end_bias in END_BIASES]
    counts = np.bincount(np.concatenate(decoded), minlength=MOST + 1)
    print(f"{sum(map(len, decoded))} texts; of each length {counts.tolist()}")
    assert (counts > 0).sum() >= 4, "texts of one length prove little"


def compare(end_bias: float, settings: dict) -> np.ndarray:
    """Compares all texts of a model, and returns their lengths."""
    model, params = pair(end_bias)
    source, mask, _ = inputs()
    count = settings["beams"]
    with torch.no_grad():
        out = model.generate(
            torch.tensor(source, dtype=torch.long),
            attention_mask=torch.tensor(mask),
            decoder_start_token_id=START,
            eos_token_id=END,
            pad_token_id=PAD,
            max_new_tokens=MOST,
            do_sample=False,
            num_return_sequences=count,
            return_dict_in_generate=True,
            output_scores=True,
            **{{"beams": "num_beams"}.get(key, key): value for key, value in settings.items()},
        )
    found = decode(params, DecodingArrays.make(Decoding(max_tokens=MOST, **settings), END), count)
    expected = out.sequences.numpy()[:, 1:].reshape(ROWS * count, -1)
    tokens, lengths = np.asarray(found.tokens).reshape(ROWS * count, -1), np.asarray(found.lengths).reshape(-1)
    for text, length, theirs in zip(tokens, lengths, expected, strict=True):
        np.testing.assert_array_equal(text[:length], theirs[:length])
        assert (theirs[length:] == PAD).all()
    if count > 1:
        np.testing.assert_allclose(np.asarray(found.scores).reshape(-1), out.sequences_scores.numpy(), atol=3e-4)
    return lengths
