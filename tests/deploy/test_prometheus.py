# SPDX-License-Identifier: MIT
"""Rules, dashboard and runbook speak of what exists; a real server scrapes a real job."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import yaml

from tests.support.processes import free_port
from tests.support.runs import generate, small
from trainer.config.config import TrainConfig
from trainer.runtime.runtime import Runtime
from trainer.telemetry.alerts import ADVICE
from trainer.telemetry.prometheus_metrics import METRICS
from trainer.trainer import Trainer

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "prometheus"
RUNBOOK = (ROOT / "deploy" / "RUNBOOK.md").read_text("utf-8")
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "fullrank.json").read_text("utf-8"))
RULES = [
    rule
    for group in yaml.safe_load((FOLDER / "rules.yml").read_text("utf-8"))["groups"]
    for rule in group["rules"]
]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
SHOWN = [target["expr"] for panel in PANELS for target in panel["targets"]]
EXPRESSIONS = [rule["expr"] for rule in RULES] + SHOWN
# What Prometheus itself adds to every series, and what rules have made of ours.
ADDED = {"instance", "job", "node"}

needs_promtool = pytest.mark.skipif(
    not shutil.which("promtool"), reason="promtool is absent (Debian's package prometheus has it)"
)
needs_server = pytest.mark.skipif(
    not shutil.which("prometheus"), reason="prometheus is absent (Debian's package prometheus)"
)


def known() -> set[str]:
    """Names of series: of runs, of nights, of the rules' own records."""
    nights = (ROOT / "pipelines" / "nightly" / "night_metrics.py").read_text("utf-8")
    names = set(re.findall(r"fullrank_(?:night|stage)_[a-z_]+", nights))
    return names | {m.full_name for m in METRICS} | {r["record"] for r in RULES if "record" in r}


def names_of(expression: str) -> set[str]:
    return set(re.findall(r"\bfullrank[_:][a-z0-9_:]+", expression))


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_expression_names_series_that_exist(expression):
    assert not names_of(expression) - known()
    labels = {metric.full_name: {*metric.all_labels, *ADDED} for metric in METRICS}
    for name, selected in re.findall(r"\b(fullrank_[a-z0-9_]+)\{([^}]*)\}", expression):
        found = set(re.findall(r"(\w+)\s*(?:=~|!=|!~|=)", selected))
        nights = {"model", "part", "pipeline", "stage", "state"}
        assert found <= labels.get(name, {*nights, *ADDED}), name


def test_the_dashboard_shows_every_metric_that_is_a_measurement():
    shown = {name for expression in SHOWN for name in names_of(expression)}
    shown |= {name for r in RULES if r.get("record") in shown for name in names_of(r["expr"])}
    hidden = {
        "fullrank_steps_total",  # of alerts: what skips are a share of
        "fullrank_last_step_timestamp_seconds",  # by rank
        "fullrank_checkpoint_interval_seconds",
        "fullrank_checkpoint_failures_total",
        "fullrank_evaluation_timestamp_seconds",
        "fullrank_evaluation_rows",
        "fullrank_rank_step",
        "fullrank_rank_skew_seconds",  # of a node; the dashboard has the ranks of all
        "fullrank_input_wait_ratio",  # of rank 0; the dashboard has the rate over all ranks
        "fullrank_rows_per_second",
    }
    assert {metric.full_name for metric in METRICS} - shown == hidden


def test_panels_have_titles_and_places_of_their_own():
    titles = [panel["title"] for panel in DASHBOARD["panels"]]
    assert all(titles)
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(titles)
    cells = [
        (x, y)
        for panel in DASHBOARD["panels"]
        for place in [panel["gridPos"]]
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
    assert all(panel["datasource"]["uid"] == "${datasource}" for panel in PANELS)


@pytest.mark.parametrize("name", ALERTS)
def test_every_alert_leads_to_its_section_of_the_runbook(name):
    rule = ALERTS[name]
    assert rule["labels"]["severity"] in ("page", "look")
    assert rule["annotations"]["summary"]
    assert rule["annotations"]["runbook"] == f"deploy/RUNBOOK.md#{name.lower()}"
    assert f"\n## {name}\n" in RUNBOOK


def rows() -> list[list[str]]:
    """Rows of the runbook's table: symptom, words, test."""
    lines = [line for line in RUNBOOK.splitlines() if line.startswith("| ")][1:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_the_runbook_s_table_has_every_alert_and_every_row_a_symptom():
    named = {name for row in rows() for name in re.findall(r"`(FullRank\w+)`", row[1])}
    assert named == set(ALERTS)
    assert all(len(row) == 3 and all(row) for row in rows())


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_a_symptom_has_a_test_and_its_message_is_in_the_code(row):
    _, words, test = row
    path, _, name = test.strip("`").partition("::")
    assert re.search(rf"^def {name}\(", (ROOT / path).read_text("utf-8"), re.MULTILINE), test
    messages = re.findall(r'"([^"]+)"', words)
    assert messages or re.findall(r"`FullRank\w+`", words)
    sources = [p for folder in ("trainer", "pipelines") for p in (ROOT / folder).rglob("*.py")]
    # Messages may break over the lines of the code.
    code = "".join(re.sub(r'"\s*\n\s*f?"', "", p.read_text("utf-8")) for p in sources)
    assert not [message for message in messages if message not in code]


def promtool(*words: str) -> None:
    done = subprocess.run(["promtool", *words], cwd=FOLDER, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_promtool_finds_nothing_wrong():
    promtool("check", "rules", "rules.yml")
    promtool("check", "config", "prometheus.yml")


@needs_promtool
def test_each_alert_rings_in_its_case_and_none_over_a_healthy_run():
    promtool("test", "rules", "rules_test.yml")
    cases = yaml.safe_load((FOLDER / "rules_test.yml").read_text("utf-8"))["tests"]
    checks = [check for case in cases for check in case["alert_rule_test"]]
    assert {c["alertname"] for c in checks if c["exp_alerts"]} == set(ALERTS)
    assert {c["alertname"] for c in checks if not c["exp_alerts"]} == set(ALERTS)


class Server:
    """A Prometheus server of this test."""

    def __init__(self, port: int) -> None:
        self.port, self.address = port, f"http://127.0.0.1:{port}/api/v1"

    def ask(self, expression: str) -> list[dict[str, Any]]:
        """Return the result of an instant query."""
        words = urllib.parse.urlencode({"query": expression}).encode()
        with urllib.request.urlopen(f"{self.address}/query", words, timeout=10) as answer:
            content = json.load(answer)
        assert content["status"] == "success"
        return content["data"]["result"]

    def value(self, expression: str) -> float | None:
        """Return the one value of a query, None for none."""
        found = self.ask(expression)
        return float(found[0]["value"][1]) if found else None


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not come"
        time.sleep(0.2)


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """Run a server that scrapes every second whatever notes lie in folder/targets."""
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text("utf-8"))
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(FOLDER / "rules.yml")]
    config["scrape_configs"] = config["scrape_configs"][:1]
    (discovery,) = config["scrape_configs"][0]["file_sd_configs"]
    discovery |= {"files": [str(folder / "targets/*.json")], "refresh_interval": "1s"}
    (folder / "targets").mkdir()
    (folder / "config.yml").write_text(yaml.safe_dump(config), "utf-8")
    port = free_port()
    words = [f"--config.file={folder / 'config.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    words += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(["prometheus", *words], stdout=log, stderr=log)
    server = Server(port)

    def ready() -> bool:
        assert process.poll() is None, (folder / "log").read_text("utf-8")
        try:
            return server.value("vector(1)") == 1
        except OSError:
            return False

    try:
        until(ready)
        yield server
    finally:
        process.terminate()
        process.wait()


def scraped_job(runtime: Runtime, config: TrainConfig, output: Path, port: int) -> dict[str, Any]:
    """Train on this rank; stay until the server has seen the end; return what it has seen."""
    trainer, server, seen = Trainer(config, output, runtime), Server(port), dict[str, Any]()
    wait = trainer.saver.wait

    def waiting(last: bool = False) -> None:
        wait(last)
        if last and runtime.is_first:
            until(lambda: server.value("fullrank_evaluation_auc") is not None)
            for name in ("fullrank_ranks", "fullrank_rows_total", "count(fullrank_rank_step)"):
                seen[name] = server.value(name)
            seen["failed"] = [
                text
                for text in SHOWN
                if not isinstance(server.ask(text.replace("$run", ".*")), list)
            ]
            note = Path(config.export.targets) / f"{output.name}-exporter-0.json"
            seen["note"] = note.read_text("utf-8")
        if last:
            dist.barrier()  # nobody leaves before

    trainer.saver.wait = waiting
    trainer.fit()
    return seen


@needs_server
@pytest.mark.dist
def test_a_real_server_sees_a_run_come_and_go(processes, tmp_path):
    logs, runs = generate(tmp_path / "logs"), tmp_path / "runs"
    with serving(tmp_path) as server:
        targets = ("--export.targets", str(tmp_path / "targets"))
        config, port = small("dlrm.demo", logs, *targets), server.port
        seen = processes.run(scraped_job, config, runs / "one", port)[0]
        assert (seen["fullrank_ranks"], seen["count(fullrank_rank_step)"]) == (2, 2)
        assert seen["fullrank_rows_total"] == 640
        # The run has ended: its target is gone, and none of its series is left.
        until(lambda: server.ask('{__name__=~"fullrank_.*"}') == [])
        until(lambda: server.ask('up{job="fullrank"}') == [])
        # Another one begins: nothing of the first is taken for a part of it.
        seen = processes.run(scraped_job, config, runs / "two", port)[0]
        assert (seen["fullrank_ranks"], seen["fullrank_rows_total"]) == (2, 640)
        # One that is killed leaves its note, and nobody who answers.
        (tmp_path / "targets" / "two-exporter-0.json").write_text(seen["note"], "utf-8")
        until(lambda: server.ask('ALERTS{alertname="FullRankRunGone"}') != [])
        assert server.value('up{job="fullrank"}') == 0
        assert server.ask("fullrank_ranks") == []


def test_alerts_that_page_someone_are_alerts_of_a_run_and_the_others_wait():
    rules = [rule for rule in RULES if rule.get("alert") == "FullRankAlert"]
    paged, later = (re.search(r'alert(=~|!~)"([^"]+)"', rule["expr"]) for rule in rules)
    assert paged and later and paged[2] == later[2] and (paged[1], later[1]) == ("=~", "!~")
    assert set(paged[2].split("|")) <= ADVICE.keys()
    assert [rule["labels"]["severity"] for rule in rules] == ["page", "look"]
