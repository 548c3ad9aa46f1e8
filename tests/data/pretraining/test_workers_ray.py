"""A Ray cluster builds the same examples as one process, even if one of its nodes is killed."""

import contextlib
import os
import pickle
import random
import re
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from bert.commands.corpus import examples_command as main
from bert.commands.corpus import tokenizer_command
from bert.config import TokenizerConfig
from bert.data import worker_processes
from bert.data.corpus import filters, vocabulary
from bert.data.corpus.vocabulary import corpus_vocabulary
from bert.data.pretraining import build, workers
from bert.data.pretraining.build import build_examples
from bert.errors import UserError
from bert.tokenizer.library import SPECIAL_TOKENS
from bert.tokenizer.vocabulary import literal_tokenizer, load_tokenizer
from tests.data.pretraining.conftest import word
from tests.helpers import PROSE, config_of, digest

ROOT = Path(__file__).parents[3]


@pytest.mark.medium
def test_a_task_gives_the_files_of_a_worker(place, tokenizer, tmp_path, monkeypatch) -> None:
    """Covers duplicated examples and documents that a mixture repeats."""
    monkeypatch.setattr(build, "SHARD_BYTES", 8000)
    config = config_of(place, dupe_factor=2)
    whole = build_examples(config, tokenizer, tmp_path / "local")
    built: list[str] = []

    def in_this_process(tasks, tokenizer, work, max_tasks, log):
        for group in workers.groups_of(tasks):
            text = workers.text_of(group)
            assert [task.name for task in group] == [task.name for task in text.tasks]
            workers._write_files(workers.build_from_text(text, literal_tokenizer(tokenizer)), group, work)
            built.extend(task.name for task in group)
            yield from (task.name for task in group)

    monkeypatch.setattr(workers, "build_shards_on_ray", in_this_process)
    assert digest(build_examples(config, tokenizer, tmp_path / "shipped", engine="ray")) == digest(whole)
    assert len(built) == len(set(built)) > 4


def test_a_text_that_a_range_has_twice_is_carried_once(place, tokenizer, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(build, "SHARD_BYTES", 8000)
    config = config_of(place)
    tasks = build._shard_tasks(tmp_path, config, lambda *_: None)
    task = tasks[-1]
    order = np.load(task.order)
    order[task.first + 1] = order[task.first]
    np.save(task.order, order)
    text = workers.text_of([task])
    assert len(text.documents) == task.last - task.first - 1
    assert text.order[0] == text.order[1]


def test_what_cannot_be_is_one_sentence(place, fails, monkeypatch) -> None:
    arguments = [f"--data.train={place / 'corpus.txt'}", f"--tokenizer.path={place / 'vocab.txt'}"]
    assert "use local or ray" in fails(main, *arguments, "--engine=spark")
    assert "remove --shard" in fails(main, *arguments, "--engine=ray", "--shard=1/2")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'bert-jax\[ray\]'"):
        worker_processes.require_ray()


@pytest.mark.medium
def test_the_words_that_tasks_count_train_and_extend_as_one_process(place, tmp_path, monkeypatch, capsys) -> None:
    """By the command, with the calls made here and their results in another order."""
    monkeypatch.setattr(vocabulary, "SHARD_BYTES", 4000)
    calls = []

    def in_this_process(function, inputs, shared, max_tasks, log):
        for number, (name, value) in reversed(list(enumerate(inputs))):
            calls.append(name)
            yield number, pickle.loads(pickle.dumps(function))(value, pickle.loads(pickle.dumps(shared)))

    monkeypatch.setattr(vocabulary, "run_tasks", in_this_process)
    corpus = f"--data.train={place / 'corpus.txt'}"
    for case, options in {
        "trained": ["--tokenizer.vocab_size=90"],
        "extended": [f"--tokenizer.path={place / 'vocab.txt'}", "--extend=5", "--tokenizer.min_frequency=1"],
    }.items():
        for engine in ("local", "ray"):
            arguments = [corpus, *options, f"--engine={engine}", f"--output={tmp_path / case / engine}"]
            assert tokenizer_command(arguments) == 0
        for file in ("tokenizer.json", "vocab.txt"):
            actual, expected = (tmp_path / case / engine / file for engine in ("local", "ray"))
            assert actual.read_bytes() == expected.read_bytes()
    assert len(set(calls)) > 4
    assert "counted 5,040 words" in capsys.readouterr().out


@pytest.fixture
def cluster(monkeypatch):
    """Two nodes of one core each; this process belongs to the first."""
    ray = pytest.importorskip("ray", reason="the extra ray is not installed")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # else a token is written into the home folder
    result = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    result.add_node(num_cpus=1)
    monkeypatch.setenv("RAY_ADDRESS", result.address)
    yield result
    ray.shutdown()
    result.shutdown()


@pytest.fixture
def large(place, tmp_path) -> Path:
    """Folder with thirteen megabytes of text and a vocabulary: tasks of half a second."""
    folder = tmp_path / "large"
    folder.mkdir()
    words = [word(document, 0, number) for document in range(60) for number in range(7)]
    drawn = np.random.default_rng(0).choice(words, (120_000, 14))
    lines = [" ".join(row) + "." + ("\n" if number % 20 == 19 else "") for number, row in enumerate(drawn)]
    (folder / "corpus.txt").write_text("\n".join(lines))
    (folder / "vocab.txt").write_bytes((place / "vocab.txt").read_bytes())
    return folder


def kill_a_busy_worker() -> None:
    """Kills a process that has worked on a shard for two tenths of a second; Ray writes what a worker does into its
    title. One that has just got its task may not have begun it, and then nothing is done again."""
    until = time.monotonic() + 60
    begun: dict[bytes, float] = {}
    while time.monotonic() < until:
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                title = (folder / "cmdline").read_bytes().rstrip(b"\0")
                if not title.startswith(b"ray::train-"):
                    continue
                used = sum(map(int, (folder / "stat").read_text().rpartition(")")[2].split()[11:13]))
                if used - begun.setdefault(title, used) >= 0.2 * os.sysconf("SC_CLK_TCK"):
                    os.kill(int(folder.name), signal.SIGKILL)
                    return


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="finds processes in /proc")
def test_a_cluster_that_loses_workers_and_gains_some_builds_the_same(
    cluster, large, tokenizer, tmp_path, monkeypatch
) -> None:
    """A worker is killed in its work, then the whole node of another one, then a node joins."""
    monkeypatch.setattr(build, "SHARD_BYTES", 1_000_000)
    config = config_of(large)
    whole = build_examples(config, tokenizer, tmp_path / "local")
    lines: list[str] = []
    node = cluster.list_all_nodes()[-1]
    events = {
        2: threading.Thread(target=kill_a_busy_worker).start,  # while the build continues
        6: lambda: cluster.remove_node(node, allow_graceful=False),
        9: lambda: cluster.add_node(num_cpus=2),
    }

    def disturb(stage: str, done: int, total: int | None) -> None:
        lines.append(stage)
        if stage == "building examples" and done in events:
            events.pop(done)()

    example_set = build_examples(config, tokenizer, tmp_path / "ray", progress=disturb, engine="ray")
    assert digest(example_set) == digest(whole)
    assert not events
    [again] = [line for line in lines if "run again" in line]
    assert 1 <= int(again.split()[0]) <= 6


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wordpiece", "byte_level", "unigram"])
def test_a_cluster_trains_the_vocabulary_of_one_process(cluster, large, tmp_path, monkeypatch, kind) -> None:
    """Trains from one block of text and from several."""
    config = TokenizerConfig(kind=kind, vocab_size=400)
    alone = corpus_vocabulary(config_of(large, cache_dir=str(tmp_path / "local")), config, print).to_str()
    for blocks in (1, 3):
        monkeypatch.setattr(vocabulary, "SHARD_BYTES", (large / "corpus.txt").stat().st_size // blocks + 1)
        lines: list[str] = []
        data = config_of(large, cache_dir=str(tmp_path / f"{blocks}"), num_workers=None)
        assert corpus_vocabulary(data, config, lines.append, "ray").to_str() == alone
        assert any("counted" in line for line in lines)


@pytest.mark.slow
def test_a_cluster_filters_the_same(cluster, tmp_path, monkeypatch) -> None:
    """The rules run in tasks, and the filter of duplicates runs here."""
    draw = random.Random(0)
    texts = [draw.sample(PROSE, k=draw.choice((2, 5, 5))) for _ in range(200)]  # two lines are too few for C4
    texts = [[*text, "No end"] if number % 3 else text * 2 for number, text in enumerate([*texts, *texts[:20]])]
    (tmp_path / "corpus.txt").write_text("\n\n".join(map("\n".join, texts)))
    words = sorted(set(re.findall(r"\w+|[.,]", " ".join(PROSE).lower())))
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, *words]))
    tokenizer = load_tokenizer(tmp_path / "vocab.txt")
    names = ["c4", "gopher", "exact_duplicates"]
    config = config_of(tmp_path, filters=names, one_sentence_per_line=False)
    whole = build_examples(config, tokenizer, tmp_path / "local")
    tasks: list[list[str]] = []

    def on_cluster(function, blocks, steps, max_tasks, log):
        blocks = list(blocks)
        tasks.extend(list(steps) for _ in blocks)
        return worker_processes.run_tasks(function, blocks, steps, max_tasks, log)

    monkeypatch.setattr(filters, "run_tasks", on_cluster)
    monkeypatch.setattr(filters, "BLOCK_CHARACTERS", 10_000)
    example_set = build_examples(config, tokenizer, tmp_path / "ray", engine="ray")
    assert digest(example_set) == digest(whole)
    assert example_set.filtered == whole.filtered
    assert all(whole.filtered[name]["documents"] for name in names)
    assert len(tasks) > 4
    assert all(steps == names[:2] for steps in tasks)


@pytest.mark.slow
def test_an_error_of_a_task_is_that_of_a_local_build(cluster, tokenizer, tmp_path) -> None:
    (tmp_path / "corpus.txt").write_text("\n\n".join(f"{word(number, 0, 0)}." for number in range(50)))
    config = config_of(tmp_path, input_format="sop")
    for engine in ("local", "ray"):
        with pytest.raises(UserError, match=r"no document of .* has two sentences"):
            build_examples(config, tokenizer, tmp_path / engine, engine=engine)


@pytest.mark.slow
def test_a_cluster_that_is_not_there_is_one_sentence(place, tokenizer, tmp_path, monkeypatch) -> None:
    pytest.importorskip("ray", reason="the extra ray is not installed")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(UserError, match="RAY_ADDRESS"):
        build_examples(config_of(place), tokenizer, tmp_path, engine="ray")
