"""One model of each kind that the page has tabs for."""

import dataclasses
from pathlib import Path

import pytest

import bert
from bert.model.heads import HEADS
from bert.model.pretraining import BertForPreTraining
from bert.tasks.registry import published_task
from tests.language_models import language_model
from tests.tiny_models import CONFIG, DATA, TASKS, encoder_decoder, model_of

LONG = dataclasses.replace(CONFIG, max_position_embeddings=48)
MULTILABEL = published_task("sequence_classification", "topics", ("no", "yes", "maybe"), "multi_label_classification")


class Models(dict[str, bert.Pretrained]):
    """Models by kind, each made when it is first used."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __missing__(self, kind: str) -> bert.Pretrained:
        self[kind] = self._make(kind)
        return self[kind]

    def _make(self, kind: str) -> bert.Pretrained:
        if kind == "mlm":
            return model_of(self.folder, BertForPreTraining(LONG), None)
        if kind == "encoder":
            model = self["mlm"]
            return dataclasses.replace(model, params={"bert": model.params["bert"]}, architecture="Bert")
        if kind == "causal":
            return language_model()
        if kind == "encoder_decoder":
            return encoder_decoder(self.folder)
        task = {**TASKS, "multilabel": MULTILABEL}[kind]
        model = model_of(self.folder, HEADS[task.kind](LONG, task.num_labels), task)
        return dataclasses.replace(model, data=dataclasses.replace(DATA, max_length=48))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))
