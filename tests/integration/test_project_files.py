"""The files for GitHub, pre-commit, citations and Docker agree with pyproject.toml."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / ".github").is_dir(), reason="not a clone")


@pytest.fixture(scope="module")
def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def read_yaml(path):
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def test_each_job_of_continuous_integration_is_one_script():
    jobs = read_yaml(".github/workflows/ci.yml")["jobs"].values()
    steps = [[step["run"] for step in job["steps"] if "run" in step] for job in jobs]
    assert steps == [[".ci/run"], [".ci/versions ${{ matrix.resolution }}"]]
    for script in (".ci/run", ".ci/versions"):
        assert (ROOT / script).stat().st_mode & 0o111


def test_the_oldest_python_is_tested_with_the_lowest_versions(project):
    _, job = read_yaml(".github/workflows/ci.yml")["jobs"].values()
    oldest = project["requires-python"].removeprefix(">=")
    assert {"python": oldest, "resolution": "lowest-direct"} in job["strategy"]["matrix"]["include"]


def test_issue_forms_ask_for_files_that_a_run_has():
    for name in ("bug", "feature"):
        form = read_yaml(f".github/ISSUE_TEMPLATE/{name}.yml")
        assert {"name", "description", "body"} <= form.keys()
        ids = [field["id"] for field in form["body"]]
        assert len(ids) == len(set(ids))


def test_pre_commit_has_the_ruff_of_the_tests(project):
    [local] = [repo for repo in read_yaml(".pre-commit-config.yaml")["repos"] if repo["repo"] == "local"]
    wanted = next(text for text in project["optional-dependencies"]["dev"] if text.startswith("ruff"))
    found = [hook["additional_dependencies"] for hook in local["hooks"] if hook["id"].startswith("ruff")]
    assert found == [[wanted], [wanted]]


def test_the_citation_has_version_and_license(project):
    citation = read_yaml("CITATION.cff")
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])


def test_the_image_has_extras_that_exist(project):
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    named = re.search(r"with commas between several: (.*)\.", text)[1].split(", ")
    assert set(named) <= project["optional-dependencies"].keys()
    copied = re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE)
    sources = [name for line in copied for name in line.split()]
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert all((ROOT / name).exists() and f"!{name}" in ignored for name in sources)
