"""Compares decoding speed with transformers, for one random model of GPT-2 small's size, in turns:

    PYTHONPATH=. python benchmarks/generation.py --output generation.json

Both sides continue the same prompts of 16 tokens by 256 tokens, which include no end token, and must generate the same
tokens. The first call, which loads and compiles, is timed separately. An interrupted comparison resumes.

The side "weights" is the roofline of a single row: it only multiplies each matrix of the model by a vector, once per
token, with NumPy's BLAS. Every decoder reads all weights for a token, so that the speed of the memory is the limit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from turns import in_turns, table

SIDES = ("ours", "transformers", "weights")
VOCABULARY = 50257


def main() -> None:
    """Measures all sides or, as a worker, one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("generation.json"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--max_tokens", type=int, default=256)
    parser.add_argument("--beams", type=int, default=1)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--worker", nargs=3, metavar=("SIDE", "ROWS", "MODEL"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        print(json.dumps(measured(given)))
        return
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), given.layers, given.width)
        common = [__file__, "--max_tokens", str(given.max_tokens), "--beams", str(given.beams), "--worker"]
        sides = {
            f"{side}, {rows} rows": [*common, side, str(rows), folder]
            for rows in given.batch_sizes
            for side in given.sides
            if side != "weights" or rows == 1
        }
        found = in_turns(sides, given, {"HF_HUB_OFFLINE": "1", "BERT_COMPILATION_CACHE": "off"})
    print(found["hardware"], found["versions"])
    print(table(found, ("tokens_per_second", "first_seconds")))
    for rows in given.batch_sizes:
        decoders = [side for side in given.sides if side != "weights"]
        runs = [run for side in decoders for run in found["sides"][f"{side}, {rows} rows"]]
        same = len({run.get("digest") for run in runs}) == 1
        print(f"{rows} rows: {'the same tokens on all sides' if same else 'DIFFERENT tokens'}")


def write_model(folder: Path, layers: int, width: int) -> None:
    """Writes a random GPT-2 model in transformers' format, with a vocabulary of matching size and no merges."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "n_layer": layers, "n_embd": width, "n_head": width // 64}
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(folder)
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens += [f"<{number}>" for number in range(VOCABULARY - 1 - len(tokens))] + ["<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")


def measured(given: argparse.Namespace) -> dict[str, Any]:
    """Returns tokens per second of the second call, and the seconds of loading and of the first call."""
    side, rows, folder = given.worker[0], int(given.worker[1]), Path(given.worker[2])
    if side == "weights":
        return read_weights(folder, given.max_tokens)
    random = np.random.default_rng(0)
    prompts = ["".join(random.choice(list("abcdefghij klmnop"), 16)) for _ in range(rows)]
    start = time.perf_counter()
    generate = {"ours": ours, "transformers": transformers}[side](folder, given.max_tokens, given.beams)
    generate(prompts)
    first = time.perf_counter() - start
    start = time.perf_counter()
    tokens = generate(prompts)
    seconds = time.perf_counter() - start
    assert tokens.shape == (rows, given.max_tokens), "a text has ended"
    return {
        "tokens_per_second": tokens.size / seconds,
        "seconds": seconds,
        "first_seconds": first,
        "digest": hashlib.sha256(tokens.astype(np.int64).tobytes()).hexdigest(),
    }


def read_weights(folder: Path, max_tokens: int) -> dict[str, Any]:
    """Returns the tokens per second of a decoder that does nothing but multiply by its matrices."""
    from safetensors.numpy import load_file

    weights = load_file(folder / "model.safetensors").items()
    matrices = [array for name, array in weights if array.ndim == 2 and "wpe" not in name]
    vectors = [np.ones(matrix.shape[1], np.float32) for matrix in matrices]

    def seconds() -> float:
        start = time.perf_counter()
        for _ in range(max_tokens):
            for matrix, vector in zip(matrices, vectors, strict=True):
                matrix @ vector
        return time.perf_counter() - start

    first, later = seconds(), seconds()
    return {"tokens_per_second": max_tokens / later, "seconds": later, "first_seconds": first}


Generate = Callable[[list[str]], np.ndarray]


def ours(folder: Path, max_tokens: int, beams: int) -> Generate:
    """Decodes with `bert.load(...).generate`."""
    import bert

    model = bert.load(folder)

    def generate(prompts: list[str]) -> np.ndarray:
        answers = model.generate(prompts, max_tokens=max_tokens, beams=beams, details=True)
        return np.array([answer.token_ids for answer in answers])

    return generate


def transformers(folder: Path, max_tokens: int, beams: int) -> Generate:
    """Decodes with transformers' ``generate`` and its cache."""
    import torch
    from transformers import GPT2LMHeadModel

    from bert.tokenizer.vocabulary import load_tokenizer

    model, tokenizer = GPT2LMHeadModel.from_pretrained(folder).eval(), load_tokenizer(folder)

    def generate(prompts: list[str]) -> np.ndarray:
        ids = torch.tensor([tokenizer.encode(prompt).ids for prompt in prompts])
        settings: dict[str, Any] = {
            "max_new_tokens": max_tokens,
            "num_beams": beams,
            "do_sample": False,
            "pad_token_id": 0,
        }
        with torch.inference_mode():
            return model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[:, ids.shape[1] :].numpy()

    return generate


if __name__ == "__main__":
    main()
