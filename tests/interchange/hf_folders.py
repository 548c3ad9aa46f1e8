"""Models of random weights, and their folders changed as others write them, or spoil them."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
from flax import traverse_util
from safetensors.numpy import load_file, save_file

import bert
from bert.config import ModelConfig
from bert.interchange.shapes import expected_shapes
from bert.model import names
from bert.tokenizer.vocabulary import load_tokenizer

CONFIG = ModelConfig(
    vocab_size=23,
    hidden_size=12,
    num_hidden_layers=2,
    num_attention_heads=3,
    intermediate_size=20,
    hidden_act="gelu_tanh",
    max_position_embeddings=16,
    type_vocab_size=3,
    layer_norm_eps=1e-7,
    pooler_dropout=False,
)
ROBERTA = dataclasses.replace(CONFIG, hidden_act="gelu", pooler_dropout=True, position_offset=2, type_vocab_size=1)
LONGFORMER = dataclasses.replace(ROBERTA, position_offset=1, attention_window=3, global_attention_sep_id=3)
ELECTRA = dataclasses.replace(CONFIG, hidden_act="gelu", pooler_act="gelu", pooler_dropout=True, embedding_size=8)
ALBERT = dataclasses.replace(CONFIG, embedding_size=8, num_hidden_layers=4, layer_groups=2)
DISTILBERT = dataclasses.replace(CONFIG, pooler_act="relu", type_vocab_size=0, layer_norm_eps=1e-12)
MPNET = dataclasses.replace(
    CONFIG,
    hidden_act="gelu",
    pooler_dropout=True,
    position_offset=2,
    type_vocab_size=0,
    relative_attention_buckets=32,
)
DEBERTA = dataclasses.replace(
    CONFIG, hidden_act="gelu", pooler_act="gelu", type_vocab_size=0, position_embedding_type="disentangled",
    relative_attention_buckets=8,
)  # fmt: skip
DEBERTA_V1 = dataclasses.replace(
    DEBERTA, type_vocab_size=2, position_embedding_type="deberta_v1", relative_attention_buckets=14,
    position_table=True,
)  # fmt: skip
GPT2 = dataclasses.replace(
    CONFIG, type_vocab_size=0, causal=True, pre_layer_norm=True, embedding_norm=False, prediction_transform=False,
    prediction_bias=False, residual_init="scaled",
)  # fmt: skip
MODERNBERT = dataclasses.replace(
    CONFIG, hidden_size=24, num_hidden_layers=4, hidden_act="gelu", type_vocab_size=0, position_embedding_type="rotary",
    rotary_base=1000.0, local_rotary_base=100.0, attention_window=2, global_attention_every=3, gated_feed_forward=True,
    use_bias=False, norm_bias=False, pre_layer_norm=True, first_layer_norm=False, pooler_type="transform",
    pooler_input="mean",
)  # fmt: skip
XLNET = dataclasses.replace(
    CONFIG, hidden_act="gelu", position_embedding_type="transformer_xl", query_key_value_bias=False,
    attention_output_bias=False, embedding_norm=False, prediction_transform=False, pooler_input="last",
)  # fmt: skip
QWEN3 = dataclasses.replace(
    CONFIG, hidden_act="silu", type_vocab_size=0, position_embedding_type="rotary", rotary_base=1000.0, causal=True,
    num_key_value_heads=1, attention_head_size=6, query_key_norm=True, norm_type="rms", norm_bias=False, use_bias=False,
    pre_layer_norm=True, embedding_norm=False, prediction_transform=False, prediction_bias=False,
    gated_feed_forward=True, tie_word_embeddings=False, hidden_dropout_prob=0.0, rotary_scaling="yarn",
    rotary_scaling_factor=4.0, rotary_original_length=4,
)  # fmt: skip
GEMMA = dataclasses.replace(
    QWEN3, hidden_act="gelu_tanh", query_key_norm=False, norm_type="rms_plus_one", scale_embeddings=True,
    tie_word_embeddings=True, rotary_scaling="none", rotary_scaling_factor=1.0, rotary_original_length=None,
)  # fmt: skip
EXAMPLES = {
    "qwen3": QWEN3,
    "llama": dataclasses.replace(
        QWEN3, query_key_norm=False, rotary_scaling="none", rotary_scaling_factor=1.0, rotary_original_length=None
    ),
    "eurobert": dataclasses.replace(
        QWEN3,
        causal=False,
        use_bias=True,
        query_key_value_bias=False,
        attention_output_bias=False,
        intermediate_bias=False,
        output_bias=False,
        pooler_act="gelu",
        pooler_input="each",
        query_key_norm=False,
    ),
    "nomic_bert": dataclasses.replace(
        CONFIG,
        position_embedding_type="rotary",
        gated_feed_forward=True,
        query_key_value_bias=False,
        attention_output_bias=False,
        intermediate_bias=False,
        output_bias=False,
    ),
    "gemma": GEMMA,
    "gemma2": dataclasses.replace(
        GEMMA,
        sublayer_output_norm=True,
        attention_window=3,
        global_attention_every=2,
        first_global_layer=1,
        query_pre_attn_scalar=9.0,
        attention_softcap=5.0,
        prediction_softcap=7.0,
    ),
    "gemma3_text": dataclasses.replace(
        GEMMA,
        sublayer_output_norm=True,
        attention_window=3,
        query_key_norm=True,
        local_rotary_base=50.0,
    ),
    "esm": dataclasses.replace(
        CONFIG,
        hidden_act="gelu",
        pooler_dropout=True,
        position_offset=1,
        type_vocab_size=0,
        pre_layer_norm=True,
        embedding_norm=False,
        token_dropout_id=4,
    ),
    "gte": dataclasses.replace(
        CONFIG,
        hidden_act="gelu",
        position_embedding_type="rotary",
        rotary_scaling="linear",
        rotary_scaling_factor=2.0,
        gated_feed_forward=True,
        intermediate_bias=False,
    ),
    "megatron-bert": dataclasses.replace(CONFIG, pre_layer_norm=True, embedding_norm=False),
    "bert": CONFIG,
    "roberta": dataclasses.replace(ROBERTA, position_offset=1),
    "roberta-prelayernorm": dataclasses.replace(ROBERTA, position_offset=1, pre_layer_norm=True),
    "longformer": LONGFORMER,
    "distilbert": DISTILBERT,
    "electra": ELECTRA,
    "albert": ALBERT,
    "mpnet": MPNET,
    "deberta-v2": dataclasses.replace(DEBERTA, conv_kernel_size=3),
    "deberta": DEBERTA_V1,
    "roformer": dataclasses.replace(
        CONFIG,
        hidden_size=24,
        hidden_act="gelu",
        pooler_act="gelu",
        pooler_dropout=True,
        position_embedding_type="rotary",
    ),
    "gpt2": GPT2,
    "xlnet": XLNET,
    "modernbert": MODERNBERT,
    "encoder-decoder": dataclasses.replace(CONFIG, decoder_layers=1),
}
"""A configuration of each family, by its model_type."""

LABELS = ("no", "yes", "both")


def random_model(
    vocabulary: Path, architecture: str = "Bert", config: ModelConfig = CONFIG, **settings
) -> bert.Pretrained:
    """A model with every parameter random, and the labels that its architecture has."""
    random = np.random.default_rng(0)
    labels = LABELS if architecture in ("BertForSequenceClassification", "BertForTokenClassification") else ()
    shapes = expected_shapes(config, architecture, len(labels))
    parts = {names.ENCODER, *names.parts_of(architecture, config)}
    # transformers' ELECTRA, DistilBERT, ModernBERT and XLNet have no pooler
    without_pooler = config.pooler_act != "tanh" or config.pooler_type == "transform" or config.pooler_input == "last"
    if architecture == "Bert" and without_pooler:
        parts -= {names.POOLER}
    flat = {
        path: random.normal(size=shape).astype(np.float32)
        for path, shape in shapes.items()
        if names.part_of(path) in parts
    }
    return bert.Pretrained(
        config=config,
        params=traverse_util.unflatten_dict(flat, sep="/"),
        tokenizer=load_tokenizer(vocabulary),
        task=None,
        step=None,
        source="made",
        architecture=architecture,
        labels=labels,
        **settings,
    )


def without(folder: Path, *starts: str) -> None:
    """Removes the tensors whose names start so."""
    rewrite(folder, lambda tensors: {name: x for name, x in tensors.items() if not name.startswith(starts)})


def edit(folder: Path, **values) -> None:
    """Sets keys of config.json, or removes those given as None."""
    content = {**json.loads((folder / "config.json").read_text()), **values}
    content = {key: value for key, value in content.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(content))


def rewrite(folder: Path, change) -> dict[str, np.ndarray]:
    tensors = change(load_file(folder / "model.safetensors"))
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, folder / "model.safetensors")
    return tensors


def shard(folder: Path) -> dict[str, str]:
    """Splits the weights in two files with an index; returns its map."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    places = {name: files[number % 2] for number, name in enumerate(sorted(tensors))}
    for file in files:
        save_file({name: tensors[name] for name, place in places.items() if place == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return places


def assert_same(params, others) -> None:
    """Equal in every name, shape and bit."""
    assert jax.tree.structure(params) == jax.tree.structure(others)
    jax.tree.map(np.testing.assert_array_equal, params, others)


def publish_adapters(folder: Path, adapters: dict[str, dict[str, np.ndarray]], prompts: dict[str, str]) -> None:
    """Adds adapters with the names of transformers' class, as the folder jinaai/jina-embeddings-v3-hf holds them."""
    edit(folder, lora_adaptations=list(adapters), task_instructions=prompts)
    settings = {"peft_type": "LORA", "base_model_name_or_path": None, "r": 4, "lora_alpha": 1, "lora_dropout": 0.0}
    for task, tensors in adapters.items():
        place = folder / task.replace(".", "_").replace("-", "_")
        place.mkdir()
        named = {
            f"roberta.{name.replace('layers', 'encoder.layers').replace('self_attn.o_proj', 'mixer.out_proj')}": array
            for name, array in tensors.items()
        }
        save_file(
            {name: np.ascontiguousarray(array) for name, array in named.items()}, place / "adapter_model.safetensors"
        )
        targets = {name.partition(".lora_")[0].rpartition(".")[2] for name in tensors}
        (place / "adapter_config.json").write_text(json.dumps({**settings, "target_modules": sorted(targets)}))


def as_first_published(folder: Path, adapters: dict[str, dict[str, np.ndarray]]) -> None:
    """Rewrites a folder of `publish_adapters` as jinaai/jina-embeddings-v3: its own code reads stacked adapters."""
    first = next(iter(adapters.values()))
    modules = {name.partition(".lora_")[0] for name in first}
    stacked: dict[str, np.ndarray] = {}
    for module in modules:
        file = module.replace("layers", "encoder.layers").replace("self_attn.o_proj", "mixer.out_proj")
        kind, end = ("embedding_", "") if "embeddings" in module else ("", ".weight")
        for side in "AB":
            factors = np.stack([tensors[f"{module}.lora_{kind}{side}{end}"] for tensors in adapters.values()])
            stacked[f"roberta.{file}.{side}"] = factors.transpose(0, 2, 1) if kind else factors
    for query in [name for name in stacked if name.endswith("q_proj.A")]:
        stem = query.removesuffix("self_attn.q_proj.A")
        parts = {side: [stacked.pop(f"{stem}self_attn.{part}_proj.{side}") for part in "qkv"] for side in "AB"}
        assert all(np.array_equal(part, parts["A"][0]) for part in parts["A"]), "one factor for all three"
        stacked[f"{stem}mixer.Wqkv.A"] = parts["A"][0]
        stacked[f"{stem}mixer.Wqkv.B"] = np.concatenate(parts["B"], axis=1)
    adapted = {name[:-2] for name in stacked}

    def change(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        renamed = {}
        for name, array in tensors.items():
            module = f"roberta.{name.removeprefix('roberta.').removesuffix('.weight')}"
            is_adapted = name.endswith(".weight") and module in adapted
            renamed[
                f"{module}.parametrizations.weight.original"
                if is_adapted
                else f"roberta.{name.removeprefix('roberta.')}"
            ] = array
        return renamed | {f"{name[:-2]}.parametrizations.weight.0.lora_{name[-1]}": x for name, x in stacked.items()}

    rewrite(folder, change)
    for task in adapters:
        shutil.rmtree(folder / task.replace(".", "_").replace("-", "_"))
    settings = json.loads((folder / "config.json").read_text())
    base = (settings.get("rope_parameters") or {}).get("rope_theta", settings.get("rope_theta", 20_000.0))
    edit(
        folder,
        model_type="xlm-roberta",
        architectures=["XLMRobertaModel"],
        auto_map={"AutoModel": "jinaai/xlm-roberta-flash-implementation--modeling_lora.XLMRobertaLoRA"},
        position_embedding_type="rotary",
        rotary_emb_base=base,
        rope_theta=None,
        rope_parameters=None,
        lora_rank=4,
        lora_alpha=1,
    )
