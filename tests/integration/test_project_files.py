"""The files for GitHub, pre-commit, citations and Docker agree with pyproject.toml."""

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted(ROOT.glob(".github/workflows/*.yml"))
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
    for script in (".ci/run", ".ci/versions", ".ci/wheel"):
        assert (ROOT / script).stat().st_mode & 0o111


def test_the_oldest_python_is_tested_with_the_lowest_versions(project):
    _, job = read_yaml(".github/workflows/ci.yml")["jobs"].values()
    oldest = project["requires-python"].removeprefix(">=")
    assert {"python": oldest, "resolution": "lowest-direct"} in job["strategy"]["matrix"]["include"]


def test_the_wheel_is_tested_with_each_python_and_the_lowest_versions(project):
    matrix = read_yaml(".github/workflows/wheel.yml")["jobs"]["wheel"]["strategy"]["matrix"]
    prefix = "Programming Language :: Python :: "
    assert matrix["python"] == [
        line.removeprefix(prefix) for line in project["classifiers"] if line.startswith(f"{prefix}3.")
    ]
    assert matrix["resolution"] == ["highest", "lowest-direct"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_and_jobs_have_a_limit(path):
    """A tag of an action can be moved to other code. A commit cannot."""
    used = re.findall(r"^ *-? ?uses: (?!\./)(.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert used
    assert [line for line in used if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line)] == []
    workflow = read_yaml(path)
    assert workflow["permissions"] == {"contents": "read"}
    assert all("timeout-minutes" in job for job in workflow["jobs"].values() if "uses" not in job)


def test_each_action_has_one_version():
    text = "".join(path.read_text(encoding="utf-8") for path in WORKFLOWS)
    pins = dict(re.findall(r"uses: ([\w/-]+)@(\w{40})", text))
    assert set(re.findall(r"uses: ([\w/-]+)@(\w{40})", text)) == set(pins.items())


@pytest.mark.parametrize("name", ["release", "site"])
def test_publishing_waits_for_a_variable_and_uses_no_password(name):
    text = (ROOT / f".github/workflows/{name}.yml").read_text(encoding="utf-8")
    job = yaml.safe_load(text)["jobs"]["publish"]
    assert re.match(r"vars\.PUBLISH_\w+ == 'true'", job["if"])
    assert job["permissions"]["id-token"] == "write"
    assert "secrets." not in text


def test_the_release_has_links_that_work_outside_the_repository(tmp_path):
    steps = read_yaml(".github/workflows/release.yml")["jobs"]["build"]["steps"]
    [command] = [step["run"] for step in steps if "README.md" in step.get("run", "")]
    shutil.copy(ROOT / "README.md", tmp_path)
    names = {"GITHUB_SERVER_URL": "https://github.com", "GITHUB_REPOSITORY": "me/mine", "GITHUB_REF_NAME": "v1.0"}
    subprocess.run(["bash", "-euo", "pipefail", "-c", command], cwd=tmp_path, env=os.environ | names, check=True)
    before, after = (
        re.findall(r"\]\(([^)]+)\)", (folder / "README.md").read_text(encoding="utf-8")) for folder in (ROOT, tmp_path)
    )
    for old, new in zip(before, after, strict=True):
        kind = "raw" if old.endswith(".png") else "blob"
        assert new == (old if old.startswith("https:") else f"https://github.com/me/mine/{kind}/v1.0/{old}")


def test_the_address_of_the_repository_is_in_one_place(project):
    """Once Repository is set in pyproject.toml, the failure of this test prints the README's badges."""
    address = project.get("urls", {}).get("Repository")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    if address is None:
        assert "badge" not in readme, "badges need an address: set Repository in [project.urls] of pyproject.toml"
        return
    badges = " ".join(
        f"[![{name}]({address}/actions/workflows/{file}.yml/badge.svg)]({address}/actions/workflows/{file}.yml)"
        for name, file in (("CI", "ci"), ("Wheel", "wheel"), ("Site", "site"))
    )
    assert f"# bert-jax\n\n{badges}\n" in readme, f"put this line below the title of README.md:\n{badges}"


def test_issue_forms_ask_for_files_that_a_run_has():
    for name in ("bug", "feature"):
        form = read_yaml(f".github/ISSUE_TEMPLATE/{name}.yml")
        assert {"name", "description", "body"} <= form.keys()
        ids = [field["id"] for field in form["body"]]
        assert len(ids) == len(set(ids))


def test_pre_commit_has_the_ruff_of_the_tests(project):
    [local] = [repo for repo in read_yaml(".pre-commit-config.yaml")["repos"] if repo["repo"] == "local"]
    requirement = next(text for text in project["optional-dependencies"]["dev"] if text.startswith("ruff"))
    dependencies = [hook["additional_dependencies"] for hook in local["hooks"] if hook["id"].startswith("ruff")]
    assert dependencies == [[requirement], [requirement]]


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
