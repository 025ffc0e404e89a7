# SPDX-License-Identifier: MIT
"""RankElastor where a log needs other settings, and the five models that its authors released.

A run: python -m trainer.train rankelastor.criteo --output DIR --data.path LOGS.

The released models (`criteo_dim10` ... `avazu_dim64`) have the release's tokenizer, blocks, head,
batch size and dense learning rate; their dense parameters are counted in the tests. data.path is
the training file of the public split, data.test_path the test file. What differs from the release:
tables learn by row-wise Adagrad, ids are hashed, and neither the penalty on all rows of all tables
nor the fall of the learning rate on a plateau is there. The AUC that a docstring quotes is the
release's own; none of the five was trained here.
"""

from __future__ import annotations

import dataclasses

from embeddings.schema.schema import Label, Schema, SparseFeature, Table
from models.fields import ProjectionConfig
from models.heads import HeadConfig
from models.ranking import ModelConfig
from models.tokens import TokenizerConfig
from models.towers.rankelastor import RankElastorConfig
from trainer.config.config import TrainConfig
from trainer.data.loader import LoaderConfig
from trainer.distributed.optimizer import DenseOptimizerConfig
from trainer.distributed.precision import PrecisionConfig
from trainer.recipes import datasets, schemas, towers


def demo_code() -> TrainConfig:
    """RankElastor as its authors released it, on the generated log."""
    return datasets.demo(_code_model())


def globo() -> TrainConfig:
    """RankElastor on Globo's sessions, train 2017-10-01..11, test 2017-10-12."""
    return datasets.globo(towers.rankelastor(token_dim=16, depth=1))


def globo_code() -> TrainConfig:
    """RankElastor as released, on Globo's sessions."""
    return datasets.globo(_code_model(token_dim=16, depth=1))


def criteo() -> TrainConfig:
    """RankElastor on a Criteo log, 15 tokens of width 26 as in the paper."""
    return datasets.criteo(towers.rankelastor(token_dim=26, num_tokens=15, depth=1))


def movielens() -> TrainConfig:
    """RankElastor on MovieLens-100K."""
    return datasets.movielens(towers.rankelastor(token_dim=16, depth=1))


def criteo_dim10() -> TrainConfig:
    """RankElastor as released for Criteo, fields of width 10: 1,484,093 dense parameters.

    Published AUC .814719.
    """
    return _released_criteo(field_dim=10, num_tokens=15, token_dim=26)


def criteo_dim20() -> TrainConfig:
    """RankElastor as released for Criteo, fields of width 20: 3,681,981 dense parameters.

    Published AUC .814883.
    """
    return _released_criteo(field_dim=20, num_tokens=26, token_dim=30)


def avazu_dim16() -> TrainConfig:
    """RankElastor as released for Avazu, width 16, four blocks: 1,870,209 dense parameters.

    Published AUC .793131.
    """
    return _released_avazu(token_dim=16, depth=4)


def avazu_dim32() -> TrainConfig:
    """RankElastor as released for Avazu, width 32, three blocks.

    Published AUC .794352.
    """
    return _released_avazu(token_dim=32, depth=3)


def avazu_dim64() -> TrainConfig:
    """RankElastor as released for Avazu, width 64, five blocks: 25,980,289 dense parameters.

    Published AUC .794775.
    """
    return _released_avazu(token_dim=64, depth=5, learning_rate=1e-4)


def _code_model(token_dim: int = 32, depth: int = 2) -> ModelConfig:
    return towers.fields(RankElastorConfig(variant="code", depth=depth), token_dim)


def _released_criteo(*, field_dim: int, num_tokens: int, token_dim: int) -> TrainConfig:
    # 26 ids and 13 numbers, which the release reads as numbers only. Tables are as wide as lookup
    # kernels allow at least (a multiple of 4), of which field_dim columns are read.
    whole = schemas.criteo(num_embeddings=262_144, embedding_dim=-(-field_dim // 4) * 4)
    ids = tuple(feature for feature in whole.sparse if feature.transform == "hash")
    tables = tuple(table for table in whole.tables if table.name in {f.table for f in ids})
    return _released(
        dataclasses.replace(whole, tables=tables, sparse=ids),
        RankElastorConfig(variant="code", depth=1, hidden_units=(64, 64), pooling="flatten"),
        TokenizerConfig(
            token_dim=token_dim,
            num_tokens=num_tokens,
            dense_dim=field_dim,
            projection=ProjectionConfig(
                kind="shared_mlp", hidden=500, dropout=0.1, field_dim=field_dim
            ),
        ),
        loader=LoaderConfig(batch_size=0, global_batch_size=4096),
        learning_rate=1e-3,
    )


def _released_avazu(*, token_dim: int, depth: int, learning_rate: float = 1e-3) -> TrainConfig:
    fields = (
        *("hour", "weekday", "weekend", "C1", "banner_pos"),
        *("site_id", "site_domain", "site_category", "app_id", "app_domain", "app_category"),
        *("device_id", "device_ip", "device_model", "device_type", "device_conn_type"),
        *(f"C{number}" for number in range(14, 22)),
    )
    schema = Schema(
        tables=tuple(
            Table(name=name, num_embeddings=262_144, embedding_dim=token_dim) for name in fields
        ),
        sparse=tuple(SparseFeature(name=name, table=name) for name in fields),
        labels=(Label(name="click"),),
    )
    return _released(
        schema,
        RankElastorConfig(variant="code", depth=depth, pooling="flatten"),
        TokenizerConfig(
            token_dim=token_dim,
            num_tokens=len(fields),
            projection=ProjectionConfig(kind="joint_mlp", hidden=800),
        ),
        loader=LoaderConfig(batch_size=0, global_batch_size=10_000),
        learning_rate=learning_rate,
    )


def _released(
    schema: Schema,
    tower: RankElastorConfig,
    tokenizer: TokenizerConfig,
    *,
    loader: LoaderConfig,
    learning_rate: float,
) -> TrainConfig:
    # The release's head: all T·D outputs, twice as many units, one logit.
    head = HeadConfig(hidden_units=(2 * tokenizer.num_tokens * tokenizer.token_dim,))
    model = ModelConfig(tower=tower, tokenizer=tokenizer, head=head)
    return dataclasses.replace(
        datasets.frappe(model),
        schema=schema,
        loader=loader,
        dense=DenseOptimizerConfig(learning_rate=learning_rate),
        precision=PrecisionConfig(max_norm=10.0),
        epochs=1,
    )
