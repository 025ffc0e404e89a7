# SPDX-License-Identifier: MIT
"""The doctor: every known mismatch is named with the pair that fits, and a crash is a finding."""

import json
import subprocess
import sys

import pytest

from trainer import doctor
from trainer.runtime import probes

FITTING = {"torch": "2.13.0+cpu", "torchrec": "1.8.0", "fbgemm-gpu-cpu": "1.8.0"}


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch):
    def pretend(**changes: str | None) -> None:
        versions = {**FITTING, **{name.replace("_", "-"): v for name, v in changes.items()}}
        monkeypatch.setattr(doctor, "installed_version", versions.get)

    return pretend


def only(findings: list[doctor.Finding]) -> doctor.Finding:
    (finding,) = findings
    return finding


def test_versions_that_fit_are_fine(install) -> None:
    install()
    assert only(doctor.check_versions()).state == "ok"


def test_fbgemm_of_another_torch_names_both_pairs_that_fit(install) -> None:
    install(fbgemm_gpu_cpu="1.6.0", torchrec="1.6.0")
    finding = only(doctor.check_versions())
    assert finding.state == "fail"
    assert "fbgemm-gpu-cpu 1.6.0 does not fit torch 2.13.0+cpu" in finding.detail
    assert "built against torch 2.11" in finding.detail
    assert "torch 2.13.0+cpu with fbgemm-gpu-cpu 1.8" in finding.remedy
    assert "torch 2.11 with fbgemm-gpu-cpu 1.6.0" in finding.remedy


def test_torchrec_of_another_fbgemm_is_named(install) -> None:
    install(torchrec="1.7.0")
    finding = only(doctor.check_versions())
    assert finding.state == "fail"
    assert "torchrec 1.7.0 does not fit fbgemm-gpu-cpu 1.8.0" in finding.detail
    assert "torchrec 1.8 with fbgemm-gpu-cpu 1.8.0" in finding.remedy


def test_both_builds_of_fbgemm_are_one_too_many(install) -> None:
    install(fbgemm_gpu="1.8.0")
    finding = only(doctor.check_versions())
    assert finding.state == "fail"
    assert "fbgemm-gpu and fbgemm-gpu-cpu are both installed" in finding.detail
    assert "make clean install" in finding.remedy


@pytest.mark.parametrize(
    ("missing", "named"),
    [("torch", "torch"), ("torchrec", "torchrec"), ("fbgemm_gpu_cpu", "fbgemm-gpu-cpu")],
)
def test_a_missing_package_is_named(install, missing: str, named: str) -> None:
    install(**{missing: None})
    finding = only(doctor.check_versions())
    assert finding.state == "fail"
    assert f"not installed: {named}" in finding.detail


def test_an_undefined_symbol_names_the_versions_found_and_those_that_fit(install) -> None:
    install(fbgemm_gpu_cpu="1.7.0")
    detail = "ImportError: fbgemm_gpu_py.so: undefined symbol: _ZN3c104impl3cow"
    finding = doctor.judge({"probe": "fbgemm_gpu", "state": "fail", "detail": detail})
    assert "Installed: torch 2.13.0+cpu, fbgemm-gpu-cpu 1.7.0, torchrec 1.8.0" in finding.remedy
    assert "fbgemm-gpu-cpu 1.8 and torchrec 1.8" in finding.remedy


def test_a_cuda_torch_without_cuda_libraries_is_shown_the_way_to_the_cpu_build(install) -> None:
    install(torch="2.13.0")
    message = "ImportError: libcudart.so.13: cannot open shared object file: No such file"
    assert "PIP_EXTRA_INDEX_URL" in doctor.diagnose(message)


def test_a_cuda_fbgemm_beside_a_cpu_torch_is_named(install) -> None:
    install(fbgemm_gpu="1.8.0", fbgemm_gpu_cpu=None)
    message = "OSError: libnvrtc.so.13: cannot open shared object file: No such file"
    assert "fbgemm-gpu is the CUDA build, torch 2.13.0+cpu is not" in doctor.diagnose(message)


def test_a_package_off_its_pin_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    found = doctor.installed_version
    monkeypatch.setattr(
        doctor, "installed_version", lambda name: "1.0" if name == "numpy" else found(name)
    )
    finding = only(doctor.check_pins())
    assert finding.state == "warn"
    assert "numpy 1.0 (pinned 2." in finding.detail


def test_an_old_python_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "OLDEST_PYTHON", (99, 0))
    finding = only(doctor.check_python())
    assert finding.state == "fail"
    assert "expected 99.0 or newer" in finding.detail


def test_a_probe_that_kills_its_process_is_a_finding_and_the_rest_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dies_at_b = (
        "import json, os, sys\n"
        "for name in sys.argv[1:]:\n"
        "    if name == 'b':\n"
        "        print('Segmentation fault', file=sys.stderr, flush=True); os.abort()\n"
        "    print(json.dumps({'probe': name, 'state': 'ok', 'detail': ''}), flush=True)\n"
    )
    run_child = doctor.run_child
    monkeypatch.setattr(doctor, "PROBES", dict.fromkeys("abc"))
    monkeypatch.setattr(
        doctor, "run_child", lambda command: run_child([command[0], "-c", dies_at_b, *command[3:]])
    )
    findings = doctor.check_probes()
    assert [(f.name, f.state) for f in findings] == [("a", "ok"), ("b", "fail"), ("c", "ok")]
    assert "the process died (exit status -6): Segmentation fault" in findings[1].detail


def test_a_probe_that_never_answers_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PROBE_TIMEOUT_SECONDS", 0.2)
    sleeper = [sys.executable, "-c", "import time; print('one', flush=True); time.sleep(60)"]
    ending, out, _ = doctor.run_child(sleeper)
    assert ending == "no answer in 0.2 s"
    assert out.strip() in ("one", "")


def test_an_import_error_becomes_an_answer() -> None:
    def broken() -> str:
        raise ImportError("libfoo.so: undefined symbol: bar\nmore")

    got = probes.answer("foo", broken)
    assert got == {
        "probe": "foo",
        "state": "fail",
        "detail": "ImportError: libfoo.so: undefined symbol: bar",
    }


def test_the_cause_that_a_package_hides_behind_its_own_error_is_told() -> None:
    def broken() -> str:
        try:
            raise OSError("foo.so: undefined symbol: bar")
        except OSError as error:
            raise ImportError("Could not load this library") from error

    assert probes.answer("foo", broken)["detail"] == (
        "ImportError: Could not load this library <- OSError: foo.so: undefined symbol: bar"
    )


def test_the_report_puts_each_way_out_below_its_line() -> None:
    findings = [
        doctor.Finding(name="python", state="ok", detail="3.11"),
        doctor.Finding(name="gloo", state="fail", detail="no network", remedy="use lo"),
    ]
    lines = doctor.report(findings).splitlines()
    assert lines[1].split() == ["fail", "gloo", "no", "network"]
    assert lines[2].strip() == "-> use lo"
    assert lines[3] == "This machine cannot train yet: 1 failed, 0 warned, 2 checked."


def test_a_way_out_of_several_failures_is_told_once() -> None:
    findings = [
        doctor.Finding(name=name, state="fail", detail="d", remedy="buy a GPU") for name in "ab"
    ]
    ways = [line.strip() for line in doctor.report(findings).splitlines() if "->" in line]
    assert ways == ["-> buy a GPU", "-> as above"]


@pytest.mark.parametrize(("state", "status"), [("ok", 0), ("warn", 0), ("fail", 1)])
def test_only_a_failure_gives_exit_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], state: str, status: int
) -> None:
    finding = doctor.Finding(name="x", state=state, detail="d")  # type: ignore[arg-type]
    monkeypatch.setattr(doctor, "examine", lambda: [finding])
    assert doctor.main(["--json"]) == status
    assert json.loads(capsys.readouterr().out) == [
        {"name": "x", "state": state, "detail": "d", "remedy": ""}
    ]


@pytest.mark.launch
def test_this_environment_is_fit_to_train() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trainer.doctor", "--json"],
        cwd=doctor.ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)}
    assert done.returncode == 0, done.stdout
    assert findings.keys() == {"python", "versions", "pins", *probes.PROBES}
