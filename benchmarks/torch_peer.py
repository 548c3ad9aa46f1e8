"""The peer for fine-tuning: transformers' models in PyTorch, used as in transformers' examples.

    PYTHONPATH=. python benchmarks/torch_peer.py glue MODEL GLUE/MRPC --seed 0
    PYTHONPATH=. python benchmarks/torch_peer.py ner MODEL WNUT_DIR --seed 0
    PYTHONPATH=. python benchmarks/torch_peer.py squad MODEL SQUAD_DIR --seed 0

Prints one JSON line with settings, training seconds and scores. `--keep FILE` saves the training state every 50 steps
and resumes from it. The recipe matches `bert finetune`: AdamW without decay on biases and LayerNorm, 10% warm-up and
linear decay, clipping at 1, dynamic padding. Tokenization, windows, labels and spans are transformers' own. Only the
last step, from words and texts to scores, is ours on both sides (`bert.metrics`). As in `bert finetune`, `--doc_stride`
is the distance between the starts of two windows; transformers' `stride` is their overlap. SQUAD_DIR holds train.json
and dev.json (see squad_split.py). WNUT_DIR holds train.conll and dev.conll, and test.conll if it is to be scored.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    get_linear_schedule_with_warmup,
)

from bert import metrics
from bert.data.batching import epoch_batches
from bert.runtime.process import reexec_with_huge_pages

IGNORED = -100

Window = dict[str, Any]
"""A question answering row: tokens, answer positions, and the text offsets of the positions."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["glue", "ner", "squad"])
    parser.add_argument("model", help="folder of Hugging Face's layout")
    parser.add_argument("data", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=float, default=3.0)
    parser.add_argument("--learning_rate", type=float, default=5e-5)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--max_length", type=int, default=None, help="384 for squad, else 128")
    parser.add_argument("--doc_stride", type=int, default=128)
    parser.add_argument("--max_train_samples", type=int, default=None)
    parser.add_argument("--same_batches", action="store_true", help="the batches of bert finetune, in its order")
    parser.add_argument("--keep", type=Path, default=None, help="where training is saved and goes on from")
    parser.add_argument("--best", action="store_true", help="made as fast as it gets: huge pages, one kernel an update")
    arguments = parser.parse_args()
    if arguments.best:
        reexec_with_huge_pages()
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    scores = {"glue": glue, "ner": ner, "squad": squad}[arguments.task](arguments)
    print(json.dumps({**{name: str(value) for name, value in vars(arguments).items()}, **scores}), flush=True)


def train(model: Any, rows: Sequence[dict[str, Any]], collate: Callable[..., Any], arguments: Any) -> float:
    """Trains the model in place and returns the seconds."""
    decayed = [p for n, p in model.named_parameters() if "bias" not in n and "LayerNorm" not in n]
    spared = [p for n, p in model.named_parameters() if "bias" in n or "LayerNorm" in n]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": spared, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=arguments.learning_rate, eps=1e-6, fused=arguments.best or None)
    size = arguments.batch_size
    steps = int(arguments.epochs * -(-len(rows) // size))
    schedule = get_linear_schedule_with_warmup(optimizer, int(0.1 * steps), steps)
    model.train()
    shuffled = np.random.default_rng(arguments.seed)
    orders = [shuffled.permutation(len(rows)) for _ in range(math.ceil(arguments.epochs))]
    batches = [order[first : first + size] for order in orders for first in range(0, len(order), size)][:steps]
    if arguments.same_batches:
        lengths, by_length = np.array([len(row["input_ids"]) for row in rows]), arguments.task != "ner"
        epochs = (epoch_batches(lengths, size, arguments.seed, epoch, by_length) for epoch in range(len(orders)))
        batches = [batch for epoch in epochs for batch in epoch][:steps]
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    done, seconds = 0, 0.0
    if arguments.keep and arguments.keep.exists():
        kept = torch.load(arguments.keep, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(kept[name])
        torch.set_rng_state(kept["random"])
        done, seconds = kept["step"], kept["seconds"]
    began = time.time() - seconds
    for step, batch in enumerate(batches[done:], start=done + 1):
        loss = model(**collate([rows[i] for i in batch])).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"step {step} of {steps}, loss {loss.item():.3f}, {time.time() - began:.0f} s", file=sys.stderr)
            if arguments.keep:
                state = {name: part.state_dict() for name, part in parts.items()}
                state |= {"random": torch.get_rng_state(), "step": step, "seconds": time.time() - began}
                torch.save(state, arguments.keep.with_suffix(".new"))
                arguments.keep.with_suffix(".new").replace(arguments.keep)
    return round(time.time() - began, 1)


def padded(rows: Sequence[dict[str, Any]], fill: dict[str, int]) -> dict[str, torch.Tensor]:
    """Pads rows of lists to tensors of the longest row's length."""
    longest = max(len(row["input_ids"]) for row in rows)
    return {
        name: torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in rows])
        for name, value in fill.items()
    }


TEXT = {"input_ids": 0, "token_type_ids": 0, "attention_mask": 0}


GLUE = {"CoLA": (0, 3, None, 1), "MRPC": (1, 3, 4, 0), "RTE": (1, 1, 2, 3), "SST-2": (1, 0, None, 1)}
"""Number of header lines, columns of the texts, and column of the label."""


def glue(arguments: Any) -> dict[str, Any]:
    header, first, second, label = GLUE[arguments.data.name]
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForSequenceClassification.from_pretrained(arguments.model, num_labels=2)

    def rows_of(split: str, most: int | None = None) -> list[dict[str, Any]]:
        lines = (arguments.data / f"{split}.tsv").read_text(encoding="utf-8-sig").split("\n")[header:]
        cells = [line.split("\t") for line in lines if line][:most]
        texts = [[row[column] for row in cells] for column in (first, second) if column is not None]
        encoded = tokenizer(*texts, truncation=True, max_length=arguments.max_length or 128)
        return [
            {**{name: encoded[name][place] for name in TEXT}, "label": int(row[label] in ("1", "not_entailment"))}
            for place, row in enumerate(cells)
        ]

    def collate(rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return {**padded(rows, TEXT), "labels": torch.tensor([row["label"] for row in rows])}

    seconds = train(model, rows_of("train", arguments.max_train_samples), collate, arguments)
    model.eval()
    dev, answered = rows_of("dev"), []
    with torch.no_grad():
        for begin in range(0, len(dev), 32):
            answered += model(**collate(dev[begin : begin + 32])).logits.argmax(-1).tolist()
    right = np.array([row["label"] for row in dev])
    return {
        "train_seconds": seconds,
        **metrics.compute_metrics(("accuracy", "f1", "matthews"), np.array(answered), right),
    }


def ner(arguments: Any) -> dict[str, Any]:
    length = arguments.max_length or 128
    files = {name: arguments.data / f"{name}.conll" for name in ("train", "dev", "test")}
    read = {name: columns(file) for name, file in files.items() if file.is_file()}
    types = sorted({tag[2:] for _, tags in read["train"] for tag in tags} - {""})
    labels = ["O", *(f"{prefix}-{kind}" for kind in types for prefix in "BI")]
    number = {label: place for place, label in enumerate(labels)}
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForTokenClassification.from_pretrained(arguments.model, num_labels=len(labels))

    def rows_of(split: str) -> list[dict[str, Any]]:
        made = []
        for words, tags in read[split][: arguments.max_train_samples if split == "train" else None]:
            encoded = tokenizer(words, is_split_into_words=True, truncation=True, max_length=length)
            places, before = encoded.word_ids(), None
            chosen = []
            for place in places:
                first = place is not None and place != before
                chosen.append(number[tags[place]] if first else IGNORED)
                before = place
            made.append({**encoded, "labels": chosen, "words": places})
        return made

    def collate(rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return padded(rows, {**TEXT, "labels": IGNORED})

    seconds = train(model, rows_of("train"), collate, arguments)
    model.eval()
    scores = {}
    for split in [name for name in read if name != "train"]:
        rows = rows_of(split)
        answered: list[Any] = []
        losses = []  # one loss per labelled word
        with torch.no_grad():
            for first in range(0, len(rows), 32):
                some = rows[first : first + 32]
                batch = collate(some)
                logits = model(**batch).logits
                by_token = cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")
                losses.append(by_token[batch["labels"] != IGNORED])
                for row, best in zip(some, logits.argmax(-1).tolist(), strict=True):
                    words, _ = read[split][len(answered)]
                    tags = ["O"] * len(words)  # for words beyond the last token
                    for place, label, chosen in zip(row["words"], row["labels"], best, strict=False):
                        if label != IGNORED:
                            tags[place] = labels[chosen]
                    answered.append(tags)
        found = metrics.entity_metrics(answered, [tags for _, tags in read[split]])
        scores[split] = {name: found[name] for name in ("precision", "recall", "f1")}
        scores[split]["loss"] = float(torch.cat(losses).mean())
    return {"train_seconds": seconds, **scores}


def columns(path: Path) -> list[tuple[list[str], list[str]]]:
    """Reads sentences, which end with an empty line or, as in WNUT-17's training file, a line with a tab."""
    sentences = []
    lines = [line.split("\t") if line.strip() else [] for line in path.read_text(encoding="utf-8").split("\n")]
    for ended, rows in itertools.groupby(lines, key=lambda cells: not cells):
        if not ended:
            words, *_, tags = zip(*rows, strict=True)
            sentences.append((list(words), list(tags)))
    return sentences


def squad(arguments: Any) -> dict[str, Any]:
    length = arguments.max_length or 384
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForQuestionAnswering.from_pretrained(arguments.model)

    def labelled(split: str, most: int | None = None) -> tuple[list[dict[str, Any]], list[Window]]:
        questions = questions_of(arguments.data / f"{split}.json")[:most]
        return questions, windows(tokenizer, questions, length, arguments.doc_stride)

    _, rows = labelled("train", arguments.max_train_samples)

    def collate(some: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        ends = {f"{end}_positions": torch.tensor([row[key] for row in some]) for end, key in ENDS}
        return {**padded(some, TEXT), **ends}

    seconds = train(model, rows, collate, arguments)
    model.eval()
    questions, rows = labelled("dev")
    best: dict[str, tuple[float, str]] = {question["id"]: (-np.inf, "") for question in questions}
    losses = []
    with torch.no_grad():
        for start in range(0, len(rows), 32):
            some = rows[start : start + 32]
            batch = collate(some)
            out = model(**batch)
            logits = torch.stack([out.start_logits, out.end_logits], dim=1)
            right = torch.stack([batch["start_positions"], batch["end_positions"]], dim=1)
            padding = batch["attention_mask"][:, None] == 0
            losses.append(cross_entropy(logits.masked_fill(padding, -1e9).transpose(1, 2), right, reduction="none"))
            for row, begins, ends in zip(some, out.start_logits.numpy(), out.end_logits.numpy(), strict=True):
                question = questions[row["question"]]
                score, first, last = best_span(begins, ends, row["context"])
                if score > best[question["id"]][0]:
                    text = question["context"][row["offsets"][first][0] : row["offsets"][last][1]]
                    best[question["id"]] = (score, text)
    references = {question["id"]: [answer["text"] for answer in question["answers"]] for question in questions}
    scores = metrics.squad_metrics({id: text for id, (_, text) in best.items()}, references)
    dev = {"exact_match": scores["exact_match"], "f1": scores["f1"], "loss": float(torch.cat(losses).mean())}
    return {"train_seconds": seconds, "dev": dev}


ENDS = (("start", "first"), ("end", "last"))


def windows(tokenizer: Any, questions: Sequence[dict[str, Any]], length: int, doc_stride: int) -> list[Window]:
    """Returns the rows of all questions in order. Windows start ``doc_stride`` tokens apart for any question length.

    Questions are encoded one at a time, because the required overlap depends on the question's length.
    """
    rows = []
    for number, question in enumerate(questions):
        text, answer = question["question"].lstrip(), question["answers"][0]
        room = length - len(tokenizer(text)["input_ids"]) - 1
        encoded = tokenizer(
            text,
            question["context"],
            truncation="only_second",
            max_length=length,
            stride=max(room - doc_stride, 0),
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        for row, offsets in enumerate(encoded["offset_mapping"]):
            first, last = span(encoded, row, answer["answer_start"], answer["answer_start"] + len(answer["text"]))
            rows.append(
                {
                    **{name: encoded[name][row] for name in TEXT},
                    "first": first,
                    "last": last,
                    "question": number,
                    "context": [sequence == 1 for sequence in encoded.sequence_ids(row)],
                    "offsets": offsets,
                }
            )
    return rows


def questions_of(path: Path) -> list[dict[str, Any]]:
    articles = json.loads(path.read_text(encoding="utf-8"))["data"]
    return [
        {**question, "context": paragraph["context"]}
        for article in articles
        for paragraph in article["paragraphs"]
        for question in paragraph["qas"]
    ]


def span(encoded: Any, row: int, start: int, end: int) -> tuple[int, int]:
    """Returns the answer's tokens in a window; the first token twice if the answer is not completely inside."""
    inside = [
        place
        for place, (sequence, (a, b)) in enumerate(
            zip(encoded.sequence_ids(row), encoded["offset_mapping"][row], strict=True)
        )
        if sequence == 1 and a < end and b > start
    ]
    offsets = encoded["offset_mapping"][row]
    whole = inside and offsets[inside[0]][0] <= start and offsets[inside[-1]][1] >= end
    return (inside[0], inside[-1]) if whole else (0, 0)


def best_span(begins: np.ndarray, ends: np.ndarray, context: list[bool], longest: int = 30) -> tuple[float, int, int]:
    """Returns score, first and last token of the best answer in the context."""
    here = np.flatnonzero(context)
    total = begins[here][:, None] + ends[here][None, :]
    width = here[None, :] - here[:, None]
    total = np.where((width >= 0) & (width < longest), total, -np.inf)
    first, last = np.unravel_index(total.argmax(), total.shape)
    return float(total[first, last]), int(here[first]), int(here[last])


if __name__ == "__main__":
    main()
