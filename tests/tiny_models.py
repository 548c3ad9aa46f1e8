"""Models of random weights with a vocabulary of letters, one for each kind of task, for several packages."""

from __future__ import annotations

import dataclasses
import string
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import bert
from bert.config import ModelConfig, TaskDataConfig
from bert.inference.pretrained import Pretrained
from bert.interchange.writers import hf
from bert.model.decoders import BertForSequenceToSequence
from bert.model.encoder import Bert
from bert.model.heads import BertForSequenceClassification
from bert.model.pooling import Pooling
from bert.tasks import find_task
from bert.tasks.base import Task
from bert.tasks.registry import published_task
from bert.tasks.sequence_classification import CustomClassification
from bert.tasks.token_classification import TokenClassificationTask
from bert.tokenizer.vocabulary import load_tokenizer

PIECES = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    *string.ascii_lowercase,
    *(f"##{c}" for c in string.ascii_lowercase),
]
CONFIG = ModelConfig(
    vocab_size=len(PIECES),
    hidden_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=8,
    max_position_embeddings=16,
)
DATA = TaskDataConfig(max_length=16, max_query_length=6, doc_stride=4)
BINARY = {"labels": ("no", "yes"), "label_names": ("no", "yes")}
TASKS: dict[str, Task] = {
    "classification": CustomClassification(**BINARY),
    "pairs": find_task("mrpc"),
    "regression": find_task("stsb"),
    "published": published_task("sequence_classification", "published", ("no", "yes"), None),
    "choices": find_task("swag"),
    "squad": find_task("squad"),
    "squad2": find_task("squad2"),
    "tagging": TokenClassificationTask(name="conll2003", labels=("O", "B-X", "I-X")),
}


def model_of(folder: Path, module: Any, task: Task | None, **settings: Any) -> bert.Pretrained:
    """A model with every parameter random."""
    random = np.random.default_rng(0)
    row = np.zeros((1, 2, 8) if task is not None and task.kind in ("multiple_choice", "reranker") else (1, 8), np.int32)
    shapes = jax.eval_shape(module.init, jax.random.key(0), row, row, row)["params"]
    params = jax.tree.map(lambda leaf: random.normal(scale=0.3, size=leaf.shape).astype(np.float32), shapes)
    (folder / "vocab.txt").write_text("\n".join(PIECES) + "\n")
    tokenizer = load_tokenizer(folder / "vocab.txt")
    return bert.Pretrained(
        config=module.config,
        params=params,
        tokenizer=tokenizer,
        task=task,
        source="made",
        architecture=type(module).__name__,
        data=DATA,
        **settings,
    )


def encoder_decoder(folder: Path) -> Pretrained:
    """A randomly initialized model with a separate vocabulary for targets."""
    config = ModelConfig(
        vocab_size=12, decoder_vocab_size=9, decoder_layers=2, hidden_size=8, num_hidden_layers=1,
        num_attention_heads=2, intermediate_size=8, max_position_embeddings=6, initializer_range=0.5,
    )  # fmt: skip
    tokenizers = []
    for letters in ("abcdefg", "wxyz"):
        file = folder / "vocab.txt"
        file.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters]))
        tokenizers.append(load_tokenizer(file))
    ids = np.zeros((1, 2), np.int32)
    params = jax.jit(BertForSequenceToSequence(config).init)(jax.random.key(0), ids, ids)["params"]
    return Pretrained(
        config=config, params=params, tokenizer=tokenizers[0], target_tokenizer=tokenizers[1],
        architecture="BertForSequenceToSequence", source="made",
    )  # fmt: skip


ROTARY = dataclasses.replace(
    CONFIG, hidden_size=16, num_hidden_layers=2, intermediate_size=24, max_position_embeddings=512, hidden_act="silu",
    position_embedding_type="rotary", gated_feed_forward=True,
)  # fmt: skip
EMBEDDING_RECIPES = {
    "nomic_embed": dataclasses.replace(
        ROTARY, query_key_value_bias=False, attention_output_bias=False, intermediate_bias=False, output_bias=False
    ),
    "qwen3_embed": dataclasses.replace(
        ROTARY, type_vocab_size=0, causal=True, num_key_value_heads=1, query_key_norm=True, norm_type="rms",
        norm_bias=False, use_bias=False, pre_layer_norm=True, embedding_norm=False, prediction_transform=False,
        prediction_bias=False, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    ),
}  # fmt: skip
"""A small model of the family for which a recipe is, by the recipe's name."""

QUESTIONS = [
    {"query": f"who is {a}", "positive": f"{a} is {b}", "negatives": [f"{b} and {a}"]}
    for a, b in zip(string.ascii_lowercase, reversed(string.ascii_lowercase), strict=True)
]


def embedding_recipe_run(recipe: str, folder: Path) -> bert.Run:
    """Three steps of a recipe for embeddings from a published folder of its family."""
    (model := model_of(folder, Bert(EMBEDDING_RECIPES[recipe]), None)).params.pop("pooler", None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf, "logits_difference", lambda model, folder: None)  # compared in tests/real
        dataclasses.replace(model, params={"bert": model.params}).save(folder / "init")
    overrides = {"training.steps": 3, "training.epochs": None, "training.batch_size": 8, "training.micro_batch_size": 4}
    return bert.finetune(
        recipe, init=folder / "init", train=QUESTIONS, output_dir=folder / "run", overrides={**overrides, "seed": 1}
    )


def sentence_encoder(folder: Path) -> Path:
    """A sentence-transformers folder with random weights that declares mean pooling."""
    model = model_of(folder, BertForSequenceClassification(CONFIG, 2), None, pooling=Pooling("mean", normalize=True))
    model = dataclasses.replace(model, params={"bert": model.params["bert"]}, architecture="Bert")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf, "logits_difference", lambda model, folder: None)  # compared in tests/real
        model.save(folder / "out")
    return folder / "out"
