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

NUM_LOG1P = {"relu": 1, "log1p_relu": 2}
"""Values of ``activation_function`` of SpladePooling, and the corresponding `Pooling.num_log1p`."""

CROSS_ENCODER = "sentence_transformers"
"""Key of config.json with the settings of cross-encoders."""
