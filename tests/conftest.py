"""Eight CPU devices for every test (each says how many it uses), and one compilation cache for all of them."""

import importlib.metadata
import os
import random
import shutil
import sys
from pathlib import Path

# Also where PYTHONDONTWRITEBYTECODE is set: else each worker process compiles all modules and rewrites all assertions.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

pytest_plugins = ["tests.cpu_budget"]

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
os.environ["BERT_NUM_DEVICES"] = "1"  # one of the eight, unless a test sets another number
os.environ.setdefault(
    "JAX_PLATFORMS", "cpu"
)  # even on a machine with a GPU: tests that need the GPU set this in a separate process
# Most of the time of the fast and medium tests would go into compiling tiny models: their kernels are not optimised and
# built in the quickest way there is (either version of XLA ends at a flag of the other). Other tiers, and users, have
# XLA's choice.
QUICK_TO_COMPILE = " --xla_backend_optimization_level=0 " + (
    "--xla_cpu_use_fusion_emitters=false"
    if importlib.metadata.version("jax").startswith("0.10.")
    else "--xla_cpu_opt_preset=CPU_OPT_PRESET_FAST_COMPILE"
)
# The loop compiles its steps again in every run, and runs of the command line are processes of their own: what one test
# has compiled, the next one takes from here, also when the tests run again.
COMPILED = Path(__file__).parents[1] / ".pytest_cache" / "jax"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(COMPILED))
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "0"

from jaxtyping import install_import_hook

from tests import shape_checks

# Before any of them is imported: from here on a wrong shape or type in a call of the core is an error.
TYPED = (
    "bert.model.mask",
    "bert.model.packing",
    "bert.model.linear",
    "bert.model.positions",
    "bert.model.attention",
    "bert.model.layers",
    "bert.model.recurrence",
    "bert.model.reductions",
    "bert.model.encoder",
    "bert.model.heads",
    "bert.model.pretraining",
    "bert.model.electra",
    "bert.model.decoders",
    "bert.training.finetuning.ranking_losses",
    "bert.training.losses",
    "bert.training.token_losses",
    "bert.training.pretraining.distillation",
    "bert.data.pretraining.masking",
    "bert.inference.decoding",
    "bert.inference.sampling",
)
install_import_hook(TYPED, f"{shape_checks.__name__}.check")

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from filelock import FileLock

TRAINED_RUNS = {"pretrained", "finetuned", "detected", "continued", "run_of_two"}
"""Fixtures that train before a test begins."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of these fixtures, before others choose by marks."""
    for item in items:
        if TRAINED_RUNS.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.medium)


SMALL_MODEL = [
    "--model.hidden_size=16",
    "--model.num_hidden_layers=1",
    "--model.num_attention_heads=2",
    "--model.intermediate_size=32",
    "--model.max_position_embeddings=32",
]
NSP_RUN = [
    "--data.input_format=nsp",
    "--data.eval_fraction=0.05",
    "--model.position_embedding_type=learned",
    "--model.pooler_act=tanh",
    "--optimizer.learning_rate=3e-3",
    "--embedding_init=random",
    "--transfer=null",
]
"""Next-sentence pairs by BERT's own form, from the recipe that commands take by default, without its transfer."""

SMALL_RUN = [
    *SMALL_MODEL,
    *NSP_RUN,
    "--data.sequence_length=32",
    "--data.max_predictions_per_sequence=5",
    "--data.num_workers=1",
    "--tokenizer.vocab_size=200",
    "--training.steps=6",
    "--training.batch_size=8",
    "--training.log_every=2",
    "--training.eval_every=3",
    "--training.checkpoint_every=3",
    "--optimizer.warmup_steps=1",
    "--optimizer.schedule=linear",
]

PERMUTED = ["--training.objective=plm", "--data.input_format=full_sentences"]
REPLACED = [
    "--training.objective=rtd",
    "--data.input_format=full_sentences",
    "--electra.generator_hidden_size=0.5",
    "--model.embedding_size=8",
    "--model.pooler_act=gelu",
]

NEXT = [
    "--data.input_format=blocks",
    "--training.objective=clm",
    "--data.max_predictions_per_sequence=20",
    "--model.causal=true",
    "--model.pre_layer_norm=true",
    "--model.embedding_norm=false",
    "--model.prediction_transform=false",
    "--model.prediction_bias=false",
    "--model.residual_init=scaled",
    "--model.type_vocab_size=0",
    "--tokenizer.kind=byte_level",
    "--tokenizer.vocab_size=300",
]
"""Next tokens of blocks, with the settings of GPT-2."""


STREAMED = ["--data.streaming=true", "--data.stream_readers=2", "--data.shuffle_buffer=1"]
"""Two readers of a stream; it needs data.eval."""


def translation_options(folder: Path) -> list[str]:
    """Options of a small `multi30k`, which turns around texts of one to four words; these are written to a folder."""
    stream = random.Random(0)
    words = ["red", "green", "blue", "black", "white", "brown"]
    for split, count in (("train", 400), ("val", 16), ("test_a", 5)):
        rows = [stream.choices(words, k=stream.randint(1, 4)) for _ in range(count)]
        for end, order in (("de", 1), ("en", -1)):
            (folder / f"{split}.{end}").write_text("".join(f"{' '.join(row[::order])}\n" for row in rows))
    options = ["--config=multi30k", f"--data.dir={folder}", *SMALL_MODEL, "--tokenizer.vocab_size=100"]
    options += ["--tokenizer.min_frequency=1", "--data.max_length=12", "--data.buckets=12", "--decoding.beams=2"]
    return [*options, "--decoding.max_tokens=8", "--training.tokens_per_batch=96"]


def pytest_configure(config: pytest.Config) -> None:
    """Before any test module is imported, and so before JAX reads its flags."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        size = sum(file.stat().st_size for file in COMPILED.glob("*"))
        if size > 2**30:  # a limit of JAX's own would make every entry slow
            shutil.rmtree(COMPILED)
    if is_fast_tier(config):
        os.environ["XLA_FLAGS"] += QUICK_TO_COMPILE


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out the tests on real data from the fast tests: they import PyTorch and transformers if they are there."""
    return True if is_fast_tier(config) and collection_path.name == "real" else None


def is_fast_tier(config: pytest.Config) -> bool:
    """Whether the fast or the medium tests run, which compile quickly."""
    return "not slow" in config.getoption("markexpr")


@pytest.fixture(scope="session", autouse=True)
def _examples_are_cached_in_a_new_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def drawn() -> None:
    """Enables plots in the fast tests, for tests that check them."""


@pytest.fixture(autouse=True)
def _runs_of_a_fast_test_are_not_drawn(request: pytest.FixtureRequest) -> Iterator[None]:
    """Skips plots, which take longer than a few training steps. Shared runs and commands still draw them."""
    with pytest.MonkeyPatch.context() as patch:
        if is_fast_tier(request.config) and "drawn" not in request.fixturenames:
            patch.setattr("bert.runs.plots._draw", lambda path, *_: path.touch() or True)
        yield


@pytest.fixture
def bucket() -> Iterator[Any]:
    """An empty store in memory."""
    import fsspec

    store = fsspec.filesystem("memory")
    store.store.clear()
    store.pseudo_dirs[:] = [""]
    yield store
    store.store.clear()
    store.pseudo_dirs[:] = [""]


@pytest.fixture
def quick_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases of stores that are renewed, and expire, within a second."""
    for name, seconds in (("PERIOD", 0.05), ("EXPIRY", 0.5), ("SETTLING", 0.05)):
        monkeypatch.setattr(f"bert.runs.mirror.{name}", seconds)


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], object]], Path]:
    """Creates a named folder in the first worker process that needs it. Other workers wait for it and share it."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    shared.mkdir(exist_ok=True)

    def make_once(name: str, make: Callable[[Path], object]) -> Path:
        folder, done = shared / name, shared / f"{name}.done"
        with FileLock(shared / f"{name}.lock"):
            if not done.exists():
                make(folder)
                done.touch()
        return folder

    return make_once


@pytest.fixture(scope="session")
def corpus(made_once) -> Path:
    """30 documents of short sentences over 60 words."""
    return made_once("corpus", _write_corpus) / "corpus.txt"


def _write_corpus(folder: Path) -> None:
    folder.mkdir()
    random = np.random.default_rng(0)
    syllables = ["ba", "ko", "ri", "tu", "ne", "lo", "sa", "mi"]
    words = ["".join(random.choice(syllables, random.integers(1, 4))) for _ in range(60)]
    documents = []
    for _ in range(30):
        sentences = (
            " ".join(random.choice(words, random.integers(4, 10))).capitalize() + "."
            for _ in range(random.integers(6, 12))
        )
        documents.append(" ".join(sentences))
    (folder / "corpus.txt").write_text("\n\n".join(documents) + "\n", encoding="utf-8")


@pytest.fixture(scope="session")
def sst2(made_once) -> Path:
    """SST-2's files with 40 training, 17 dev and 5 test rows. A word implies the label. Row 16 is over 32 tokens."""
    return made_once("SST-2", _write_sst2)


def _write_sst2(folder: Path) -> None:
    folder.mkdir()
    for split, rows in (("train", 40), ("dev", 17)):
        counts = [40 if row == 16 else row % 5 for row in range(rows)]
        lines = [f"{'ba' if row % 3 else 'ko'} ri {'tu ' * counts[row]}\t{int(row % 3 > 0)}" for row in range(rows)]
        (folder / f"{split}.tsv").write_text("sentence\tlabel\n" + "\n".join(lines) + "\n", encoding="utf-8")
    (folder / "test.tsv").write_text("index\tsentence\n" + "".join(f"{i}\tba ri {i}\n" for i in range(5)))


@pytest.fixture(scope="session")
def mrpc(made_once) -> Path:
    """MRPC's files, byte order mark and quotes included."""
    return made_once("MRPC", _write_mrpc)


def _write_mrpc(folder: Path) -> None:
    folder.mkdir()
    header = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
    for split, rows in (("train", 24), ("dev", 10)):
        lines = [f'{int(row % 3 > 0)}\t{row}\t{row}\t" ba ri {row}\tko ba " {row}\n' for row in range(rows)]
        (folder / f"{split}.tsv").write_text(header + "".join(lines), encoding="utf-8")


@pytest.fixture(scope="session")
def pretrained(corpus: Path, made_once) -> Path:
    """The folder of a finished pretraining run of six steps."""
    from bert.commands.pretrain import main

    def train(folder: Path) -> None:
        assert main([f"--data.train={corpus}", f"--output_dir={folder}", *SMALL_RUN]) == 0

    return made_once("pretrained", train)


@pytest.fixture(scope="session")
def finetuned(pretrained: Path, sst2: Path, made_once) -> Path:
    """The folder of a finished fine-tuning run of three epochs on SST-2's layout."""
    from bert.commands.finetune import main

    def train(folder: Path) -> None:
        arguments = [f"--data.dir={sst2}", f"--output_dir={folder}", "--data.max_length=32", "--data.buckets=32"]
        assert main(["--config=sst2", f"--init={pretrained}", *arguments, "--training.batch_size=8"]) == 0

    return made_once("finetuned", train)


@pytest.fixture(scope="session")
def permuted(corpus: Path, made_once) -> Path:
    """The folder of a finished run of six steps of permuted prediction."""
    from bert.commands.pretrain import main

    def train(folder: Path) -> None:
        assert main([f"--data.train={corpus}", f"--output_dir={folder}", *SMALL_RUN, *PERMUTED]) == 0

    return made_once("permuted", train)


@pytest.fixture(scope="session")
def detected(corpus: Path, made_once) -> Path:
    """The folder of a finished run of six steps of replaced-token detection."""
    from bert.commands.pretrain import main

    def train(folder: Path) -> None:
        assert main([f"--data.train={corpus}", f"--output_dir={folder}", *SMALL_RUN, *REPLACED]) == 0

    return made_once("detected", train)


@pytest.fixture(scope="session")
def continued(corpus: Path, made_once) -> Path:
    """The folder of a finished run of six steps of next-token prediction."""
    from bert.commands.pretrain import main

    def train(folder: Path) -> None:
        assert main([f"--data.train={corpus}", f"--output_dir={folder}", *SMALL_RUN, *NEXT]) == 0

    return made_once("continued", train)


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command as a program, which must end with status 2; returns its one error, without the warnings."""
    from bert.commands.cli.arguments import run_program

    def run(main: Callable[[list[str]], int], *arguments: str) -> str:
        capsys.readouterr()
        assert run_program(main)(list(arguments)) == 2
        lines = capsys.readouterr().err.splitlines(keepends=True)
        [error] = [line for line in lines if not line.startswith("warning: ")]
        assert error.startswith("error: ")
        return error

    return run
