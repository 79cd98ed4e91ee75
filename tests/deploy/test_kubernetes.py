# SPDX-License-Identifier: Apache-2.0
"""Test the manifest in ``deploy/kubernetes``: the schemas of Kubernetes accept it, and its parts fit together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from kvoffload.specs import read_config
from kvoffload.tiering.options import parse_tiers
from kvoffload.units import parse_bytes

MANIFEST = Path(__file__).parents[2] / "deploy/kubernetes/vllm.yaml"
DOCUMENTS = list(yaml.safe_load_all(MANIFEST.read_text()))


def of_kind(kind: str) -> Any:
    (found,) = [document for document in DOCUMENTS if document["kind"] == kind]
    return found


CLAIM = of_kind("StatefulSet")["spec"]["volumeClaimTemplates"][0]
POD = of_kind("StatefulSet")["spec"]["template"]["spec"]
(SERVER,) = POD["containers"]
(CHECK,) = POD["initContainers"]
CONFIG = read_config(yaml.safe_load(of_kind("ConfigMap")["data"]["offload.yaml"]))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document["kind"])
def test_kubernetes_takes_it(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, "1.31", strict=True)


def test_the_checker_refuses_what_is_wrong() -> None:
    wrong = json.loads(json.dumps(of_kind("StatefulSet")))
    wrong["spec"]["template"]["spec"]["terminationGracePeriod"] = 90
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, "1.31", strict=True)


def test_the_server_has_time_to_write_what_only_host_memory_has() -> None:
    (timeout,) = [arg.partition("=")[2] for arg in SERVER["args"] if arg.startswith("--shutdown-timeout")]
    assert POD["terminationGracePeriodSeconds"] > float(timeout) > CONFIG.max_wait_s


def test_memory_and_disk_hold_what_the_configuration_asks_for() -> None:
    (shm,) = [volume["emptyDir"] for volume in POD["volumes"] if volume["name"] == "shm"]
    assert shm["medium"] == "Memory"
    limit_bytes = parse_bytes(SERVER["resources"]["limits"]["memory"])
    assert CONFIG.cpu_bytes < parse_bytes(shm["sizeLimit"]) < limit_bytes
    assert parse_bytes(CHECK["resources"]["limits"]["memory"]) == limit_bytes, "it is checked under the same limit"
    (disk,) = parse_tiers(CONFIG.secondary_tiers)
    assert disk.bound_bytes is not None
    assert disk.bound_bytes < parse_bytes(CLAIM["spec"]["resources"]["requests"]["storage"])


def test_each_path_is_mounted() -> None:
    mounts = {mount["name"]: mount["mountPath"] for mount in SERVER["volumeMounts"]}
    assert CHECK["volumeMounts"] == SERVER["volumeMounts"]
    assert mounts.keys() == {volume["name"] for volume in POD["volumes"]} | {CLAIM["metadata"]["name"]}
    variables = {each["name"]: each["value"] for each in SERVER["env"] if "value" in each}
    assert variables["KVOFFLOAD_CONFIG"] == f"{mounts['config']}/offload.yaml"
    assert CHECK["command"] == ["kvoffload", "check-config", f"{mounts['config']}/offload.yaml"]
    assert [tier.directories for tier in parse_tiers(CONFIG.secondary_tiers)] == [(mounts["kv"],)]
    assert mounts["shm"] == "/dev/shm"


def test_host_memory_may_be_locked() -> None:
    assert "IPC_LOCK" in SERVER["securityContext"]["capabilities"]["add"]
