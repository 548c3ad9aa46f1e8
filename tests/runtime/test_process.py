"""The allocator of the C library, closed standard streams, and names that are not UTF-8."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bert.runs.metrics_log import MetricsLog
from bert.runs.plots import plot_curves
from bert.runtime import process
from bert.runtime.process import _huge_pages_on_demand, is_accelerator_visible, reexec_with_huge_pages

REPOSITORY = Path(__file__).parents[2]

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")

HEAPS = """
import ctypes, os, threading
from pathlib import Path
from bert.runtime.process import release_free_memory, limit_malloc_arenas

limit_malloc_arenas()
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fopen.restype = ctypes.c_void_p
libc.malloc.argtypes, libc.malloc_info.argtypes = [ctypes.c_size_t], [ctypes.c_int, ctypes.c_void_p]
libc.free.argtypes = libc.fclose.argtypes = [ctypes.c_void_p]
count = 16 * (os.cpu_count() or 1)
together = threading.Barrier(count)

def use():
    kept = libc.malloc(1000)
    together.wait()
    libc.free(kept)

threads = [threading.Thread(target=use) for _ in range(count)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
file = libc.fopen(b"heaps.xml", b"w")
libc.malloc_info(0, file)
libc.fclose(file)
print(Path("heaps.xml").read_text().count("<heap "), os.cpu_count())
"""


def heaps(folder, **environment):
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **environment}
    command = [sys.executable, "-c", HEAPS]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    return tuple(map(int, done.stdout.split()))


@LINUX
def test_many_threads_share_few_heaps(tmp_path):
    result, cores = heaps(tmp_path)
    assert 1 <= result <= 2 * cores
    more, cores = heaps(tmp_path, MALLOC_ARENA_MAX=str(3 * cores))
    assert 2 * cores < more <= 3 * cores  # the environment decides


STARTS = """
import os, sys
print("starts")
from bert.runtime.process import reexec_with_huge_pages
reexec_with_huge_pages()
print(os.environ.get("GLIBC_TUNABLES"), sys.argv[1:], sys.stdin.read())
"""


def starts(folder, tunables, **more):
    (folder / "program.py").write_text(STARTS)
    environment = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    environment |= {"PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu", **more}
    environment |= {} if tunables is None else {"GLIBC_TUNABLES": tunables}
    command = [sys.executable, "-u", str(folder / "program.py"), "an argument", "--another"]
    done = subprocess.run(command, env=environment, input="text", capture_output=True, text=True, check=True)
    *began, last = done.stdout.splitlines()
    setting, _, rest = last.partition(" ")
    assert rest == "['an argument', '--another'] text"
    return len(began), setting


@pytest.mark.medium
@pytest.mark.skipif(not _huge_pages_on_demand(), reason="no huge pages on demand here")
def test_a_program_starts_anew_with_huge_pages_and_once(tmp_path):
    assert starts(tmp_path, None) == (2, "glibc.malloc.hugetlb=1")
    assert starts(tmp_path, "glibc.malloc.arena_max=3") == (2, "glibc.malloc.arena_max=3:glibc.malloc.hugetlb=1")
    assert starts(tmp_path, "glibc.malloc.hugetlb=0") == (1, "glibc.malloc.hugetlb=0")  # the environment decides
    assert starts(tmp_path, None, BERT_NO_REEXEC="1") == (1, "None")
    assert starts(tmp_path, None, JAX_PLATFORMS="cuda,cpu") == (1, "None")


@pytest.mark.parametrize(
    ("files", "variables", "visible"),
    [
        ([], {}, False),
        (["nvidiactl", "vfio/vfio"], {}, False),
        (["nvidia0"], {}, True),
        (["nvidia0"], {"CUDA_VISIBLE_DEVICES": ""}, False),
        (["nvidia0"], {"JAX_PLATFORMS": "cpu"}, False),
        (["accel0"], {}, True),
        (["vfio/0"], {}, True),
        ([], {"TPU_NAME": "local"}, True),
        ([], {"JAX_PLATFORMS": "tpu"}, True),
    ],
)
def test_accelerators_are_found_without_jax(tmp_path, monkeypatch, files, variables, visible):
    for name in ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES", *process._TPU_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setattr(process, "_DEVICES", tmp_path)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert is_accelerator_visible() == visible


@pytest.mark.parametrize("kernel", ["[always] madvise never", "always madvise [never]", None])
def test_nothing_happens_where_it_would_change_nothing(tmp_path, monkeypatch, kernel):
    file = tmp_path / "enabled"
    if kernel is not None:
        file.write_text(kernel)
    monkeypatch.setattr(process, "_KERNEL", file)
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("started again"))
    reexec_with_huge_pages()


@pytest.mark.medium
@pytest.mark.usefixtures("drawn")
def test_figures_do_not_pile_up(tmp_path):
    with MetricsLog(tmp_path, 0) as log:
        log.write("train", 1, {"loss": 5.0, "learning_rate": 1e-4})
    plot_curves(tmp_path)
    gc.collect()
    gc.disable()
    try:
        plot_curves(tmp_path)
        assert gc.collect() < 100  # one figure is some thousands
    finally:
        gc.enable()


ROOT = Path(__file__).parents[2]
READ = """
import sys
from bert.runtime.process import is_stdout_closed, prepare_streams
prepare_streams()
print("for people", file=sys.stderr)
print("an answer", ascii(sys.stdin.read()), is_stdout_closed())
"""


def run(redirection: str, program: str = READ, **variables: str) -> tuple[str, str]:
    """Standard output and standard error of a program. The shell's redirections come last."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    command = ["sh", "-c", f'exec "$0" -c "$1" {redirection}', sys.executable, program]
    ended = subprocess.run(command, input=b"typed", capture_output=True, check=True, env=environment, cwd=ROOT)
    return ended.stdout.decode(), ended.stderr.decode()


@pytest.mark.parametrize(
    ("redirection", "printed", "said"),
    [
        ("", "an answer 'typed' False\n", "for people\n"),
        ("<&-", "an answer '' False\n", "for people\n"),
        (">&-", "", "for people\n"),
        ("2>&-", "an answer 'typed' False\n", ""),
        ("<&- >&- 2>&-", "", ""),
    ],
)
def test_closed_streams_are_empty_and_mix_nothing(redirection: str, printed: str, said: str) -> None:
    assert run(redirection) == (printed, said)


def test_names_that_are_not_utf_8_are_printed() -> None:
    program = "from bert.runtime.process import prepare_streams; prepare_streams(); print('caf\\udce9')"
    assert run("", program, PYTHONIOENCODING="utf-8:strict")[0] == "caf\\udce9\n"


@pytest.mark.medium
def test_answers_without_an_output_are_one_sentence(tmp_path: Path) -> None:
    program = """
import contextlib, sys
from bert.commands.cli.answers import open_output
from bert.errors import UserError
from bert.runtime.process import prepare_streams
prepare_streams()
try:
    with open_output(None):
        pass
except UserError as error:
    print(error, file=sys.stderr)
"""
    assert "standard output is closed" in run(">&-", program)[1]
