"""Families with a file of another form, pooling or setting: ERNIE, NomicBERT's published keys, Qwen3 as an embedder."""

import importlib
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file, save_file

import bert
from bert.data.encoding import tokenize
from bert.interchange import families
from bert.interchange.families.base import OPTIONAL
from bert.model.decoders import BertForCausalLM
from bert.model.positions import Rotation
from bert.tokenizer.library import special_ids
from bert.training.token_losses import make_next_token_loss
from tests.interchange.hf_folders import edit
from tests.real.family_cases import CASES, DECODER, YARN
from tests.real.hf_models import HOSTILE, answers, assert_alike, drawn, inputs, our_answers, torch, transformers
from tests.real.vocabularies import PIECES, write_wordpiece

pytestmark = pytest.mark.real


@pytest.mark.parametrize("tasks", [False, True])
@pytest.mark.parametrize("architecture", families.family_of_type("ernie").classes)
def test_ernie_is_read_and_exported_as_bert(architecture: str, tasks: bool, tmp_path: Path) -> None:
    reference = drawn(tmp_path / "theirs", architecture, "ernie", use_task_id=tasks)
    model = bert.load(tmp_path / "theirs")
    assert model.architecture == architecture
    batch = inputs(architecture, padded=True)
    expected = answers(reference, batch)
    assert_alike(our_answers(model, batch), expected, batch["attention_mask"])
    lines: list[str] = []
    model.save(tmp_path / "ours", log=lines.append)
    assert "logits within" in lines[0]
    again = bert.load(tmp_path / "ours")
    assert_alike(our_answers(again, batch), expected, batch["attention_mask"])


def test_ernies_embedding_of_the_task_is_unused_without_use_task_id(tmp_path: Path) -> None:
    reference = drawn(tmp_path, "Bert", "ernie", use_task_id=True)
    edit(tmp_path, use_task_id=None)
    reference = type(reference).from_pretrained(tmp_path).eval()
    batch = inputs("Bert", padded=True)
    assert_alike(our_answers(bert.load(tmp_path), batch), answers(reference, batch), batch["attention_mask"])


@pytest.mark.parametrize("name", {case.family.model_type: name for name, case in CASES.items()}.values())
def test_rates_and_epsilon_that_config_json_lacks(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    architecture = (case.architectures or tuple(case.family.classes))[0]
    drawn(tmp_path, architecture, case.family.model_type, case.adjust, **case.settings)
    keys = {field: case.family.keys[field] for field in OPTIONAL if field in case.family.keys}
    doubles = ("embd_pdrop", "mlp_dropout")  # equal to another rate, or rejected
    edit(tmp_path, **dict.fromkeys((*keys.values(), *doubles)))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    config = bert.load(tmp_path).config
    assert {field: getattr(config, field) for field in keys} == {field: getattr(theirs, keys[field]) for field in keys}


PUBLISHED = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
    "resid_pdrop": "hidden_dropout_prob",
    "attn_pdrop": "attention_probs_dropout_prob",
    "layer_norm_epsilon": "layer_norm_eps",
}


def test_the_published_keys_of_nomic_bert(tmp_path: Path) -> None:
    drawn(tmp_path, "Bert", "nomic_bert")
    expected = bert.load(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    old = {key: content[name] for key, name in PUBLISHED.items()}
    removed = dict.fromkeys([*PUBLISHED.values(), "hidden_act", "rope_parameters", "head_dim"])
    edit(tmp_path, **removed, **old, activation_function="swiglu", rotary_emb_base=1000, rotary_emb_fraction=1.0)
    model = bert.load(tmp_path)
    assert model.config == expected.config
    edit(tmp_path, rotary_emb_fraction=0.5)
    with pytest.raises(bert.UserError, match=r"rotary_emb_fraction is 0\.5"):
        bert.load(tmp_path)


@pytest.mark.parametrize("architecture", ["Bert", "BertForMaskedLM"])
def test_the_published_files_of_gte(architecture: str, tmp_path: Path) -> None:
    """Their keys, their prefix, no segments, and their scaling of rotations, which a base and a factor express."""
    scaled = {"rope_type": "linear", "factor": 8 ** (2 / 32), "rope_theta": 8 * 500.0}
    settings = {"type_vocab_size": 0, "pad_token_id": 1, "rope_parameters": scaled}
    reference = drawn(tmp_path, architecture, "gte", **settings)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({re.sub("^gte", "new", name): x for name, x in tensors.items()}, tmp_path / "model.safetensors")
    edit(
        tmp_path,
        model_type="new",
        architectures=[families.NEW.classes[architecture]],
        rope_parameters=None,
        rope_theta=500.0,
        rope_scaling={"type": "ntk", "factor": 8.0},
        auto_map={"AutoModel": "Alibaba-NLP/new-impl--modeling.NewModel"},
        **{"position_embedding_type": "rope", "layer_norm_type": "layer_norm", "pack_qkv": True},
    )
    model = bert.load(tmp_path)
    ids = np.random.default_rng(0).integers(2, 1000, (2, 40))
    batch = {"input_ids": ids, "token_type_ids": np.zeros_like(ids), "attention_mask": np.ones_like(ids)}
    theirs = answers(reference, {key: batch[key] for key in ("input_ids", "attention_mask")})
    assert_alike(our_answers(model, batch), theirs, batch["attention_mask"])
    # The published code (NTKScalingRotaryEmbedding): 1 / (base * factor)^(2 i / H), divided by factor^(2 / H).
    expected = (500.0 * 8) ** -(np.arange(16) / 16) / 8 ** (2 / 32)
    rotation = Rotation.from_config(model.config, False, np.ones((1, 1), int))
    np.testing.assert_allclose(np.arctan2(rotation.sin, rotation.cos)[0, 0], expected, rtol=1e-5)
    edit(tmp_path, logn_attention_scale=True)
    with pytest.raises(bert.UserError, match="logn_attention_scale is True"):
        bert.load(tmp_path)


def neobert(tensors: dict, ids: np.ndarray, mask: np.ndarray, layers: int, heads: int) -> tuple:
    """Last hidden state and logits by the published architecture (chandar-lab/NeoBERT, model.py)."""
    weight = {name: torch.tensor(array) for name, array in tensors.items()}
    functional, length = torch.nn.functional, ids.shape[1]
    x = weight["model.encoder.weight"][ids]
    size = x.shape[-1] // heads
    angles = torch.outer(torch.arange(length), 10_000.0 ** -(torch.arange(0, size, 2) / size))
    turn = torch.polar(torch.ones_like(angles), angles)[None, :, None]

    def norm(x, name: str):
        return functional.rms_norm(x, x.shape[-1:], weight[f"model.{name}.weight"], 1e-5)

    def rotate(x):  # neighbours are the parts of a complex number
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())
        return torch.view_as_real(pairs * turn).flatten(-2)

    for number in range(layers):
        block = f"transformer_encoder.{number}"
        packed = norm(x, f"{block}.attention_norm") @ weight[f"model.{block}.qkv.weight"].T
        query, key, value = packed.view(*ids.shape, heads, 3 * size).chunk(3, dim=-1)
        by_head = [part.transpose(1, 2) for part in (rotate(query), rotate(key), value)]
        visible = torch.tensor(mask).bool()[:, None, None]
        mixed = functional.scaled_dot_product_attention(*by_head, attn_mask=visible).transpose(1, 2).flatten(2)
        x = x + mixed @ weight[f"model.{block}.wo.weight"].T
        first, second = (norm(x, f"{block}.ffn_norm") @ weight[f"model.{block}.ffn.w12.weight"].T).chunk(2, dim=-1)
        x = x + (functional.silu(first) * second) @ weight[f"model.{block}.ffn.w3.weight"].T
    x = norm(x, "layer_norm")
    return x.numpy(), (x @ weight["decoder.weight"].T + weight["decoder.bias"]).numpy()


def test_neobert_by_its_published_architecture(tmp_path: Path) -> None:
    random, width, inner = np.random.default_rng(0), 96, 8 * 9  # 2 / 3 of 100, rounded up
    shapes = {"model.encoder.weight": (PIECES, width), "model.layer_norm.weight": (width,)}
    for number in range(2):
        parts = {"qkv": (3 * width, width), "wo": (width, width), "ffn.w12": (2 * inner, width)}
        parts |= {"ffn.w3": (width, inner), "attention_norm": (width,), "ffn_norm": (width,)}
        shapes |= {f"model.transformer_encoder.{number}.{name}.weight": shape for name, shape in parts.items()}
    shapes |= {"decoder.weight": (PIECES, width), "decoder.bias": (PIECES,)}
    tensors = {name: random.normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    content = {"model_type": "neobert", "architectures": ["NeoBERTLMHead"], "hidden_act": "SwiGLU", "norm_eps": 1e-5}
    content |= {"vocab_size": PIECES, "hidden_size": width, "num_hidden_layers": 2, "num_attention_heads": 3}
    (tmp_path / "config.json").write_text(json.dumps({**content, "intermediate_size": 100, "max_length": 64}))
    write_wordpiece(tmp_path)
    model = bert.load(tmp_path)
    batch = inputs("BertForMaskedLM", padded=True)
    expected = neobert(tensors, batch["input_ids"], batch["attention_mask"], layers=2, heads=3)
    assert_alike(our_answers(model, batch)[-2:], list(expected), batch["attention_mask"])
    with pytest.raises(bert.UserError, match="EuroBERT does not have: export it as onnx"):
        model.save(tmp_path / "out")
    edit(tmp_path, hidden_act="gelu")
    with pytest.raises(bert.UserError, match="hidden_act is 'gelu'"):
        bert.load(tmp_path)


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_scaled_rotations_beyond_the_original_length(family: str, outside: bool, tmp_path: Path) -> None:
    """A length outside of ``rope_parameters`` comes before the one in it."""
    settings = {**DECODER, "max_position_embeddings": 200, "rope_parameters": YARN}
    reference = drawn(tmp_path, "BertForCausalLM", family, **settings)
    if outside:
        edit(tmp_path, original_max_position_embeddings=40)
        reference = type(reference).from_pretrained(tmp_path).eval()
    ids = np.random.default_rng(0).integers(0, DECODER["vocab_size"] - 1, (2, 190))
    batch = {"input_ids": ids, "token_type_ids": np.zeros_like(ids), "attention_mask": np.ones_like(ids)}
    theirs = answers(reference, {key: batch[key] for key in ("input_ids", "attention_mask")})
    assert_alike(our_answers(bert.load(tmp_path), batch), theirs, batch["attention_mask"])


@pytest.mark.parametrize(("name", "tokenizer"), [("esm, rotary", "Esm"), ("gemma3, both sides", "PreTrained")])
def test_hostile_texts_equal_transformers_tokenizer(name: str, tokenizer: str, tmp_path: Path) -> None:
    case = CASES[name]
    drawn(tmp_path, "Bert", case.family.model_type, **case.settings)
    model, theirs = bert.load(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer == "PreTrained" or type(theirs).__name__ == f"{tokenizer}Tokenizer"
    texts = [*HOSTILE, "MKTAYIAKQR", "M K<mask>L", "mkt", "M\x1cK\x1fxyz zyx", "AB.-J<null_1><cls>O", "<eos> <pad>é"]
    pairs = [pair for pair in zip(texts, texts[::-1], strict=True) if pair[1]]  # it leaves out an empty second text
    for text in (*texts, *pairs):
        expected = theirs(*((text,) if isinstance(text, str) else text))["input_ids"]
        assert tokenize(model.tokenizer, [text], 2000).ids.tolist() == expected, text


def test_qwen3_embeds_by_the_last_token(tmp_path: Path) -> None:
    """The folder of a sentence encoder: the texts of the published form end with the token that is pooled."""
    st = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    modules = importlib.import_module("sentence_transformers.models")
    drawn(tmp_path / "qwen", "Bert", "qwen3", **DECODER, head_dim=40)
    word = modules.Transformer(str(tmp_path / "qwen"), max_seq_length=40)
    pooling = modules.Pooling(word.get_word_embedding_dimension(), pooling_mode="lasttoken")
    reference = st.SentenceTransformer(modules=[word, pooling, modules.Normalize()], device="cpu")
    reference.save(str(tmp_path / "theirs"))
    model = bert.load(tmp_path / "theirs")
    assert (model.pooling.mode, model.config.causal) == ("lasttoken", True)
    np.testing.assert_allclose(model.encode(HOSTILE).embeddings, reference.encode(HOSTILE), atol=1e-4)
    model.save(tmp_path / "ours")
    again = st.SentenceTransformer(str(tmp_path / "ours"), device="cpu")
    np.testing.assert_allclose(again.encode(HOSTILE), reference.encode(HOSTILE), atol=1e-4)


def test_a_convolution_reads_hostile_texts_as_transformers_does(tmp_path: Path) -> None:
    """Texts of very different lengths in one batch."""
    case = CASES["deberta, convolution of 3"]
    reference = drawn(tmp_path, "Bert", "deberta-v2", case.adjust, **case.settings)
    model, tokenizer = bert.load(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    texts = [*HOSTILE, "a", ("a pair", "of texts")]
    length = model.config.max_position_embeddings
    rows = [tokenizer(*((x,) if isinstance(x, str) else x), truncation=True, max_length=length) for x in texts]
    batch = tokenizer.pad(rows, padding_side="right", return_tensors="pt")
    with torch.no_grad():
        expected = reference(**batch).last_hidden_state.numpy()
    mask = batch["attention_mask"].numpy().astype(bool)
    assert mask.sum(1).min() < 4 < length == mask.sum(1).max()
    encoded = model.encode(texts)
    np.testing.assert_array_equal(encoded.attention_mask, mask)
    np.testing.assert_allclose(encoded.last_hidden_state[mask], expected[mask], atol=1e-4)


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_capped_logits_of_generation_scores_and_training(family: str, tmp_path: Path) -> None:
    """Greedy and beam search with the cache, the score of a text, and the gradient of its loss."""
    case = CASES[family]
    reference = drawn(tmp_path, "BertForCausalLM", case.family.model_type, **case.settings)
    model = bert.load(tmp_path)
    text = "The model reads a text"
    ids = torch.tensor([model.tokenizer.encode(text, add_special_tokens=False).ids])
    for beams in (1, 3):
        out = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, num_beams=beams,
            output_scores=True, return_dict_in_generate=True,
        )  # fmt: skip
        answer = model.generate(text, max_tokens=12, beams=beams, details=True)
        end = [special_ids(model.tokenizer).end] * answer.ended
        assert [*answer.token_ids, *end] == out.sequences[0, ids.shape[1] :].tolist()
        if beams > 1:
            assert answer.score == pytest.approx(out.sequences_scores.item(), abs=1e-4)
    row = torch.cat([torch.full((1, 1), special_ids(model.tokenizer).end), ids], dim=1)
    loss = reference(row, attention_mask=torch.ones_like(row), labels=row).loss
    loss.backward()
    score = model.score(text)
    assert -score.log_probability / score.num_tokens == pytest.approx(loss.item(), abs=1e-4)
    batch = {"input_ids": row[:, :-1], "next_token_ids": row[:, 1:], "attention_mask": torch.ones_like(ids)}
    batch = {name: array.numpy() for name, array in batch.items()}
    batch["next_token_weights"] = np.full(ids.shape, 1 / ids.shape[1], np.float32)
    objective = make_next_token_loss(BertForCausalLM(model.config))
    gradients = jax.jit(jax.grad(lambda params: objective.forward(params, batch, None)[0]["lm_loss"][0]))(model.params)
    flat, theirs = flatten_dict(gradients, sep="/"), dict(reference.named_parameters())
    tensors = case.family.names.tensors(model.config.num_hidden_layers, "BertForCausalLM")
    compared = [tensor for tensor in tensors if tensor.name in theirs]
    assert len(compared) == len(theirs) and max(np.abs(flat[tensor.paths[0]]).max() for tensor in compared) > 0.01
    for tensor in compared:
        np.testing.assert_allclose(tensor.join(flat), theirs[tensor.name].grad.numpy(), atol=1e-4)


CAUSAL = ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text")


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("qwen3", {"use_sliding_window": True}, "use_sliding_window is true"),
        ("qwen3", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "'dynamic'"),
        ("llama", {"rope_parameters": {**YARN, "beta_fast": 16}}, "beta_fast is 16"),
        ("llama", {"rope_parameters": {**YARN, "factor": "two"}}, "factor is 'two'"),
        ("llama", {"num_key_value_heads": 2}, r"num_attention_heads \(3\).*num_key_value_heads \(2\)"),
        ("llama", {"attention_bias": "yes"}, "attention_bias is 'yes'"),
        ("gemma2", {"final_logit_softcapping": 0}, "final_logit_softcapping is 0: set it to a positive number"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention is true.*without a head"),
        ("gemma3_text", {"layer_types": ["full_attention", "sliding_attention"] * 3}, "not a list of 1 entries"),
        ("gemma3_text", {"sliding_window": 1, "layer_types": ["sliding_attention"]}, "sliding_window is 1"),
        ("gemma3_text", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
        *((family, {"is_causal": False}, "is_causal is False") for family in CAUSAL),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping is 50\.0, and only None"),
    ],
)
def test_settings_without_a_counterpart_are_rejected(family: str, changes: dict, said: str, tmp_path: Path) -> None:
    drawn(tmp_path, "BertForCausalLM", family, **DECODER, num_hidden_layers=1)
    edit(tmp_path, **changes)
    with pytest.raises(bert.UserError, match=said) as caught:
        bert.load(tmp_path)
    assert "config.json" in str(caught.value)
