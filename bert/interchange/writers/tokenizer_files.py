"""Tokenizer files as transformers writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, processors

from bert.files import write_atomic
from bert.interchange.bundle import ModelBundle
from bert.interchange.generation_files import TARGET_TOKENIZER
from bert.tokenizer.hf_settings import set_prefix_space, truncation_side
from bert.tokenizer.library import library_errors
from bert.tokenizer.special_tokens import special_ids
from bert.tokenizer.vocabulary import save_tokenizer


def published_tokenizer(model: ModelBundle) -> Tokenizer:
    """The model's tokenizer; that of some runs is set so that transformers makes the rows that the model reads.

    Every word of a run that tags words, and is byte-level, has a space in front: ``add_prefix_space`` puts one into
    lists of words. A language model continues texts without special tokens around them.
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
    """The vocabulary and that of a target of its own, with the folder of each."""
    target = [] if model.target_tokenizer is None else [(model.target_tokenizer, folder / TARGET_TOKENIZER)]
    return [(published_tokenizer(model), folder), *target]


def save_published_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int, segments: bool = True) -> None:
    """Writes tokenizer.json, the vocabulary, tokenizer_config.json and special_tokens_map.json.

    Args:
        max_length: most tokens of a row.
        segments: whether the model reads token_type_ids, which most of transformers' tokenizers make.
    """
    save_tokenizer(tokenizer, folder)
    content = json.loads(tokenizer.to_str())
    if content["model"]["type"] == "BPE":
        with library_errors(f"{folder} cannot be written", "free space there, or name another folder"):
            tokenizer.model.save(str(folder))  # vocab.json and merges.txt
    special = special_ids(tokenizer).by_role
    of_text = () if "cls" in special else ("bos", "eos")  # those of RoBERTa are cls and sep, which its class knows
    roles = [role for role in ("pad", "unk", "cls", "sep", "mask", *of_text) if role in special]
    names = {f"{role}_token": tokenizer.id_to_token(special[role]) for role in roles}
    config = {**_class(content), **names, "model_max_length": max_length}
    if truncation_side(tokenizer) == "left":
        config["truncation_side"] = "left"
    if not segments or _has_one_type(content["post_processor"]):
        config["model_input_names"] = ["input_ids", "attention_mask"]
    for name, content in (("tokenizer_config.json", config), ("special_tokens_map.json", names)):
        write_atomic(folder / name, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _has_one_type(ending: dict[str, Any] | None) -> bool:
    """Whether a template gives both texts of a pair the type 0."""
    pair = (ending or {}).get("pair")
    return isinstance(pair, list) and not any(part["type_id"] for piece in pair for part in piece.values())


def _class(content: dict[str, Any]) -> dict[str, Any]:
    """The class that makes the same ids: a model's own with its settings, or the one that takes tokenizer.json."""
    steps, words = content["normalizer"] or {}, content["pre_tokenizer"] or {}
    if not _has_standard_template(content["post_processor"]):
        return {"tokenizer_class": "PreTrainedTokenizerFast"}
    own_rows = (content["post_processor"] or {}).get("type") == "RobertaProcessing"  # the class makes these alone
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
    """Whether rows are laid out as BERT's or RoBERTa's own: ``[CLS] A [SEP] B [SEP]``, ``<s> A </s></s> B </s>``."""
    if steps is None or steps["type"] in ("BertProcessing", "RobertaProcessing"):
        return True
    if steps["type"] != "TemplateProcessing":
        return False
    single, pair = (
        [next(iter(step.values()))["id"] for step in steps[name] if isinstance(step, dict)]
        for name in ("single", "pair")
    )
    return (single, pair) == (["[CLS]", "A", "[SEP]"], ["[CLS]", "A", "[SEP]", "B", "[SEP]"])
