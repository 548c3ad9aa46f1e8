"""Measures the latency of one short input in a loaded model: PYTHONPATH=. python benchmarks/latency.py

Uses a model with the recipe tiny, random weights and 30,522 tokens for every kind of task, or RUN, a fine-tuned model:
PYTHONPATH=. python benchmarks/latency.py RUN 'a text'
"""

import dataclasses
import statistics
import sys
import time

import jax
import jax.numpy as jnp
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

import bert
from bert.config import PretrainConfig, TaskDataConfig, recipe_folder
from bert.config.yaml_io import load_config
from bert.inference.pretrained import Pretrained
from bert.model.heads import HEADS
from bert.tasks import find_task
from bert.tasks.token_classification import TokenClassificationTask

CALLS = 100
PIECES = 30522
TEXT = "the film is a gripping and beautifully shot story of two brothers"
INPUTS = {
    "sst2": TEXT,
    "ner": TEXT,
    "squad": ("what is the film", TEXT),
    "multiple_choice": (TEXT, "it is good", "it is bad", "it is long"),
}


def main() -> None:
    if len(sys.argv) > 1:
        measure(sys.argv[1], bert.load(sys.argv[1]), sys.argv[2])
        return
    for name, given in INPUTS.items():
        measure(name, tiny(name), given)


def tiny(name: str) -> Pretrained:
    task = find_task(name)
    if isinstance(task, TokenClassificationTask):
        task = dataclasses.replace(task, labels=("O", *(f"{prefix}-{type}" for type in "ABCD" for prefix in "BI")))
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokens = list(dict.fromkeys([*special, *" ".join(map(str, INPUTS.values())).replace("'", " ").split()]))
    tokens += [f"token{number}" for number in range(PIECES - len(tokens))]
    tokenizer = Tokenizer(models.WordPiece({token: number for number, token in enumerate(tokens)}, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    config = dataclasses.replace(load_config(PretrainConfig, recipe_folder() / "tiny.yaml").model, vocab_size=PIECES)
    model = HEADS[task.kind](config, task.num_labels)
    shape = (1, 2, 8) if task.kind == "multiple_choice" else (1, 8)
    params = model.init(jax.random.key(0), jnp.zeros(shape, jnp.int32))["params"]
    data = TaskDataConfig(max_length=384)
    return Pretrained(
        config=config, params=jax.device_get(params), tokenizer=tokenizer, task=task, source=name, data=data
    )


def measure(name: str, model: Pretrained, given: object) -> None:
    times = []
    for _ in range(CALLS + 1):
        start = time.perf_counter()
        model.predict([given])
        times.append((time.perf_counter() - start) * 1e3)
    first, rest = times[0], sorted(times[1:])
    print(
        f"{name}: first call {first:.0f} ms, then median {statistics.median(rest):.2f} ms, "
        f"90 of 100 below {rest[89]:.2f} ms, slowest {rest[-1]:.2f} ms"
    )


if __name__ == "__main__":
    main()
