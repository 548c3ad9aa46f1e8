"""The README.md of an exported model: what it is, how to use it, its recipe and its measured scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import yaml

from bert.config import DOCSTRINGS_PREFIX, HUB_PREFIX
from bert.config.resume import INCIDENTAL_KEYS
from bert.config.validation import PATHS
from bert.errors import UserError
from bert.files import read_json
from bert.interchange.bundle import ModelBundle, describe_labels
from bert.interchange.families import family_of
from bert.interchange.generation_files import TARGET_TOKENIZER
from bert.interchange.hub import is_downloaded
from bert.interchange.names import has_decoder
from bert.metrics.tagging_schemes import is_span_tag

PIPELINES = {
    "BertForPreTraining": "fill-mask",
    "BertForMaskedLM": "fill-mask",
    "BertForCausalLM": "text-generation",
    "BertForSequenceClassification": "text-classification",
    "BertForTokenClassification": "token-classification",
    "BertForQuestionAnswering": "question-answering",
    "BertForMultipleChoice": "multiple-choice",
    "Bert": "feature-extraction",
}


def model_card(model: ModelBundle, architecture: str) -> str:
    """Markdown with the front matter that the hub reads; ``architecture`` is transformers' class."""
    source, config = Path(model.source), model.config
    recipe = _recipe(source)
    size = sum(leaf.size for leaf in jax.tree.leaves(model.params))
    sections = [
        _front_matter(model, recipe),
        f"# {model.title}",
        f"{architecture}, {size:,} parameters: {_layers(model)} of width {config.hidden_size} with "
        f"{config.num_attention_heads} heads, {config.vocab_size:,} tokens, up to {config.max_position_embeddings} "
        "tokens. Exported by bert-jax.",
        "```python\n"
        f"from transformers import AutoTokenizer, {architecture}\n\n"
        'tokenizer = AutoTokenizer.from_pretrained("PATH")\n'
        f'model = {architecture}.from_pretrained("PATH")\n'
        f"{_generation(model)}"
        "```",
        *_aggregation(model),
    ]
    if model.labels:
        sections += ["## Labels", describe_labels(model)]
    results = _results(source)
    if results:
        rows = [f"| {name} | {value} |" for name, value in _flat(results) if not name.startswith("details.")]
        sections += ["## Scores", "Measured at the end of the run.", "\n".join(["| | |", "|---|---|", *rows])]
    if recipe:
        text = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True, width=120).rstrip()
        sections += ["## Recipe", f"```yaml\n{text}\n```"]
    return "\n\n".join(sections) + "\n"


def _layers(model: ModelBundle) -> str:
    layers = f"{model.config.num_hidden_layers} layers"
    if not has_decoder(model.architecture):
        return layers
    return f"{layers} of the encoder and {model.config.decoder.num_hidden_layers} of the decoder,"


def _aggregation(model: ModelBundle) -> list[str]:
    """How transformers gives the entities that `bert predict` gives, of a tagger of entities."""
    if model.architecture != "BertForTokenClassification" or not all(map(is_span_tag, model.labels)):
        return []
    return [
        'The tag of a word is that of its first token: `pipeline("token-classification", "PATH", '
        'aggregation_strategy="first")` gives the same entities, except that some tokenizers of transformers split '
        "words at punctuation within them, such as U.N."
    ]


def _generation(model: ModelBundle) -> str:
    """The lines that write a target, of an encoder-decoder."""
    if not has_decoder(model.architecture):
        return ""
    own = f'AutoTokenizer.from_pretrained("PATH/{TARGET_TOKENIZER}")'
    return (
        'rows = tokenizer(["a text"], return_tensors="pt")\n'
        'targets = model.generate(rows["input_ids"], attention_mask=rows["attention_mask"])\n'
        f"{'tokenizer' if model.target_tokenizer is None else own}.batch_decode(targets, skip_special_tokens=True)\n"
    )


def _front_matter(model: ModelBundle, recipe: dict[str, Any]) -> str:
    """What the hub reads. The license is left out: it is the user's to choose."""
    family = family_of(model).model_type
    fields: dict[str, Any] = {"library_name": "transformers", "tags": [family, "jax", "bert-jax"]}
    if (pipeline := PIPELINES.get(model.architecture)) is not None:
        fields["pipeline_tag"] = pipeline
    base = next((name for name in (model.source, recipe.get("init")) if name and is_downloaded(name)), None)
    if base is not None:
        fields["base_model"] = base
    data = recipe.get("data", {})
    sources = [data.get("dir"), *_as_list(data.get("train"))]
    if names := sorted({source.split(":")[1] for source in sources if source and source.startswith(HUB_PREFIX)}):
        fields["datasets"] = names
    return f"---\n{yaml.safe_dump(fields, sort_keys=False, allow_unicode=True)}---"


def _recipe(source: Path) -> dict[str, Any]:
    """A run's configuration in what decides the result: without local paths, and without what may change on resume."""
    file = source / "config.yaml"
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except Exception:  # constructors of YAML raise anything; a card without a recipe is better than no export
        content = {}
    if not isinstance(content, dict):
        return {}
    for key in {*PATHS, *INCIDENTAL_KEYS}:
        section, _, name = key.rpartition(".")
        inside = content.get(section) if section else content
        for settings in inside if isinstance(inside, list) else [inside or {}]:
            if name in settings and (key in INCIDENTAL_KEYS or not _is_public(key, settings[name])):
                del settings[name]
    return content


def _is_public(key: str, value: Any) -> bool:
    """Whether an option for paths holds names that mean the same on every machine."""
    if key in ("init", "architecture_from"):
        return value == "none" or (value is not None and is_downloaded(value))
    return value is not None and all(source.startswith((DOCSTRINGS_PREFIX, HUB_PREFIX)) for source in _as_list(value))


def _as_list(value: list[str] | str | None) -> list[str]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _results(source: Path) -> dict[str, Any]:
    file = source / "results.json"
    try:
        content = read_json(file) if file.is_file() else {}
    except UserError:  # a card without scores is better than no export
        content = {}
    return content if isinstance(content, dict) else {}


def _flat(nested: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Numbers by their dotted name, and a few words; lists, such as filled masks, and paths are left out."""
    flat = []
    for key, value in nested.items():
        if isinstance(value, dict):
            flat += _flat(value, f"{prefix}{key}.")
        elif isinstance(value, float):
            flat.append((prefix + key, f"{value:.6g}"))
        elif isinstance(value, int) or key in ("task", "main_metric", "baseline"):
            flat.append((prefix + key, json.dumps(value, ensure_ascii=False)))
    return flat
