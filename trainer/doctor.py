# SPDX-License-Identifier: MIT
"""Say whether this machine can train, and if not what is at fault: `python -m trainer.doctor`.

Nearly every failed first start is one of two things: versions that do not fit each other (seen as
`undefined symbol`), or a build that does not fit the machine. The first is found from the installed
versions alone, without importing anything; the second by running each piece in a child process
(trainer/runtime/probes.py), since a broken native library may take its process down. Each finding
that is not fine names a way out. `--json` prints the findings as a list; exit status 1 on any
failure.
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from trainer.runtime.probes import PROBES
from trainer.runtime.program import Parser, program, quiet_pipe

ROOT = Path(__file__).resolve().parents[1]
OLDEST_PYTHON = (3, 11)
PROBE_TIMEOUT_SECONDS = 300
REINSTALL = "rebuild the environment from the pinned list: make clean install"
CPU_BUILD_OF_TORCH = (
    "install the CPU build of torch: point pip at an index that has it (PIP_EXTRA_INDEX_URL=...), "
    "then make clean install PLATFORM=cpu; or install the CUDA libraries as well: "
    "make clean install PLATFORM=gpu"
)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report: check, state, detail, and the remedy if there is one."""

    name: str
    state: Literal["ok", "warn", "fail"]
    detail: str
    remedy: str = ""


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def minor(version: str) -> tuple[int, int]:
    """Return (major, minor) of a version such as 2.13.0+cpu."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        raise ValueError(f"version: expected MAJOR.MINOR first, got {version!r}")
    return int(match[1]), int(match[2])


def fitting_fbgemm(torch: str) -> str:
    """Return the fbgemm (and torchrec) release that pairs with a torch: 1.X with 2.(X+5)."""
    return f"1.{minor(torch)[1] - 5}"


def fitting_torch(fbgemm: str) -> str:
    """Return the torch release that an fbgemm 1.X is built against: 2.(X+5)."""
    return f"2.{minor(fbgemm)[1] + 5}"


def check_python() -> list[Finding]:
    """Check the interpreter's version."""
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info >= OLDEST_PYTHON:
        return [Finding(name="python", state="ok", detail=f"{version}, {sys.executable}")]
    oldest = ".".join(map(str, OLDEST_PYTHON))
    detail = f"{version}; expected {oldest} or newer"
    remedy = f"make clean install PYTHON=/path/to/python{oldest}"
    return [Finding(name="python", state="fail", detail=detail, remedy=remedy)]


def check_versions() -> list[Finding]:
    """Check torch, fbgemm and torchrec against each other, from their metadata alone."""
    fault = find_version_fault()
    if fault:
        detail, remedy = fault
        return [Finding(name="versions", state="fail", detail=detail, remedy=remedy)]
    names = ("torch", *fbgemm_builds(), "torchrec")
    found = ", ".join(f"{name} {installed_version(name)}" for name in names)
    return [Finding(name="versions", state="ok", detail=f"{found} fit each other")]


def fbgemm_builds() -> list[str]:
    """Return which of the two distributions that install `fbgemm_gpu` are there."""
    return [name for name in ("fbgemm-gpu", "fbgemm-gpu-cpu") if installed_version(name)]


def find_version_fault() -> tuple[str, str] | None:
    """Return (what does not fit, the way out), or None where the three versions fit."""
    torch, torchrec, builds = (
        installed_version("torch"),
        installed_version("torchrec"),
        fbgemm_builds(),
    )
    if torch is None or torchrec is None or not builds:
        missing = [name for name, there in (("torch", torch), ("torchrec", torchrec)) if not there]
        missing += [] if builds else ["fbgemm-gpu-cpu (or fbgemm-gpu)"]
        return f"not installed: {', '.join(missing)}", REINSTALL
    if len(builds) == 2:
        return (
            "fbgemm-gpu and fbgemm-gpu-cpu are both installed; they share one import name "
            "(fbgemm_gpu) and overwrite each other's files, so neither works",
            f"{REINSTALL}. It passes --no-deps to pip: torchrec asks for fbgemm-gpu everywhere",
        )
    build, fbgemm = builds[0], installed_version(builds[0]) or ""
    fits = fitting_fbgemm(torch)
    if minor(fbgemm) != minor(fits):
        built_for = fitting_torch(fbgemm)
        return (
            f"{build} {fbgemm} does not fit torch {torch}: it is built against torch {built_for}",
            f"pairs that fit: torch {torch} with {build} {fits}, or torch {built_for} with "
            f"{build} {fbgemm}; {REINSTALL}",
        )
    if minor(torchrec) != minor(fbgemm):
        return (
            f"torchrec {torchrec} does not fit {build} {fbgemm}: the minor versions must be equal",
            f"the pair that fits: torchrec {fits} with {build} {fbgemm}; {REINSTALL}",
        )
    return None


def check_pins() -> list[Finding]:
    """Compare what is installed with the pinned list of the build of fbgemm that is installed."""
    platform = "gpu" if installed_version("fbgemm-gpu") else "cpu"
    path = ROOT / "requirements" / f"{platform}.txt"
    if not path.exists():
        detail = f"{path.name} not found beside the code; versions not compared"
        return [Finding(name="pins", state="warn", detail=detail)]
    pins = re.findall(r"^([A-Za-z0-9._-]+)==(\S+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    # A local label names the build, not the release: 2.13.0+cpu satisfies ==2.13.0.
    found = {name: (installed_version(name) or "missing").split("+")[0] for name, _ in pins}
    off = [f"{name} {found[name]} (pinned {pin})" for name, pin in pins if found[name] != pin]
    if not off:
        detail = f"all {len(pins)} packages are as requirements/{path.name} pins them"
        return [Finding(name="pins", state="ok", detail=detail)]
    detail = ", ".join(off[:5]) + (f" and {len(off) - 5} more" if len(off) > 5 else "")
    return [Finding(name="pins", state="warn", detail=detail, remedy=REINSTALL)]


def check_probes() -> list[Finding]:
    """Run every probe in a child process; after one that takes the child down, go on in another."""
    left, findings = list(PROBES), []
    while left:
        ending, out, errors = run_child([sys.executable, "-m", "trainer.runtime.probes", *left])
        answers = [json.loads(line) for line in out.splitlines() if line.startswith('{"probe"')]
        findings += [judge(answer) for answer in answers]
        left = left[len(answers) :]
        if left:
            detail = f"the process died ({ending}): {last_line(errors) or 'without a message'}"
            findings.append(judge({"probe": left.pop(0), "state": "fail", "detail": detail}))
    return findings


def run_child(command: list[str]) -> tuple[str, str, str]:
    """Run a command from the repository's root; return how it ended, its output and its errors."""
    try:
        child = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=PROBE_TIMEOUT_SECONDS
        )
    except subprocess.TimeoutExpired as expired:
        output = expired.stdout or b""
        text = output.decode(errors="replace") if isinstance(output, bytes) else output
        return f"no answer in {PROBE_TIMEOUT_SECONDS} s", text, ""
    return f"exit status {child.returncode}", child.stdout, child.stderr


def judge(answer: dict[str, str]) -> Finding:
    """Turn a probe's answer into a finding, with the way out that its message calls for."""
    state, detail = answer["state"], answer["detail"]
    if state == "ok":
        return Finding(name=answer["probe"], state="ok", detail=detail)
    remedy = answer.get("remedy") or diagnose(detail)
    state = "warn" if state == "warn" else "fail"
    return Finding(name=answer["probe"], state=state, detail=detail, remedy=remedy)


def diagnose(message: str) -> str:
    """Return the way out for an import or load error."""
    torch, builds = installed_version("torch"), fbgemm_builds()
    if "undefined symbol" in message and torch:
        found = ", ".join(f"{name} {installed_version(name)}" for name in (*builds, "torchrec"))
        build, fits = (builds or ["fbgemm-gpu-cpu"])[0], fitting_fbgemm(torch)
        return (
            f"a native library was built against another torch. Installed: torch {torch}, {found}; "
            f"with torch {torch} go {build} {fits} and torchrec {fits}. {REINSTALL.capitalize()}"
        )
    if re.search(r"lib(cu|nv|nccl)\w*\.so[\w.]*: cannot open shared object file", message):
        if "fbgemm-gpu" in builds and torch and "+cpu" in torch:
            return f"fbgemm-gpu is the CUDA build, torch {torch} is not; {REINSTALL} PLATFORM=cpu"
        return f"a CUDA build without its CUDA libraries; {CPU_BUILD_OF_TORCH}"
    return REINSTALL


def last_line(text: str) -> str:
    """Return the last line of a text that is not blank."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def report(findings: list[Finding]) -> str:
    """Format findings as a table, with each remedy once: one fault can fail many probes."""
    width = max(len(finding.name) for finding in findings)
    lines: list[str] = []
    told: set[str] = set()
    for finding in findings:
        lines.append(f"{finding.state:<4}  {finding.name:<{width}}  {finding.detail}")
        if finding.remedy:
            remedy = "as above" if finding.remedy in told else finding.remedy
            lines.append(f"{'':<{width + 6}}  -> {remedy}")
            told.add(finding.remedy)
    failed = sum(finding.state == "fail" for finding in findings)
    warned = sum(finding.state == "warn" for finding in findings)
    verdict = "This machine cannot train yet" if failed else "This machine can train"
    lines.append(f"{verdict}: {failed} failed, {warned} warned, {len(findings)} checked.")
    return "\n".join(lines)


def examine() -> list[Finding]:
    """Run every check, cheap ones first."""
    return [*check_python(), *check_versions(), *check_pins(), *check_probes()]


def main(arguments: list[str] | None = None) -> int:
    """Print the report; return 1 when anything failed, else 0."""
    parser = Parser(
        prog=program("trainer.doctor"), description="Check whether this machine can train."
    )
    parser.add_argument("--json", action="store_true", help="print the findings as a JSON list")
    options = parser.parse_args(arguments)
    findings = examine()
    if options.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=1))
    else:
        print(report(findings))
    return int(any(finding.state == "fail" for finding in findings))


if __name__ == "__main__":
    sys.exit(quiet_pipe(main))
