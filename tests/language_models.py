"""A small left-to-right language model with a byte-level vocabulary, for the tests of several packages."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from bert.config import ModelConfig, TokenizerConfig
from bert.inference.pretrained import Pretrained
from bert.model.decoders import BertForCausalLM
from bert.tokenizer.byte_level import train_byte_level
from bert.tokenizer.library import special_ids

WORDS = ["the cat sat on the mat", "a dog ran to the cat", "mats and dogs, cats and “hats”"]
POSITIONS = 24
TOKENIZER = train_byte_level(WORDS, TokenizerConfig(kind="byte_level", vocab_size=280, min_frequency=1))
END = special_ids(TOKENIZER).end


def language_model(tokenizer: Tokenizer = TOKENIZER, end_bias: float = 2.0, **changes: Any) -> Pretrained:
    """Random weights with a deviation that makes texts depend on their prompts, and an end token that is likely."""
    config = ModelConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=POSITIONS,
        type_vocab_size=0,
        pre_layer_norm=True,
        initializer_range=0.5,
        causal=True,
    )
    config = dataclasses.replace(config, **changes)
    params = jax.jit(BertForCausalLM(config).init)(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]
    params = jax.tree.map(np.array, params)
    if config.prediction_bias:
        params["predictions"]["bias"][special_ids(tokenizer).end] = end_bias
    return Pretrained(
        config=config, params=params, tokenizer=tokenizer, architecture="BertForCausalLM", source="runs/lm"
    )
