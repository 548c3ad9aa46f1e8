"""Model families: one table entry each, every class in and out, and what they do not support.

Readers and writers contain no family names.
"""

import ast
import dataclasses
import re
import shutil
from collections.abc import Callable
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
from tests.interchange.hf_folders import CONFIG, EXAMPLES, ROBERTA, assert_same, edit, rewrite, without

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
    with pytest.raises(UserError, match="BertForPreTraining of Made-up"):
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
    with pytest.raises(UserError, match=r"model_type is 'other'.* bert, roberta-prelayernorm, roberta, camembert,"):
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


ARCHITECTURES = {
    "bert": "BertForPreTraining",
    "electra": "BertForMultipleChoice",
    "gpt2": "BertForCausalLM",
    "encoder-decoder": "BertForSequenceToSequence",
}
"""The architecture of `saved`, if it is not the masked language model."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.fixture
def saved(made, folders: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A function that copies the exported example of a family, which is made once."""

    def copy(family: str) -> Path:
        if not (folders / family).is_dir():
            made(ARCHITECTURES.get(family, "BertForMaskedLM"), EXAMPLES[family]).save(folders / family)
        return Path(shutil.copytree(folders / family, tmp_path / "model"))

    return copy


CLASSES = [
    (family.model_type, architecture)
    for family in families.FAMILIES
    for architecture in family.classes
    if family.model_type in EXAMPLES
    and not (family.model_type in ("gpt2", "gemma3_text") and architecture == "Bert")
    and not (family.model_type in ("llama", "gemma", "gemma2") and architecture != "BertForCausalLM")
]
"""Every class, except Llama's and Gemma's, which are Qwen3's and Gemma 3's. A bare GPT-2 or Gemma is read as a language
model."""


@pytest.mark.medium
@pytest.mark.parametrize(("family", "architecture"), CLASSES)
def test_every_class_in_and_out(family: str, architecture: str, made, tmp_path: Path) -> None:
    """Bit for bit, with an explicit dropout before the pooler that equals the default of each configuration."""
    config = EXAMPLES[family]
    assert config == dataclasses.replace(config, pooler_dropout=None).resolved
    model = made(architecture, config)
    said: list[str] = []
    model.save(tmp_path / "one", log=said.append)
    assert re.match(r"verified: \d+ tensors read back identical", said[0])
    assert read_json(tmp_path / "one" / "config.json")["model_type"] == family
    again = bert.load(tmp_path / "one", said.append)
    assert (again.architecture, again.config, again.labels) == (architecture, config, model.labels)
    if family == "encoder-decoder":  # transformers' encoder always has a pooler
        again.params["bert"].pop("pooler")
    assert_same(again.params, model.params)
    again.save(tmp_path / "two")
    for name in ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


FULL, SLIDING = "full_attention", "sliding_attention"

UNSUPPORTED_SETTINGS = {
    "electra": [
        ({"embedding_size": None}, "lacks embedding_size"),
        ({"embedding_size": "8"}, "embedding_size is '8'"),
        ({"embedding_size": 9}, r"is \[23, 8\], .* \[23, 9\]"),
        ({"embedding_size": 12}, r"electra.embeddings.word_embeddings.weight is \[23, 8\], .* \[23, 12\]"),
        ({"summary_type": "mean"}, "summary_type is 'mean', and only 'first'"),
        ({"summary_activation": "tanh"}, "summary_activation is 'tanh', and only 'gelu'"),
        ({"hidden_size": 10}, "hidden_size"),
    ],
    "albert": [
        ({"inner_group_num": 2}, "inner_group_num is 2, and only 1"),
        ({"num_hidden_groups": 3}, "layer_groups is 3, .* num_hidden_layers .4."),
        ({"embedding_size": "narrow"}, "embedding_size is 'narrow'"),
        ({"hidden_size": 8}, "embedding_size and hidden_size are both 8"),
        ({"architectures": ["AlbertForCausalLM"]}, "architecture is 'AlbertForCausalLM'"),
    ],
    "xlnet": [({"bi_data": True}, "bi_data is True, and only False")],
    "longformer": [
        ({"attention_window": [6, 8]}, r"attention_window is \[6, 8\], but this package has one window for all layers"),
        ({"attention_window": [6]}, r"attention_window is \[6\]: set it to an even number .* for each of the 2 layers"),
        *(
            ({"attention_window": value}, f"attention_window is {value}: set it to an even number of at least 2")
            for value in (7, 0, True)
        ),
        ({"attention_mode": "n2"}, "attention_mode is 'n2', and only 'longformer'"),
        ({"ignore_attention_mask": True}, "ignore_attention_mask is True, and only False"),
        ({"sep_token_id": -1}, "sep_token_id is -1: set it to the id of the separator token"),
        ({"sep_token_id": 99}, "global_attention_sep_id is 99, but vocab_size is 23: set it to the id of a token"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key', and only 'absolute'"),
    ],
    "mpnet": [({"relative_attention_num_buckets": 64}, "relative_attention_num_buckets is 64, and only 32")],
    "deberta-v2": [
        ({"conv_kernel_size": None}, "holds deberta.encoder.conv.conv.weight, which"),
        ({"conv_kernel_size": 5}, r"conv.conv.weight is \[12, 12, 3\], but config.json makes it \[12, 12, 5\]"),
        ({"conv_kernel_size": 4}, "conv_kernel_size is 4: set it to an odd number of at most 31"),
        ({"conv_kernel_size": "3"}, "conv_kernel_size is '3': set it to a whole number"),
        ({"conv_kernel_size": True}, "conv_kernel_size is True: set it to a whole number"),
        ({"conv_act": None}, "conv_act is 'tanh', and only 'gelu'"),
        ({"conv_groups": 3}, "conv_groups is 3, and only 1"),
        ({"share_att_key": None}, "share_att_key is False, and only True"),
        ({"position_biased_input": None}, "lacks deberta.embeddings.position_embeddings.weight"),
        ({"position_biased_input": "no"}, "position_biased_input is 'no': set it to true or false"),
        ({"norm_rel_ebd": "none"}, "norm_rel_ebd is 'none', and only 'layer_norm'"),
        ({"pos_att_type": "p2p"}, "pos_att_type is 'p2p', and only c2p[|]p2c, c2p, p2c are"),
        ({"pos_att_type": "c2p|c2p"}, "pos_att_type is .*, and only c2p[|]p2c, c2p, p2c are"),
        ({"attention_head_size": 8}, "attention_head_size is 8, and only 4"),
        ({"embedding_size": 8}, "embedding_size is 8, and only 12"),
        ({"max_relative_positions": 8}, "max_relative_positions is 8, and only max_position_embeddings .16."),
        ({"position_buckets": -1}, "position_buckets is -1: set it to at least 1"),
        ({"position_buckets": None}, "lacks position_buckets"),
        ({"type_vocab_size": 2}, "type_vocab_size is 2, and only 0"),
        ({"legacy": False}, "legacy is False, and only True"),
    ],
    "deberta": [
        ({"relative_attention": None}, "relative_attention is False, and only True"),
        ({"pos_att_type": None}, "pos_att_type is None, and only c2p[|]p2c, c2p, p2c are"),
        ({"max_relative_positions": 2.5}, r"max_relative_positions is 2\.5: set it to a whole number"),
        ({"max_relative_positions": 8}, r"rel_embeddings.weight is \[14, 12\], .* \[16, 12\]"),
        ({"talking_head": True}, "talking_head is true, and only false"),
        ({"pooler_dropout": 0.1}, "pooler_dropout is 0.1, and only 0"),
        ({"embedding_size": 8}, "embedding_size is 8, and only 12"),
        ({"position_biased_input": 1}, "position_biased_input is 1: set it to true or false"),
        ({"type_vocab_size": 0}, "token_type_embeddings.weight, which does not belong to config.json"),
        ({"intermediate_size": 24}, r"is \[20, 12\], but config.json makes it \[24, 12\]"),
        ({"legacy": False}, "legacy is False, and only True"),
        ({"architectures": ["DebertaForMultipleChoice"]}, "architecture is 'DebertaForMultipleChoice'"),
    ],
    "gpt2": [
        ({"scale_attn_weights": False}, "scale_attn_weights is False, and only True"),
        ({"is_causal": False}, "is_causal is False, and only True"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True, and only False"),
        ({"add_cross_attention": True}, "add_cross_attention is True, and only False"),
        ({"embd_pdrop": 0.2}, "embd_pdrop is 0.2 and resid_pdrop is 0.1"),
        ({"n_inner": "wide"}, "n_inner is 'wide'"),
        ({"activation_function": "mish"}, "activation_function is 'mish'"),
        ({"n_embd": 24}, r"transformer\..* is \[.*\], but config.json makes it \[.*\]"),
        ({"architectures": ["GPT2DoubleHeadsModel"]}, "architecture is 'GPT2DoubleHeadsModel'"),
    ],
    "modernbert": [
        ({"mlp_bias": True}, "attention_bias False, mlp_bias True, classifier_bias False .*use_bias"),
        ({"classifier_activation": "silu"}, "classifier_activation 'silu' .*hidden_act"),
        ({"mlp_dropout": 0.3}, "embedding_dropout 0.1, mlp_dropout 0.3"),
        ({"classifier_pooling": "max"}, "classifier_pooling is 'max': .* cls, mean"),
        ({"norm_bias": "no"}, "norm_bias is 'no': set it to true or false"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling is .*, and only None"),
        (
            {"rope_parameters": {FULL: {"rope_type": "yarn", "rope_theta": 1e4}}},
            "rope_parameters.full_attention.rope_type is 'yarn', and only 'default'",
        ),
        ({"local_attention": "far"}, "local_attention is 'far'"),
        ({"layer_types": [SLIDING, FULL, SLIDING, FULL]}, r"layer_types has full_attention at layers \[1, 3\]"),
        ({"hidden_activation": "mish"}, "hidden_activation is 'mish'"),
        ({"num_hidden_layers": 3}, "layer_types is not a list of 3"),
        ({"architectures": ["ModernBertForCausalLM"]}, "architecture is 'ModernBertForCausalLM'"),
        ({"num_attention_heads": 8}, "a head has 3"),
    ],
    "encoder-decoder": [
        ({"decoder": value}, "config.json: decoder is .*, not the settings of a model") for value in (None, [], "bert")
    ],
}


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [(family, *case) for family, cases in UNSUPPORTED_SETTINGS.items() for case in cases],
)
def test_settings_that_are_not_supported_are_rejected(family: str, changes: dict, message: str, saved) -> None:
    folder = saved(family)
    edit(folder, **changes)
    with pytest.raises(UserError, match=message):
        bert.load(folder)


MISSING_TENSORS = [
    ("albert", "albert.encoder.albert_layer_groups.1.albert_layers.0.ffn.weight"),
    ("mpnet", "mpnet.encoder.relative_attention_bias.weight"),
    ("gpt2", "transformer.h.1.attn.c_attn.bias"),
    ("longformer", "longformer.encoder.layer.1.attention.self.key_global.weight"),
    ("deberta", "deberta.encoder.layer.1.attention.self.pos_q_proj.bias"),
    ("deberta-v2", "deberta.encoder.conv.conv.weight"),
    ("deberta-v2", "deberta.encoder.conv.LayerNorm.bias"),
    *(("modernbert", f"model.{name}.weight") for name in ("layers.1.attn_norm", "layers.0.mlp.Wi")),
    ("modernbert", "head.norm.weight"),
    ("encoder-decoder", "decoder.bert.embeddings.word_embeddings.weight"),
    ("encoder-decoder", "decoder.cls.predictions.transform.dense.weight"),
    ("encoder-decoder", "decoder.bert.encoder.layer.0.crossattention.self.query.weight"),
    ("encoder-decoder", "encoder.embeddings.word_embeddings.weight"),
]


@pytest.mark.parametrize(("family", "tensor"), MISSING_TENSORS)
def test_a_missing_tensor_is_named(family: str, tensor: str, saved) -> None:
    folder = saved(family)
    without(folder, tensor)
    with pytest.raises(UserError, match=f"lacks {re.escape(tensor)}: copy it again"):
        bert.load(folder)


UNKNOWN_TENSORS = [
    ("modernbert", "model.layers.0.attn_norm.weight", (24,)),
    ("modernbert", "model.layers.1.mlp.Wi.bias", (40,)),
    ("encoder-decoder", "enc_to_dec_proj.weight", (12, 12)),
]


@pytest.mark.parametrize(("family", "tensor", "shape"), UNKNOWN_TENSORS)
def test_a_tensor_too_many_is_named(family: str, tensor: str, shape: tuple, saved) -> None:
    folder = saved(family)
    rewrite(folder, lambda tensors: {**tensors, tensor: np.ones(shape, np.float32)})
    with pytest.raises(UserError, match=f"holds {re.escape(tensor)}, which"):
        bert.load(folder)


UNSUPPORTED_MODELS = {
    "bert": (
        "BERT",
        [
            {"pre_layer_norm": True},
            {"scale_embeddings": True},
            {"embedding_norm": False},
            {"prediction_transform": False},
            {"pooler_act": "gelu"},
            {"embedding_size": 6},
            {"norm_type": "rms"},
            {"attention_window": 3},
            {"gated_feed_forward": True},
            {"pooler_type": "transform"},
            {"pooler_input": "mean"},
            {"conv_kernel_size": 3},
            {"prediction_softcap": 5.0},
        ],
    ),
    "roberta": ("RoBERTa", [{"hidden_act": "relu"}]),
    "roberta-prelayernorm": (
        "RoBERTa-PreLayerNorm",
        [{"scale_embeddings": True}, {"hidden_act": "relu"}, {"position_offset": 2}],
    ),
    "longformer": ("Longformer", [{"embedding_size": 6}, {"pre_layer_norm": True}, {"hidden_act": "relu"}]),
    "distilbert": ("DistilBERT", [{"type_vocab_size": 2}, {"layer_norm_eps": 1e-5}, {"embedding_norm": False}]),
    "albert": ("ALBERT", [{"step_embedding": True}, {"pre_layer_norm": True}]),
    "mpnet": ("MPNet", [{"relative_attention_buckets": 8}, {"position_offset": 0}, {"type_vocab_size": 2}]),
    "deberta-v2": ("DeBERTa-v3", [{"type_vocab_size": 2}, {"pre_layer_norm": True}]),
    "deberta": (
        "DeBERTa",
        [{"embedding_size": 6}, {"pre_layer_norm": True}, {"position_offset": 2}, {"conv_kernel_size": 3}],
    ),
    "roformer": ("RoFormer", [{"rotary_base": 500.0}, {"attention_window": 4}]),
    "gpt2": (
        "GPT-2",
        [
            {"pre_layer_norm": False},
            {"scale_embeddings": True},
            {"embedding_norm": True},
            {"prediction_bias": True},
            {"prediction_softcap": 5.0},
            {"type_vocab_size": 2},
        ],
    ),
    "modernbert": (
        "ModernBERT",
        [
            {"gated_feed_forward": False},
            {"norm_type": "rms"},
            {"first_layer_norm": True},
            {"type_vocab_size": 2},
            {"embedding_size": 8},
        ],
    ),
    "encoder-decoder": (
        "encoder-decoder of two BERTs",
        [
            {"pre_layer_norm": True},
            {"embedding_norm": False},
            {"scale_embeddings": True},
            {"prediction_transform": False},
            {"embedding_size": 8},
            {"position_offset": 2},
        ],
    ),
}
"""Title, and settings that transformers' classes of the family cannot express."""


@pytest.mark.medium
@pytest.mark.parametrize(
    ("family", "changes"), [(family, one) for family, (_, changes) in UNSUPPORTED_MODELS.items() for one in changes]
)
def test_models_that_transformers_lacks_are_exported_in_other_formats(
    family: str, changes: dict, made, tmp_path: Path
) -> None:
    architecture = ARCHITECTURES.get(family, "BertForMaskedLM")
    [(key, value)] = changes.items()
    title = UNSUPPORTED_MODELS[family][0]
    formats = "stablehlo" if family == "encoder-decoder" else "stablehlo or onnx"
    message = rf"model\.{key} {str(value).lower()}, .*transformers' {title}\b.*: export it as {formats}$"
    with pytest.raises(UserError, match=message):
        made(architecture, dataclasses.replace(EXAMPLES[family], **changes)).save(tmp_path / "out")


@pytest.mark.parametrize(
    ("family", "architecture", "changes", "message"),
    [
        ("bert", "BertForPreTraining", {"hidden_act": "elu"}, "hidden_act elu, .*transformers .*stablehlo or onnx$"),
        ("albert", "BertForMaskedLM", {"embedding_size": None}, "layer_groups 2, .*BERT"),
        ("mpnet", "BertForCausalLM", {"causal": True}, "relative_attention_buckets 32, .*GPT-2"),
        ("roformer", "BertForSequenceClassification", {"pooler_act": "tanh"}, "pooler_act tanh, .*RoFormer"),
        ("roformer", "BertForPreTraining", {}, "BertForPreTraining of RoFormer"),
        ("roberta", "BertForPreTraining", {}, "BertForPreTraining of RoBERTa"),
        ("longformer", "BertForPreTraining", {}, "BertForPreTraining of Longformer"),
        ("longformer", "BertForSequenceToSequence", {"position_offset": 0}, "global_attention_sep_id 3, .*two BERTs"),
        ("roberta", "BertForNextSentencePrediction", {}, "BertForNextSentencePrediction of RoBERTa"),
        ("roberta", "BertForReplacedTokenDetection", {}, "BertForReplacedTokenDetection of RoBERTa"),
    ],
)
def test_variants_of_another_form_are_rejected(
    family: str, architecture: str, changes: dict, message: str, made, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        made(architecture, dataclasses.replace(EXAMPLES[family], **changes)).save(tmp_path / "out")
