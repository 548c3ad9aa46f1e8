"""Compares the encoder-decoder with transformers' EncoderDecoderModel, for one random BERT2BERT model, in turns:

    PYTHONPATH=. python benchmarks/sequence_to_sequence.py --output sequence_to_sequence.json

Training step: float32, dropout 0.1, AdamW, clipping at 1. All rows have ``--length`` source and target tokens; with
``--parallel_text SOURCE TARGET``, rows are as long as the lines of two text files, and ``seconds`` is the time of
``--batches`` steps. Ours then divides a batch as `bert finetune` does, and the peer pads each side to its longest row,
as DataCollatorForSeq2Seq does. Beam search: no text ends before its last token, and both sides must generate the same
tokens. The first call, which loads and compiles, is timed separately. Every measurement runs in a separate process. An
interrupted comparison resumes.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from train_step import timed
from turns import in_turns, table

SIZES = {"layers": 6, "width": 384, "heads": 12, "vocab_size": 30522, "rows": 32, "length": 64,
         "texts": 8, "beams": 5, "max_tokens": 32}  # fmt: skip
SIDES = ("step, ours", "step, transformers", "beams, ours", "beams, transformers")
BEAMS = {side for side in SIDES if side.startswith("beams")}
PAD, UNKNOWN, START, END, FIRST_WORD = 0, 1, 2, 3, 5


def main() -> None:
    """Measures all sides or, as a worker, one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("sequence_to_sequence.json"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="timed in each process, after three that are not")
    parser.add_argument("--parallel_text", nargs=2, metavar=("SOURCE", "TARGET"), help="text files with a row per line")
    parser.add_argument("--batches", type=int, default=8, help="with --parallel_text")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--worker", nargs=2, metavar=("SIDE", "MODEL"), help=argparse.SUPPRESS)
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    if given.worker:
        side, folder = given.worker
        print(json.dumps(measured(side, WORKERS[side](given, Path(folder)), given.steps)))
        return
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), given)
        shape = [part for name in SIZES for part in (f"--{name}", str(getattr(given, name)))]
        if given.parallel_text:
            shape += ["--parallel_text", *map(os.path.abspath, given.parallel_text), "--batches", str(given.batches)]
        common = [__file__, "--steps", str(given.steps), *shape, "--worker"]
        found = in_turns({side: [*common, side, folder] for side in given.sides}, given,
                         {"HF_HUB_OFFLINE": "1", "BERT_COMPILATION_CACHE": "off"})  # fmt: skip
    print(found["hardware"], found["versions"])
    print(table(found, ("seconds", "cpu_seconds", "first_seconds")))
    digests = {run.get("digest") for side in BEAMS & set(given.sides) for run in found["sides"][side]}
    if digests:
        print(f"beams: {'the same tokens on all sides' if len(digests) == 1 else 'DIFFERENT tokens'}")


def write_model(folder: Path, given: argparse.Namespace) -> None:
    """Writes a random model in transformers' format, whose texts do not end, and a vocabulary of matching size."""
    import torch
    from transformers import BertConfig, EncoderDecoderConfig, EncoderDecoderModel

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": given.vocab_size, "hidden_size": given.width, "num_hidden_layers": given.layers,
        "num_attention_heads": given.heads, "intermediate_size": 4 * given.width, "initializer_range": 0.1,
    }  # fmt: skip
    decoder = BertConfig(**sizes, is_decoder=True, add_cross_attention=True)
    config = EncoderDecoderConfig.from_encoder_decoder_configs(BertConfig(**sizes), decoder)
    config.decoder_start_token_id, config.pad_token_id, config.eos_token_id = START, PAD, END
    model = EncoderDecoderModel(config)
    with torch.no_grad():
        bias = model.get_output_embeddings().bias
        assert bias is not None
        bias[END] = -1e4
    model.save_pretrained(folder)
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{n}" for n in range(given.vocab_size - FIRST_WORD))]
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in tokens))


def measured(side: str, call: Callable[[], Any], steps: int) -> dict[str, Any]:
    """Returns the seconds of a call and, for beam search, a digest of the tokens."""
    seconds = timed(call, steps)
    return {**seconds, "digest": hashlib.sha256(call().tobytes()).hexdigest()} if side in BEAMS else seconds


def sources(given: argparse.Namespace) -> np.ndarray:
    """Returns source rows: words between the start and end tokens."""
    ids = np.random.default_rng(0).integers(FIRST_WORD, given.vocab_size, (given.rows, given.length))
    ids[:, 0], ids[:, -1] = START, END
    return ids.astype(np.int32)


def pairs(given: argparse.Namespace) -> list[list[np.ndarray]]:
    """Returns the rows of sources and of targets: words between the start and end tokens."""
    if not given.parallel_text:
        return [list(sources(given))] * 2
    random, sides = np.random.default_rng(0), []
    for name in given.parallel_text:
        lines = Path(name).read_text(encoding="utf-8").splitlines()[: given.batches * given.rows]
        lengths = [min(len(line.split()) + 2, given.length) for line in lines]
        words = [random.integers(FIRST_WORD, given.vocab_size, length - 2) for length in lengths]
        sides.append([np.array([START, *ids, END], np.int32) for ids in words])
    return sides


def batches_of_rows(given: argparse.Namespace) -> list[Any]:
    """Returns our training batches of the pairs, in random order, as `bert finetune` makes them."""
    from bert.config import FinetuneConfig, TaskDataConfig, TrainingConfig
    from bert.data.batching import FinetuningLoader, LengthGroups, make_batches
    from bert.data.rows import SourceTargetRows, TokenRows

    sides = []
    for rows in pairs(given):
        lengths = np.array([len(row) for row in rows])
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        sides.append(TokenRows(np.concatenate(rows), offsets, lengths.astype(np.int32), None))
    features: Any = SourceTargetRows(sides[0], sides[1], None, given.length)  # type: ignore[arg-type]
    data, training = TaskDataConfig(max_length=given.length), TrainingConfig(batch_size=given.rows, epochs=1)
    config = FinetuneConfig(data=data, training=training)
    batches = make_batches(features, config, 1, by_length=False)
    groups = LengthGroups(data.buckets, data.max_length, 1, True, (0,) * 4)
    loader = FinetuningLoader(features, config, (0, 1), batches, groups)
    return [loader.batch(step) for step in range(loader.steps_per_epoch)]


def step_ours(given: argparse.Namespace, folder: Path) -> Callable[[], None]:
    """Runs the steps like `bert finetune`."""
    import jax
    import jax.numpy as jnp

    import bert
    from bert.config import FinetuneConfig, OptimizerConfig
    from bert.parallel.backends import PmapParallelism
    from bert.tasks import TASKS
    from bert.training.finetuning.kinds import TASK_KINDS, build_task_model, make_apply, task_loss
    from bert.training.length_groups import over_groups
    from bert.training.losses import make_task_loss
    from bert.training.optimizer import make_optimizer
    from bert.training.step import TrainState, compile_bucketed_train_step

    loaded = bert.load(folder)
    task, config = TASKS["translation"], FinetuneConfig(task="translation", model=loaded.config)
    apply = make_apply(build_task_model(task, config), None, TASK_KINDS[task.kind].forward)
    loss = over_groups(make_task_loss(task_loss(task, config), apply))
    optimizer = make_optimizer(OptimizerConfig(bias_correction=True), 1_000_000)
    parallel = PmapParallelism(jax.devices()[:1])
    train_step = compile_bucketed_train_step(loss, optimizer, 0, "hash", parallel)
    batches = [parallel.shard_batch(batch, 1) for batch in batches_of_rows(given)]
    states = [parallel.put_state(TrainState.create(jax.tree.map(jnp.array, loaded.params), optimizer, loss.metrics))]

    def steps() -> None:
        state = states.pop()
        for batch in batches:
            state, outcome = train_step(state, batch)
        states.append(state)
        jax.block_until_ready((state, outcome))

    return steps


def step_transformers(given: argparse.Namespace, folder: Path) -> Callable[[], None]:
    """Runs transformers' model with torch's AdamW, as in transformers' examples."""
    import torch
    from torch.nn.utils.rnn import pad_sequence
    from transformers import EncoderDecoderModel

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = EncoderDecoderModel.from_pretrained(folder).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)
    sides = [[torch.tensor(row).long() for row in rows] for rows in pairs(given)]
    batches = []
    for start in range(0, len(sides[0]), given.rows):
        ids, labels = (
            pad_sequence(rows[start : start + given.rows], batch_first=True, padding_value=padding)
            for rows, padding in zip(sides, (PAD, -100), strict=True)
        )
        batches.append({"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": labels})

    def steps() -> None:
        for batch in batches:
            model(**batch).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return steps


def texts(given: argparse.Namespace) -> list[str]:
    return [" ".join(f"w{id - FIRST_WORD}" for id in row[1:-1]) for row in sources(given)[: given.texts]]


def beams_ours(given: argparse.Namespace, folder: Path) -> Callable[[], np.ndarray]:
    """Searches with `bert.load(...).generate`."""
    import bert

    generate = functools.partial(bert.load(folder).generate, max_tokens=given.max_tokens, beams=given.beams)
    return lambda: np.array([answer.token_ids for answer in generate(texts(given), details=True)], np.int64)


def beams_transformers(given: argparse.Namespace, folder: Path) -> Callable[[], np.ndarray]:
    """Searches with transformers' ``generate`` and its cache."""
    import torch
    from transformers import EncoderDecoderModel

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = EncoderDecoderModel.from_pretrained(folder).eval()
    ids = torch.tensor(sources(given)[: given.texts]).long()
    settings: dict[str, Any] = {"max_new_tokens": given.max_tokens, "num_beams": given.beams, "do_sample": False}

    def generate() -> np.ndarray:
        with torch.inference_mode():
            return model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[:, 1:].numpy().astype(np.int64)

    return generate


WORKERS = dict(zip(SIDES, (step_ours, step_transformers, beams_ours, beams_transformers), strict=True))

if __name__ == "__main__":
    main()
