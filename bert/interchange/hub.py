"""Downloads models from the Hugging Face hub, if named, and uploads models to it."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import get_args

from bert.errors import LOGGER, UserError, first_line
from bert.interchange.generation_files import GENERATION_CONFIG, TARGET_TOKENIZER
from bert.interchange.sentence_transformers.late_interaction import STANFORD_METADATA
from bert.interchange.sentence_transformers.names import MULTI_VECTOR_MASK, PROMPTS, TEXT_SETTINGS
from bert.interchange.sentence_transformers.routes import ROUTER_CONFIG
from bert.model.late_interaction import Role
from bert.tokenizer.sentencepiece import FILES as SENTENCEPIECE_FILES

_NAMES = [
    "config.json",
    GENERATION_CONFIG,
    "tokenizer.json",
    "tokenizer_config.json",
    "added_tokens.json",
    "special_tokens_map.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    *SENTENCEPIECE_FILES,
    *TEXT_SETTINGS,
]
_TASKS = ["retrieval_query", "retrieval_passage", "separation", "classification", "text_matching"]
"""Folders of the adapters of Jina embeddings v3."""

_WEIGHTS = ["model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors"]
_PICKLES = ["pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*-of-*.bin"]


def _with_subfolders(names: list[str]) -> list[str]:
    """Adds the paths next to the other files, and in the subfolders of encoders of sentence-transformers."""
    places = ("", "0_Transformer/", "0_StaticEmbedding/", *(f"{route}*/" for route in get_args(Role)))
    return [f"{place}{name}" for place in places for name in names]


SETTINGS = [
    *_with_subfolders(_NAMES),
    f"{TARGET_TOKENIZER}/*",
    "modules.json",
    f"*{ROUTER_CONFIG}",
    "*_Asym/config.json",
    "adapter_config.json",
    *(f"{task}/adapter_config.json" for task in _TASKS),
    PROMPTS,
    "*Pooling/config.json",
    "*_Dense/config.json",
    "*_Normalize/config.json",
    f"*_{MULTI_VECTOR_MASK}/config.json",
    STANFORD_METADATA,
]
DENSE_WEIGHTS = ["*_Dense/model.safetensors", "*_Dense/pytorch_model.bin"]
ADAPTER_WEIGHTS = ["adapter_model.safetensors", *(f"{task}/adapter_model.safetensors" for task in _TASKS)]
WEIGHTS, PICKLES = _with_subfolders(_WEIGHTS), _with_subfolders(_PICKLES)


REVISION = r"(@[\w./-]+)?"
"""A branch, tag or commit after a hub name."""

LEGACY_MODEL_NAME = re.compile(
    r"((distil)?(bert|roberta)-(base|large)(-[\w-]+)?|xlm-roberta-(base|large)|camembert-base"
    r"|albert-(base|large|xlarge|xxlarge)-v[12]|(distil)?gpt2(-medium|-large|-xl)?)" + REVISION
)
"""Hub models without an organization in their name, which predate organizations."""


def is_hub_name(source: str | Path) -> bool:
    """Whether ``source`` is a hub name, ``organisation/name`` with an optional ``@revision``, and not a mistyped path.

    The first part must not be an existing folder, nor ``runs``: the documentation uses runs/NAME for runs, and anybody
    could register a hub model of that name. Names without an organization are limited to the hub's original models,
    such as ``bert-base-uncased`` and ``gpt2``.
    """
    name = str(source)
    named = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*" + REVISION, name) or LEGACY_MODEL_NAME.fullmatch(name)
    first = name.split("/")[0]
    return bool(named) and first != "runs" and not Path(first).exists()


def is_downloaded(name: str) -> bool:
    """Whether this is a hub name and the model is in the local hub cache."""
    from huggingface_hub import try_to_load_from_cache

    try:
        repository, revision = _at_revision(name)
        cached = is_hub_name(name) and try_to_load_from_cache(repository, "config.json", revision=revision)
        return isinstance(cached, str)
    except ValueError:  # not a valid hub name
        return False


def _at_revision(name: str) -> tuple[str, str | None]:
    repository, _, revision = name.partition("@")
    return repository, revision or None


def announce(name: str) -> None:
    """Warns that a third-party model is about to be used."""
    LOGGER.warning(f"{name} is not a local folder: downloading it from the Hugging Face hub")


def download(name: str, weights: bool = True) -> Path:
    """Returns the folder of a hub model in the hub's cache. Downloads it if necessary, after a note on stderr.

    Args:
        name: ``organisation/name``, optionally with ``@revision``.
        weights: whether to download the weights, in addition to configuration and vocabulary.

    Raises:
        UserError: the model does not exist, or there is no access or network.
    """
    from huggingface_hub import snapshot_download

    announce(name)
    repository, revision = _at_revision(name)
    patterns = [*SETTINGS, *([*WEIGHTS, *ADAPTER_WEIGHTS, *DENSE_WEIGHTS] if weights else [])]
    try:
        folder = Path(snapshot_download(repository, revision=revision, allow_patterns=patterns))
        whole = any(any(folder.glob(pattern)) for pattern in WEIGHTS)
        if weights and not whole and any(any(folder.glob(path)) for path in _with_subfolders(["config.json"])):
            patterns += PICKLES
            folder = Path(snapshot_download(repository, revision=revision, allow_patterns=patterns))
    except Exception as error:  # the client raises its own exceptions, and those from httpx and the OS
        raise UserError(
            f"{name} is not a local folder and cannot be downloaded from the Hugging Face hub ({first_line(error)}): "
            "use an existing folder, or correct the name or the network"
        ) from None
    return folder


def upload(save: Callable[[Path], None], name: str, private: bool, message: str) -> str:
    """Uploads the folder that ``save`` writes as one commit, and returns its URL.

    Args:
        save: writes the folder of a model, with the placeholder PATH in its model card.
        name: ``organisation/name``, or ``name`` in the user's namespace. The repository is created if necessary.

    Raises:
        UserError: the name is invalid, or there is no access or network. Errors from ``save`` are passed on.
    """
    from huggingface_hub import HfApi

    if not re.fullmatch(r"([\w-][\w.-]*/)?[\w-][\w.-]*", name):
        raise UserError(f"{name!r} is not a repository name on the hub: use organisation/name")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, name.rpartition("/")[2])
        save(folder)  # before the repository is created
        try:
            client = HfApi()
            repository = client.create_repo(name, private=private, exist_ok=True).repo_id
            card = folder / "README.md"
            card.write_text(card.read_text(encoding="utf-8").replace('"PATH', f'"{repository}'), encoding="utf-8")
            return client.upload_folder(repo_id=repository, folder_path=folder, commit_message=message).commit_url
        except Exception as error:  # the client raises its own exceptions, and those from httpx and the OS
            raise UserError(
                f"{name} cannot be uploaded to the Hugging Face hub ({first_line(error)}): sign in with hf auth login, "
                "or correct the name or the network"
            ) from None
