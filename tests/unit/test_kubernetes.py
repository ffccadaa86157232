"""The manifest and the container file hold together: with each other, with the checkout, with the flags."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from clap_zero.config.flags import read_flags

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "launch" / "kubernetes"
CONTAINERFILE = (FOLDER / "Containerfile").read_text()


@pytest.fixture(scope="module")
def job() -> dict[str, Any]:
    return yaml.safe_load((FOLDER / "pytorchjob.yaml").read_text())


@pytest.fixture(scope="module")
def container(job: dict[str, Any]) -> dict[str, Any]:
    return job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]


def test_it_is_a_job_of_the_operator(job: dict[str, Any]) -> None:
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert set(replicas) == {"Master", "Worker"}
    assert replicas["Master"]["replicas"] == 1
    assert replicas["Master"]["template"] == replicas["Worker"]["template"]
    assert {one["restartPolicy"] for one in replicas.values()} == {"OnFailure"}


def test_ranks_and_gpus_agree(job: dict[str, Any], container: dict[str, Any]) -> None:
    assert container["name"] == "pytorch"
    assert int(job["spec"]["nprocPerNode"]) == container["resources"]["limits"]["nvidia.com/gpu"]


def test_every_mount_has_a_volume(job: dict[str, Any], container: dict[str, Any]) -> None:
    volumes = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["volumes"]
    assert {one["name"] for one in volumes} == {one["name"] for one in container["volumeMounts"]}


def test_the_command_is_one_that_the_program_accepts(container: dict[str, Any]) -> None:
    assert container["command"][:3] == ["torchrun", "-m", "clap_zero.train"]
    flags = read_flags(container["command"][3:])
    assert (ROOT / flags.values["ds_config"]).is_file()


def test_no_secret_stands_in_the_manifest(container: dict[str, Any]) -> None:
    assert [one["name"] for one in container["env"] if "value" not in one] == ["WANDB_API_KEY"]
    assert [one["name"] for one in container["env"] if "KEY" in one["name"] and "value" in one] == []


def test_the_image_holds_what_the_installation_needs(job: dict[str, Any]) -> None:
    copied = [source for line in re.findall(r"^COPY (.*)$", CONTAINERFILE, re.M) for source in line.split()[:-1]]
    assert [source for source in copied if not (ROOT / source).exists()] == []
    assert {"pyproject.toml", "hatch_build.py", "packaging", "clap_zero", "examples", "ds_configs"} <= set(copied)
    user = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["securityContext"]["runAsUser"]
    assert f"--uid {user} " in CONTAINERFILE
