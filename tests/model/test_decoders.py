"""The left-to-right language model: what each position sees, decoding with a cache, and its settings."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert import BertForCausalLM
from bert.config import ModelConfig
from bert.model.attention import make_cache
from bert.model.layers import LayerExecution
from bert.model.mask import Mask, Packing

SIZES = ModelConfig(
    vocab_size=53, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
    max_position_embeddings=24, initializer_range=0.2, hidden_act="gelu_tanh", causal=True,
)  # fmt: skip
GPT2 = dataclasses.replace(
    SIZES, pre_layer_norm=True, embedding_norm=False, prediction_transform=False, prediction_bias=False,
    type_vocab_size=0,
)  # fmt: skip
OTHER = dataclasses.replace(SIZES, embedding_size=16, tie_word_embeddings=False, position_offset=2)
"""Post-LN, with the parts that GPT-2 leaves out, and rows of the position table that begin at 2."""
CONFIGS = {"gpt2": GPT2, "other": OTHER}
IDS = jax.random.randint(jax.random.key(1), (3, 9), 0, 53)


@functools.cache
def model_of(name: str) -> tuple:
    model = BertForCausalLM(CONFIGS[name])
    params = jax.jit(model.init)(jax.random.key(0), IDS)
    return model, params, jax.jit(model.apply)


@pytest.mark.medium
def test_parameters_are_those_of_the_parts_that_the_config_names() -> None:
    shapes = lambda name: model_of(name)[1]["params"]  # noqa: E731
    assert set(shapes("gpt2")) == {"bert"}  # no head parameters: tied, without bias and transform
    assert set(shapes("gpt2")["bert"]) == {"embeddings", "encoder"}
    assert set(shapes("gpt2")["bert"]["embeddings"]) == {"word", "position"}
    assert set(shapes("other")["predictions"]) == {"transform", "norm", "bias", "decoder"}
    assert set(shapes("other")["bert"]["embeddings"]) == {"word", "position", "segment", "norm", "projection"}


PUBLISHED = {  # layers, width, heads, tokens V, positions T, parameters
    "GPT-2 small": (12, 768, 12, 50_257, 1024, 124_439_808),
    "GPT-2 medium": (24, 1024, 16, 50_257, 1024, 354_823_168),
    "GPT-2 large": (36, 1280, 20, 50_257, 1024, 774_030_080),
    "GPT-2 XL": (48, 1600, 25, 50_257, 1024, 1_557_611_200),
}
SCALE = {  # the same, with the parameters that are published, in thousands of millions
    "Megatron": (72, 3072, 24, 51_200, 1024, 8.3),  # Shoeybi et al. 2019
    "Turing": (78, 4256, 28, 50_257, 1024, 17.2),  # Microsoft 2020
    "GPT-3": (96, 12_288, 96, 50_257, 2048, 175),  # Brown et al. 2020, table 2.1
    "Gopher": (80, 16_384, 128, 32_000, 2048, 280),  # Rae et al. 2021, table 1
}


def parameters_of(sizes: tuple, **settings) -> int:
    """Counted without an array: the largest model would take 1.1 TB. Each layer adds as many as the second."""
    layers, width, heads, tokens, positions, _ = sizes

    def count(depth: int) -> int:
        config = ModelConfig(tokens, width, depth, heads, 4 * width, max_position_embeddings=positions)
        model = BertForCausalLM(dataclasses.replace(config, **settings))
        shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32)))
        return sum(int(np.prod(leaf.shape, dtype=np.int64)) for leaf in jax.tree.leaves(shapes))

    one = count(1)
    return one + (layers - 1) * (count(2) - one) if layers > 12 else count(layers)


def settings_of(config: ModelConfig) -> dict:
    """The settings that make a model GPT-2."""
    names = ("causal", "pre_layer_norm", "embedding_norm", "prediction_transform", "prediction_bias", "type_vocab_size")
    return {name: getattr(config, name) for name in names}


@pytest.mark.medium
@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_of_gpt2(name: str) -> None:
    assert parameters_of(PUBLISHED[name], **settings_of(GPT2)) == PUBLISHED[name][-1]


@pytest.mark.medium
def test_size_of_gpt() -> None:
    """117 million (Radford et al. 2018, section 4.1): post-LN, so that there is no LayerNorm after the last layer."""
    gpt = (12, 768, 12, 40_478, 512, None)
    assert parameters_of(gpt, **{**settings_of(GPT2), "pre_layer_norm": False}) == 116_534_784


@pytest.mark.parametrize("name", SCALE)
def test_sizes_of_larger_models(name: str) -> None:
    """Gopher has relative positions instead of a table, and a matrix [D, D] for them in each layer."""
    layers, width, *_, published = SCALE[name]
    result = parameters_of(SCALE[name], **settings_of(GPT2)) + (layers * width**2 if name == "Gopher" else 0)
    assert result / 1e9 == pytest.approx(published, rel=0.03)


@pytest.mark.medium
@pytest.mark.parametrize("name", CONFIGS)
def test_no_logit_depends_on_a_later_token(name: str) -> None:
    """The Jacobian of the logits by the embeddings' output is exactly 0 above the diagonal, and nowhere else."""
    model, params, _ = model_of(name)
    bert = model.bind(params).bert
    x = bert.embeddings(IDS[:1])

    def logits(x):
        def decode(model, x):
            hidden = model.bert.encoder(x, Mask(causal=True)).last_hidden_state
            return model.predictions(hidden, model.bert.embedding_table())[0, :, 0]

        return model.apply(params, x, method=decode)

    influence = jnp.abs(jax.jit(jax.jacrev(logits))(x)[:, 0]).sum(-1)
    np.testing.assert_array_equal(jnp.triu(influence, 1), 0)
    assert (influence[jnp.tril_indices(9)] > 0).all()


@pytest.mark.medium
@pytest.mark.parametrize("name", CONFIGS)
def test_no_logit_changes_with_a_later_token(name: str) -> None:
    _, params, run = model_of(name)
    whole = run(params, IDS)
    for place in range(1, 9):
        changed = run(params, IDS.at[:, place:].add(1) % 53)
        np.testing.assert_array_equal(changed[:, :place], whole[:, :place])


def decode(model, params, ids, keys, prompt: int) -> np.ndarray:
    """[B, T, V] logits, ``prompt`` positions in one call, then a position a call in one program."""
    step = jax.jit(functools.partial(model.apply, method="step"))
    cache = make_cache(model.config, len(ids), 16, jnp.float32)
    room = jnp.pad(keys, ((0, 0), (0, 16 - keys.shape[1])), constant_values=1)
    positions = model.config.position_offset + jnp.maximum(jnp.cumsum(keys, axis=1) - 1, 0)
    logits = []
    for start, end in [(0, prompt), *((place, place + 1) for place in range(prompt, ids.shape[1]))]:
        mask = Mask(keys=room, start=jnp.asarray(start), causal=True)
        result, cache = step(params, ids[:, start:end], positions[:, start:end], mask, cache)
        logits.append(result)
    assert step._cache_size() == 2  # the prompt, and all that follows it
    return np.concatenate(logits, axis=1)


@pytest.mark.medium
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("prompt", [4, 8])
def test_logits_with_a_cache_are_those_without(name: str, prompt: int) -> None:
    model, params, run = model_of(name)
    decoded = decode(model, params, IDS, jnp.ones_like(IDS), prompt)
    np.testing.assert_allclose(decoded, run(params, IDS), atol=1e-5)


@pytest.mark.medium
@pytest.mark.parametrize("name", CONFIGS)
def test_left_padded_prompts_have_the_logits_of_the_text_alone(name: str) -> None:
    model, params, run = model_of(name)
    paddings = (0, 3, 1)
    keys = (jnp.arange(9) >= jnp.array(paddings)[:, None]).astype(jnp.int32)
    decoded = decode(model, params, IDS, keys, 5)
    assert np.isfinite(decoded).all()
    for row, padding in enumerate(paddings):
        alone = run(params, IDS[row : row + 1, padding:])
        np.testing.assert_allclose(decoded[row, padding:], alone[0], atol=1e-5)


@pytest.mark.medium
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("attention", ["eager", "xla"])
def test_packed_examples_see_themselves_alone_and_no_future(name: str, attention: str) -> None:
    """Two examples in a row, of 5 and 3 tokens and a padding, have the logits that each has alone."""
    _, params, run = model_of(name)
    packed = BertForCausalLM(CONFIGS[name], execution=LayerExecution(attention=attention))
    examples = jnp.broadcast_to(jnp.array([1] * 5 + [2] * 3 + [0]), IDS.shape)
    positions = jnp.broadcast_to(jnp.array([0, 1, 2, 3, 4, 0, 1, 2, 0]), IDS.shape)
    packing = Packing(examples, positions, jnp.zeros((3, 2), jnp.int32))
    logits = jax.jit(packed.apply)(params, IDS, packing=packing)
    np.testing.assert_allclose(logits[:, :5], run(params, IDS[:, :5]), atol=1e-5)
    np.testing.assert_allclose(logits[:, 5:8], run(params, IDS[:, 5:8]), atol=1e-5)


@pytest.mark.medium
@pytest.mark.parametrize(
    "execution",
    [LayerExecution("full"), LayerExecution("dots", scan=True), LayerExecution(scan=True, attention="xla")],
)
def test_how_layers_are_run_changes_no_logit_and_no_gradient(execution: LayerExecution) -> None:
    model, params, _ = model_of("gpt2")
    keys = (jnp.arange(9) < jnp.array([9, 4, 6])[:, None]).astype(jnp.int32)

    def loss(params, model):
        logits = model.apply(params, IDS, None, keys)
        return jnp.sum(jnp.where(keys[..., None] > 0, jnp.sin(logits), 0)), logits

    value = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=1)
    (_, expected), gradients = value(params, model)
    (_, actual), others = value(params, BertForCausalLM(model.config, execution=execution))
    real = keys.astype(bool)
    np.testing.assert_allclose(actual[real], expected[real], atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4), gradients, others)


@pytest.mark.medium
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("multiple", [1, 8])
def test_logits_are_the_product_of_hidden_states_and_decoder(name: str, multiple: int) -> None:
    """Losses use this product to decode a few positions at a time. Vocabulary padding never has the highest logit."""
    _, params, run = model_of(name)
    model = BertForCausalLM(CONFIGS[name], execution=LayerExecution(pad_vocab_to_multiple_of=multiple))

    def read(model, *inputs):
        return model.hidden_states(*inputs), *model.decoder_weights()

    hidden, table, bias = model.apply(params, IDS, method=read)
    logits = hidden @ table.T + bias
    assert logits.shape[-1] == (53 if multiple == 1 else 56)
    np.testing.assert_allclose(logits[..., :53], run(params, IDS), atol=1e-5)
    np.testing.assert_allclose(logits, model.apply(params, IDS), rtol=1e-5, atol=1e-5)
    assert (jax.nn.softmax(logits)[..., 53:] == 0).all()
