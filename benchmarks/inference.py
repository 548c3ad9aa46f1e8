"""Compares the speed and memory of `embed`, `encode`, sentence-transformers and our export in onnxruntime, in turns:

    PYTHONPATH=. python benchmarks/inference.py MODEL --output inference.json

MODEL is a sentence-transformers folder, such as all-MiniLM-L6-v2. All sides read the same texts: short ones of 2 to 15
words, 1,500 mixed ones of 3 to 100, and long ones of 480, which are cut at 256 tokens. They are made from the words of
the model's vocabulary with a fixed seed. The table has texts per second at `--batch_size`, the median of the latency of
a single mixed text, and the largest resident memory.

`embed` corresponds to sentence-transformers' `encode`. Our `encode` ("all states") also returns the hidden states of
all tokens. "onnxruntime" is used carefully: sorted by length, and padded to the longest text of the batch.
"transformers" does the same without sentence-transformers, whose row reports if it is not installed. The first call,
which loads and compiles without caches, is timed separately. `--peer_python` names the interpreter of the peers, if
another one has them. An interrupted comparison resumes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from turns import in_turns, table

PEERS = ("sentence-transformers", "transformers")
SIDES = ("ours", "ours, onnxruntime", "ours, int8", "ours, all states", *PEERS, "onnxruntime")
Encode = Callable[[list[str]], np.ndarray]
LONGEST = 256
CALLS = 200
WORDS = {"short": (1.9, 0.4, 2, 15, 2.0), "mixed": (2.8, 0.7, 3, 100, 1.0), "long": (6.5, 0.0, 480, 480, 0.08)}
"""Mean and deviation of the logarithm of the number of words of a text, the limits of the number, and the number of
texts as a multiple of `--sentences`."""


def main() -> None:
    """Measures all sides or, as a worker, one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--output", type=Path, default=Path("inference.json"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sentences", type=int, default=1500)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--words", choices=list(WORDS), nargs="+", default=list(WORDS), help="length of the texts")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of ours and PyTorch's")
    parser.add_argument("--peer_python", default=sys.executable)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--worker", nargs=2, metavar=("SIDE", "EXPORT"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        print(json.dumps(measured(given)))
        return
    with tempfile.TemporaryDirectory() as folder:
        exported = Path(folder, "onnx")
        if "onnxruntime" in given.sides:
            import bert

            bert.load(given.model).save(exported, format="onnx")
        common = [__file__, str(given.model), "--sentences", str(given.sentences), "--words", *given.words]
        common += ["--batch_size", str(given.batch_size), "--dtype", given.dtype, "--worker"]
        sides = {side: [*common, side, str(exported)] for side in given.sides}
        environment = {"HF_HUB_OFFLINE": "1", "BERT_COMPILATION_CACHE": "off"}
        found = in_turns(sides, given, environment, dict.fromkeys(PEERS, given.peer_python))
    print(found["hardware"], found["versions"])
    keys = (*(f"{kind}_per_second" for kind in given.words), "p50_ms", "memory_mb", "load_seconds", "first_seconds")
    print(table(found, keys, given.sides[0]))


def sentences(model: Path, count: int, kind: str) -> list[str]:
    """Makes texts from whole words of the vocabulary; ``count`` is the number of mixed ones."""
    from tokenizers import Tokenizer

    tokens = Tokenizer.from_file(str(model / "tokenizer.json")).get_vocab()
    words = sorted(token for token in tokens if token.isascii() and token.isalpha() and len(token) > 2)
    random = np.random.default_rng(0)
    mean, deviation, low, high, share = WORDS[kind]
    lengths = np.clip(random.lognormal(mean, deviation, int(share * count)).astype(int), low, high)
    return [" ".join(random.choice(words, length)) for length in lengths]


def measured(given: argparse.Namespace) -> dict[str, float]:
    """Returns texts per second of the second pass, the median latency, the memory, and the time of the first batch."""
    side, exported = given.worker
    texts = {kind: sentences(given.model, given.sentences, kind) for kind in given.words}
    first_texts = next(iter(texts.values()))[: given.batch_size]
    start = time.perf_counter()
    encode = {
        "ours": ours,
        "ours, onnxruntime": engine,
        "ours, int8": int8,
        "ours, all states": all_states,
        "sentence-transformers": sentence_transformers,
        "transformers": transformers,
        "onnxruntime": onnxruntime,
    }[side](given, Path(exported))
    result = {"load_seconds": time.perf_counter() - start}
    encode(first_texts)
    result["first_seconds"] = time.perf_counter() - start
    for kind, some in texts.items():
        encode(some)
        start = time.perf_counter()
        embeddings = encode(some)
        result[f"{kind}_per_second"] = len(some) / (time.perf_counter() - start)
        result[f"{kind}_checksum"] = float(np.abs(embeddings).sum())
    singles = texts.get("mixed", first_texts)[:CALLS]
    latencies = [latency(encode, text) for text in [*singles, *singles]][len(singles) :]  # the first pass compiles
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    memory = int(status["VmHWM"].split()[0]) / 1024  # unlike getrusage, without the parent's
    return {**result, "p50_ms": statistics.median(latencies), "memory_mb": memory}


def latency(encode: Encode, text: str) -> float:
    """Returns the milliseconds that a single text takes."""
    start = time.perf_counter()
    encode([text])
    return (time.perf_counter() - start) * 1e3


def ours(given: argparse.Namespace, exported: Path) -> Encode:
    """Embeds with `bert.load(...).embed`."""
    import bert
    from bert.runtime.compilation_cache import use_compilation_cache

    use_compilation_cache()
    loaded = bert.load(given.model, dtype=given.dtype)
    return lambda texts: loaded.embed(texts, given.batch_size)


def engine(given: argparse.Namespace, exported: Path) -> Encode:
    """Embeds with `bert.load(..., engine="onnxruntime").embed`."""
    import bert

    loaded = bert.load(given.model, engine="onnxruntime")
    return lambda texts: loaded.embed(texts, given.batch_size)


def int8(given: argparse.Namespace, exported: Path) -> Encode:
    """Embeds with weights of 8 bits in ONNX Runtime."""
    import bert

    loaded = bert.load(given.model, engine="onnxruntime", dtype="int8")
    return lambda texts: loaded.embed(texts, given.batch_size)


def all_states(given: argparse.Namespace, exported: Path) -> Encode:
    """Embeds with `bert.load(...).encode`."""
    import bert

    loaded = bert.load(given.model, dtype=given.dtype)

    def encode(texts: list[str]) -> np.ndarray:
        return loaded.encode(texts, given.batch_size).embeddings

    return encode


def sentence_transformers(given: argparse.Namespace, exported: Path) -> Encode:
    """Embeds with sentence-transformers' `encode`."""
    import torch
    from sentence_transformers import SentenceTransformer

    settings = {"dtype": getattr(torch, given.dtype)}
    loaded = SentenceTransformer(str(given.model), device="cpu", model_kwargs=settings)
    return lambda texts: loaded.encode(texts, batch_size=given.batch_size, show_progress_bar=False)


def transformers(given: argparse.Namespace, exported: Path) -> Encode:
    """Embeds with transformers and SDPA: normalized mean of the tokens."""
    import torch
    from transformers import AutoModel

    loaded = AutoModel.from_pretrained(given.model, dtype=getattr(torch, given.dtype)).eval()

    def forward(batch: dict[str, np.ndarray]) -> np.ndarray:
        with torch.inference_mode():
            return (
                loaded(**{name: torch.from_numpy(array) for name, array in batch.items()})
                .last_hidden_state.float()
                .numpy()
            )

    return _batched(given.model, given.batch_size, forward)


def onnxruntime(given: argparse.Namespace, exported: Path) -> Encode:
    """Embeds with our export."""
    from onnxruntime import InferenceSession, SessionOptions

    options = SessionOptions()
    options.intra_op_num_threads = len(os.sched_getaffinity(0))
    session = InferenceSession(str(exported / "model.onnx"), options, providers=["CPUExecutionProvider"])
    types = {one.name: np.int32 if "int32" in one.type else np.int64 for one in session.get_inputs()}
    outputs = [one.name for one in session.get_outputs()]
    wanted = ["last_hidden_state"] if "last_hidden_state" in outputs else outputs[:1]
    return _batched(
        given.model,
        given.batch_size,
        lambda batch: session.run(wanted, {name: batch[name].astype(type_) for name, type_ in types.items()})[0],
    )


def _batched(model: Path, batch_size: int, forward: Callable[[dict[str, np.ndarray]], np.ndarray]) -> Encode:
    """Sorts by length, pads to the longest text of a batch, and returns the normalized mean of the tokens."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.no_padding()
    positions = json.loads((model / "config.json").read_text())["max_position_embeddings"]
    tokenizer.enable_truncation(min(LONGEST, positions))

    def encode(texts: list[str]) -> np.ndarray:
        rows = [encoded.ids for encoded in tokenizer.encode_batch(texts)]
        order = np.argsort([len(row) for row in rows], kind="stable")[::-1]
        made = []
        for begin in range(0, len(rows), batch_size):
            some = [rows[number] for number in order[begin : begin + batch_size]]
            ids = np.zeros((len(some), max(map(len, some))), np.int64)
            mask = np.zeros_like(ids)
            for number, row in enumerate(some):
                ids[number, : len(row)], mask[number, : len(row)] = row, 1
            hidden = forward({"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)})
            mean = (hidden * mask[:, :, None]).sum(1) / mask.sum(1, keepdims=True)
            made.append(mean / np.linalg.norm(mean, axis=1, keepdims=True))
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        return np.concatenate(made)[back]

    return encode


if __name__ == "__main__":
    main()
