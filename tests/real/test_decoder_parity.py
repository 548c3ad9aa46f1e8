"""The encoder with a causal mask against GPT-2, and with a memory against BERT's decoder layer, of transformers."""

import jax.numpy as jnp
import numpy as np
import pytest

from bert.config import ModelConfig
from bert.model.attention import Memory, make_cache
from bert.model.encoder import Encoder
from bert.model.layers import Layer
from bert.model.mask import Mask

pytestmark = pytest.mark.real

torch = pytest.importorskip("torch", reason="needs the extra `torch`")
transformers = pytest.importorskip("transformers", reason="needs the extra `torch`")

SIZES = {"num_hidden_layers": 3, "num_attention_heads": 3, "max_position_embeddings": 40}
CONFIG = ModelConfig(97, 48, intermediate_size=192, **SIZES)


def weights_of(model) -> dict[str, np.ndarray]:
    """The model's weights after random numbers were added to all of them."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return {name: tensor.numpy() for name, tensor in model.eval().state_dict().items()}


def norm(weights, name: str) -> dict:
    return {"scale": weights[f"{name}.weight"], "bias": weights[f"{name}.bias"]}


def gpt2_layer(weights, name: str) -> dict:
    """GPT-2 has queries, keys and values in one matrix, and matrices as [in, out]."""
    dense = lambda part: {"kernel": weights[f"{part}.weight"], "bias": weights[f"{part}.bias"]}  # noqa: E731
    kernels, biases = (np.split(weights[f"{name}.attn.c_attn.{part}"], 3, axis=-1) for part in ("weight", "bias"))
    attention = {
        part: {"kernel": kernel, "bias": bias}
        for part, kernel, bias in zip(("query", "key", "value"), kernels, biases, strict=True)
    }
    return {
        "attention": {**attention, "output": dense(f"{name}.attn.c_proj")},
        "attention_norm": norm(weights, f"{name}.ln_1"),
        "intermediate": dense(f"{name}.mlp.c_fc"),
        "output": dense(f"{name}.mlp.c_proj"),
        "output_norm": norm(weights, f"{name}.ln_2"),
    }


def test_with_a_causal_mask_and_pre_ln_the_encoder_is_gpt2() -> None:
    torch.manual_seed(0)
    gpt2 = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=97, n_positions=40, n_embd=48, n_layer=3, n_head=3, attn_implementation="eager"
        )
    )
    weights = weights_of(gpt2)
    config = ModelConfig(
        97, 48, intermediate_size=192, hidden_act="gelu_tanh", layer_norm_eps=1e-5, pre_layer_norm=True, **SIZES
    )
    params = {f"layer_{number}": gpt2_layer(weights, f"transformer.h.{number}") for number in range(3)}
    params["norm"] = norm(weights, "transformer.ln_f")
    ids = np.random.default_rng(0).integers(0, 97, (3, 17))
    words = weights["transformer.wte.weight"]
    x = words[ids] + weights["transformer.wpe.weight"][:17]
    expected = gpt2(torch.tensor(ids)).logits.detach().numpy()

    encoder = Encoder(config)
    states = encoder.apply({"params": params}, x, Mask(causal=True))
    np.testing.assert_allclose(np.asarray(states.last_hidden_state) @ words.T, expected, atol=1e-5)
    cache = make_cache(config, 3, 17, jnp.float32)
    for start, end in ((0, 11), (11, 16), (16, 17)):
        states = encoder.apply({"params": params}, x[:, start:end], Mask(start=start, causal=True), cache=cache)
        cache = states.cache
        logits = np.asarray(states.last_hidden_state) @ words.T
        np.testing.assert_allclose(logits, expected[:, start:end], atol=1e-5)


def test_a_layer_with_a_memory_is_berts_decoder_layer() -> None:
    torch.manual_seed(0)
    layer = transformers.models.bert.modeling_bert.BertLayer(
        transformers.BertConfig(
            vocab_size=97, hidden_size=48, intermediate_size=192, is_decoder=True, add_cross_attention=True,
            attn_implementation="eager", **SIZES,
        )
    )  # fmt: skip
    weights = weights_of(layer)
    dense = lambda name: {"kernel": weights[f"{name}.weight"].T, "bias": weights[f"{name}.bias"]}  # noqa: E731
    params = {"intermediate": dense("intermediate.dense"), "output": dense("output.dense")}
    params["output_norm"] = norm(weights, "output.LayerNorm")
    for ours, theirs in (("attention", "attention"), ("cross_attention", "crossattention")):
        params[ours] = {part: dense(f"{theirs}.self.{part}") for part in ("query", "key", "value")}
        params[ours]["output"] = dense(f"{theirs}.output.dense")
    params["attention_norm"] = norm(weights, "attention.output.LayerNorm")
    params["cross_norm"] = norm(weights, "crossattention.output.LayerNorm")

    random = np.random.default_rng(0)
    x, memory = (random.normal(size=(3, length, 48)).astype(np.float32) for length in (7, 5))
    keys = np.arange(5) < np.array([5, 2, 4])[:, None]
    closed = lambda allowed: torch.tensor(np.where(allowed, 0, np.finfo(np.float32).min))  # noqa: E731
    with torch.no_grad():
        expected = layer(
            torch.tensor(x),
            closed(np.tri(7, dtype=bool)[None, None]).float(),
            encoder_hidden_states=torch.tensor(memory),
            encoder_attention_mask=closed(keys[:, None, None]).float(),
        )
    expected = expected[0] if isinstance(expected, tuple) else expected
    found, states = Layer(CONFIG).apply({"params": params}, x, Mask(causal=True), None, Memory(memory, Mask(keys=keys)))
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-5)
    np.testing.assert_array_equal(np.asarray(states.cross_weights)[1, :, :, 2:], 0)
