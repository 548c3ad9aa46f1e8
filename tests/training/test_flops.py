"""Operations per token against the compiled model and published figures, and the time of a step on a pod."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from bert.config import FinetuneConfig, ModelConfig
from bert.model.decoders import BertForCausalLM
from bert.model.encoder import Bert
from bert.model.pretraining import BertForPreTraining
from bert.parallel.devices import FIGURES
from bert.training.flops import (
    ATTENTION,
    EMBEDDING_PROJECTION,
    FEED_FORWARD,
    PREDICTIONS,
    UTILIZATION,
    all_reduce_terms,
    compute_term,
    finetuning_flops_per_token,
    forward_flops,
    num_hosts,
    step_lines,
    training_flops,
)
from bert.training.token_losses import decoded_loss
from tests.messages import has_all

BASE = ModelConfig(30522, 768, 12, 12, 3072)


def test_base_by_hand() -> None:
    flops = forward_flops(BASE, 128, ("pooler", PREDICTIONS), 20, {})
    assert flops[ATTENTION] == 12 * (8 * 768 * 768 + 4 * 128 * 768)
    assert flops[FEED_FORWARD] == 12 * 4 * 768 * 3072
    # 85 million weights of the layers at two operations each, and attention's own 4.7 million.
    assert sum(flops[part] for part in (ATTENTION, FEED_FORWARD)) == pytest.approx(2 * 84.9e6 + 4.7e6, rel=0.01)
    # Of all positions the head would cost 48 million, more than a quarter of the encoder; of 20 in 128 it is 7.5.
    assert flops[PREDICTIONS] == pytest.approx(20 / 128 * (2 * 768 * 30522 + 2 * 768**2))
    flops = forward_flops(dataclasses.replace(BASE, prediction_transform=False), 128, (PREDICTIONS,), 20, {})
    assert flops[PREDICTIONS] == pytest.approx(20 / 128 * 2 * 768 * 30522)


def test_fine_tuning_has_flops_per_token_unless_tokens_are_predicted() -> None:
    config = FinetuneConfig(model=BASE)
    shapes = {("bert", "pooler", "kernel"): (768, 768), ("classifier", "kernel"): (768, 2)}
    arguments = ("BertForSequenceClassification", 24)
    forward = forward_flops(BASE, 24, ("pooler",), 0, {"classifier": (768 * 2, False)})
    assert finetuning_flops_per_token(config, shapes, *arguments) == pytest.approx(3 * sum(forward.values()))
    for part in ("decoder", PREDICTIONS):
        assert finetuning_flops_per_token(config, {**shapes, (part, "kernel"): (768, 768)}, *arguments) is None
    with_language_model = dataclasses.replace(config, language_model_weight=0.5)
    assert finetuning_flops_per_token(with_language_model, shapes, *arguments) is None


def products(jaxpr: jax.extend.core.Jaxpr) -> int:
    """Two operations for each element of each product of matrices in a program."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            depth = 1
            for axis in contracted:
                depth *= equation.invars[0].aval.shape[axis]
            total += 2 * depth * equation.outvars[0].aval.size
        # Of one product in two forms, for two kinds of devices, the plain one has the fewest.
        total += min((products(branch.jaxpr) for branch in equation.params.get("branches", ())), default=0)
        for inner in equation.params.values():
            inner = getattr(inner, "jaxpr", inner)
            rounds = equation.params["length"] if equation.primitive.name == "scan" else 1
            total += rounds * products(inner) if hasattr(inner, "eqns") else 0
    return total


@pytest.mark.medium
@pytest.mark.parametrize("conv_kernel_size", [None, 5])
def test_the_formula_is_what_the_model_does(conv_kernel_size: int | None) -> None:
    config = dataclasses.replace(BASE, vocab_size=100, hidden_size=32, num_hidden_layers=3, num_attention_heads=4)
    config = dataclasses.replace(config, conv_kernel_size=conv_kernel_size)
    model = BertForPreTraining(config)
    rows, length, predictions = 2, 24, 5
    ids, positions = jnp.zeros((rows, length), jnp.int32), jnp.zeros((rows, predictions), jnp.int32)
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), ids))

    def loss(params):
        output = model.apply(params, ids, ids, ids, positions)
        return output.prediction_logits.sum() + output.seq_relationship_logits.sum()

    forward = forward_flops(config, length, ("pooler", PREDICTIONS), predictions, {"seq_relationship": (64, False)})
    counted = products(jax.make_jaxpr(loss)(params).jaxpr)
    assert counted == pytest.approx(sum(forward.values()) * rows * length, rel=1e-9)
    # Training multiplies the first layer's input, too, by its weights, so thrice is exact for products of matrices.
    counted = products(jax.make_jaxpr(jax.grad(loss))(params).jaxpr)
    assert counted == pytest.approx(training_flops(forward, 3) * rows * length, rel=1e-9)


@pytest.mark.medium
@pytest.mark.parametrize("products_kept", ["both", "content_to_position", "position_to_content"])
@pytest.mark.parametrize("kind", ["disentangled", "deberta_v1"])
def test_vectors_of_distances_count_as_keys(kind: str, products_kept: Any) -> None:
    """Besides the projection of the vectors, which is computed once per batch."""
    config = dataclasses.replace(
        BASE, vocab_size=100, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, position_embedding_type=kind,
        relative_attention_buckets=16, disentangled_products=products_kept,
    )  # fmt: skip
    model, ids = Bert(config), jnp.zeros((2, 24), jnp.int32)
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), ids))
    counted = products(jax.make_jaxpr(lambda params: model.apply(params, ids).last_hidden_state)(params).jaxpr)
    projected = 3 * (2 if products_kept == "both" else 1) * 2 * 16 * 32**2
    pooler = 2 * 2 * 32**2
    expected = sum(forward_flops(config, 24, (), 0, {}).values()) * ids.size
    assert counted - projected - pooler == pytest.approx(expected, rel=1e-9)


@pytest.mark.medium
@pytest.mark.parametrize("length", [24, 128])
@pytest.mark.parametrize("kind", ["first", "before_separator"])
def test_global_tokens_add_projections_and_products(kind: Any, length: int) -> None:
    """In short rows, and in rows that are computed in blocks of 32 tokens."""
    config = dataclasses.replace(
        BASE, vocab_size=100, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        attention_window=8, global_attention_sep_id=3,
    )  # fmt: skip
    model, ids = Bert(config, add_pooling_layer=False, global_tokens=kind), jnp.zeros((2, length), jnp.int32)
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), ids))
    counted = products(jax.make_jaxpr(lambda params: model.apply(params, ids).last_hidden_state)(params).jaxpr)
    forward = forward_flops(config, length, (), 0, {}, global_tokens=kind)
    assert counted == pytest.approx(sum(forward.values()) * ids.size, rel=1e-9)
    assert sum(forward.values()) > sum(forward_flops(config, length, (), 0, {}).values())


@pytest.mark.medium
def test_a_left_to_right_model_decodes_every_position() -> None:
    """Includes the loss that decodes a few positions at a time and decodes no position twice."""
    config = ModelConfig(100, 32, 3, 4, 64, causal=True, pre_layer_norm=True, prediction_transform=False)
    model, rows, length = BertForCausalLM(config), 2, 24
    ids = jnp.zeros((rows, length), jnp.int32)
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), ids))
    forward = forward_flops(config, length, (PREDICTIONS,), length, {})
    assert forward[PREDICTIONS] == 2 * 32 * 100
    counted = products(jax.make_jaxpr(lambda params: model.apply(params, ids))(params).jaxpr)
    assert counted == pytest.approx(sum(forward.values()) * rows * length, rel=1e-9)

    def loss(params):
        read = lambda model: (model.hidden_states(ids), *model.decoder_weights())  # noqa: E731
        return decoded_loss(*model.apply(params, method=read), ids, jnp.ones(ids.shape), stretch=length).loss[0]

    counted = products(jax.make_jaxpr(jax.grad(loss))(params).jaxpr)
    assert counted == pytest.approx(training_flops(forward, 3) * rows * length, rel=1e-9)


def test_what_is_frozen_costs_the_forward_pass_alone() -> None:
    forward = forward_flops(BASE, 128, ("pooler",), 0, {"classifier": (1536, False)})
    total = sum(forward.values())
    assert training_flops(forward, 12) == pytest.approx(3 * total)
    layers = forward[ATTENTION] + forward[FEED_FORWARD]
    assert training_flops(forward, 12, 3) == pytest.approx(3 * total - 2 * layers / 4)
    assert training_flops(forward, 12, 12, ("pooler",)) == pytest.approx(total + 2 * forward["classifier"])


def test_narrow_embeddings_make_the_decoder_cheaper() -> None:
    narrow = dataclasses.replace(BASE, embedding_size=128)
    flops = forward_flops(narrow, 128, (PREDICTIONS, EMBEDDING_PROJECTION), 20, {})
    assert flops[EMBEDDING_PROJECTION] == pytest.approx(2 * 128 * 768)
    assert flops[PREDICTIONS] == pytest.approx(20 / 128 * (2 * 128 * 30522 + 2 * 768 * 128))


def test_a_head_over_tokens_may_read_all_of_them_through_the_pooler() -> None:
    pooled = dataclasses.replace(BASE, pooler_type="transform")
    for config, head, count in ((BASE, True, 1), (pooled, False, 1), (pooled, True, 128)):
        flops = forward_flops(config, 128, ("pooler",), 0, {"classifier": (1536, head)})
        assert flops["pooler"] == pytest.approx(count * 2 * 768**2 / 128)


V5E, H100 = FIGURES["v5e"], FIGURES["h100"]


def test_a_slice_is_one_ring() -> None:
    [term] = all_reduce_terms(400e6, 4, V5E)
    assert term.seconds == pytest.approx(2 * 3 / 4 * 400e6 / 200e9)
    assert term.arithmetic == "2 x 3/4 x 400.0 MB = 600.0 MB at 200 GB/s"
    assert all_reduce_terms(400e6, 1, V5E)[0].seconds == 0


def test_hosts_of_gpus_add_parts_that_each_device_has_of_its_host() -> None:
    local, hosts = all_reduce_terms(400e6, 32, H100)
    assert local.seconds == pytest.approx(2 * 7 / 8 * 400e6 / 450e9)
    assert hosts.seconds == pytest.approx(2 * 3 / 4 * 50e6 / 50e9)
    assert all_reduce_terms(400e6, 8, H100)[1].seconds == 0
    assert [num_hosts(count, H100) for count in (1, 8, 9, 64)] == [1, 1, 2, 8]


def test_the_published_run_takes_its_published_hours() -> None:
    """mosaicml/examples: 286.7 million rows of 128 tokens in 11.5 hours of eight A100."""
    tokens = 4096 * 128
    steps = round(286.7e6 * 128 / tokens)
    compute = compute_term(tokens, 546e6, 8, FIGURES["a100"], UTILIZATION)
    assert steps * compute.seconds / 3600 == pytest.approx(11.5, rel=0.03)
    lines = step_lines(compute, [], tokens, steps)
    assert lines[-1].endswith("11.7 h")
    assert "all-reduce" not in "".join(lines)


def test_the_share_is_that_of_both_terms_of_a_step() -> None:
    compute = compute_term(1000, 197e6, 1, V5E, 1.0)
    assert compute.seconds == pytest.approx(1e-3)
    lines = step_lines(compute, all_reduce_terms(400e6, 2, V5E), 1000, None)
    assert has_all(lines[-1], "3.000 ms, 66.7%", "333,333 tokens")
