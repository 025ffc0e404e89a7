# SPDX-License-Identifier: MIT
"""The impressions of a generated day: from pages of slots to rows in time order to Arrow columns.

Shapes: P pages, S slots of a page, H history length; rows are the slots that were shown.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Array = NDArray[Any]
TASKS = ("click", "like")
DENSE = ("price", "item_age_h", "user_clicks", "since_last_s")
_IDS = (
    "user_id",
    "timestamp",
    "item_id",
    "category_id",
    "brand_id",
    "country",
    "device",
    "position",
)


@dataclass
class Pages:
    """The impressions of one day, in time order; everything but the history is one value a row.

    Args:
        columns: name -> (rows,) array; NaN in a float column is a null.
        history: name -> (rows, H) array, the newest events at the right end.
        history_length: (rows,) how many of the H are events.
        probabilities: (rows, 2) P(click), P(like): what the labels were drawn from.
    """

    columns: dict[str, Array]
    history: dict[str, Array]
    history_length: NDArray[np.int64]
    probabilities: NDArray[np.float64]


def in_time_order(shown: list[dict[str, Array]], size: int) -> Pages:
    """Join the rounds of a day, sort the pages by time and lay out one row per impression."""
    pages = {name: np.concatenate([one[name] for one in shown]) for name in shown[0]}
    order = np.argsort(pages["timestamp"], kind="stable")
    seen = pages.pop("seen")[order].ravel()
    rows: dict[str, Array] = {
        "position": np.tile(np.arange(size), len(order))[seen],
    }
    for name, values in pages.items():
        ordered = values[order]
        by_slot = ordered.ndim == 2 and not name.startswith("hist_")
        rows[name] = ordered.ravel()[seen] if by_slot else np.repeat(ordered, size, axis=0)[seen]
    history = {name: rows.pop(name) for name in pages if name.startswith("hist_")}
    probabilities = np.stack([rows.pop("p_click"), rows.pop("p_like")], axis=1)
    event_ms = history.pop("hist_ms")
    history["hist_age_s"] = (rows["timestamp"][:, None] - event_ms) // 1_000
    return Pages(rows, history, (event_ms >= 0).sum(axis=1), probabilities)


def to_table(pages: Pages) -> pa.Table:
    """Lay out a day in the types that ingestion writes."""
    columns = pages.columns
    data: dict[str, pa.Array] = {name: pa.array(columns[name], pa.int64()) for name in _IDS}
    for name in DENSE:
        values = columns[name].astype(np.float32)
        data[name] = pa.array(values, mask=np.isnan(values))
    length = pages.history["hist_item"].shape[1]
    kept = np.arange(length) >= length - pages.history_length[:, None]
    offsets = np.concatenate([[0], np.cumsum(pages.history_length)]).astype(np.int32)
    for name, values in pages.history.items():
        data[name] = pa.ListArray.from_arrays(offsets, pa.array(values[kept], pa.int64()))
    for task in TASKS:
        data[task] = pa.array(columns[task].astype(np.int8))
    return pa.table(data)
