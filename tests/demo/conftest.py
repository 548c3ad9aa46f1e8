"""One model of each kind that the page has tabs for."""

import dataclasses

import pytest

import bert
from bert.model.heads import HEADS
from bert.model.pretraining import BertForPreTraining
from bert.tasks.inference_only import published_task
from tests.language_models import language_model
from tests.tiny_models import CONFIG, DATA, TASKS, encoder_decoder, model_of

LONG = dataclasses.replace(CONFIG, max_position_embeddings=48)
MULTILABEL = published_task("classification", "topics", ("no", "yes", "maybe"), "multi_label_classification")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bert.Pretrained]:
    folder = tmp_path_factory.mktemp("models")
    tasks = {**TASKS, "multilabel": MULTILABEL}
    made = {name: model_of(folder, HEADS[task.head](LONG, task.num_labels), task) for name, task in tasks.items()}
    mlm = model_of(folder, BertForPreTraining(LONG), None)
    data = dataclasses.replace(DATA, max_length=48)
    return {
        **{name: dataclasses.replace(model, data=data) for name, model in made.items()},
        "mlm": mlm,
        "encoder": dataclasses.replace(mlm, params={"bert": mlm.params["bert"]}, architecture="Bert"),
        "causal": language_model(),
        "encoder_decoder": encoder_decoder(folder),
    }
