"""Training starts from the folders of others: RoBERTa's, Google's, sentence-transformers'."""

import dataclasses
import itertools
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import traverse_util
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

import bert
from bert.commands.finetune import main as finetune
from bert.commands.pretrain import main as pretrain
from bert.errors import require
from bert.interchange.families import GOOGLE_NAMES, family_of_type
from bert.interchange.readers.google import CHECKPOINT
from bert.model.heads import HEADS
from bert.model.pooling import Pooling
from bert.tasks.base import Task
from bert.tasks.multiple_choice import MultipleChoiceTask
from bert.tasks.question_answering import CustomQuestionAnswering
from bert.tasks.sequence_classification import CustomClassification
from bert.tasks.token_classification import CustomTokenClassification
from bert.training.finetuning.initialization import Head, match_head
from bert.training.finetuning.kinds import head_of_task
from bert.training.initialization import load_pretrained_params
from tests.interchange.bundle_writer import write_bundle
from tests.interchange.hf_folders import ALBERT, CONFIG, EXAMPLES, LABELS, ROBERTA

FEW_STEPS = [
    "--transfer=null",
    "--training.steps=2",
    "--optimizer.warmup_steps=0",
    "--training.batch_size=4",
    "--training.checkpoint_every=2",
    "--training.log_every=1",
]
SHORT_ROWS = [
    "--data.sequence_length=16",
    "--data.max_predictions_per_sequence=3",
    "--data.num_workers=1",
]


def write_roberta(folder: Path, made, corpus: Path) -> None:
    """Writes a RoBERTa with a byte-level vocabulary of the corpus and one embedding row per token."""
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(corpus.read_text().splitlines(), trainer)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    config = dataclasses.replace(ROBERTA, vocab_size=tokenizer.get_vocab_size())
    model = made("BertForMaskedLM", config)
    dataclasses.replace(model, tokenizer=tokenizer).save(folder)


def write_google(folder: Path, made, corpus: Path | None = None, architecture: str = "BertForPreTraining") -> None:
    model = made(architecture)
    model.params["bert"].setdefault("pooler", made().params["bert"]["pooler"])  # which all of Google's have
    folder.mkdir()
    parameters = traverse_util.flatten_dict(model.params, sep="/")
    table = GOOGLE_NAMES.tensors(CONFIG.num_hidden_layers, architecture)
    tensors = {tensor.name: tensor.join(parameters) for tensor in table if tensor.paths[0] in parameters}
    assert len(tensors) == len(parameters)
    write_bundle(folder / CHECKPOINT, {name: np.ascontiguousarray(array) for name, array in tensors.items()})
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
             "max_position_embeddings", "type_vocab_size")  # fmt: skip
    content = {**{key: getattr(CONFIG, key) for key in sizes}, "hidden_act": "gelu"}
    (folder / "bert_config.json").write_text(json.dumps(content))
    tokens = sorted(model.tokenizer.get_vocab(), key=model.tokenizer.token_to_id)
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in tokens))


def write_sentences(folder: Path, made, corpus: Path) -> None:
    made(pooling=Pooling("cls", normalize=True)).save(folder)


FOLDERS = {"roberta": write_roberta, "google": write_google, "sentence-transformers": write_sentences}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Documents of words that the small models' vocabulary has."""
    words = itertools.cycle("abcdefghijk")
    sentences = (" ".join(itertools.islice(words, 7)).capitalize() + "." for _ in itertools.count())
    documents = (" ".join(itertools.islice(sentences, 8)) for _ in range(30))
    (tmp_path / "corpus.txt").write_text("\n\n".join(documents) + "\n", encoding="utf-8")
    return tmp_path / "corpus.txt"


@pytest.mark.slow
@pytest.mark.parametrize("kind", FOLDERS)
def test_both_commands_start_from_it(kind: str, made, corpus: Path, sst2: Path, tmp_path: Path, capsys) -> None:
    source = tmp_path / "source"
    FOLDERS[kind](source, made, corpus)
    before = bert.load(source)

    data = [f"--data.train={corpus}", f"--data.input_format={'nsp' if kind == 'google' else 'full_sentences'}"]
    run = tmp_path / "run"
    assert pretrain([*data, *FEW_STEPS, *SHORT_ROWS, f"--init={source}", f"--output_dir={run}"]) == 0
    said = capsys.readouterr().out
    heads = {"roberta": ", predictions", "google": ", predictions, seq_relationship", "sentence-transformers": ""}[kind]
    assert f"from {source}: bert{heads} (" in said
    assert ("randomly initialized: predictions" in said) == (kind == "sentence-transformers")
    after = bert.load(run)
    assert after.tokenizer.get_vocab() == before.tokenizer.get_vocab()
    assert after.config.position_offset == before.config.position_offset
    assert after.config.hidden_act == before.config.hidden_act
    after.save(tmp_path / "pretrained")
    again = bert.load(tmp_path / "pretrained")
    assert again.architecture == ("BertForPreTraining" if kind == "google" else "BertForMaskedLM")
    jax.tree.map(np.testing.assert_array_equal, again.params, after.params)
    after.save(tmp_path / "onnx", "onnx")
    after.save(tmp_path / "stablehlo", "stablehlo", length=8)

    arguments = [f"--data.dir={sst2}", f"--output_dir={tmp_path / 'sst2'}", "--data.max_length=16", "--data.buckets=16"]
    arguments += ["--training.epochs=1", "--training.batch_size=8"]
    assert finetune(["--config=sst2", f"--init={source}", *arguments]) == 0
    assert f"from {source}: bert (" in capsys.readouterr().out
    texts = ["ba ri", "ko ri tu"]
    answers = bert.load(tmp_path / "sst2").predict(texts)
    bert.load(tmp_path / "sst2").save(tmp_path / "out")
    assert bert.load(tmp_path / "out").predict(texts) == answers


@pytest.mark.parametrize("kind", FOLDERS)
def test_what_came_in_goes_out_as_transformers_writes_it_bit_for_bit(
    kind: str, made, corpus: Path, tmp_path: Path
) -> None:
    FOLDERS[kind](tmp_path / "source", made, corpus)
    model = bert.load(tmp_path / "source")
    model.save(tmp_path / "out")
    again = bert.load(tmp_path / "out")
    assert (again.config, again.architecture, again.pooling) == (model.config, model.architecture, model.pooling)
    assert again.tokenizer.to_str() == model.tokenizer.to_str()
    assert jax.tree.structure(again.params) == jax.tree.structure(model.params)
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)


def test_rows_longer_than_the_position_table_are_one_sentence(made, corpus: Path, tmp_path: Path, fails) -> None:
    made().save(tmp_path / "model")
    arguments = [f"--data.train={corpus}", f"--init={tmp_path / 'model'}", f"--output_dir={tmp_path / 'run'}"]
    error = fails(pretrain, *arguments, "--data.sequence_length=32")
    assert "data.sequence_length is 32, but model.max_position_embeddings is 16" in error


def test_long_rows_are_checked_against_the_model_that_is_read(made, corpus: Path, tmp_path: Path, fails) -> None:
    """The default of 512 positions must not reject the rows before the model is read."""
    made("BertForMaskedLM", dataclasses.replace(CONFIG, max_position_embeddings=1024)).save(tmp_path / "model")
    arguments = [f"--data.train={corpus}", f"--init={tmp_path / 'model'}", f"--output_dir={tmp_path / 'run'}"]
    error = fails(pretrain, *arguments, "--data.sequence_length=1025")
    assert "data.sequence_length is 1025, but model.max_position_embeddings is 1024" in error
    error = fails(pretrain, "--config=hours", *arguments, "--phases.2.sequence_length=1026")
    assert "phases.2.sequence_length is 1026, but model.max_position_embeddings is 1024" in error


@pytest.mark.medium
def test_rates_by_layer_are_refused_if_the_model_that_is_read_shares_layers(
    made, corpus: Path, tmp_path: Path, fails
) -> None:
    made("BertForMaskedLM", ALBERT).save(tmp_path / "model")
    arguments = [f"--data.train={corpus}", f"--init={tmp_path / 'model'}", f"--output_dir={tmp_path / 'run'}"]
    error = fails(pretrain, *arguments, *FEW_STEPS, *SHORT_ROWS, "--optimizer.layerwise_lr_decay=0.8")
    assert "optimizer.layerwise_lr_decay is 0.8" in error


ORDER = ("both", "no", "yes")
TASKS: dict[str, Task] = {
    "BertForSequenceClassification": CustomClassification(labels=ORDER, label_names=ORDER),
    "BertForTokenClassification": CustomTokenClassification(labels=ORDER),
    "BertForQuestionAnswering": CustomQuestionAnswering(),
    "BertForMultipleChoice": MultipleChoiceTask(name="choices"),
}


def start_from(source: bert.Pretrained, task: Task) -> dict:
    """The parameters of a task's model that starts from another; what is drawn at random is a shape."""
    module = HEADS[task.kind](source.config, task.num_labels)
    ids = np.zeros((1, 2, 8) if task.kind == "multiple_choice" else (1, 8), np.int32)
    shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), ids)["params"])
    given = Head(source.architecture, source.problem_type, source.labels)
    head = match_head(head_of_task(task, None), given, "X")
    return load_pretrained_params(shapes, source.params, "X", ("bert", *head.modules), lambda text: None, head.rows)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("family", "architecture"),
    [(name, one) for name in EXAMPLES for one in TASKS if one in require(family_of_type(name), name).classes],
)
def test_a_published_head_is_kept_by_the_names_of_its_labels(family: str, architecture: str, made, tmp_path) -> None:
    made(architecture, EXAMPLES[family]).save(tmp_path / "source")
    source = bert.load(tmp_path / "source")
    params = start_from(source, TASKS[architecture])
    name = "qa_outputs" if architecture == "BertForQuestionAnswering" else "classifier"
    rows = [LABELS.index(label) for label in ORDER] if architecture in list(TASKS)[:2] else slice(None)
    expected = {**source.params, name: {key: leaf[..., rows] for key, leaf in source.params[name].items()}}
    jax.tree.map(np.testing.assert_array_equal, params, expected)


@pytest.mark.medium
def test_googles_heads_are_kept_where_their_outputs_are_known(made, tmp_path: Path) -> None:
    for architecture, task, rows in (
        ("BertForQuestionAnswering", TASKS["BertForQuestionAnswering"], [0, 1]),
        ("BertForSequenceClassification", CustomClassification(labels=(*"021",), label_names=(*"021",)), [0, 2, 1]),
    ):
        write_google(tmp_path / architecture, made, architecture=architecture)
        source = bert.load(tmp_path / architecture)
        name = "qa_outputs" if architecture == "BertForQuestionAnswering" else "classifier"
        params = start_from(source, task)
        for key, leaf in source.params[name].items():
            np.testing.assert_array_equal(params[name][key], leaf[..., rows])
    assert isinstance(start_from(source, TASKS[architecture])["classifier"]["kernel"], jax.ShapeDtypeStruct)
