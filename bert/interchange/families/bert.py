"""BERT in the layouts of Hugging Face and google-research/bert."""

from __future__ import annotations

from bert.interchange.families.base import ABSOLUTE_POSITIONS, BERT_LIMITS, Family, Limit, class_names, encoder_names
from bert.interchange.names import Names
from bert.model.names import LAYER

BERT = Family(
    model_type="bert",
    title="BERT",
    prefix="bert",
    classes=class_names("Bert", "PreTraining", "NextSentencePrediction"),
    names=Names(
        {
            **encoder_names("bert"),
            "bert/pooler": "bert.pooler.dense",
            "predictions/transform": "cls.predictions.transform.dense",
            "predictions/norm": "cls.predictions.transform.LayerNorm",
            "predictions/bias": "cls.predictions.bias",
            "predictions/decoder": "cls.predictions.decoder.weight",
            "seq_relationship": "cls.seq_relationship",
        }
    ),
    decoder_bias="cls.predictions.decoder.bias",
    limits={
        **BERT_LIMITS,
        "embedding_size": Limit(None, "its embeddings have hidden_size features"),
        "pooler_act": Limit("tanh", "its pooler has tanh"),
    },
    fixed=ABSOLUTE_POSITIONS,
    has_form=lambda config, architecture: True,
)

GOOGLE_NAMES = Names(
    {
        "bert/embeddings/word": "bert/embeddings/word_embeddings",
        "bert/embeddings/position": "bert/embeddings/position_embeddings",
        "bert/embeddings/segment": "bert/embeddings/token_type_embeddings",
        "bert/embeddings/norm": "bert/embeddings/LayerNorm",
        f"{LAYER}/attention/query": f"{LAYER}/attention/self/query",
        f"{LAYER}/attention/key": f"{LAYER}/attention/self/key",
        f"{LAYER}/attention/value": f"{LAYER}/attention/self/value",
        f"{LAYER}/attention/output": f"{LAYER}/attention/output/dense",
        f"{LAYER}/attention_norm": f"{LAYER}/attention/output/LayerNorm",
        f"{LAYER}/intermediate": f"{LAYER}/intermediate/dense",
        f"{LAYER}/output": f"{LAYER}/output/dense",
        f"{LAYER}/output_norm": f"{LAYER}/output/LayerNorm",
        "bert/pooler": "bert/pooler/dense",
        "predictions/transform": "cls/predictions/transform/dense",
        "predictions/norm": "cls/predictions/transform/LayerNorm",
        "predictions/bias": "cls/predictions/output_bias",
        "seq_relationship": "cls/seq_relationship/",
        "classifier": "",  # run_classifier.py
        "qa_outputs": "cls/squad/",  # run_squad.py
    },
    arrays={
        "table": (("/embedding", "", False),),
        "dense": (("/kernel", "/kernel", False), ("/bias", "/bias", False)),
        "output": (("/kernel", "output_weights", True), ("/bias", "output_bias", False)),
        "norm": (("/scale", "/gamma", False), ("/bias", "/beta", False)),
        "array": (("", "", False),),
    },
)
"""Names in google-research/bert checkpoints, which store the last dense layer of a head as a matrix [outputs, D]."""
