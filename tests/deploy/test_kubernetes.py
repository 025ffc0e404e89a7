# SPDX-License-Identifier: MIT
"""The Kubernetes manifests: valid by schema, locked down, and of commands that exist."""

import copy
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from deploy.components import nightly, train
from pipelines.run import _parser as pipelines_parser
from tests.support.manifests import check, templates
from trainer.config.command_line import apply_overrides
from trainer.recipes.load import load_recipe

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
# The oldest version whose podFailurePolicy is stable, and the newest with a schema.
VERSIONS = ("1.31", "1.37")


def documents() -> list[dict[str, Any]]:
    texts = [path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.yaml"))]
    return [document for text in texts for document in yaml.safe_load_all(text)]


def named(kind: str) -> dict[str, Any]:
    (found,) = [document for document in documents() if document["kind"] == kind]
    return copy.deepcopy(found)


PODS = [(one["kind"], pod) for one in documents() for pod in templates(one)]
each_pod = pytest.mark.parametrize("pod", [pod for _, pod in PODS], ids=[kind for kind, _ in PODS])


@pytest.mark.parametrize("version", VERSIONS)
def test_every_manifest_is_valid_by_its_schema(version: str) -> None:
    found = documents()
    assert [one["kind"] for one in found] == ["CronJob"] + ["PersistentVolumeClaim"] * 2 + ["Job"]
    for document in found:
        check(document, version)


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("CronJob", ("spec", "schedule"), 2),
        ("CronJob", ("spec", "jobTemplate", "spec", "backoffLimit"), "6"),
        ("CronJob", ("spec", "jobTemplate", "spec", "backofLimit"), 6),
        ("PersistentVolumeClaim", ("spec", "storage"), "1Gi"),
        ("Job", ("spec", "minAvailabel"), 2),
        ("Job", ("spec", "policies", 0, "action"), "Restart"),
        ("Job", ("spec", "tasks", 0, "template", "spec", "volumes"), {}),
        ("Job", ("spec", "tasks", 0, "template", "spec", "containers", 0, "img"), "fullrank:cpu"),
    ],
)
def test_the_schemas_find_a_wrong_field_and_a_wrong_value(
    kind: str, path: tuple[Any, ...], value: object
) -> None:
    document = next(one for one in documents() if one["kind"] == kind)
    place: Any = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        check(document, VERSIONS[-1])


@each_pod
def test_pods_are_locked_down(pod: dict[str, Any]) -> None:
    spec = pod["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] == 1000  # the image's user
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
    for container in spec["containers"]:
        lock = container["securityContext"]
        assert lock["readOnlyRootFilesystem"] is True
        assert lock["allowPrivilegeEscalation"] is False
        assert lock["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["requests"]["cpu"]
        asked, most = container["resources"]["requests"], container["resources"]["limits"]
        assert asked["memory"] == most["memory"]  # no pod is evicted for the memory it asked for


@each_pod
def test_pods_hold_no_secret_and_mount_only_claims_and_scratch(pod: dict[str, Any]) -> None:
    claims = {one["metadata"]["name"] for one in documents() if "Claim" in one["kind"]}
    volumes = {volume.pop("name"): volume for volume in copy.deepcopy(pod["spec"]["volumes"])}
    for volume in volumes.values():
        assert volume.keys() <= {"persistentVolumeClaim", "emptyDir"}
        if "emptyDir" in volume:
            assert volume["emptyDir"]["sizeLimit"]
        else:
            assert volume["persistentVolumeClaim"]["claimName"] in claims
    for container in pod["spec"]["containers"]:
        assert {variable["name"] for variable in container["env"]} == {"HOME", "OMP_NUM_THREADS"}
        assert [list(source) for source in container["envFrom"]] == [["secretRef"]]
        assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
        assert "/tmp" in {mount["mountPath"] for mount in container["volumeMounts"]}


def run_script(pod: dict[str, Any], folder: Path, **variables: str) -> list[list[str]]:
    """Run a pod's script with a `python` that only prints its words; return each call's."""
    (container,) = pod["spec"]["containers"]
    assert container["command"] == ["bash", "-c"]
    python = folder / "python"
    python.write_text('#!/bin/sh\nprintf "%s\\037" "$@"; echo\n')
    python.chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", **variables}
    command = [*container["command"], *container["args"]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return [line.split("\037")[:-1] for line in done.stdout.splitlines()]


def test_the_night_catches_up_and_its_options_are_those_of_the_pipeline() -> None:
    (pod,) = templates(named("CronJob"))
    (container,) = pod["spec"]["containers"]
    assert container["command"] == ["python", "-m", "pipelines.run", "nightly"]
    options = pipelines_parser().parse_args(["nightly", *container["args"]])
    assert (options.date, options.raw) == ("new", "data")
    assert load_recipe(options.recipe)
    assert options.overrides == ["--data.schema", "data/schema.yaml"]
    assert options.topology == f"1x{container['resources']['requests']['cpu']}"
    # As the component would start it.
    (role,) = nightly(recipe=options.recipe, raw="data", output="runs/nights", j="1x4").roles
    assert f"-m pipelines.run nightly {shlex.join(container['args'][:10])}" in role.args[1]


def test_nights_do_not_overlap_and_give_up_in_time() -> None:
    cron = named("CronJob")["spec"]
    assert cron["concurrencyPolicy"] == "Forbid"
    assert cron["timeZone"] == "Etc/UTC"  # days of the log are UTC
    job = cron["jobTemplate"]["spec"]
    assert job["template"]["spec"]["restartPolicy"] == "Never"  # podFailurePolicy wants it
    assert job["activeDeadlineSeconds"] <= 24 * 3600
    rules = {rule["action"]: rule for rule in job["podFailurePolicy"]["rules"]}
    # 1 (failed) and 5 (another run holds the lock) are worth another try: the pauses of all tries
    # are longer than a dead run's lock lives.
    assert rules["FailJob"]["onExitCodes"]["values"] == [2, 3, 4]
    assert sum(10 * 2**attempt for attempt in range(job["backoffLimit"])) > 300


def test_nodes_of_a_volcano_job_find_node_0_and_start_the_trainer(tmp_path: Path) -> None:
    job = named("Job")
    (task,) = job["spec"]["tasks"]
    assert job["spec"]["minAvailable"] == task["replicas"] == 2
    hosts = {"VC_NODE_HOSTS": "j-node-0.j,j-node-1.j"}  # VC_<task>_HOSTS, by the plugins env, svc
    assert {"env", "svc"} <= job["spec"]["plugins"].keys() and task["name"] == "node"
    (first,) = run_script(task["template"], tmp_path, **hosts, VC_TASK_INDEX="0")
    waits, second = run_script(task["template"], tmp_path, **hosts, VC_TASK_INDEX="1")
    assert waits == ["-m", "deploy.wait", "j-node-0.j", "29500", "--seconds", "600"]
    cut = first.index("trainer.train")
    assert first[cut - 1 :] == second[cut - 1 :]
    assert first[first.index("--rdzv-endpoint") + 1] == "localhost:29500"
    assert second[second.index("--rdzv-endpoint") + 1] == "j-node-0.j:29500"
    assert first[first.index("--nnodes") + 1] == str(task["replicas"])
    config = apply_overrides(load_recipe(first[cut + 1]), first[cut + 4 :])
    assert config.data.path == "data"
    annotations = task["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(config.export.port)
    (container,) = task["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"c10d": 29500, "metrics": config.export.port}
    # As torchx would start it, but for the launcher's own options.
    (role,) = train(recipe=first[cut + 1], output=first[cut + 3], j="2x4").roles
    assert shlex.join(first[cut - 1 : cut + 4]) in role.args[1]
