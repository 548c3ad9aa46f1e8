"""A model family of Hugging Face transformers: classes, parameter names and configuration, in both directions."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bert.config import ModelConfig
from bert.config.model import BIASES, Activation
from bert.config.tokenizer import VocabularyKind
from bert.interchange.names import Names
from bert.model.names import LAYER
from bert.tokenizer.library import SpecialTokenIds

KEYS = {
    name: name
    for name in (
        *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act"),
        *("hidden_dropout_prob", "attention_probs_dropout_prob", "max_position_embeddings", "type_vocab_size"),
        *("initializer_range", "layer_norm_eps"),
    )
}
"""Maps fields of `ModelConfig` to keys of BERT's config.json, in the order in which they are written."""

OPTIONAL = ("hidden_dropout_prob", "attention_probs_dropout_prob", "initializer_range", "layer_norm_eps")
"""Fields of `ModelConfig` that are optional in config.json."""

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
"""``Family.defaults`` of families without dropout."""

HEAD_DROPOUT = "classifier_dropout"
"""Key of most families, and the field of `bert.interchange.bundle.ModelBundle`."""

ROW_HEADS = ("SequenceClassification", "MultipleChoice")
"""Ends of the names of classes with one output, or one output per choice, for the whole row."""

CLASSIFIER_WITH_POOLER = {"bert/pooler": "classifier.dense", "classifier": "classifier.out_proj"}
"""Names in families whose sequence classifier contains the pooler as its first layer."""

BERT_PREDICTIONS = {
    "predictions/transform": "cls.predictions.transform.dense",
    "predictions/norm": "cls.predictions.transform.LayerNorm",
    "predictions/bias": "cls.predictions.bias",
    "predictions/decoder": "cls.predictions.decoder.weight",
}
"""Names of BERT's MLM head."""

ParametersByPath = dict[str, Any]
"""Arrays by path, see `bert.interchange.names`."""


class Limit(NamedTuple):
    """The only value of a setting that a family supports, and the reason as a clause."""

    value: Any
    reason: str


INITIAL = {"position_embedding_init": "normal", "residual_init": "plain"}
"""Settings of BERT's initialization, which config.json does not contain."""

TANH_POOLER = Limit("tanh", "its pooler has tanh")
FULL_WIDTH = Limit(None, "its embeddings have hidden_size features")
FROM_ROW_0 = Limit(0, "its positions begin at row 0")
NO_SEGMENTS = Limit(0, "it has no segments")

PLAIN_SCALE = Limit(None, "its attention scores are divided by the square root of the head size")

PLAIN_LAYERS = {
    "first_global_layer": Limit(0, "its first layer is global"),
    "global_attention_sep_id": Limit(None, "its layers have no global tokens"),
    "sublayer_output_norm": Limit(False, "its layers have two norms"),
    "token_dropout_id": Limit(None, "its mask token has an embedding"),
    "conv_kernel_size": Limit(None, "it has no convolution"),
    "prediction_softcap": Limit(None, "its logits have no limit"),
}
"""Limits of families without the options of Gemma, ESM, DeBERTa-v2 and Longformer."""

SEPARATE_LAYERS = {
    **PLAIN_LAYERS,
    "layer_groups": Limit(None, "each of its layers has parameters that are not shared"),
    "step_embedding": Limit(False, "its layers read nothing of their number"),
    "halting": Limit(None, "each position has all layers"),
}
"""Limits of all families except those with shared layers."""

PLAIN_ATTENTION = {
    "num_key_value_heads": Limit(None, "all of its heads have their own keys and values"),
    "attention_head_size": Limit(None, "its heads have hidden_size / num_attention_heads features"),
    "query_key_norm": Limit(False, "its queries and keys are not normalized"),
    "attention_softcap": Limit(None, "its attention scores have no limit"),
    "query_pre_attn_scalar": PLAIN_SCALE,
    "rotary_fraction": Limit(1.0, "its rotations include all features of a head"),
    "rotary_scaling": Limit("none", "its rotations are not scaled"),
}
"""Limits of families without the options of recent models in attention."""

PLAIN_BIASES = dict.fromkeys(BIASES, Limit(None, "its dense layers have biases, or all of them have none"))

CLASSIC_LIMITS = {
    **SEPARATE_LAYERS,
    **PLAIN_ATTENTION,
    **PLAIN_BIASES,
    "position_embedding_type": Limit("learned", "its positions are a table"),
    "norm_type": Limit("layer", "it has LayerNorm"),
    "norm_bias": Limit(True, "its LayerNorm has biases"),
    "use_bias": Limit(True, "its dense layers have biases"),
    "attention_window": Limit(None, "all of its layers attend to the whole row"),
    "gated_feed_forward": Limit(False, "its feed-forward layers have no gate"),
    "relative_attention_buckets": Limit(None, "its attention scores have no bias by distance"),
    "first_layer_norm": Limit(True, "all of its layers have the same LayerNorm"),
    "pooler_type": Limit("dense", "its pooler is a dense layer"),
    "pooler_input": Limit("first", "its pooler reads the first token"),
}
"""Limits of BERT and GPT-2. Biases and positions that a model lacks are written as zeros."""

BERT_LIMITS = {
    **CLASSIC_LIMITS,
    "causal": Limit(False, "its tokens attend to the whole row"),
    "pre_layer_norm": Limit(False, "it has LayerNorm after attention and feed-forward"),
    "scale_embeddings": Limit(False, "it adds the word embeddings as they are"),
    "embedding_norm": Limit(True, "its embeddings have LayerNorm"),
    "prediction_transform": Limit(True, "its MLM head has a dense layer before its decoder"),
    "prediction_bias": Limit(True, "its MLM head has a bias"),
}
"""Limits shared by BERT's descendants."""

ABSOLUTE_POSITIONS = {"position_embedding_type": "absolute"}
"""``Family.fixed`` of families whose classes support, or used to support, other positions with this key."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model family: one module of this package, and one entry of `bert.interchange.families.FAMILIES`.

    Attributes:
        model_type: the value in config.json.
        title: display name for messages.
        prefix: prefix of the encoder's parameter names. Files of a bare encoder omit it.
        classes: maps supported architectures to their transformers classes.
        vocabulary: the only kind of vocabulary that this family supports; None for any.
        published_tokenizer: kind of tokenizer of the published models, for the documentation. Others are read as well.
        own_tokenizer: how the family's transformers tokenizer differs from BERT's; None if it does not.
        names: names of the parameters in files.
        may_lack_segments: whether its classes have models without segments. If false, a model without segments that is
            exported gets a table of zeros, if the family has one.
        decoder_bias: second name of the MLM head's bias, in the decoder; None if there is only one name.
        keys: maps fields of `ModelConfig` to keys of config.json, in the order in which they are written.
        restrictions: what is not read, or is read or exported in another way, as sentences for the documentation.
        defaults: transformers' values of optional settings (`OPTIONAL`) that differ from this package's defaults, for a
            config.json without these settings.
        more_sizes: further integer keys of config.json, for ``read_config``.
        limits: settings of `ModelConfig` with a single supported value, which is the value of every model that is read.
        prediction_act: activation of the MLM head; None: use the model's ``hidden_act``.
        fixed: keys of config.json with a single supported value.
        settings: further such keys for each architecture in ``classes``.
        pooler_dropout: whether classifiers in training apply dropout before the pooler.
        pads_left: whether rows must be padded at their beginning, because classifiers read the last position.
        initial: settings of `ModelConfig` that only affect initialization, with the values from ``read_config``.
        constants: pattern for names of tensors that are not parameters and are skipped.
        has_form: whether a model with the given configuration and architecture is exported as this family.
        read_config: maps a checked config.json to the fields of `ModelConfig` that differ from ``keys`` and ``limits``.
            Raises UserError.
        write_config: the inverse of ``read_config``, as keys of config.json.
        head_dropout: key of config.json for the dropout of heads, and ends of the names of the classes that read it.
        flatten: moves the settings of nested models in config.json to the top level. Raises UserError.
        nest: the inverse of ``flatten``, given the configuration and the special tokens of the target.
        separate: maps configuration, parameters and padding id to configuration and parameters without sharing, as in
            files.
        share: the inverse of ``separate``: equal copies become shared parameters.
        locate: maps the name of a module in an adapter, which may be transformers' name, to the name of the module in
            the file, the index of the part, and the number of parts of which the file's module consists.
        attention_modules: the self-attention of layer ``{}`` in transformers' class, if the class has the projections
            q_proj, k_proj, v_proj and o_proj, which files name otherwise; None if files have the names of the class.
        from_files: maps the configuration, config.json and the tensors of a file by name to the tensors that are read.
        to_files: maps the configuration and named tensors to the tensors of the file. Features may be reordered
            (``share`` restores the order), and constants that transformers expects are added.
    """

    model_type: str
    title: str
    prefix: str
    classes: Mapping[str, str]
    vocabulary: VocabularyKind | None = None
    published_tokenizer: str = "WordPiece"
    own_tokenizer: str | None = None
    names: Names
    may_lack_segments: bool = False
    decoder_bias: str | None = None
    keys: Mapping[str, str] = field(default_factory=lambda: KEYS)
    restrictions: str = ""
    defaults: Mapping[str, float] = field(default_factory=dict)
    more_sizes: tuple[str, ...] = ()
    limits: Mapping[str, Limit]
    prediction_act: Activation | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    pooler_dropout: bool = False
    pads_left: bool = False
    initial: Mapping[str, Any] = field(default_factory=lambda: INITIAL)
    constants: str = r"(^|\.)embeddings\.(position_ids|token_type_ids)$"
    has_form: Callable[[ModelConfig, str], bool]
    read_config: Callable[[dict[str, Any]], dict[str, Any]] = lambda content: {}
    write_config: Callable[[ModelConfig, SpecialTokenIds], dict[str, Any]] = lambda config, special: {}
    head_dropout: tuple[str, tuple[str, ...]] = (HEAD_DROPOUT, ("",))
    flatten: Callable[[dict[str, Any]], dict[str, Any]] = lambda content: content
    nest: Callable[[dict[str, Any], ModelConfig, SpecialTokenIds], dict[str, Any]] = lambda content, *_: content
    separate: Callable[[ModelConfig, ParametersByPath, int], tuple[ModelConfig, ParametersByPath]] = (
        lambda config, params, _: (config, params)
    )
    share: Callable[[ModelConfig, ParametersByPath], tuple[ModelConfig, ParametersByPath]] = lambda *model: model
    locate: Callable[[str], tuple[str, int, int]] = lambda module: (module, 0, 1)
    attention_modules: str | None = None
    from_files: Callable[[ModelConfig, dict[str, Any], dict[str, Any]], dict[str, Any]] = (
        lambda config, content, tensors: tensors
    )
    to_files: Callable[[ModelConfig, dict[str, Any]], dict[str, Any]] = lambda config, tensors: tensors

    @property
    def class_prefix(self) -> str:
        """Prefix of the class names."""
        model, *others = self.classes.values()
        starts = (name.rpartition("For")[0] for name in others)
        return next((start for start in starts if start and model.startswith(start)), model.removesuffix("Model"))

    def class_of(self, architecture: str) -> str:
        """Returns the class of an architecture. If transformers lacks it, returns the name that it would have."""
        return self.classes.get(architecture) or self.class_prefix + architecture.removeprefix("Bert")

    def head_dropout_key(self, class_name: str) -> str:
        """Returns the key of config.json for the dropout of a class's head."""
        key, heads = self.head_dropout
        return key if class_name.endswith(heads) else HEAD_DROPOUT

    def architecture_of(self, name: str) -> str | None:
        """Returns the architecture of a transformers class; None if it is not supported."""
        return next((architecture for architecture, known in self.classes.items() if known == name), None)

    def current_name(self, name: str) -> str:
        """Returns the current name of a tensor from an old file or a bare encoder."""
        name = re.sub(r"(LayerNorm|layer_norm)\.gamma$", r"\1.weight", name)
        name = re.sub(r"(LayerNorm|layer_norm)\.beta$", r"\1.bias", name)
        return f"{self.prefix}.{name}" if self.is_bare(name) else name

    def is_bare(self, name: str) -> bool:
        """Whether a name belongs to a tensor of the encoder without the prefix."""
        start = f"{self.prefix}."
        inside = (module.removeprefix(start) for module in self.names.modules.values() if module.startswith(start))
        return name.split(".")[0] in {module.split(".")[0] for module in inside}


def class_names(prefix: str, *heads: str) -> dict[str, str]:
    """Returns the classes of a family: the encoder, ``heads``, and the heads that every family has."""
    common = ("MaskedLM", "SequenceClassification", "TokenClassification", "QuestionAnswering", "MultipleChoice")
    return {"Bert": f"{prefix}Model"} | {f"BertFor{head}": f"{prefix}For{head}" for head in (*heads, *common)}


def encoder_names(prefix: str, without: tuple[str, ...] = ()) -> dict[str, str]:
    """Returns the parameter names of embeddings, layers and task outputs that BERT's descendants share.

    Args:
        without: embeddings that the family lacks, for example ``segment``.
    """
    embeddings, layer = f"{prefix}.embeddings", f"{prefix}.encoder.layer.{{}}"
    names = {
        "bert/embeddings/word": f"{embeddings}.word_embeddings",
        "bert/embeddings/position": f"{embeddings}.position_embeddings",
        "bert/embeddings/segment": f"{embeddings}.token_type_embeddings",
        "bert/embeddings/norm": f"{embeddings}.LayerNorm",
        f"{LAYER}/attention/query": f"{layer}.attention.self.query",
        f"{LAYER}/attention/key": f"{layer}.attention.self.key",
        f"{LAYER}/attention/value": f"{layer}.attention.self.value",
        f"{LAYER}/attention/output": f"{layer}.attention.output.dense",
        f"{LAYER}/attention_norm": f"{layer}.attention.output.LayerNorm",
        f"{LAYER}/intermediate": f"{layer}.intermediate.dense",
        f"{LAYER}/output": f"{layer}.output.dense",
        f"{LAYER}/output_norm": f"{layer}.output.LayerNorm",
        "classifier": "classifier",
        "qa_outputs": "qa_outputs",
    }
    return {path: name for path, name in names.items() if path.removeprefix("bert/embeddings/") not in without}


def read_embedding_size(content: dict[str, Any]) -> int | None:
    """Returns the width of the embeddings; None if it is the width of the hidden states."""
    size: int | None = content.get("embedding_size")
    return None if size == content["hidden_size"] else size
