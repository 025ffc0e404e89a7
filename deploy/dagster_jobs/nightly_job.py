# SPDX-License-Identifier: MIT
"""The night as a Dagster job: ingest yesterday's raw logs, then train, compare and decide.

`dagster dev -f deploy/dagster_jobs/nightly_job.py`. Its ops run the commands of pipelines/ in this
checkout with its own .venv, so Dagster needs none of our packages. Everything can be tried again: a
day is typed anew only if its raw files have changed, a night keeps the stages that are made, and it
trains on all days since the last, so nothing is caught up.

What may help is tried again every half hour, such as a day that is late; wrong options or data and
a refused candidate fail at once.
"""

import datetime
import subprocess
from pathlib import Path

import dagster  # pyright: ignore[reportMissingImports]

CHECKOUT = Path(__file__).resolve().parents[2]
FINAL = {2: "options or data are wrong", 3: "the candidate was refused"}  # of pipelines.run


class Night(dagster.ConfigurableResource):
    """What a night is made from; paths are relative to the checkout."""

    date: str = ""  # yesterday in UTC, unless given
    raw: str = "raw"
    schema_file: str = "schema.yaml"
    data: str = "data"
    recipe: str = "dlrm.demo"
    output: str = "runs/nights"
    processes: int = 1


def run(context: dagster.OpExecutionContext, words: list[str]) -> None:
    """Run `python -m WORDS` in the checkout and show what it says.

    Raises:
        Failure: trying again would change nothing.
        RetryRequested: it may.
    """
    command = [str(CHECKOUT / ".venv" / "bin" / "python"), "-m", *words]
    with subprocess.Popen(
        command, cwd=CHECKOUT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in process.stdout or ():
            context.log.info(line.rstrip())
    code = process.returncode
    if code in FINAL:
        raise dagster.Failure(f"{words[0]} ended with {code}: {FINAL[code]}", allow_retries=False)
    if code:
        raise dagster.RetryRequested(max_retries=12, seconds_to_wait=1800)


@dagster.op
def ingest(context: dagster.OpExecutionContext, settings: Night) -> str:
    """Turn the day's raw logs into typed Parquet; return the day."""
    yesterday = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
    day = settings.date or yesterday.strftime("%Y-%m-%d")
    words = ["pipelines.deliveries", settings.raw, "--days", day]
    run(context, [*words, "--schema", settings.schema_file, "--output", settings.data])
    return day


@dagster.op
def night(context: dagster.OpExecutionContext, settings: Night, day: str) -> None:
    """Train on the new days, compare with the model that serves, promote or refuse."""
    words = ["pipelines.run", "nightly", "--date", day, "--recipe", settings.recipe]
    words += ["--data", settings.data, "--output", settings.output, "-j", f"1x{settings.processes}"]
    run(context, [*words, "--", "--data.schema", settings.schema_file])


@dagster.job(resource_defs={"settings": Night()})
def fullrank_nightly() -> None:
    """Ingest, then the night."""
    night(ingest())  # pyright: ignore[reportCallIssue]  # wired here, called by Dagster


nightly_schedule = dagster.ScheduleDefinition(
    job=fullrank_nightly, cron_schedule="23 2 * * *", execution_timezone="UTC"
)
definitions = dagster.Definitions(jobs=[fullrank_nightly], schedules=[nightly_schedule])
