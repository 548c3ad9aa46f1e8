"""One row for each family of transformers and each of its settings that is compared with ours."""

from typing import Any, NamedTuple

from bert.interchange import families
from bert.interchange.families.base import Family
from tests.real.vocabularies import ESM_VOCABULARY, GPT2_END, GPT2_PIECES, MODERNBERT_ADDED, MODERNBERT_SPECIAL


class Case(NamedTuple):
    """Settings of one family, and what must be read from the folder of such a model."""

    family: Family
    settings: dict[str, Any]
    read: dict[str, Any]
    """Fields of `ModelConfig`."""
    architectures: tuple[str, ...] = ()
    """Defaults to every class of the family."""
    classifier_dropout: float | None = None
    columns: tuple[str, ...] = ("input_ids", "token_type_ids", "attention_mask")
    """Inputs of transformers' model."""
    magnified: tuple[str, float] | None = None
    """A parameter, and the factor that makes an error in its use larger than the tolerance."""
    long_rows: int = 0
    real_rows: bool = True
    """Whether texts are compared as well, which needs a token of padding."""
    exported: Family | None = None
    """The family as which it is exported, if that is another one."""
    last_state: bool = True
    """Whether the last hidden state in transformers' list is the output."""
    unused: tuple[str, ...] = ()
    """Tensors that transformers saves and does not use."""
    tolerance: float = 1e-4

    def adjust(self, model: Any) -> None:
        """Changes a random model before it is saved."""
        if self.magnified is not None:
            suffix, factor = self.magnified
            [parameter] = [value for name, value in model.named_parameters() if name.endswith(suffix)]
            parameter.mul_(factor)
        if self.family is families.ROFORMER:  # the position table has no gradient, but is a parameter
            positions = getattr(model, "roformer", model).encoder.embed_positions
            positions.weight.data = positions.create_weight()


def without(family: Family, *architectures: str) -> tuple[str, ...]:
    return tuple(name for name in family.classes if name not in architectures)


ACTIVATIONS = {"relu": "relu", "gelu_new": "gelu_tanh", "gelu": "gelu"}
MASK_ALONE = ("input_ids", "attention_mask")
ROBERTA = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "type_vocab_size": 1}
CAMEMBERT = {"pad_token_id": 1, "bos_token_id": 5, "eos_token_id": 6, "type_vocab_size": 1}
OFFSET = {"position_offset": 2, "max_position_embeddings": 38}
DISTILBERT = {"dim": 96, "n_layers": 5, "n_heads": 3, "hidden_dim": 200, "seq_classif_dropout": 0.3}
ALBERT = {"embedding_size": 32, "num_hidden_groups": 1, "hidden_act": "gelu_new", "classifier_dropout_prob": 0.2}
DEBERTA = {
    **{"type_vocab_size": 0, "relative_attention": True, "position_buckets": 16, "norm_rel_ebd": "layer_norm"},
    **{"share_att_key": True, "pos_att_type": "p2c|c2p", "position_biased_input": False, "cls_dropout": 0.3},
    **{"num_hidden_layers": 2, "max_relative_positions": -1, "max_position_embeddings": 60},
}
DEBERTA_V1 = {
    **{"type_vocab_size": 0, "relative_attention": True, "pos_att_type": "c2p|p2c", "position_biased_input": False},
    **{"cls_dropout": 0.3, "num_hidden_layers": 2, "max_relative_positions": -1},
}
DEBERTA_V1_VARIANTS = {
    "as published": {},
    "table and segments": {"position_biased_input": True, "type_vocab_size": 2, "layer_norm_eps": 1e-5},
    "content to position": {"pos_att_type": ["c2p"], "max_relative_positions": 7, "hidden_act": "relu"},
    "position to content": {"pos_att_type": ["p2c"], "max_relative_positions": 50, "pooler_hidden_act": "tanh"},
}
XLNET = {
    **{"d_model": 96, "n_layer": 2, "n_head": 3, "d_inner": 200, "summary_last_dropout": 0.3, "pad_token_id": 5},
    **dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")),
    **dict.fromkeys(("max_position_embeddings", "type_vocab_size")),
}
"""None: transformers' configuration has no such key."""
GPT2 = {"vocab_size": GPT2_PIECES, "bos_token_id": GPT2_END, "eos_token_id": GPT2_END}
MODERNBERT_IDS = {role: MODERNBERT_SPECIAL.index(f"[{role.upper()}]") for role in ("cls", "sep", "pad")}
MODERNBERT = {
    **{f"{role}_token_id": number for role, number in MODERNBERT_IDS.items()},
    **{"bos_token_id": MODERNBERT_IDS["cls"], "eos_token_id": MODERNBERT_IDS["sep"]},
    **{"vocab_size": GPT2_PIECES + len(MODERNBERT_ADDED)},
    **{"max_position_embeddings": 48, "local_attention": 8},
    "attn_implementation": "eager",
}
MODERNBERT_VARIANTS = {
    "mean, biases": {
        **dict.fromkeys(("attention_bias", "mlp_bias", "norm_bias", "classifier_bias"), True),
        "classifier_pooling": "mean",
    },
    "all global, no bias": {"global_attn_every_n_layers": 1, "decoder_bias": False, "tie_word_embeddings": False},
    "all local, swiglu": {
        "layer_types": ["sliding_attention"] * 5,
        "hidden_activation": "silu",
        "classifier_activation": "silu",
        "classifier_pooling": "mean",
    },
    "other bases, odd window": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 77.0},
        },
        "local_attention": 11,
        "global_attn_every_n_layers": 2,
    },
}

DECODER = {**GPT2, "pad_token_id": GPT2_END, "num_key_value_heads": 1}
YARN = {"rope_type": "yarn", "rope_theta": 200.0, "factor": 4.0, "original_max_position_embeddings": 10}
DECODERS = {
    "llama": (families.LLAMA, {}),
    "llama, biases and yarn": (
        families.LLAMA,
        {"attention_bias": True, "mlp_bias": True, "head_dim": 40, "rope_parameters": YARN},
    ),
    "qwen2": (families.QWEN2, {"tie_word_embeddings": True}),
    "qwen3": (families.QWEN3, {"head_dim": 40, "rms_norm_eps": 1e-3}),
    "qwen3, biases and linear": (
        families.QWEN3,
        {
            **{"attention_bias": True, "tie_word_embeddings": True, "head_dim": 32},
            "rope_parameters": {"rope_type": "linear", "rope_theta": 200.0, "factor": 4.0},
        },
    ),
}
EUROBERT = {
    **{"vocab_size": GPT2_PIECES, "bos_token_id": 0, "eos_token_id": 1, "mask_token_id": 2, "pad_token_id": 1},
    **{"num_key_value_heads": 1, "attn_implementation": "eager"},
}
EUROBERT_VARIANTS = {
    "late": {},
    "first, biases": {"classifier_pooling": "bos", "attention_bias": True, "mlp_bias": True, "head_dim": 20},
    "mean, tied": {"classifier_pooling": "mean", "tie_word_embeddings": True, "rope_parameters": YARN},
}

ESM = {
    **{"vocab_size": len(ESM_VOCABULARY), "mask_token_id": 32, "pad_token_id": 1},
    **{"position_embedding_type": "rotary", "token_dropout": True, "emb_layer_norm_before": False},
}
ESM_CONSTANTS = tuple(
    f"{prefix}{name}"
    for prefix in ("", "esm.")
    for name in (
        *("contact_head.regression.weight", "contact_head.regression.bias", "rotary_embeddings.inv_freq"),
        "encoder.layer.*.attention.self.rotary_embeddings.inv_freq",
    )
)
ESM_VARIANTS = {
    "rotary": {},
    "table, norm": {"position_embedding_type": "absolute", "emb_layer_norm_before": True, "layer_norm_eps": 1e-5},
    "no dropout of tokens": {"token_dropout": False, "rope_theta": 200.0},
}

GEMMA = {
    **{"vocab_size": GPT2_PIECES, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "head_dim": 20},
    **{"num_key_value_heads": 1, "attn_implementation": "eager"},
}
GEMMA_VARIANTS = {
    "gemma": (families.GEMMA, {"tie_word_embeddings": False}, ()),
    "gemma2": (
        families.GEMMA2,
        {
            **{"sliding_window": 5, "query_pre_attn_scalar": 7, "attn_logit_softcapping": 2.0},
            "final_logit_softcapping": 3.0,
        },
        without(families.GEMMA2, "Bert"),
    ),
    "gemma3": (
        families.GEMMA3,
        {
            **{"sliding_window": 5, "query_pre_attn_scalar": 11, "sliding_window_pattern": 3, "attention_bias": True},
            "final_logit_softcapping": 2.0,
        },
        without(families.GEMMA3, "Bert"),
    ),
    "gemma3, both sides": (
        families.GEMMA3,
        {
            **{"use_bidirectional_attention": True, "sliding_window": 9, "sliding_window_pattern": 2},
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
        ("Bert",),
    ),
}

CASES = {
    **{
        name: Case(
            family,
            {**GEMMA, **settings},
            {
                **{"norm_type": "rms_plus_one", "causal": "use_bidirectional_attention" not in settings},
                "prediction_softcap": settings.get("final_logit_softcapping"),
            },
            architectures=architectures,
            columns=MASK_ALONE,
        )
        for name, (family, settings, architectures) in GEMMA_VARIANTS.items()
    },
    **{
        f"esm, {name}": Case(
            families.ESM,
            {**ESM, **settings},
            {"pre_layer_norm": True, "type_vocab_size": 0},
            columns=MASK_ALONE,
            architectures=() if name == "rotary" else ("BertForMaskedLM",),
            real_rows=False,
            last_state=False,
            unused=ESM_CONSTANTS,
        )
        for name, settings in ESM_VARIANTS.items()
    },
    **{
        name: Case(
            family,
            {**DECODER, **settings},
            {"causal": True, "num_key_value_heads": 1},
            architectures=without(family, *(("Bert",) if settings.get("tie_word_embeddings") else ())),
            columns=MASK_ALONE,
            real_rows=family is not families.LLAMA,
        )
        for name, (family, settings) in DECODERS.items()
    },
    **{
        f"eurobert, {name}": Case(
            families.EUROBERT, {**EUROBERT, **settings}, {"num_key_value_heads": 1}, columns=MASK_ALONE
        )
        for name, settings in EUROBERT_VARIANTS.items()
    },
    "nomic_bert": Case(families.NOMIC_BERT, {}, {"rotary_base": 1000.0}),
    "nomic_bert, wide heads": Case(
        families.NOMIC_BERT,
        {"head_dim": 40, "hidden_act": "gelu", "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
        {"rotary_base": 50.0, "attention_head_size": 40},
    ),
    "gte": Case(
        families.GTE,
        {
            **{"type_vocab_size": 1, "pad_token_id": 1, "layer_norm_eps": 1e-6},
            "rope_parameters": {"rope_type": "linear", "factor": 1.5, "rope_theta": 300.0},
        },
        {"gated_feed_forward": True, "rotary_base": 300.0, "rotary_scaling_factor": 1.5},
    ),
    "jina_embeddings_v3": Case(
        families.JINA_V3,
        {"type_vocab_size": 1, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2},
        {"rotary_base": 20_000.0, "position_offset": 0},
    ),
    "xlm-roberta-xl": Case(
        families.XLM_ROBERTA_XL,
        ROBERTA,
        {"position_offset": 2, "pre_layer_norm": True, "embedding_norm": False},
        last_state=False,
    ),
    "megatron-bert": Case(families.MEGATRON_BERT, {}, {"pre_layer_norm": True, "embedding_norm": False}),
    **{
        f"bert, {act}": Case(families.BERT, {"hidden_act": act}, {"hidden_act": ours})
        for act, ours in ACTIVATIONS.items()
    },
    "roberta": Case(families.ROBERTA, ROBERTA, OFFSET),
    "longformer": Case(
        families.LONGFORMER,
        {**ROBERTA, "sep_token_id": 2, "attention_window": [8] * 5, "max_position_embeddings": 152},
        {
            **{"position_offset": 2, "max_position_embeddings": 150},
            **{"attention_window": 4, "global_attention_sep_id": 2},
        },
        long_rows=150,
    ),
    # the MLM heads of transformers' RoBERTa and ELECTRA have no other activation than gelu
    **{
        f"roberta, {act}": Case(
            families.ROBERTA,
            {**ROBERTA, "hidden_act": act, "type_vocab_size": segments},
            OFFSET,
            without(families.ROBERTA, "BertForMaskedLM"),
        )
        for act, segments in (("relu", 3), ("gelu_new", 1))
    },
    **{
        f"electra of width {width}, {act}": Case(
            families.ELECTRA,
            {"hidden_act": act, "embedding_size": width},
            {"embedding_size": None if width == 96 else width, "pooler_act": "gelu"},
            without(families.ELECTRA, *(() if act == "gelu" else ("BertForMaskedLM",))),
        )
        for width in (40, 96)
        for act in ("gelu", "relu")
    },
    **{
        f"distilbert, {act}": Case(
            families.DISTILBERT,
            {**DISTILBERT, "activation": act},
            {"type_vocab_size": 0, "pooler_act": "relu"},
            classifier_dropout=0.3,
            columns=MASK_ALONE,
        )
        for act in ("gelu", "relu")
    },
    "roberta-prelayernorm": Case(
        families.ROBERTA_PRELAYERNORM, ROBERTA, {"position_offset": 2, "pre_layer_norm": True}, last_state=False
    ),
    "deberta": Case(
        families.DEBERTA,
        DEBERTA,
        {
            **{"position_embedding_type": "disentangled", "relative_attention_buckets": 32},
            **{"pooler_act": "gelu", "type_vocab_size": 0},
        },
        classifier_dropout=0.3,
        magnified=("encoder.LayerNorm.weight", 3),
    ),
    **{
        f"deberta, {name}": Case(
            families.DEBERTA,
            {**DEBERTA, "pos_att_type": kind, "position_biased_input": True},
            {"disentangled_products": products, "position_table": True},
            ("BertForMaskedLM", "BertForSequenceClassification"),
            classifier_dropout=0.3,
            magnified=("encoder.LayerNorm.weight", 3),
        )
        for name, kind, products in (
            ("content to position", "c2p", "content_to_position"),
            ("position to content", "p2c", "position_to_content"),
        )
    },
    **{
        f"deberta, convolution of {size}": Case(
            families.DEBERTA,
            {**DEBERTA, "conv_kernel_size": size, "conv_act": act, "hidden_act": act},
            {"conv_kernel_size": size},
            architectures,
            classifier_dropout=0.3,
            magnified=("encoder.conv.conv.weight", 3),
        )
        for size, act, architectures in (
            (3, "gelu", ()),
            (7, "tanh", ("BertForMaskedLM", "BertForTokenClassification")),
        )
    },
    **{
        f"deberta v1, {name}": Case(
            families.DEBERTA_V1,
            {**DEBERTA_V1, **settings},
            {
                **{
                    "position_embedding_type": "deberta_v1",
                    "pooler_act": settings.get("pooler_hidden_act", "gelu"),
                },
                **{"relative_attention_buckets": 2 * settings.get("max_relative_positions", 40)},
                **{
                    "position_table": name == "table and segments",
                    "type_vocab_size": settings.get("type_vocab_size", 0),
                },
            },
            classifier_dropout=0.3,
            magnified=("encoder.rel_embeddings.weight", 5),
        )
        for name, settings in DEBERTA_V1_VARIANTS.items()
    },
    "xlnet": Case(
        families.XLNET,
        XLNET,
        {"position_embedding_type": "transformer_xl", "pooler_input": "last", "max_position_embeddings": 512},
        classifier_dropout=0.3,
        magnified=("layer.0.rel_attn.r_r_bias", 20),
    ),
    # more positions than the distance beyond which all distances share a bucket
    "mpnet": Case(
        families.MPNET,
        {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "max_position_embeddings": 152},
        {
            **{"relative_attention_buckets": 32, "position_offset": 2},
            **{"type_vocab_size": 0, "max_position_embeddings": 150},
        },
        columns=MASK_ALONE,
        magnified=("encoder.relative_attention_bias.weight", 20),
        long_rows=150,
    ),
    **{
        f"roformer of width {width}": Case(
            families.ROFORMER, {"embedding_size": width}, {"position_embedding_type": "rotary"}
        )
        for width in (40, 96)
    },
    "albert": Case(families.ALBERT, ALBERT, {"position_offset": 0, "layer_groups": 1}),
    "albert of five groups": Case(
        families.ALBERT,
        {**ALBERT, "num_hidden_groups": 5, "hidden_act": "relu"},
        {"position_offset": 0, "layer_groups": 5},
        ("BertForMaskedLM",),
    ),
    "xlm-roberta": Case(families.XLM_ROBERTA, ROBERTA, {"position_offset": 2, "layer_groups": None}),
    "camembert": Case(
        families.CAMEMBERT,
        CAMEMBERT,
        {"position_offset": 2, "layer_groups": None},
        exported=families.XLM_ROBERTA,
    ),
    "modernbert": Case(families.MODERNBERT, MODERNBERT, {"attention_window": 4}, columns=MASK_ALONE, tolerance=2e-5),
    **{
        f"modernbert, {name}": Case(
            families.MODERNBERT,
            {**MODERNBERT, **settings},
            {"gated_feed_forward": True},
            # a class with the head of the MLM, and one with the pooler: others differ in their last layer only
            architectures=("BertForMaskedLM", "BertForSequenceClassification"),
            columns=MASK_ALONE,
            unused=() if settings.get("decoder_bias", True) else ("decoder.bias",),
            tolerance=2e-5,
        )
        for name, settings in MODERNBERT_VARIANTS.items()
    },
    **{
        f"gpt2, {name}": Case(
            families.GPT2,
            {**GPT2, **settings},
            {"causal": True},
            architectures=("BertForCausalLM",),
            columns=MASK_ALONE,
            real_rows=False,
        )
        for name, settings in {
            "as published": {},
            "relu": {"n_inner": 100, "activation_function": "relu", "layer_norm_epsilon": 1e-3},
            "untied": {"tie_word_embeddings": False, "reorder_and_upcast_attn": True},
        }.items()
    },
    # transformers finds the last token of a row by the id of padding: GPT-2 has none, so its end token fills rows
    "gpt2, heads": Case(
        families.GPT2,
        {**GPT2, "pad_token_id": GPT2_END},
        {"causal": True},
        architectures=without(families.GPT2, "Bert", "BertForCausalLM"),
        columns=MASK_ALONE,
        real_rows=False,
    ),
}
