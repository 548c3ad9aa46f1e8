"""The README.md of an exported model: what it is, how to use it, its recipe and its measured scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from bert.config import UserError
from bert.interchange.tensor_files import read_json

if TYPE_CHECKING:
    from bert.pretrained import Pretrained

PIPELINES = {
    "BertForPreTraining": "fill-mask",
    "BertForMaskedLM": "fill-mask",
    "BertForSequenceClassification": "text-classification",
    "BertForTokenClassification": "token-classification",
    "BertForQuestionAnswering": "question-answering",
    "BertForMultipleChoice": "multiple-choice",
    "Bert": "feature-extraction",
}


def model_card(model: Pretrained, architecture: str) -> str:
    """Markdown with the front matter that the hub reads; ``architecture`` is transformers' class."""
    source, config = Path(model.source), model.config
    size = sum(leaf.size for leaf in jax.tree.leaves(model.params))
    tags = ["bert", "jax", "bert-jax"]
    front = ["---", "library_name: transformers", "tags:", *(f"- {tag}" for tag in tags)]
    if (pipeline := PIPELINES.get(model.architecture)) is not None:
        front.append(f"pipeline_tag: {pipeline}")
    parts = [
        "\n".join([*front, "---"]),
        f"# {source.resolve().name}",
        f"{architecture}, {size:,} parameters: {config.num_hidden_layers} layers of width {config.hidden_size} with "
        f"{config.num_attention_heads} heads, {config.vocab_size:,} pieces, up to {config.max_position_embeddings} "
        "tokens. Exported by bert-jax.",
        "```python\n"
        f"from transformers import AutoTokenizer, {architecture}\n\n"
        'tokenizer = AutoTokenizer.from_pretrained("PATH")\n'
        f'model = {architecture}.from_pretrained("PATH")\n'
        "```",
    ]
    if model.labels:
        parts += ["## Labels", ", ".join(f"`{label}`" for label in model.labels)]
    results = _results(source)
    if results:
        rows = [f"| {name} | {value} |" for name, value in _flat(results) if not name.startswith("details.")]
        parts += ["## Scores", "Measured at the end of the run.", "\n".join(["| | |", "|---|---|", *rows])]
    recipe = source / "config.yaml"
    if recipe.is_file():
        parts += ["## Recipe", f"```yaml\n{recipe.read_text(encoding='utf-8').rstrip()}\n```"]
    return "\n\n".join(parts) + "\n"


def _results(source: Path) -> dict[str, Any]:
    file = source / "results.json"
    try:
        content = read_json(file) if file.is_file() else {}
    except UserError:  # a card without scores is better than no export
        content = {}
    return content if isinstance(content, dict) else {}


def _flat(nested: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Numbers and words by their dotted name; lists, such as filled masks, are left out."""
    flat = []
    for key, value in nested.items():
        if isinstance(value, dict):
            flat += _flat(value, f"{prefix}{key}.")
        elif isinstance(value, float):
            flat.append((prefix + key, f"{value:.6g}"))
        elif isinstance(value, int | str):
            flat.append((prefix + key, json.dumps(value, ensure_ascii=False)))
    return flat
