"""Small models of every architecture, with every parameter random, as `bert.load` gives them."""

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from bert.config import ModelConfig
from bert.inference.pretrained import Pretrained
from bert.interchange.modules import build_module
from bert.interchange.writers import hf
from bert.model.names import has_decoder
from tests.interchange.hf_folders import CONFIG, random_model

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{number}" for number in range(45)), "one", "text"]
LABELLED = ("BertForSequenceClassification", "BertForTokenClassification")


def tiny(architecture: str, pooler: bool = True, **sizes) -> Pretrained:
    """One layer, odd sizes; biases and LayerNorm random as well."""
    config = ModelConfig(
        **{
            "vocab_size": 61,
            "hidden_size": 24,
            "num_hidden_layers": 1,
            "num_attention_heads": 3,
            "intermediate_size": 40,
            "max_position_embeddings": 12,
            "type_vocab_size": 3,
            **sizes,
        }
    )
    labels = ("no", "perhaps", "yes", "both") if architecture in LABELLED else ()
    tokenizer = Tokenizer(models.WordPiece({token: i for i, token in enumerate(PIECES)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    model = Pretrained(
        config=config,
        params={"bert": {"pooler": {}} if pooler else {}},
        tokenizer=tokenizer,
        source="tiny",
        architecture=architecture,
        labels=labels,
    )
    ids = jnp.zeros((1, 2, 4) if architecture == "BertForMultipleChoice" else (1, 4), jnp.int32)
    inputs = (ids, ids) if has_decoder(architecture) else (ids,)
    shapes = jax.eval_shape(lambda: build_module(model).init(jax.random.key(0), *inputs)["params"])
    random = np.random.default_rng(1)
    params = jax.tree.map(lambda leaf: random.normal(0, 0.3, leaf.shape).astype(np.float32), shapes)
    model.params.clear()
    model.params.update({"bert": params} if architecture == "Bert" else params)
    return model


@pytest.fixture(scope="session")
def make() -> Callable[..., Pretrained]:
    """The function `tiny`."""
    return tiny


@pytest.fixture(scope="session")
def answer() -> Callable[[Pretrained, dict, dict], dict]:
    """Our outputs by their names in an exported graph, written independently of the exporters' mapping."""

    def of(model: Pretrained, params: dict, inputs: dict) -> dict:
        tree = params["bert"] if model.architecture == "Bert" else params
        second = inputs.get("decoder_input_ids", inputs.get("token_type_ids"))
        outputs = build_module(model).apply({"params": tree}, inputs["input_ids"], second, inputs["attention_mask"])
        by_name = {
            "Bert": lambda: {"last_hidden_state": outputs.last_hidden_state, "pooler_output": outputs.pooled_output},
            "BertForPreTraining": lambda: dict(vars(outputs)),
            "BertForQuestionAnswering": lambda: {"start_logits": outputs[..., 0], "end_logits": outputs[..., 1]},
        }.get(model.architecture, lambda: {"logits": outputs})()
        return {name: array for name, array in by_name.items() if array is not None}

    return of


@pytest.fixture(autouse=True)
def _without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its logits and ids are compared in tests/real: importing it takes longer than all of these tests."""
    monkeypatch.setattr(hf, "logits_difference", lambda model, folder: None)


@pytest.fixture(scope="session")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("vocabulary") / "vocab.txt"
    file.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqr"]) + "\n")
    return file


@pytest.fixture(scope="session")
def mpnet_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In the order of the published one, which has BERT's special tokens as ordinary ones."""
    file = tmp_path_factory.mktemp("mpnet") / "vocab.txt"
    special = ["<s>", "<pad>", "</s>", "<unk>", "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    file.write_text("\n".join([*special, *"abcdefghi", "##a", "##b", "<", ">", "<mask>"]) + "\n")
    return file


@pytest.fixture
def made(vocabulary: Path, mpnet_vocabulary: Path) -> Callable[..., Pretrained]:
    """The function `random_model` with a vocabulary of 23 tokens, whose padding id fits the family."""

    def make(architecture: str = "Bert", config: ModelConfig = CONFIG, **settings) -> Pretrained:
        is_mpnet = config.relative_attention_buckets is not None and config.position_embedding_type == "learned"
        return random_model(mpnet_vocabulary if is_mpnet else vocabulary, architecture, config, **settings)

    return make
