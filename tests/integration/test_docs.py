"""The README and the guides: every command in them is run, or says what it needs; every key, recipe and path exists."""

from __future__ import annotations

import ast
import io
import os
import pkgutil
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import yaml

from bert.commands import COMMANDS, command_function
from bert.config import FinetuneConfig, PretrainConfig, recipe_names
from bert.config.validation import keys_of
from tests.conftest import SMALL_MODEL

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md")] + sorted((ROOT / "docs").glob("*.md"))

RUNS = "runs"
BY_HAND = ("main", "tests")
"""Blocks of the README that install: continuous integration runs them."""

FIRST_PAGES = ("README", "get_started")
"""Pages whose commands continuous integration runs; the slow tests run every page."""

OTHERS = {
    "--xla_force_host_platform_device_count", "--cpu-durations", "--check", "--signal", "--requeue", "--logdir",
    "--small", "--dropout",
}  # fmt: skip
"""Options of other programs, the benchmarks among them, that pages mention."""

PARTS = ("bert", "configs", "tests", "benchmarks", "docs", "notebooks", ".ci")
TEXTS = (".py", ".md", ".yaml", ".ipynb", ".html", ".svg", "")
"""The parts of the project, and the ends of their text files."""

FILES = ("safetensors", "onnx", "json", "txt", "digest", "py")


CONFIGURED = ("pretrain", "finetune", "plan", "tokenizer", "examples")
"""Commands that take a configuration."""


class Block(NamedTuple):
    """A ```bash block: its page, the comment before it, its commands."""

    page: Path
    mark: str | None
    text: str

    def commands(self) -> list[list[str]]:
        """The words of each command of this package's, from its name on."""
        result = []
        for line in self.text.replace("\\\n", " ").splitlines():
            for part in re.split(r"&&|\|", line):
                words = shlex.split(part, comments=True)
                for place, word in enumerate(words):
                    if Path(word).name in ("pretrain.py", "finetune.py"):
                        result.append([Path(word).stem, *words[place + 1 :]])
                        break
                    if word == "bert" and (place == 0 or "=" in words[place - 1] or words[place - 1] == "srun"):
                        result.append(words[place + 1 :])
                        break
        return result


def blocks_of(page: Path) -> list[Block]:
    matches = re.finditer(
        r"(?:<!-- ([^\n]*?) -->\n)?^```bash\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    return [Block(page, match[1], match[2]) for match in matches]


KEY = re.compile(r"(?<![\w./-])(data|model|training|optimizer|tokenizer)\.([\w.]*\w)(?![\w(/])")
BLOCKS = [block for page in PAGES for block in blocks_of(page)]


@lru_cache
def help_of(command: str) -> str:
    text = io.StringIO()
    with redirect_stdout(text):
        try:
            command_function(command)(["--help=all" if command in CONFIGURED else "--help"])
        except SystemExit as end:
            assert not end.code
    return text.getvalue()


def options_of(command: str) -> set[str]:
    options = set(re.findall(r"--[a-z][\w.]*", help_of(command)))
    return options | options_of("finetune") if command == "benchmark" else options  # glue takes finetune's keys


def in_general(option: str) -> str:
    """The option as the help writes it: K in place of the index of a list item."""
    return re.sub(r"\.\d+\.", ".K.", option)


def test_every_block_is_run_or_says_what_it_needs() -> None:
    assert len(BLOCKS) > 20
    assert sum(block.mark == RUNS for block in BLOCKS) >= 6
    for block in BLOCKS:
        marked = block.mark in (RUNS, *BY_HAND) or re.fullmatch(r"needs: [a-z, ]+", block.mark or "")
        assert marked or block.page.name == "CONTRIBUTING.md", f"{block.page.name}: unmarked block\n{block.text}"
        assert "```bash" not in block.text


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"{block.page.stem}:{block.text.split(chr(10))[0][:40]}")
def test_commands_options_and_recipes_exist(block: Block) -> None:
    for name, *words in block.commands():
        assert name in COMMANDS, f"{block.page.name}: bert {name}"
        for word in words:
            if word.startswith("--"):
                option = in_general(word.partition("=")[0])
                assert option in options_of(name), f"{block.page.name}: bert {name} {option}"
        for place, word in enumerate(words[:-1]):
            if word == "--config":
                value = words[place + 1]
                assert value in recipe_names() or value.endswith(".yaml"), value


def inline_code() -> list[tuple[Path, str]]:
    codes = []
    for page in PAGES:
        prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        if page.name.startswith("from_"):  # the first column of its tables is another library's
            prose = re.sub(r"^\|[^|]*\|", "|", prose, flags=re.MULTILINE)
        codes += [(page, code) for code in re.findall(r"`([^`\n]+)`", prose)]
    return codes


def test_options_and_keys_in_the_prose_exist() -> None:
    options = set().union(*(options_of(name) for name in COMMANDS)) | OTHERS
    keys = keys_of(PretrainConfig).keys() | keys_of(FinetuneConfig).keys()
    for page, code in inline_code():
        for option in re.findall(r"(?<!\S)--[a-z][\w.-]*", code):
            assert in_general(option) in options, f"{page.name}: {option}"
        for section, key in KEY.findall(code):
            assert key in FILES or f"{section}.{key}" in keys, f"{page.name}: {section}.{key}"
        if match := re.match(r"bert ([a-z-]+)( |$)", code):
            assert match[1] in COMMANDS, f"{page.name}: {code}"


def test_paths_and_links_exist() -> None:
    """Checks paths anywhere on a page, and modules named relative to the package."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        paths = re.findall(rf"(?<![\w./:-])(?:{'|'.join(map(re.escape, PARTS))})/[\w./-]*\w", text)
        assert [path for path in paths if "NAME" not in path and not (ROOT / path).exists()] == [], page.name
        modules = re.findall(r"`([\w/]+\.py)(?::[\w.]+)?`", text) if not page.name.startswith("from_") else []
        places = (ROOT, ROOT / "bert")
        missing = [name for name in modules if "NAME" not in name and not any((at / name).exists() for at in places)]
        assert missing == [], page.name
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            if not target.startswith(("http://", "https://")):
                path, _, heading = target.partition("#")
                file = page.parent / path if path else page
                assert file.exists(), f"{page.name}: {target}"
                if heading:
                    titles = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
                    anchors = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
                    assert heading in anchors, f"{page.name}: {target}"


def test_dotted_names_exist() -> None:
    for page in PAGES:
        for name in set(re.findall(r"(?<![\w./-])bert(?:\.[A-Za-z_]\w*)+", page.read_text(encoding="utf-8"))):
            if not name.endswith((".yaml", ".md")):
                pkgutil.resolve_name(name)


def test_guides_have_at_most_30_000_words() -> None:
    """Except for the pages that `docs/reference.py` generates."""
    guides = [page for page in (ROOT / "docs").glob("*.md") if page.stem not in ("api", "configuration", "recipes")]
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in guides) <= 30_000


def test_routes_through_the_code_name_what_exists() -> None:
    """Limits the number of files per route."""
    section = (
        (ROOT / "docs" / "how_it_works.md").read_text(encoding="utf-8").split("## Three routes through the code")[1]
    )
    routes = [re.findall(r"^- `([\w/]+\.py):([\w.]+)`", part, re.MULTILINE) for part in section.split("**")[2:7:2]]
    limits = (35, 25, 15)
    for route, limit in zip(routes, limits, strict=True):
        assert 0 < len({file for file, _ in route}) <= limit
        for file, name in route:
            nodes: list[ast.stmt] = ast.parse((ROOT / "bert" / file).read_text(encoding="utf-8")).body
            for part in name.split("."):
                defined = [node for node in nodes if part in _defined_names(node)]
                assert defined, f"{file} has no {name}"
                nodes = getattr(defined[0], "body", [])


def _defined_names(node: ast.stmt) -> set[str]:
    targets = [*getattr(node, "targets", []), getattr(node, "target", None)]
    return {getattr(node, "name", ""), *(target.id for target in targets if isinstance(target, ast.Name))}


def test_pages_that_files_name_exist() -> None:
    there = {path.name for folder in (ROOT, ROOT / "docs", ROOT / "benchmarks") for path in folder.glob("*.md")}
    files = [file for part in PARTS for file in (ROOT / part).rglob("*") if file.suffix in TEXTS and file.is_file()]
    assert len(files) > 200
    for file in files:
        named = set(re.findall(r"\b[A-Z]+\.md\b", file.read_text(encoding="utf-8")))
        assert named <= there, f"{file.relative_to(ROOT)}: {named - there}"


def test_what_is_yaml_is_read() -> None:
    count = 0
    for page in PAGES:
        for text in re.findall(r"^```yaml\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
            count += len(list(yaml.safe_load_all(text)))
    assert count >= 5


def test_hosts_are_launched_with_options_that_exist() -> None:
    """Includes commands inside other programs' arguments: Slurm's script, gcloud's command, the pods of a Job."""
    page = (ROOT / "docs" / "devices.md").read_text(encoding="utf-8")
    hosts = page[page.index("\n## Several hosts") :]
    launched = re.findall(r"bert pretrain --config base.*?(?:auto|PROCID|COMPLETION_INDEX)\b", hosts, re.DOTALL)
    assert len(launched) == 5
    for text in launched:
        assert set(re.findall(r"--[a-z][\w.]*", text)) <= options_of("pretrain"), text


def test_the_readme_is_a_screen_and_with_the_index_links_every_guide() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 90
    assert "(docs/index.md)" in readme
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "index.md" or f"(docs/{page.name})" in readme or f"({page.name})" in index, page.name


def lengths_of_sentences(page: Path) -> list[int]:
    """Words of each sentence of prose, lists and tables; an inline code is one word."""
    text = re.sub(r"^```.*?^```|<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(
        r"!?\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "Code", re.sub(r"^#.*$", "", text, flags=re.MULTILINE))
    )
    blocks = re.split(r"\n\s*\n|\n(?=\s*[-*] |\s*\d+\. )|\|", text)
    sentences = (part for block in blocks for part in re.split(r"(?<=[.:;?!])\s+(?=[A-Z*(])", " ".join(block.split())))
    return [len(sentence.split()) for sentence in sentences if re.search(r"\w", sentence)]


def test_sentences_are_short() -> None:
    lengths = {page: lengths_of_sentences(page) for page in PAGES}
    assert {page.name: max(of_page) for page, of_page in lengths.items() if max(of_page) > 35} == {}
    assert np.mean([length for of_page in lengths.values() for length in of_page]) <= 18


def run_python(page: str, mark: str, replaced: dict[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict:
    """Runs the block below a mark in a folder with the pages, and returns its names."""
    code = python_block(page, mark)
    for old, new in replaced.items():
        assert old in code
        code = code.replace(old, new)
    (folder / "docs").symlink_to(ROOT / "docs")
    monkeypatch.chdir(folder)
    names: dict = {}
    exec(compile(code, page, "exec"), names)
    return names


def python_block(page: str, mark: str) -> str:
    """The code of the block below a mark."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return text.split(f"<!-- {mark} -->\n```python\n")[1].split("```")[0]


MINILM = "sentence-transformers/all-MiniLM-L6-v2"


@pytest.mark.slow
def test_the_search_in_the_documentation_runs(pretrained: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    names = run_python("search.md", "search", {MINILM: str(pretrained)}, tmp_path, monkeypatch)
    assert names["found"].indices.shape == (3, 2)
    assert len(capsys.readouterr().out.splitlines()) == 9
    assert len(names["titles"]) > 100


@pytest.mark.slow
def test_the_groups_and_paraphrases_in_the_documentation_are_found(
    pretrained: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    names = run_python("search.md", "groups", {MINILM: str(pretrained)}, tmp_path, monkeypatch)
    assert sorted(set(names["groups"])) == [0, 1, 2]
    assert len(capsys.readouterr().out.splitlines()) == 3
    exec(python_block("search.md", "paraphrases"), names)
    assert len(capsys.readouterr().out.splitlines()) == len(names["pairs"]) >= 3
    assert all(first < second for first, second in names["pairs"])


@pytest.mark.slow
def test_the_training_on_the_documentation_runs(pretrained: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    small = {MINILM: str(pretrained), '"training.epochs": 2': '"training.epochs": 1, "data.max_length": 32'}
    names = run_python("embeddings.md", "train", small, tmp_path, monkeypatch)
    assert set(names["run"].results["dev"]) == {"loss", "ndcg_at_10", "mrr_at_10", "recall_at_10"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.stem, marks=[pytest.mark.slice] if page.stem in FIRST_PAGES else [])
        for page in sorted({block.page for block in BLOCKS if block.mark == RUNS})
    ],
)
def test_what_is_marked_as_running_runs(page: Path, corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    shutil.copy(corpus, tmp_path / "corpus" / "some.txt")
    shutil.copy(corpus, tmp_path / "held_out.txt")
    if page.name == "README.md":  # for the reader of a clone
        shutil.rmtree(tmp_path / "corpus")
        (tmp_path / "docs").symlink_to(ROOT / "docs")
    for block in blocks_of(page):
        if block.mark == RUNS:
            output = run_as_a_user(tmp_path, block.text)
            if page.name == "README.md":
                assert '"text": "send the invoice again", "label": "billing"' in output


@pytest.mark.slow
@pytest.mark.slice
def test_a_plain_install_runs_what_the_guides_show(corpus: Path, tmp_path: Path) -> None:
    """The commands and the reader that no block marked as running has."""
    shutil.copy(corpus, tmp_path / "some.txt")
    (tmp_path / "train.csv").write_text("text,label\n" + "ba ri,a\nko tu,b\n" * 8)
    shutil.copy(tmp_path / "train.csv", tmp_path / "dev.csv")
    (tmp_path / "texts.txt").write_text("ba ri\nko tu\n")
    run_as_a_user(tmp_path, "".join(f"bert {command} --help > /dev/null\n" for command in COMMANDS))
    small = shlex.join(SMALL_MODEL[:-1])  # with room for the 128 tokens of the guide's reader
    run_as_a_user(tmp_path, f"""
        bert finetune --config classification --init none --data.dir . --output_dir run {small} --data.max_length 16 \\
          --tokenizer.vocab_size 64 --tokenizer.min_frequency 1 --training.steps 2 --training.epochs null \\
          --optimizer.warmup_steps 1
        test $(bert predict run texts.txt | wc -l) = 2
        bert inspect run
        bert compare run --output curves.png
        bert attention run "ba ri" --output heads.html
        bert attention run "ba ri" --output heads.png
        bert export run hf --format hf
        bert export run sst2-jax --format stablehlo --length 128
        bert plan --config tiny --memory 16GiB {small} --data.sequence_length 16 --training.batch_size 8 --phases null
    """)  # fmt: skip
    page = (ROOT / "docs" / "export_and_serve.md").read_text(encoding="utf-8")
    [reader] = [block.split("```")[0] for block in page.split("```python\n") if block.startswith("import jax")]
    run_as_a_user(tmp_path, f"python3 - <<'END'\nimport sys\n{reader}assert 'bert' not in sys.modules\nEND")


def run_as_a_user(folder: Path, text: str) -> str:
    """Runs shell lines in which ``bert`` and ``python3`` use $BERT_INSTALLED, or else this interpreter.

    Returns stdout.
    """
    installed = os.environ.get("BERT_INSTALLED")
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    for name, options in (("bert", " -m bert"), ("python3", "")):
        (programs / name).write_text(f'#!/bin/sh\nexec {shlex.quote(installed or sys.executable)}{options} "$@"\n')
        (programs / name).chmod(0o755)
    environment = {
        name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "PYTHONPATH", "BERT_NUM_DEVICES")
    }
    environment |= {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    if not installed:
        environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout
