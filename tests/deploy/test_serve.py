# SPDX-License-Identifier: MIT
"""The service's image and manifest: valid, locked down, and of a command that exists."""

import re
from pathlib import Path

import pytest
import yaml

from tests.support.manifests import check
from trainer import serve

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "serve"
DEPLOYMENT, SERVICE = yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text("utf-8"))


def test_the_manifest_is_valid_and_locked_down():
    for document in (DEPLOYMENT, SERVICE):
        check(document, "1.37")
    pod = DEPLOYMENT["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert SERVICE["spec"]["selector"] == DEPLOYMENT["spec"]["selector"]["matchLabels"]


def test_both_name_options_that_the_command_has(capsys):
    (container,) = DEPLOYMENT["spec"]["template"]["spec"]["containers"]
    image = (FOLDER / "Dockerfile").read_text("utf-8")
    (line,) = re.findall(r"^CMD (.*)$", image, re.M)
    with pytest.raises(SystemExit):
        serve.main(["--help"])
    text = capsys.readouterr().out
    for words in (container["command"], yaml.safe_load(line)):
        assert words[:3] == ["python", "-m", "trainer.serve"]
        assert all(word in text for word in words if word.startswith("--"))
    assert "USER fullrank" in image and "--no-deps" in image
