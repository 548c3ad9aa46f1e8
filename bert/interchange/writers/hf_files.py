"""Files of a Hugging Face folder besides the weights: config.json, the tokenizer files, and the model card."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax
import yaml
from tokenizers import Tokenizer, processors

from bert.config import DOCSTRINGS_PREFIX, HUB_PREFIX
from bert.config.run_file import INCIDENTAL_KEYS
from bert.config.validation import PATHS
from bert.data.encoding import row_template
from bert.errors import UserError, on_one_line
from bert.files import read_json, write_atomic
from bert.interchange.bundle import ModelBundle, task_settings
from bert.interchange.families import family_of
from bert.interchange.families.base import HEAD_DROPOUT
from bert.interchange.generation_files import TARGET_TOKENIZER
from bert.interchange.hub import is_downloaded
from bert.interchange.sentence_transformers.names import CROSS_ENCODER
from bert.interchange.writers.long_texts import long_text_usage
from bert.metrics.tagging_schemes import is_span_tag
from bert.model.names import has_decoder
from bert.tokenizer.hf_settings import GENERIC_CLASSES, set_prefix_space, truncation_side
from bert.tokenizer.library import library_errors, special_ids
from bert.tokenizer.vocabulary import save_tokenizer

ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new", **{name: name for name in ("relu", "silu", "tanh")}}
"""transformers' names. It has no elu, which keeps its name in the config.json of a graph."""


def published_config(model: ModelBundle) -> dict[str, Any]:
    """Returns the content of config.json."""
    config, special = model.config, special_ids(model.tokenizer)
    family = family_of(model)
    content: dict[str, Any] = {
        "architectures": [family.class_of(model.architecture)],
        "model_type": family.model_type,
        **{key: getattr(config, name) for name, key in family.keys.items()},
        family.keys["hidden_act"]: ACTIVATIONS.get(config.hidden_act, config.hidden_act),
        "tie_word_embeddings": config.tie_word_embeddings,
        "pad_token_id": special.find("pad"),
        "dtype": "float32",
        **family.write_config(config, special),
    }
    content = family.nest(content, config, special_ids(model.target_tokenizer or model.tokenizer))
    if model.labels:
        content["id2label"] = {str(index): label for index, label in enumerate(model.labels)}
        content["label2id"] = {label: index for index, label in enumerate(model.labels)}
    settings = task_settings(model)
    if HEAD_DROPOUT in settings:
        settings[family.head_dropout_key(content["architectures"][0])] = settings.pop(HEAD_DROPOUT)
    first = ("problem_type", "null_score_diff_threshold", "label_thresholds")
    content |= {key: settings.pop(key) for key in first if key in settings}
    if model.score_activation is not None:
        content[CROSS_ENCODER] = {"activation_fn": model.score_activation}
    return content | settings


def published_tokenizer(model: ModelBundle) -> Tokenizer:
    """Returns the tokenizer to publish, adjusted so that transformers makes the rows on which the model was trained.

    In a tagging run with a byte-level vocabulary every word starts with a space, which ``add_prefix_space`` adds to
    lists of words. A language model continues texts without special tokens.
    """
    if model.step is None or model.architecture not in ("BertForTokenClassification", "BertForCausalLM"):
        return model.tokenizer
    tokenizer = Tokenizer.from_str(model.tokenizer.to_str())
    if model.architecture == "BertForTokenClassification":
        set_prefix_space(tokenizer, True)
    else:
        tokenizer.post_processor = processors.TemplateProcessing(single="$A:0", pair="$A:0 $B:1", special_tokens=[])
    return tokenizer


def published_tokenizers(model: ModelBundle, folder: Path) -> list[tuple[Tokenizer, Path]]:
    """Returns the tokenizers of source and, if separate, target, with the folder of each."""
    target = [] if model.target_tokenizer is None else [(model.target_tokenizer, folder / TARGET_TOKENIZER)]
    return [(published_tokenizer(model), folder), *target]


TYPED_INPUTS = ["input_ids", "token_type_ids", "attention_mask"]


def save_published_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int, segments: bool = True) -> None:
    """Writes tokenizer.json, the vocabulary, tokenizer_config.json and special_tokens_map.json.

    If the vocabulary has no padding token, its end token is declared as one, as in config.json.

    Args:
        segments: whether the model reads token_type_ids, which most transformers tokenizers make.
    """
    save_tokenizer(tokenizer, folder)
    content = json.loads(tokenizer.to_str())
    if content["model"]["type"] == "BPE":
        with library_errors(f"{folder} cannot be written", "free space there, or name another folder"):
            tokenizer.model.save(str(folder))  # writes vocab.json and merges.txt
    special = special_ids(tokenizer).by_role
    of_text = () if "cls" in special else ("bos", "eos")  # RoBERTa's are cls and sep, which its class sets
    roles = [role for role in ("pad", "unk", "cls", "sep", "mask", *of_text) if role in special]
    names = {f"{role}_token": tokenizer.id_to_token(special[role]) for role in roles}
    if "pad" not in special and ("eos" in special or "sep" in special):
        names["pad_token"] = tokenizer.id_to_token(special_ids(tokenizer).padding)
    config = {**_class(content), **names, "model_max_length": max_length}
    if truncation_side(tokenizer) == "left":
        config["truncation_side"] = "left"
    if content["post_processor"] is not None and row_template(tokenizer).has_third_type:
        config["padding_side"] = "left"  # classifiers read the last position
        config["model_input_names"] = TYPED_INPUTS
    elif config["tokenizer_class"] in GENERIC_CLASSES:  # makes no types by default
        config["model_input_names"] = TYPED_INPUTS
    if not segments or _has_one_type(content["post_processor"]):
        config["model_input_names"] = ["input_ids", "attention_mask"]
    for name, content in (("tokenizer_config.json", config), ("special_tokens_map.json", names)):
        write_atomic(folder / name, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _has_one_type(ending: dict[str, Any] | None) -> bool:
    """Whether a template gives type 0 to both texts of a pair."""
    pair = (ending or {}).get("pair")
    return isinstance(pair, list) and not any(part["type_id"] for piece in pair for part in piece.values())


def _class(content: dict[str, Any]) -> dict[str, Any]:
    """Returns the tokenizer class that makes the same ids, and its settings: a model's class or the generic one."""
    steps, words = content["normalizer"] or {}, content["pre_tokenizer"] or {}
    if not _has_standard_template(content["post_processor"]):
        return {"tokenizer_class": "PreTrainedTokenizerFast"}
    own_rows = (content["post_processor"] or {}).get("type") == "RobertaProcessing"  # the class makes only such rows
    if content["model"]["type"] == "BPE" and not steps and words.get("type") == "ByteLevel" and own_rows:
        return {"tokenizer_class": "RobertaTokenizer", "add_prefix_space": words["add_prefix_space"]}
    plain = steps.get("type") == "BertNormalizer" and steps["clean_text"] and words.get("type") == "BertPreTokenizer"
    if content["model"]["type"] == "WordPiece" and plain:
        return {
            "tokenizer_class": "MPNetTokenizer" if own_rows else "BertTokenizer",
            "do_lower_case": steps["lowercase"],
            "strip_accents": steps["strip_accents"],
            "tokenize_chinese_chars": steps["handle_chinese_chars"],
        }
    return {"tokenizer_class": "PreTrainedTokenizerFast"}


def _has_standard_template(steps: dict[str, Any] | None) -> bool:
    """Whether the template is BERT's or RoBERTa's: ``[CLS] A [SEP] B [SEP]`` or ``<s> A </s></s> B </s>``."""
    if steps is None or steps["type"] in ("BertProcessing", "RobertaProcessing"):
        return True
    if steps["type"] != "TemplateProcessing":
        return False
    single, pair = (
        [next(iter(step.values()))["id"] for step in steps[name] if isinstance(step, dict)]
        for name in ("single", "pair")
    )
    return (single, pair) == (["[CLS]", "A", "[SEP]"], ["[CLS]", "A", "[SEP]", "B", "[SEP]"])


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
    """Returns the model card as Markdown with front matter. ``architecture`` is the transformers class."""
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
        *long_text_usage(model),
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


def describe_labels(model: ModelBundle) -> str:
    """Returns the labels, with their thresholds if any, for a README.md."""
    if not model.label_thresholds:
        return ", ".join(map(_code_span, model.labels))
    pairs = zip(model.labels, model.label_thresholds, strict=True)
    listed = ", ".join(f"{_code_span(label)} {threshold:.4g}" for label, threshold in pairs)
    return f"{listed} (a label is predicted if the sigmoid of its logit reaches the number next to it)"


def _code_span(text: str) -> str:
    """Formats a text as a Markdown code span on one line, with a fence longer than any backticks in it."""
    text = on_one_line(text)
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    space = " " if text.strip("` ") != text or not text else ""
    return f"{fence}{space}{text}{space}{fence}"


def _layers(model: ModelBundle) -> str:
    layers = f"{model.config.num_hidden_layers} layers"
    if not has_decoder(model.architecture):
        return layers
    return f"{layers} of the encoder and {model.config.decoder.num_hidden_layers} of the decoder,"


def _aggregation(model: ModelBundle) -> list[str]:
    """Returns a note on how to get the entities of `bert predict` from transformers, for entity taggers."""
    if model.architecture != "BertForTokenClassification" or not all(map(is_span_tag, model.labels)):
        return []
    return [
        'Each word has the tag of its first token: `pipeline("token-classification", "PATH", '
        'aggregation_strategy="first")` gives the same entities, except that some tokenizers of transformers split '
        "words at punctuation within them, such as U.N."
    ]


def _generation(model: ModelBundle) -> str:
    """Returns the lines that generate a target with an encoder-decoder."""
    if not has_decoder(model.architecture):
        return ""
    own = f'AutoTokenizer.from_pretrained("PATH/{TARGET_TOKENIZER}")'
    return (
        'rows = tokenizer(["a text"], return_tensors="pt")\n'
        'targets = model.generate(rows["input_ids"], attention_mask=rows["attention_mask"])\n'
        f"{'tokenizer' if model.target_tokenizer is None else own}.batch_decode(targets, skip_special_tokens=True)\n"
    )


def _front_matter(model: ModelBundle, recipe: dict[str, Any]) -> str:
    """Returns the front matter for the hub. The license is left to the user."""
    family = family_of(model).model_type
    fields: dict[str, Any] = {"library_name": "transformers", "tags": [family, "jax", "bert-jax"]}
    if family_of(model).class_of(model.architecture).endswith("LMHeadModel"):
        fields["pipeline_tag"] = "text-generation"
    elif (pipeline := PIPELINES.get(model.architecture)) is not None:
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
    """Returns the settings of a run that affect the result, without local paths and resume options."""
    file = source / "config.yaml"
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except Exception:  # YAML constructors raise anything, and a card without a recipe is better than no export
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
    """Whether an option for paths holds only names that are valid on every machine."""
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
    """Returns numbers and a few strings by dotted name. Lists, such as filled masks, and paths are omitted."""
    flat = []
    for key, value in nested.items():
        if isinstance(value, dict):
            flat += _flat(value, f"{prefix}{key}.")
        elif isinstance(value, float):
            flat.append((prefix + key, f"{value:.6g}"))
        elif isinstance(value, int) or key in ("task", "main_metric", "baseline"):
            flat.append((prefix + key, json.dumps(value, ensure_ascii=False)))
    return flat
