"""A model family is one file and one table entry. Readers and writers contain no family names."""

import ast
import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
from flax import traverse_util
from safetensors.numpy import load_file

import bert
from bert.config import ModelConfig
from bert.errors import UserError
from bert.files import read_json
from bert.interchange import families
from bert.interchange.families.base import Family, Limit
from bert.interchange.names import MODULES, Names
from bert.interchange.writers.hf_files import published_config
from bert.model import names
from tests.interchange.hf_folders import CONFIG, ROBERTA, edit

INTERCHANGE = Path(bert.__file__).parent / "interchange"
VOCABULARIES = re.compile(r"(Roberta|Bert)(Tokenizer|Processing)")
"""Classes of transformers' and tokenizers' for vocabularies."""

MADE_UP = Family(
    model_type="made-up",
    title="Made-up",
    prefix="core",
    classes={"Bert": "MadeUpModel", "BertForMaskedLM": "MadeUpForMaskedLM"},
    names=Names(
        {
            path: path.replace("bert/", "core.").replace("/", ".").replace("_{}", ".{}").replace("predictions", "words")
            for path in MODULES
            if path != "bert/embeddings/projection"
        }
        | {"bert/encoder/norm": "core.last"}
    ),
    keys={**families.BERT.keys, "hidden_size": "n_embd", "num_hidden_layers": "n_layer"},
    limits={"pre_layer_norm": Limit(True, "it has LayerNorm before attention"), "pooler_act": Limit("tanh", "none")},
    has_form=lambda config, architecture: config.pre_layer_norm,
    read_config=lambda content: {"pre_layer_norm": True, "max_position_embeddings": content["n_ctx"]},
    write_config=lambda config, special: {"n_ctx": config.max_position_embeddings, "end": special.sep},
)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Family:
    monkeypatch.setattr(families, "FAMILIES", (*families.FAMILIES, MADE_UP))
    return MADE_UP


def test_a_family_is_one_entry_of_the_table(registered: Family, made, tmp_path: Path) -> None:
    """Models of a registered family export, read back bit for bit, and raise the same errors as built-in families."""
    model = made("BertForMaskedLM", dataclasses.replace(CONFIG, pre_layer_norm=True))
    model.save(tmp_path / "one")
    content = read_json(tmp_path / "one" / "config.json")
    assert (content["model_type"], content["architectures"]) == ("made-up", ["MadeUpForMaskedLM"])
    assert (content["n_embd"], content["n_ctx"], content["end"]) == (CONFIG.hidden_size, 16, 3)
    assert "hidden_size" not in content
    stored = load_file(tmp_path / "one" / "model.safetensors")
    assert {"core.encoder.layer.1.attention.key.weight", "core.last.bias", "words.bias"} <= set(stored)
    again = bert.load(tmp_path / "one")
    assert again.config == model.config
    ours, theirs = (traverse_util.flatten_dict(params, sep="/") for params in (model.params, again.params))
    assert ours.keys() == theirs.keys() and all(np.array_equal(ours[path], theirs[path]) for path in ours)
    with pytest.raises(UserError, match="is a BertForPreTraining of Made-up's form, which transformers does not have"):
        made("BertForPreTraining", dataclasses.replace(CONFIG, pre_layer_norm=True)).save(tmp_path / "two")
    edit(tmp_path / "one", n_layer=None)
    with pytest.raises(UserError, match="lacks n_layer"):
        bert.load(tmp_path / "one")


def test_a_folder_without_a_type_is_of_the_family_of_its_class(registered: Family, made, tmp_path: Path) -> None:
    made("Bert", dataclasses.replace(CONFIG, pre_layer_norm=True)).save(tmp_path / "one")
    assert "last.bias" in load_file(tmp_path / "one" / "model.safetensors"), "a bare encoder has no prefix"
    edit(tmp_path / "one", model_type=None)
    assert bert.load(tmp_path / "one").config.pre_layer_norm
    edit(tmp_path / "one", model_type="other")
    with pytest.raises(
        UserError,
        match="model_type is 'other', and bert, roberta-prelayernorm, roberta, camembert, xlm-roberta, distilbert",
    ):
        bert.load(tmp_path / "one")


@pytest.mark.parametrize("name", ["readers/*.py", "writers/*.py", "names.py", "shapes.py"])
def test_families_are_named_in_their_files_alone(name: str) -> None:
    """Docstrings aside; ``bert`` is also the package and the path of our encoder."""
    for path in INTERCHANGE.glob(name):
        assert not find_family(path), path


def find_family(path: Path) -> re.Match[str] | None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value = ast.Constant(None)
    code = VOCABULARIES.sub("", ast.unparse(tree))
    return re.search(r"roberta|electra|gpt|families\.bert|model_type ==", code, re.IGNORECASE)


def test_tables_of_families_name_what_there_is() -> None:
    fields = {field.name for field in dataclasses.fields(ModelConfig)}
    for family in families.FAMILIES:
        assert set(family.names.modules) <= set(MODULES)
        assert set(family.classes) <= set(names.ARCHITECTURES)
        assert {*family.limits, *family.keys} <= fields
        assert set(family.settings) | set(family.names.heads) <= set(family.classes)


def test_a_graph_has_architectures_that_transformers_lacks(made) -> None:
    """ONNX's config.json names them all the same."""
    for family in families.FAMILIES:
        for architecture in names.ARCHITECTURES:
            assert family.class_of(architecture).startswith(family.class_prefix)
    assert published_config(made("BertForPreTraining", ROBERTA))["architectures"] == ["RobertaForPreTraining"]


def test_a_head_of_another_activation_is_refused_before_it_is_written(made, tmp_path: Path) -> None:
    model = made("BertForMaskedLM", dataclasses.replace(ROBERTA, hidden_act="relu"))
    with pytest.raises(UserError, match=r"hidden_act relu, which transformers' RoBERTa cannot express, as its"):
        model.save(tmp_path / "out")
