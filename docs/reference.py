"""The pages of the site that are made from the code: configuration, recipes, API and model families.

A line of a page that ends with ``<!-- generated: NAME -->`` is replaced by what the function of that name in
`GENERATED` returns. The rest of the line says where else to look.
"""

from __future__ import annotations

import importlib
import json
import re
import types
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import bert
from bert.config import (
    FinetuneConfig,
    PretrainConfig,
    TaskDataConfig,
    TaskDistillationConfig,
    recipe_folder,
    recipe_header,
    recipe_names,
)
from bert.config.run_file import RESUMABLE
from bert.config.validation import fields_of, help_texts, keys_of
from bert.interchange.families import FAMILIES
from bert.model.names import ARCHITECTURES

DIFFERENCES = Path(__file__).parent.parent / "benchmarks" / "families.json"

MARK = re.compile(r"^(?:.* )?<!-- generated: (\w+) -->$", re.MULTILINE)

TYPES = {int: "whole number", float: "number", bool: "true or false", str: "text", type(None): "null"}

API = {
    "Load and use a model": ("load", "Pretrained", "MtebEncoder", "bert.interchange.bundle.ModelBundle"),
    "Train": (
        "pretrain",
        "finetune",
        "sweep",
        "Run",
        "Callback",
        "bert.runs.loggers.RunStart",
        "TensorBoardLogger",
        "WandbLogger",
        "MlflowLogger",
    ),
    "What a model returns": (
        "bert.inference.forward.EncodeOutput",
        "bert.inference.scoring.MaskPrediction",
        "bert.inference.generate.Continuation",
        "bert.inference.scoring.TextScore",
        "bert.tasks.sequence_classification.Label",
        "bert.tasks.sequence_classification.Score",
        "bert.tasks.sequence_classification.Labels",
        "bert.tasks.question_answering.AnswerPrediction",
        "bert.tasks.token_classification.Entities",
        "bert.tasks.token_classification.Words",
        "bert.tasks.multiple_choice.Choice",
        "bert.tasks.sequence_to_sequence.TargetText",
        "bert.tasks.embedding.Embedding",
        "bert.inference.search.SearchResults",
        "bert.inference.search.RankedDocument",
    ),
    "Flax modules": (
        *(name for name in bert.__all__ if name.startswith("Bert")),
        "bert.config.ModelConfig",
        "bert.model.encoder.EncoderOutput",
        "bert.model.pretraining.PretrainingOutput",
        "bert.model.dropout.Dropout",
    ),
    "Tasks of your own": (
        "register_task",
        "bert.tasks.sequence_classification.CustomClassification",
        "bert.data.records.Records",
        "bert.tasks.base.Task",
    ),
    "Metrics": ("metrics",),
    "Errors": ("UserError",),
}
"""Sections of the API reference; a name without a dot is one of the package's."""


def fill_in(app: object, docname: str, source: list[str]) -> None:
    """Sphinx's ``source-read``: replaces the marks of a page."""
    source[0] = MARK.sub(lambda match: GENERATED[match[1]](), source[0])


def generated_pages(app: Any, env: object, added: object, changed: object, removed: object) -> list[str]:
    """Sphinx's ``env-get-outdated``: pages with marks are read at every build, for the code may have changed."""
    pages = [
        Path(app.srcdir, "docs", f"{Path(name).name}.md") for name in app.env.found_docs if name.startswith("docs/")
    ]
    return [f"docs/{page.stem}" for page in pages if MARK.search(page.read_text(encoding="utf-8"))]


def shorten(
    app: object, what: str, name: str, value: Any, options: object, signature: str | None, result: str | None
) -> tuple[str | None, str | None]:
    """Sphinx's ``autodoc-process-signature``: leaves out what nobody passes."""
    if what == "class" and name.endswith((".Pretrained", ".ModelBundle", ".RunStart")):  # which the package makes
        return "", None
    if what == "class" and hasattr(value, "setup") and signature:  # what Flax adds to every module
        signature = re.sub(r", parent: .*, name: [^,)]*", "", signature)
    if name in ("bert.pretrain", "bert.finetune") and signature:  # it exists for the error message
        signature = re.sub(r", \*\*unknown: [^,)]*", "", signature)
    return signature, result


def api() -> str:
    """The API reference, with every name of ``bert.__all__``."""
    grouped = {name for names in API.values() for name in names}
    sections = {**API, "Further names": tuple(name for name in bert.__all__ if name not in grouped)}
    blocks = {title: "".join(map(_directive, names)) for title, names in sections.items() if names}
    return "\n".join(f"## {title}\n\n```{{eval-rst}}\n{block}```\n" for title, block in blocks.items())


def _directive(name: str) -> str:
    """The autodoc directive of a name, with the members that suit its kind."""
    path = name if "." in name else f"bert.{name}"
    module, _, leaf = path.rpartition(".")
    value = getattr(importlib.import_module(module), leaf)
    options = []
    if isinstance(value, types.ModuleType):
        directive, options = "automodule", ["members:"]
    elif not isinstance(value, type):
        directive = "autofunction"
    else:
        directive = "autoclass"
        if issubclass(value, BaseException):
            options = ["show-inheritance:"]
        elif hasattr(value, "setup"):  # a Flax module
            options = ["members:", "special-members: __call__", "exclude-members: setup, dtype"]
        elif not issubclass(value, tuple):
            options = ["members:", "inherited-members:", "show-inheritance:"]
    return "".join([f".. {directive}:: {path}\n", *(f"   :{option}\n" for option in options), "\n"])


def shared_keys() -> str:
    """The keys that both commands have, with the same type, default and help."""
    return _keys_of_run(PretrainConfig, shared=True)


def pretraining_keys() -> str:
    """The keys of ``bert pretrain`` alone."""
    return _keys_of_run(PretrainConfig, shared=False)


def finetuning_keys() -> str:
    """The keys of ``bert finetune`` alone."""
    return _keys_of_run(FinetuneConfig, shared=False)


EFFECTS = {
    "exact": "exact",
    "rounding": "the same except for the rounding of sums",
    "later": "exact; log lines or evaluations are at other steps from here on",
}


def resumable_keys() -> str:
    """The table of the keys that may change when a run resumes."""
    rows = [
        f"| `{entry.key}` | {EFFECTS[entry.effect]} | {entry.condition or 'always'} | {entry.reason} |"
        for entry in RESUMABLE
    ]
    return "\n".join(["| key | result | may change if | reason |", "|---|---|---|---|", *rows])


def _keys_of_run(config_class: type, shared: bool) -> str:
    """The top level of a configuration and its sections: those that the other command has as well, or all others."""
    fields, other = fields_of(config_class), FinetuneConfig if config_class is PretrainConfig else PretrainConfig
    chosen = [name for name, field in fields.items() if (fields_of(other).get(name) == field) == shared]
    parts = ["### The run\n", *_keys(config_class, "", chosen)]
    for name in chosen:
        if (section := fields[name].section) is not None:
            parts += _section(section, f"{name}.", help_texts(config_class)[name].partition(",")[0])
    return "\n".join(parts)


def _section(config_class: type, prefix: str, title: str) -> Iterator[str]:
    """The keys of a dataclass below a heading, then its sections."""
    fields, texts = fields_of(config_class), help_texts(config_class)
    yield f"### `{prefix.rstrip('.')}`: {title}\n"
    yield from _keys(config_class, prefix, fields)
    for name, field in fields.items():
        if field.section is not None:
            yield from _section(field.section, f"{prefix}{name}.", texts[name])


def _keys(config_class: type, prefix: str, names: Iterable[str]) -> Iterator[str]:
    """The keys of one dataclass. For a list of sections, the keys of an item follow the list."""
    fields, texts = fields_of(config_class), help_texts(config_class)
    hints = typing.get_type_hints(config_class, include_extras=True)
    for name in names:
        field, key = fields[name], prefix + name
        if field.section is not None:
            continue
        kind = "list of sections, or null" if field.item else type_text(hints[name])
        # Sphinx allows one description per object: data.train is described under pretraining.
        is_second = config_class in (TaskDataConfig, TaskDistillationConfig)
        index = ":no-index:\n" if is_second and key in keys_of(PretrainConfig) else ""
        default = json.dumps(field.default)
        yield f"```{{confval}} {key}\n{index}:type: {kind}\n:default: `{default}`\n\n{_markdown(texts[name])}\n```\n"
        if field.item is not None:
            yield from _keys(field.item, f"{key}.K.", fields_of(field.item))


def _markdown(text: str) -> str:
    """A help text, its keys and file names as code."""
    parts = re.split(r"((?<![\w/.])(?:[a-z_]+\.[a-z_]+|\w+_\w+|\w+/)(?![\w/])|hub:\S*\w)", text)
    return "".join(f"`{part}`" if place % 2 else _escaped(part) for place, part in enumerate(parts))


def _escaped(text: str) -> str:
    return re.sub(r"([*_<>\[\]`])", r"\\\1", text)


def type_text(hint: Any) -> str:
    """A type as the reader writes its values: ``Annotated[int, Range(minimum=1)]`` is a whole number."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return " ".join([type_text(arguments[0]), *map(str, arguments[1:])])
    if origin is Literal:
        return " or ".join(f"`{choice}`" for choice in arguments)
    if origin is list:
        return f"list of {type_text(arguments[0])}"
    if origin in (types.UnionType, typing.Union):
        return ", or ".join(map(type_text, arguments))
    return TYPES[hint]


def recipes() -> str:
    """Tables of the recipes, then each with its header and its keys."""
    names = {"Pretraining": recipe_names(for_task=False), "Fine-tuning": recipe_names(for_task=True)}
    parts = []
    for title, group in names.items():
        rows = [f"| [`{name}`](#{name}) | {_recipe(name)[0]} |" for name in group]
        parts += ["\n".join([f"## {title}", "", "| recipe | is |", "|---|---|", *rows]), *map(_recipe_page, group)]
    return "\n\n".join(parts)


def _recipe(name: str) -> tuple[str, str, list[str], str]:
    """A recipe's first sentence, its command, the paragraphs of its header, and its keys."""
    text = (recipe_folder() / f"{name}.yaml").read_text(encoding="utf-8")
    lines = recipe_header(name)
    place = next(number for number, line in enumerate(lines) if line.startswith("bert "))
    command, keys = lines[place], re.sub(r"\A(#.*\n)+", "", text)
    about = re.split(r"\n(?=Hardware:|Time:|Score:|Measured, |\n)", "\n".join(lines[place + 1 :]))
    paragraphs = [re.sub(r"^(\w+):", r"**\1.**", _links(" ".join(part.split()))) for part in about if part.strip()]
    return _links(" ".join(lines[:place])), command, paragraphs, keys.strip()


def _recipe_page(name: str) -> str:
    first, command, paragraphs, keys = _recipe(name)
    blocks = [f"### {name}", first, f"```console\n$ {command}\n```", *paragraphs, f"```yaml\n{keys}\n```"]
    return "\n\n".join(blocks)


def _links(text: str) -> str:
    """The pages and measurements that a recipe's header names, as links from docs/."""
    parts = re.split(r"\b(benchmarks/RESULTS\.md(?:#[\w-]+)?|docs/\w+\.md)", text)
    return "".join(_link(part) if place % 2 else _escaped(part) for place, part in enumerate(parts))


def _link(path: str) -> str:
    page = path.removeprefix("docs/")
    return f"[{page}]({page})" if page != path else f"[measured](../{path})"


def families() -> str:
    """The model families: their classes, restrictions, and differences from transformers."""
    measured = json.loads(DIFFERENCES.read_text(encoding="utf-8"))
    lines = [
        "The difference is the largest one between transformers and this package, over all hidden states and logits of "
        "a random model in float32 (`benchmarks/families.py`).\n",
        "| family | `model_type` | tokenizer | classes of transformers | restrictions | difference |",
        "|---|---|---|---|---|---|",
    ]
    for family in FAMILIES:
        classes = ", ".join(f"`{family.classes[name]}`" for name in ARCHITECTURES if name in family.classes)
        gap = f"{measured[family.model_type]:.0e}" if family.model_type in measured else ""
        cells = (family.title, f"`{family.model_type}`", family.published_tokenizer, classes, family.restrictions, gap)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


GENERATED = {
    function.__name__: function
    for function in (api, resumable_keys, shared_keys, pretraining_keys, finetuning_keys, recipes, families)
}
"""Functions that replace the marks of the pages."""
