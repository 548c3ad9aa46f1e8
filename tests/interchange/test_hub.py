"""Model names on the hub, which a local folder replaces: the requested files, and no network access."""

import json
import shutil
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import huggingface_hub.constants
import jax
import numpy as np
import pytest

import bert
from bert.analysis.inspection import summarize
from bert.commands.corpus import tokenizer_command as extend
from bert.commands.export import main as export
from bert.commands.finetune import main as finetune
from bert.commands.predictions import predict_command as predict
from bert.errors import UserError
from bert.inference.load import load_vocabulary
from bert.interchange import hub as hub_names
from bert.interchange.hub import is_hub_name
from bert.interchange.sentence_transformers.reader import TANH
from bert.model.pooling import PooledDense, Pooling
from bert.training.loop import count_parameters
from tests.interchange.hf_folders import edit


@pytest.fixture
def hub(tmp_path: Path, monkeypatch) -> Path:
    """A fake hub with a folder hub/ORGANISATION/NAME per model. Requested files are copied to a cache, as usual."""
    remote, cache = tmp_path / "hub", tmp_path / "cache"

    def snapshot_download(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        name = name if revision is None else f"{name}-{revision}"
        for file in (remote / name).rglob("*"):
            place = file.relative_to(remote / name)
            if file.is_file() and any(fnmatch(str(place), pattern) for pattern in allow_patterns):
                (cache / name / place).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, cache / name / place)
        return str(cache / name)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return remote


@pytest.fixture
def fails(fails, monkeypatch) -> Callable[..., str]:
    """Like the `fails` fixture of all tests, without the log line that announces a download."""

    def run(main: Callable, *arguments: str) -> str:
        with monkeypatch.context() as patch:
            patch.setattr(hub_names, "announce", lambda name: None)
            return fails(main, *arguments)

    return run


def test_a_name_is_fetched_and_nothing_that_runs_or_is_not_read(made, hub: Path, tmp_path: Path) -> None:
    model = made("BertForMaskedLM")
    model.save(hub / "someone" / "some-bert")
    written = {path.name for path in (hub / "someone" / "some-bert").iterdir()}
    for name in ("modeling.py", "tf_model.h5", "pytorch_model.bin", "training_args.bin"):
        (hub / "someone" / "some-bert" / name).write_bytes(b"never to be read")
    loaded = bert.load("someone/some-bert")
    assert (loaded.source, loaded.config) == ("someone/some-bert", model.config)
    fetched = {path.name for path in (tmp_path / "cache" / "someone" / "some-bert").iterdir()}
    assert fetched == written - {"README.md"}


def test_a_vocabulary_on_the_hub_is_extended(made, hub: Path, tmp_path: Path, fails) -> None:
    from bert.tokenizer.vocabulary import load_tokenizer

    model = made("BertForMaskedLM")
    model.save(hub / "someone" / "some-bert")
    (tmp_path / "corpus.txt").write_text("ba ri\n\n" + "baba baba\n\n" * 9)
    arguments = [f"--data.train={tmp_path / 'corpus.txt'}", "--tokenizer.min_frequency=1", "--extend=1"]
    assert extend([*arguments, "--tokenizer.path=someone/some-bert", f"--output={tmp_path / 'longer'}"]) == 0
    before, after = model.tokenizer.get_vocab(), load_tokenizer(tmp_path / "longer").get_vocab()
    assert before.items() <= after.items()
    assert len(after) == len(before) + 1
    gone = fails(extend, *arguments, "--tokenizer.path=no/such/folder", f"--output={tmp_path / 'other'}")
    assert "no/such/folder" in gone


def test_a_pickle_is_fetched_only_where_there_is_nothing_else(made, hub: Path, tmp_path: Path, fails) -> None:
    made("BertForMaskedLM").save(hub / "someone" / "old")
    (hub / "someone" / "old" / "model.safetensors").rename(hub / "someone" / "old" / "pytorch_model.bin")
    error = fails(export, "someone/old", str(tmp_path / "out"))  # it is no pickle either
    assert "pytorch_model.bin is" in error
    assert (tmp_path / "cache" / "someone" / "old" / "pytorch_model.bin").is_file()


@pytest.mark.parametrize("architecture", ["Bert", "BertForMaskedLM"])
def test_a_sentence_transformer_on_the_hub_keeps_its_pooling(architecture: str, made, hub: Path) -> None:
    from bert.model.pooling import Pooling

    pooling = Pooling("cls", normalize=True, max_length=5)
    if architecture == "BertForMaskedLM":
        pooling = Pooling("max", num_log1p=1, similarity="dot")
    made(architecture, pooling=pooling).save(hub / "someone" / "sentences")
    assert bert.load("someone/sentences").pooling == pooling


def test_a_model_is_inspected_before_any_weights_are_downloaded(made, hub: Path) -> None:
    layer = PooledDense(np.ones((12, 3), np.float32), np.ones(3, np.float32), TANH)
    made(pooling=Pooling("mean", dense=(layer,))).save(hub / "someone" / "projected")
    facts = summarize("someone/projected")
    assert not list((hub.parent / "cache").rglob("*.safetensors"))
    model = bert.load("someone/projected")
    assert model.pooling is not None and model.pooling.dense == (layer,)
    assert facts["parameters"] == summarize("someone/projected")["parameters"] == count_parameters(model.params) + 39


def test_the_encoder_may_have_a_folder_of_its_own(made, hub: Path, tmp_path: Path) -> None:
    """Reads the layout that sentence-transformers wrote before 2.0."""
    from bert.model.pooling import Pooling

    model = made(pooling=Pooling("max"))
    model.save(hub / "someone" / "old")
    (hub / "someone" / "old" / "0_Transformer").mkdir()
    for file in list((hub / "someone" / "old").iterdir()):
        if file.is_file() and file.name != "modules.json":
            file.rename(file.parent / "0_Transformer" / file.name)
    modules = json.loads((hub / "someone" / "old" / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    (hub / "someone" / "old" / "modules.json").write_text(json.dumps(modules))
    loaded = bert.load("someone/old")
    assert (loaded.config, loaded.pooling) == (model.config, Pooling("max"))
    assert jax.tree.all(jax.tree.map(np.array_equal, loaded.params, model.params))
    assert load_vocabulary("someone/old").to_str() == model.tokenizer.to_str()


def test_the_hubs_first_models_have_a_name_of_one_part(made, hub: Path, tmp_path: Path, monkeypatch) -> None:
    made("BertForMaskedLM").save(hub / "bert-base-uncased")
    assert bert.load("bert-base-uncased").source == "bert-base-uncased"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "roberta-large").mkdir()
    assert [is_hub_name(name) for name in ("roberta-base", "roberta-large", "run", "bert-base/../x")] == [1, 0, 0, 0]
    first = ("distilbert-base-uncased", "xlm-roberta-base", "albert-base-v2", "gpt2", "distilgpt2", "gpt2-medium")
    assert all(map(is_hub_name, first)) and not any(map(is_hub_name, ("gpt2-tuned", "albert", "distilbert")))


def test_a_run_that_is_not_here_is_no_name_on_the_hub(made, hub: Path, tmp_path: Path, monkeypatch, fails) -> None:
    """Anybody may register runs/sst2 there."""
    made("BertForMaskedLM").save(hub / "runs" / "sst2")
    monkeypatch.chdir(tmp_path)
    for name in ("runs/sst2", "runs/sst2/", "./runs/sst2"):
        with pytest.raises(UserError, match="does not exist"):
            bert.load(name)
    assert "runs/sst2 does not exist" in fails(predict, "runs/sst2", "-")
    assert not (tmp_path / "cache").exists()


def test_a_download_is_announced_before_it_starts(made, hub: Path, capsys, monkeypatch) -> None:
    def offline(name: str, **settings) -> str:
        raise OSError(capsys.readouterr().err)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(UserError, match="some-bert is not a local folder"):
        bert.load("someone/some-bert")


def test_a_revision_is_fetched(made, hub: Path) -> None:
    model = made("BertForMaskedLM")
    model.save(hub / "someone" / "some-bert")
    shutil.copytree(hub / "someone" / "some-bert", hub / "someone" / "some-bert-v1.0")
    edit(hub / "someone" / "some-bert-v1.0", hidden_act="relu")
    assert bert.load("someone/some-bert").config == model.config
    assert bert.load("someone/some-bert@v1.0").config.hidden_act == "relu"
    assert bert.load("someone/some-bert", revision="v1.0").config.hidden_act == "relu"
    with pytest.raises(UserError, match="is not a model on the hub: remove revision"):
        bert.load(hub / "someone" / "some-bert", revision="v1.0")


def test_a_vocabulary_is_fetched_without_the_weights(made, hub: Path, tmp_path: Path) -> None:
    model = made("BertForMaskedLM")
    model.save(hub / "someone" / "some-bert")
    assert load_vocabulary("someone/some-bert").to_str() == model.tokenizer.to_str()
    assert not list((tmp_path / "cache" / "someone" / "some-bert").glob("*.safetensors"))


@pytest.mark.slow
def test_commands_take_a_name(made, hub: Path, tmp_path: Path, sst2: Path, capsys) -> None:
    made("BertForSequenceClassification").save(hub / "someone" / "classifier")
    (tmp_path / "texts.txt").write_text("a b c\n")
    assert predict(["someone/classifier", str(tmp_path / "texts.txt")]) == 0
    assert '"label"' in capsys.readouterr().out
    edit(hub / "someone" / "classifier", hidden_act="relu")
    assert export(["someone/classifier", str(tmp_path / "out")]) == 0
    assert bert.load(tmp_path / "out").config.hidden_act == "relu"
    arguments = [f"--data.dir={sst2}", f"--output_dir={tmp_path / 'run'}", "--data.max_length=16", "--data.buckets=16"]
    arguments += ["--training.batch_size=8", "--training.epochs=1"]
    assert finetune(["--config=sst2", "--init=someone/classifier", *arguments]) == 0
    said = capsys.readouterr().out
    assert "from someone/classifier: bert (" in said
    assert "randomly initialized: classifier" in said


def test_no_network_no_model_and_a_mistyped_path_are_one_sentence(
    sst2: Path, tmp_path: Path, monkeypatch, fails
) -> None:
    def offline(name: str, **settings) -> str:
        raise OSError("no route to the host\nand many more lines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    to = str(tmp_path / "out")
    error = fails(export, "a/b", to)
    assert "a/b is not a local folder and cannot be downloaded from the Hugging Face hub (no route to" in error
    init = ["--config=sst2", "--init=a/b", f"--data.dir={sst2}", f"--output_dir={tmp_path / 'run'}"]
    assert "cannot be downloaded" in fails(finetune, *init)
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert "model/typo does not exist" in fails(export, "model/typo", to)
    assert "a/b/c does not exist" in fails(export, "a/b/c", to)


def test_the_client_itself_offline_is_one_sentence(tmp_path: Path, monkeypatch, fails) -> None:
    """The real client in offline mode, with an empty cache."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    assert "cannot be downloaded from the Hugging Face hub" in fails(export, "nobody/nothing", str(tmp_path / "out"))


@pytest.fixture
def written(tmp_path: Path, monkeypatch) -> Path:
    """A folder in place of the hub, where repositories are written."""
    remote = tmp_path / "written"

    class Client:
        def create_repo(self, name: str, private: bool, exist_ok: bool) -> SimpleNamespace:
            if name.startswith("others/"):
                raise OSError("403 Forbidden\nYou have no access")
            (remote / "me" / name.split("/")[-1]).mkdir(parents=True, exist_ok=exist_ok)
            return SimpleNamespace(repo_id=f"me/{name.split('/')[-1]}")

        def upload_folder(self, repo_id: str, folder_path: Path, commit_message: str) -> SimpleNamespace:
            shutil.copytree(folder_path, remote / repo_id, dirs_exist_ok=True)
            return SimpleNamespace(commit_url=f"https://hub/{repo_id}/commit/1: {commit_message}")

    monkeypatch.setattr(huggingface_hub, "HfApi", Client)
    return remote


def test_a_model_is_pushed_with_its_card_and_read_again(made, written: Path) -> None:
    model = made("BertForMaskedLM")
    assert model.push_to_hub("mine", message="Add it") == "https://hub/me/mine/commit/1: Add it"
    card = (written / "me" / "mine" / "README.md").read_text()
    assert 'from_pretrained("me/mine")' in card
    assert "PATH" not in card
    assert str(written) not in card
    again = bert.load(written / "me" / "mine")
    jax.tree.map(np.testing.assert_array_equal, again.params["bert"], model.params["bert"])


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("a/b/c", "'a/b/c' is not a repository name"),
        ("others/x", "others/x cannot be uploaded to the Hugging Face hub (403 Forbidden)"),
    ],
)
def test_what_cannot_be_pushed_is_one_sentence(made, written: Path, name: str, sentence: str) -> None:
    with pytest.raises(UserError) as error:
        made("BertForMaskedLM").push_to_hub(name)
    assert str(error.value).startswith(sentence) and "\n" not in str(error.value)
    assert not written.exists()
