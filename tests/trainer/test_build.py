# SPDX-License-Identifier: MIT
"""All ranks read one log: a rank that sees another is named, with the file, before a step."""

import dataclasses
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.support.logs import SCHEMA, records, write_log
from trainer.build import open_loader
from trainer.config.fit_to_log import fit_recipe
from trainer.recipes.load import load_recipe
from trainer.runtime.runtime import Runtime


def open_on(runtime: Runtime, folders: list[str]) -> str:
    """Open the log of this rank's folder; return what went wrong."""
    config = fit_recipe(load_recipe("dlrm.demo"), SCHEMA)
    data = dataclasses.replace(
        config.data, path=folders[runtime.rank], train_days="", test_days="", allow_overlap=True
    )
    config = dataclasses.replace(config, data=data)
    try:
        return open_loader(config, runtime, train=True).fingerprint
    except ValueError as error:
        return f"error: {error}"


@pytest.mark.parametrize("change", ["same", "new", "gone", "changed", "damaged", "empty", "both"])
def test_ranks_that_see_different_logs_are_told_alike(processes, tmp_path, change):
    folders = [tmp_path / f"node{rank}" / "logs" for rank in range(2)]
    for folder in folders:
        write_log(folder, [[8], [8]], ["2026-01-01", "2026-01-02"])
    path: Path = folders[1] / "dt=2026-01-02" / "part-1.parquet"
    if change == "new":
        pq.write_table(records(3), path.with_name("late.parquet"))
    elif change == "changed":
        pq.write_table(records(8, first=50), path)
    elif change in ("gone", "empty"):
        path.unlink()
    if change == "empty":
        (folders[1] / "dt=2026-01-01" / "part-0.parquet").unlink()
    if change in ("damaged", "both"):
        for folder in folders[change == "damaged" :]:
            (folder / "dt=2026-01-02" / "part-1.parquet").write_bytes(b"PAR1")
    found = processes.run(open_on, [str(folder) for folder in folders])
    expected = {
        "new": "rank 1 sees another log than rank 0 (new: 2026-01-02/late.parquet)",
        "gone": "rank 1 sees another log than rank 0 (gone: 2026-01-02/part-1.parquet)",
        "changed": "rank 1 sees another log than rank 0 (changed: 2026-01-02/part-1.parquet)",
        "damaged": "part-1.parquet: expected a Parquet file",
        "empty": "rank 1: ",
    }
    if change == "same":
        assert found[0] == found[1] and not found[0].startswith("error")
    elif change == "both":
        assert all("part-1.parquet: expected a Parquet file" in one for one in found)
    else:
        assert all(one.startswith("error: ") and expected[change] in one for one in found), found
