"""Names of files and keys that the reader and the writer share."""

from __future__ import annotations

TEXT_SETTINGS = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""Files with the maximum length and the casing of texts. Older versions use all except the first."""

PROMPTS = "config_sentence_transformers.json"
"""File with the prompts and the model type."""

SPARSE_ENCODER = "SparseEncoder"
"""Model type of embeddings that pool masked-LM logits."""

MULTI_VECTOR_ENCODER = "MultiVectorEncoder"
"""Model type of an embedding per token."""

MULTI_VECTOR_MASK = "MultiVectorMask"
"""Module that chooses the tokens with an embedding."""

STATIC_EMBEDDING, TOKEN_TABLE = "StaticEmbedding", "SparseStaticEmbedding"
"""Modules without layers: a vector per token, or a weight per token."""

NUM_LOG1P = {"relu": 1, "log1p_relu": 2}
"""Values of ``activation_function`` of SpladePooling, and the corresponding `Pooling.num_log1p`."""

CROSS_ENCODER = "sentence_transformers"
"""Key of config.json with the settings of cross-encoders."""

SIGMOID = "torch.nn.modules.activation.Sigmoid"
"""Activation of a cross-encoder that declares none."""
