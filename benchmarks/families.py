"""Measures the largest difference between a random model of each family in transformers and here.

    python benchmarks/families.py [MODEL_TYPE ...]

For each family it draws a small model in float32, with a language modelling head if the family has one, and compares
all hidden states and logits of random and real rows (`tests/real/family_cases.py`). It updates
benchmarks/families.json, which the table of docs/models.md shows. Needs the extra `torch`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np

import bert
from tests.real.family_cases import CASES, Case
from tests.real.hf_models import answers, drawn, our_answers
from tests.real.test_hf_parity import batches_of

FILE = Path(__file__).with_name("families.json")
HEADS = ("BertForMaskedLM", "BertForCausalLM")
TEXTS = ["The company said on Monday that it would read it.", "No."] * 4


def largest_difference(case: Case) -> float:
    """Returns the largest difference of the tokens, over all hidden states and outputs."""
    possible = case.architectures or tuple(case.family.classes)
    architecture = next((head for head in HEADS if head in possible), possible[0])
    texts = (TEXTS, [(text, "No.") for text in TEXTS])
    with tempfile.TemporaryDirectory() as folder:
        reference = drawn(Path(folder), architecture, case.family.model_type, case.adjust, **case.settings)
        model = bert.load(folder)
        differences = []
        for batch in batches_of(case, model, Path(folder), texts):
            theirs = answers(reference, {column: batch[column] for column in case.columns})
            ours, mask = our_answers(model, batch), batch["attention_mask"].astype(bool)
            if not case.last_state:
                del ours[model.config.num_hidden_layers], theirs[model.config.num_hidden_layers]
            for mine, other in zip(ours, theirs, strict=True):
                gap = np.abs(np.asarray(mine) - other)
                differences.append(float((gap[mask] if gap.shape[:2] == mask.shape else gap).max()))
    return max(differences)


def main(chosen: list[str]) -> None:
    known = json.loads(FILE.read_text()) if FILE.is_file() else {}
    cases: dict[str, Case] = {}
    for case in CASES.values():
        cases.setdefault(case.family.model_type, case)
    for model_type, case in cases.items():
        if model_type in chosen or not chosen:
            known[model_type] = float(f"{largest_difference(case):.1g}")
            print(model_type, known[model_type], flush=True)
            FILE.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
