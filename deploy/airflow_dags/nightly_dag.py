# SPDX-License-Identifier: MIT
"""The night as an Airflow DAG: ingest yesterday's raw logs, then train, compare and decide.

Point Airflow's `dags_folder` at this folder. Tasks run the commands of pipelines/ in this checkout
with its own .venv, so Airflow needs none of our packages. Everything can be tried again: a day is
typed anew only if its raw files have changed, a night keeps the stages that are made, and it trains
on all days since the last, so nothing is caught up.

What may help is tried again every half hour, such as a day that is late; wrong options or data and
a refused candidate fail at once.
"""

import datetime
from pathlib import Path

from airflow.exceptions import (  # pyright: ignore[reportMissingImports]
    AirflowException,
    AirflowFailException,
)
from airflow.providers.standard.hooks.subprocess import (  # pyright: ignore[reportMissingImports]
    SubprocessHook,
)
from airflow.providers.standard.operators.python import (  # pyright: ignore[reportMissingImports]
    PythonOperator,
)
from airflow.sdk import DAG  # pyright: ignore[reportMissingImports]
from airflow.timetables.trigger import (  # pyright: ignore[reportMissingImports]
    CronTriggerTimetable,
)

CHECKOUT = Path(__file__).resolve().parents[2]
FINAL = {2: "options or data are wrong", 3: "the candidate was refused"}  # of pipelines.run
PARAMETERS = {
    "date": "",  # the day before the run's, unless given
    "raw": "raw",
    "schema": "schema.yaml",
    "data": "data",
    "recipe": "dlrm.demo",
    "output": "runs/nights",
    "processes": "1",
}
DATE = "{{ params.date or macros.ds_add(ds, -1) }}"
INGEST = ["pipelines.deliveries", "{{ params.raw }}", "--days", DATE]
INGEST += ["--schema", "{{ params.schema }}", "--output", "{{ params.data }}"]
NIGHT = ["pipelines.run", "nightly", "--date", DATE, "--recipe", "{{ params.recipe }}"]
NIGHT += ["--data", "{{ params.data }}", "--output", "{{ params.output }}"]
NIGHT += ["-j", "1x{{ params.processes }}", "--", "--data.schema", "{{ params.schema }}"]


def run(*words: str) -> None:
    """Run `python -m WORDS` in the checkout and show what it says.

    Raises:
        AirflowFailException: trying again would change nothing.
        AirflowException: it may.
    """
    command = [str(CHECKOUT / ".venv" / "bin" / "python"), "-m", *words]
    code = SubprocessHook().run_command(command, cwd=str(CHECKOUT)).exit_code
    if code in FINAL:
        raise AirflowFailException(f"{words[0]} ended with {code}: {FINAL[code]}")
    if code:
        raise AirflowException(f"{words[0]} ended with {code}")


with DAG(
    dag_id="fullrank_nightly",
    schedule=CronTriggerTimetable("23 2 * * *", timezone="UTC"),
    start_date=datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC),
    catchup=False,
    max_active_runs=1,
    params=PARAMETERS,
    default_args={"retries": 12, "retry_delay": datetime.timedelta(minutes=30)},
    tags=["fullrank"],
) as dag:
    ingest = PythonOperator(task_id="ingest", python_callable=run, op_args=INGEST)
    night = PythonOperator(task_id="night", python_callable=run, op_args=NIGHT)
    ingest.set_downstream(night)
