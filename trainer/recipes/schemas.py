# SPDX-License-Identifier: MIT
"""Schemas of the public logs that the recipes name, and of the generated one.

`demo`: what pipelines.synthesize writes.
`globo`: sessions of a news portal, one row a click, label: does another click follow in the
session.
`criteo`: 13 counts and 26 ids (int64 or strings), as in the public Criteo sets.
`frappe`: app use in context. `movielens`: rating >= 4 (MovieLens-100K columns).
"""

from __future__ import annotations

from typing import Any

from embeddings.schema.lifetime import DynamicConfig
from embeddings.schema.schema import DenseFeature, Label, Schema, SparseFeature, Table

_GLOBO_CONTEXT = ("environment", "deviceGroup", "os", "country", "region", "referrer_type")
# Of which of a session's newest clicks the age is a field of its own; 1 is the newest.
_GLOBO_AGES = (2, 3, 5, 10)


def demo() -> Schema:
    """Return the generated log's schema; items and categories share tables with the history."""
    dense = ("price", "item_age_h", "user_clicks", "since_last_s")
    sizes = {
        "user": 16_384,
        "item": 16_384,
        "category": 64,
        "brand": 1_024,
        "country": 64,
        "device": 8,
        "position": 32,
        "hour": 32,
        "age": 256,
    }
    history: dict[str, Any] = {"kind": "sequence", "max_length": 20, "history": "hist"}
    return Schema(
        tables=tuple(
            Table(name=name, num_embeddings=size, embedding_dim=16) for name, size in sizes.items()
        ),
        sparse=(
            SparseFeature(name="user_id", table="user"),
            SparseFeature(name="country", table="country"),
            SparseFeature(name="device", table="device", transform="identity"),
            SparseFeature(name="position", table="position", transform="identity"),
            SparseFeature(name="hour", table="hour", column="timestamp", transform="hour_of_day"),
            SparseFeature(name="item_id", table="item", side="item"),
            SparseFeature(name="category_id", table="category", side="item"),
            SparseFeature(name="brand_id", table="brand", side="item"),
            SparseFeature(name="hist_item", table="item", **history),
            SparseFeature(name="hist_category", table="category", **history),
            SparseFeature(
                name="hist_age", table="age", column="hist_age_s", transform="log_square", **history
            ),
        ),
        dense=tuple(DenseFeature(name=name, transform="log1p") for name in dense),
        labels=tuple(Label(name=name) for name in ("click", "like")),
        user="user_id",
        timestamp="timestamp",
        history_actions={"hist": "hist_action"},
    )


def globo(articles: int = 131_072, dynamic: DynamicConfig | None = None) -> Schema:
    """Return the schema of the Globo.com session log (partitions dt=YYYY-MM-DD).

    articles: rows of each of the two tables of articles, hashed or `dynamic`.

    Beside the history itself, how long it is and how old its newest events are are fields of their
    own: sessions end for those who just came and for those who have been idle, and a pooled history
    hides both. Article ids are ordered by topic, so their logarithmic bucket is a coarse topic.
    """
    return Schema(
        tables=(
            *(
                Table(name=name, num_embeddings=articles, embedding_dim=16, dynamic=dynamic)
                for name in ("article", "hist_article")
            ),
            Table(name="topic", num_embeddings=256, embedding_dim=16),
            Table(name="user", num_embeddings=262_144, embedding_dim=16),
            *(Table(name=name, num_embeddings=256, embedding_dim=16) for name in _GLOBO_CONTEXT),
            Table(name="hour_of_day", num_embeddings=32, embedding_dim=16),
            Table(name="hour_of_week", num_embeddings=256, embedding_dim=16),
            Table(name="session_pos", num_embeddings=128, embedding_dim=16),
            Table(name="hist_length", num_embeddings=16, embedding_dim=16),
            *(Table(name=f"age_{k}", num_embeddings=256, embedding_dim=16) for k in _GLOBO_AGES),
            Table(name="age", num_embeddings=256, embedding_dim=16),
        ),
        sparse=(*_globo_session(), *_globo_articles()),
        labels=(Label(name="label"),),
        user="user_id",
        timestamp="ts",
    )


def _globo_session() -> tuple[SparseFeature, ...]:
    """Return what is known of the user and the session, articles left out."""
    return (
        SparseFeature(name="user_id", table="user"),
        *(SparseFeature(name=name, table=name) for name in _GLOBO_CONTEXT),
        *(
            SparseFeature(name=name, table=name, column="ts", transform=name)
            for name in ("hour_of_day", "hour_of_week")
        ),
        SparseFeature(
            name="session_pos",
            table="session_pos",
            transform="identity",
            out_of_range="oov",
        ),
        SparseFeature(
            name="hist_length", table="hist_length", column="hist_article", transform="length"
        ),
        *(
            SparseFeature(
                name=f"age_{k}",
                table=f"age_{k}",
                column="hist_age_s",
                transform="log_square",
                position=-k,
            )
            for k in _GLOBO_AGES
        ),
    )


def _globo_articles() -> tuple[SparseFeature, ...]:
    """Return the article, the session's articles before it, and their ages."""
    return (
        SparseFeature(name="last_article", table="article", column="hist_article", position=-1),
        SparseFeature(
            name="hist_bag", table="article", column="hist_article", kind="bag", max_length=10
        ),
        SparseFeature(name="article_id", table="article", side="item"),
        SparseFeature(
            name="topic",
            table="topic",
            column="article_id",
            transform="log_square",
            side="item",
        ),
        SparseFeature(
            name="hist_article",
            table="hist_article",
            kind="sequence",
            max_length=10,
            history="hist",
        ),
        SparseFeature(
            name="hist_age_s",
            table="age",
            transform="log_square",
            kind="sequence",
            max_length=10,
            history="hist",
        ),
    )


def criteo(num_embeddings: int = 10_000, embedding_dim: int = 16) -> Schema:
    """Return the schema of the Criteo logs: I1-I13 in logarithmic buckets, C1-C26 hashed.

    One table a field; a missing count or id reads its table's row 0. Counts are also read as
    numbers, since on a small log most buckets are seen too rarely to learn that they are ordered.
    """
    counts = [f"I{index}" for index in range(1, 14)]
    ids = [f"C{index}" for index in range(1, 27)]
    return Schema(
        tables=(
            *(Table(name=name, num_embeddings=128, embedding_dim=embedding_dim) for name in counts),
            *(
                Table(name=name, num_embeddings=num_embeddings, embedding_dim=embedding_dim)
                for name in ids
            ),
        ),
        sparse=(
            *(SparseFeature(name=name, table=name, transform="log_quarter") for name in counts),
            *(SparseFeature(name=name, table=name) for name in ids),
        ),
        dense=tuple(
            DenseFeature(name=f"{name}_value", column=name, transform="log1p", standardize=True)
            for name in counts
        ),
        labels=(Label(name="label"),),
    )


def frappe() -> Schema:
    """Return the schema of Frappe (user, item and eight context fields, all hashed)."""
    fields = (
        "daytime",
        "weekday",
        "isweekend",
        "homework",
        "cost",
        "weather",
        "country",
        "city",
    )
    return Schema(
        tables=(
            Table(name="user", num_embeddings=4_096, embedding_dim=16),
            Table(name="item", num_embeddings=16_384, embedding_dim=16),
            *(Table(name=name, num_embeddings=512, embedding_dim=16) for name in fields),
        ),
        sparse=(
            SparseFeature(name="user", table="user"),
            *(SparseFeature(name=name, table=name) for name in fields),
            SparseFeature(name="item", table="item", side="item"),
        ),
        labels=(Label(name="label"),),
        user="user",
    )


def movielens() -> Schema:
    """Return the schema of MovieLens-100K with a list of genres.

    Timestamps are seconds and not read.
    """
    return Schema(
        tables=(
            Table(name="user", num_embeddings=4_096, embedding_dim=16),
            Table(name="item", num_embeddings=8_192, embedding_dim=16),
            Table(name="age", num_embeddings=256, embedding_dim=16),
            Table(name="gender", num_embeddings=16, embedding_dim=16),
            Table(name="occupation", num_embeddings=128, embedding_dim=16),
            Table(name="zip_code", num_embeddings=4_096, embedding_dim=16),
            Table(name="release_year", num_embeddings=512, embedding_dim=16),
            Table(name="genre", num_embeddings=128, embedding_dim=16),
        ),
        sparse=(
            SparseFeature(name="user_id", table="user"),
            SparseFeature(name="age", table="age"),
            SparseFeature(name="gender", table="gender"),
            SparseFeature(name="occupation", table="occupation"),
            SparseFeature(name="zip_code", table="zip_code"),
            SparseFeature(name="item_id", table="item", side="item"),
            SparseFeature(name="release_year", table="release_year", side="item"),
            SparseFeature(name="genres", table="genre", kind="bag", max_length=8, side="item"),
        ),
        labels=(Label(name="label"),),
        user="user_id",
    )
