"""Writes tiny TensorFlow checkpoints without TensorFlow, and folders of google-research/bert with random weights."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np

from bert.config import ModelConfig

NUMBERS = {"float32": 1, "float64": 2, "int32": 3, "int64": 9, "bool": 10, "bfloat16": 14, "float16": 19}
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def slow_crc32c(data: bytes) -> int:
    """Bit by bit, from the definition."""
    register = 0xFFFFFFFF
    for octet in data:
        register ^= octet
        for _ in range(8):
            register = register >> 1 ^ (0x82F63B78 if register & 1 else 0)
    return register ^ 0xFFFFFFFF


def masked_crc(data: bytes) -> bytes:
    checksum = slow_crc32c(data)
    return ((((checksum >> 15) | (checksum << 17)) + 0xA282EAD8) % 2**32).to_bytes(4, "little")


def varint(value: int) -> bytes:
    low = []
    while value > 127:
        low.append(value & 127 | 128)
        value >>= 7
    return bytes([*low, value])


def field(number: int, value: int | bytes) -> bytes:
    """A protocol buffer's field: a whole number, or what is nested."""
    if isinstance(value, bytes):
        return varint(number << 3 | 2) + varint(len(value)) + value
    return varint(number << 3) + varint(value) if value else b""


def entry(array: np.ndarray, octets: bytes, shard: int, offset: int, partitioned: bool = False) -> bytes:
    shape = b"".join(field(2, field(1, size)) for size in array.shape)
    return (
        field(1, NUMBERS[array.dtype.name])
        + field(2, shape)
        + field(3, shard)
        + field(4, offset)
        + field(5, len(octets))
        + (varint(6 << 3 | 5) + masked_crc(octets))
        + (field(7, b"") if partitioned else b"")
    )


def table(pairs: list[tuple[bytes, bytes]], pairs_a_block: int, compression: int) -> bytes:
    """LevelDB's table: keys with what they share with the one before left out, except at every second one."""
    content = b""

    def block(items: list[tuple[bytes, bytes]], compression: int = 0) -> bytes:
        nonlocal content
        body, places, last = b"", [], b""
        for number, (key, value) in enumerate(items):
            shared = 0
            if number % 2 == 0:
                places.append(len(body))
            else:
                while shared < min(len(key), len(last)) and key[shared] == last[shared]:
                    shared += 1
            body += varint(shared) + varint(len(key) - shared) + varint(len(value)) + key[shared:] + value
            last = key
        body += b"".join(place.to_bytes(4, "little") for place in places or [0])
        body += len(places or [0]).to_bytes(4, "little")
        handle = varint(len(content)) + varint(len(body))
        content += body + bytes([compression]) + masked_crc(body + bytes([compression]))
        return handle

    index = []
    for begin in range(0, len(pairs), pairs_a_block):
        items = pairs[begin : begin + pairs_a_block]
        index.append((items[-1][0], block(items, compression)))
    footer = block([]) + block(index)
    return content + footer.ljust(40, b"\0") + (0xDB4775248B80FB57).to_bytes(8, "little")


def write_bundle(
    prefix: Path,
    tensors: dict[str, np.ndarray],
    *,
    shards: int = 1,
    pairs_a_block: int = 3,
    compression: int = 0,
    big_endian: bool = False,
    min_consumer: int = 0,
    partitioned: tuple[str, ...] = (),
    more: dict[bytes, bytes] | None = None,
) -> None:
    """Tensors go to the shards in turn. ``more`` are keys and values of the index as they are."""
    data = [b""] * shards
    pairs = {b"": field(1, shards) + field(2, int(big_endian)) + field(3, field(1, 1) + field(2, min_consumer))}
    for number, (name, array) in enumerate(sorted(tensors.items())):
        shard = number % shards
        octets = np.ascontiguousarray(array).tobytes()
        if big_endian:
            octets = np.frombuffer(octets, np.uint8).reshape(-1, array.itemsize)[:, ::-1].tobytes()
        pairs[name.encode()] = entry(array, octets, shard, len(data[shard]), name in partitioned)
        data[shard] += octets
    content = table(sorted({**pairs, **(more or {})}.items()), pairs_a_block, compression)
    Path(f"{prefix}.index").write_bytes(content)
    for shard, octets in enumerate(data):
        Path(f"{prefix}.data-{shard:05d}-of-{shards:05d}").write_bytes(octets)


SIZES = {
    "vocab_size": 23,
    "hidden_size": 6,
    "num_hidden_layers": 11,  # so that layer_1 is the beginning of another's name
    "num_attention_heads": 2,
    "intermediate_size": 10,
    "max_position_embeddings": 9,
    "type_vocab_size": 3,
}
RATES = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.2, "initializer_range": 0.03}
CONFIG = ModelConfig(**SIZES, **RATES, hidden_act="gelu_tanh", pooler_dropout=False)
PIECES = ["[PAD]", "[unused1]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "##s", "café", "中"]
HEADS = {
    "pretraining": ("predictions", "seq_relationship"),
    "classification": ("classifier",),
    "squad": ("qa_outputs",),
    "none": (),
}


def weights(*heads: str, labels: int = 4) -> dict[str, np.ndarray]:
    """Random tensors under the names of google-research/bert."""
    random = np.random.default_rng(0)
    V, D, F = 23, 6, 10
    shapes: dict[str, tuple[int, ...]] = {}

    def dense(name: str, inputs: int, outputs: int) -> None:
        shapes.update({f"{name}/kernel": (inputs, outputs), f"{name}/bias": (outputs,)})

    def norm(name: str) -> None:
        shapes.update({f"{name}/LayerNorm/gamma": (D,), f"{name}/LayerNorm/beta": (D,)})

    shapes["bert/embeddings/word_embeddings"] = (V, D)
    shapes["bert/embeddings/position_embeddings"] = (9, D)
    shapes["bert/embeddings/token_type_embeddings"] = (3, D)
    norm("bert/embeddings")
    for layer in range(11):
        for part in ("query", "key", "value"):
            dense(f"bert/encoder/layer_{layer}/attention/self/{part}", D, D)
        dense(f"bert/encoder/layer_{layer}/attention/output/dense", D, D)
        norm(f"bert/encoder/layer_{layer}/attention/output")
        dense(f"bert/encoder/layer_{layer}/intermediate/dense", D, F)
        dense(f"bert/encoder/layer_{layer}/output/dense", F, D)
        norm(f"bert/encoder/layer_{layer}/output")
    dense("bert/pooler/dense", D, D)
    if "predictions" in heads:
        dense("cls/predictions/transform/dense", D, D)
        norm("cls/predictions/transform")
        shapes["cls/predictions/output_bias"] = (V,)
    for head, scope, outputs in (
        ("seq_relationship", "cls/seq_relationship/", 2),
        ("classifier", "", labels),
        ("qa_outputs", "cls/squad/", 2),
    ):
        if head in heads:
            shapes.update({f"{scope}output_weights": (outputs, D), f"{scope}output_bias": (outputs,)})
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def write_folder(
    folder: Path, tensors: dict[str, np.ndarray], name: str = "bert_model.ckpt", tokens: list[str] = PIECES, **changes
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = {**SIZES, **RATES, "hidden_act": "gelu", **changes}
    content = {key: value for key, value in config.items() if value is not None}
    (folder / "bert_config.json").write_text(json.dumps(content), encoding="utf-8")
    (folder / "vocab.txt").write_text("".join(token + "\n" for token in tokens), encoding="utf-8")
    write_bundle(folder / name, tensors, shards=2)
    return folder
