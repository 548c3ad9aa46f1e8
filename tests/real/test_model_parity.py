"""The encoder and both pretraining heads against transformers, from the same weights."""

import jax.numpy as jnp
import numpy as np
import pytest

from bert.config import ModelConfig
from bert.model.encoder import Bert
from bert.model.pretraining import BertForPreTraining
from tests.helpers import params_of_transformers

pytestmark = pytest.mark.real

torch = pytest.importorskip("torch", reason="needs the extra `torch`")
transformers = pytest.importorskip("transformers", reason="needs the extra `torch`")

LAYERS = 3


@pytest.mark.parametrize(("ours", "theirs"), [("gelu", "gelu"), ("gelu_tanh", "gelu_new"), ("relu", "relu")])
@pytest.mark.parametrize("padded", [False, True])
def test_hidden_states_and_logits_equal_transformers(ours: str, theirs: str, padded: bool) -> None:
    sizes = {
        "vocab_size": 1013,
        "hidden_size": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 3,
        "intermediate_size": 200,
        "max_position_embeddings": 40,
        "type_vocab_size": 3,
        "initializer_range": 0.1,
    }
    torch.manual_seed(0)
    reference = transformers.BertForPreTraining(transformers.BertConfig(**sizes, hidden_act=theirs)).eval()
    with torch.no_grad():
        for parameter in reference.parameters():  # biases and LayerNorm as well: fresh ones are zeros and ones
            parameter.add_(0.05 * torch.randn_like(parameter))
    config = ModelConfig(**sizes, hidden_act=ours)
    params = {"params": params_of_transformers(reference)}

    random = np.random.default_rng(0)
    ids, segments = random.integers(0, 1013, (4, 33)), random.integers(0, 3, (4, 33))
    mask = np.ones((4, 33), int)
    if padded:
        mask[1, 20:] = mask[2, 5:] = 0
    with torch.no_grad():
        expected = reference(
            *map(torch.tensor, (ids, mask, segments)), output_hidden_states=True, output_attentions=False
        )
    inputs = tuple(map(jnp.asarray, (ids, segments, mask)))
    logits = BertForPreTraining(config).apply(params, *inputs)
    encoded = Bert(config).apply({"params": params["params"]["bert"]}, *inputs, intermediates=True)
    real = mask.astype(bool)
    for mine, other in zip(encoded.hidden_states, expected.hidden_states, strict=True):
        np.testing.assert_allclose(mine[real], other.numpy()[real], atol=1e-4)
    np.testing.assert_allclose(logits.prediction_logits[real], expected.prediction_logits.numpy()[real], atol=1e-4)
    np.testing.assert_allclose(logits.seq_relationship_logits, expected.seq_relationship_logits.numpy(), atol=1e-4)
