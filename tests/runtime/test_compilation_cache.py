"""The compilation cache of JAX persists between processes and changes no results."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from jax._src.lru_cache import LRUCache

from bert.commands import main
from bert.runtime.compilation_cache import ENV_VAR, use_compilation_cache

SETTINGS = ("JAX_COMPILATION_CACHE_DIR", "JAX_COMPILATION_CACHE_MAX_SIZE", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")
ROOT = Path(__file__).parents[2]

PROGRAM = """
import hashlib, os
from bert.runtime.compilation_cache import use_compilation_cache
print(use_compilation_cache())
import jax, jax.numpy as jnp
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name) if name.endswith("cache_hits") else None)
x = jnp.linspace(0, 1, 4096).reshape(64, 64)
y = jax.jit(jax.grad(lambda x: jnp.sum(jnp.tanh(x @ x.T) ** 2)))(x)
print(hashlib.sha256(y.tobytes()).hexdigest())
print(len(hits) > 0, jax.config.jax_compilation_cache_max_size)
"""


@pytest.fixture
def settings(monkeypatch):
    """An environment without the tests' compilation cache or any other one."""
    for name in (*SETTINGS, ENV_VAR):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    yield monkeypatch
    for name in SETTINGS:
        os.environ.pop(name, None)  # what was set, so that monkeypatch puts back what was there


def test_it_lies_in_the_users_cache_folder_and_is_bounded(settings, tmp_path):
    settings.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = use_compilation_cache()
    assert folder.parent == tmp_path / "bert-jax" / "compiled"
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == str(folder)
    assert 2**28 <= int(os.environ["JAX_COMPILATION_CACHE_MAX_SIZE"]) <= 2**33
    assert not folder.exists()  # nothing is written before something is compiled


def test_it_moves_and_turns_off(settings, tmp_path):
    settings.setenv(ENV_VAR, "off")
    assert use_compilation_cache() is None
    assert not set(SETTINGS) & set(os.environ)
    settings.setenv(ENV_VAR, str(tmp_path / "elsewhere"))
    assert use_compilation_cache().parent == tmp_path / "elsewhere"


def test_jaxs_own_settings_stay(settings, tmp_path):
    settings.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    assert use_compilation_cache() is None
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == str(tmp_path)
    settings.delenv("JAX_COMPILATION_CACHE_DIR")
    settings.setenv("JAX_COMPILATION_CACHE_MAX_SIZE", "1000")
    assert use_compilation_cache() is not None
    assert os.environ["JAX_COMPILATION_CACHE_MAX_SIZE"] == "1000"


def test_a_default_folder_that_cannot_be_written_is_done_without(settings, tmp_path):
    (tmp_path / "file").write_text("in the way")
    settings.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert use_compilation_cache() is None
    assert "JAX_COMPILATION_CACHE_DIR" not in os.environ


def test_a_user_without_a_home_does_without(settings):
    def home():
        raise RuntimeError("Could not determine home directory.")

    settings.delenv("XDG_CACHE_HOME", raising=False)
    settings.setattr(Path, "home", home)
    assert use_compilation_cache() is None
    assert "JAX_COMPILATION_CACHE_DIR" not in os.environ


def killed_between_its_writes(folder):
    """A cache of JAX's with a whole program, and one whose time of last use is missing."""
    cache = LRUCache(str(folder), max_size=10**6)
    cache.put("whole", b"program")
    (folder / "half-cache").write_bytes(b"prog")
    return cache


def test_what_a_kill_left_half_written_is_removed_at_the_start(settings, tmp_path):
    settings.setenv(ENV_VAR, str(tmp_path))
    folder = use_compilation_cache()
    for name in SETTINGS:
        settings.delenv(name)
    cache = killed_between_its_writes(folder)
    assert use_compilation_cache() == folder
    assert {path.name for path in folder.iterdir()} == {"whole-cache", "whole-atime", ".lockfile"}
    cache.put("half", b"program")  # else it stays as it is, or JAX fails
    assert cache.get("half") == b"program"


def test_what_another_process_is_writing_stays(settings, tmp_path):
    settings.setenv(ENV_VAR, str(tmp_path))
    settings.setattr("bert.runtime.compilation_cache.LOCK_SECONDS", 0.05)
    folder = use_compilation_cache()
    for name in SETTINGS:
        settings.delenv(name)
    with killed_between_its_writes(folder).lock:
        assert use_compilation_cache() == folder
    assert (folder / "half-cache").is_file()


def test_an_unbounded_cache_has_no_times_of_use_and_stays(settings, tmp_path):
    settings.setenv(ENV_VAR, str(tmp_path))
    settings.setenv("JAX_COMPILATION_CACHE_MAX_SIZE", "-1")
    folder = use_compilation_cache()
    LRUCache(str(folder), max_size=-1).put("whole", b"program")
    settings.delenv("JAX_COMPILATION_CACHE_DIR")
    assert use_compilation_cache() == folder
    assert (folder / "whole-cache").is_file()


def test_a_named_folder_that_cannot_be_written_is_one_sentence(settings, tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    settings.setenv(ENV_VAR, str(tmp_path / "file" / "cache"))
    assert main(["pretrain", "--print_config"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {ENV_VAR} is ") and error.endswith("name another folder, or off\n")


def test_a_folder_that_jax_was_given_stays(settings, tmp_path):
    settings.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = SimpleNamespace(jax_compilation_cache_dir="elsewhere")
    settings.setitem(sys.modules, "jax", SimpleNamespace(config=config))
    assert use_compilation_cache() is None
    assert "JAX_COMPILATION_CACHE_DIR" not in os.environ


def run(cache, program, *arguments):
    """Words that a program prints in a process with an empty environment of JAX."""
    environment = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    environment |= {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(cache)}
    environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


LOADED = """
import sys
import bert, jax
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name) if name.endswith("cache_hits") else None)
bert.load(sys.argv[1]).embed("ba ko")
print(len(hits) > 0)
"""


@pytest.mark.slow
def test_a_loaded_model_answers_with_what_another_process_has_compiled(pretrained, tmp_path):
    assert [run(tmp_path, LOADED, str(pretrained)) for _ in range(2)] == [["False"], ["True"]]


@pytest.mark.slow
def test_another_process_finds_what_one_has_compiled_with_the_same_bits(tmp_path):
    (folder, first, hit, size), (_, second, hit_then, _) = run(tmp_path, PROGRAM), run(tmp_path, PROGRAM)
    assert (hit, hit_then) == ("False", "True")
    assert first == second
    assert int(size) == 2 * 2**30
    assert any(file.name.endswith("-cache") for file in Path(folder).iterdir())
