# SPDX-License-Identifier: MIT
"""Kubernetes manifests against the schemas of their kinds."""

from typing import Any

import jsonschema
import kubernetes_validate

NAME = {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
COUNT = {"type": "integer", "minimum": 0}
EVENTS = {"enum": ["*", "PodFailed", "PodEvicted", "PodPending", "TaskCompleted", "TaskFailed"]}
ACTIONS = {"enum": ["AbortJob", "RestartJob", "RestartTask", "TerminateJob", "CompleteJob"]}


def fields(required: list[str], **properties: Any) -> dict[str, Any]:
    """An object that has `required` fields and none but these."""
    shape = {"type": "object", "properties": properties, "required": required}
    return {**shape, "additionalProperties": False}


POLICIES = {
    "type": "array",
    "items": fields(
        ["action"], action=ACTIONS, event=EVENTS, events={"type": "array", "items": EVENTS}
    ),
}
# The fields that we and torchx use of Volcano's own kind, as its API reference describes them. Its
# pods are those of Kubernetes, and are checked as such.
VOLCANO_JOB = fields(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "batch.volcano.sh/v1alpha1"},
    kind={"const": "Job"},
    metadata={"type": "object"},
    spec=fields(
        ["schedulerName", "queue", "tasks"],
        schedulerName={"const": "volcano"},
        queue=NAME,
        minAvailable=COUNT,
        maxRetry=COUNT,
        ttlSecondsAfterFinished=COUNT,
        priorityClassName=NAME,
        policies=POLICIES,
        plugins={
            "type": "object",
            "additionalProperties": {"type": "array", "items": {"type": "string"}},
        },
        tasks={
            "type": "array",
            "minItems": 1,
            "items": fields(
                ["name", "replicas", "template"],
                name=NAME,
                replicas=COUNT,
                minAvailable=COUNT,
                maxRetry=COUNT,
                policies=POLICIES,
                template={"type": "object"},
            ),
        },
    ),
)


def templates(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The pods of a document."""
    if document["kind"] == "CronJob":
        return [document["spec"]["jobTemplate"]["spec"]["template"]]
    return [task["template"] for task in document["spec"].get("tasks", [])]


def check(document: dict[str, Any], version: str) -> None:
    """Validate a document and the pods of a Volcano job; unknown fields are errors."""
    if document["apiVersion"] != VOLCANO_JOB["properties"]["apiVersion"]["const"]:
        kubernetes_validate.validate(document, version, strict=True)
        return
    jsonschema.validate(document, VOLCANO_JOB)
    for pod in templates(document):
        kubernetes_validate.validate(
            {"apiVersion": "v1", "kind": "Pod", **pod}, version, strict=True
        )
