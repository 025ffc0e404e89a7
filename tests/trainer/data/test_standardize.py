# SPDX-License-Identifier: MIT
import dataclasses

import numpy as np
import pytest
import torch

from embeddings.schema.schema import DenseFeature
from models.fields import DenseExpansion
from tests.support.logs import SCHEMA, records, write_log
from trainer.build import standardize
from trainer.data.files import discover, keep_rows
from trainer.data.transforms import dense_moments

SCHEMA2 = dataclasses.replace(
    SCHEMA,
    dense=(
        DenseFeature(name="price", transform="log1p", standardize=True),
        DenseFeature(name="raw_price", column="price"),
    ),
)


def test_statistics_are_those_of_the_first_rows_across_files_and_row_groups(tmp_path):
    files = discover(write_log(tmp_path, [[5, 7], [4, 20]]), None, SCHEMA2)
    kept = keep_rows(files, (3 / 36, 1.0))
    for log, num_rows, first, stop in ((files, 18, 0, 18), (files, 999, 0, 36), (kept, 4, 3, 7)):
        price = np.asarray(records(stop).column("price"))[first:].astype(np.float64)
        expected = np.stack((np.log1p(price), price))
        mean, std = dense_moments(log, SCHEMA2, num_rows)
        np.testing.assert_allclose(mean, expected.mean(1), rtol=1e-6)
        np.testing.assert_allclose(std, expected.std(1), rtol=1e-6)


@pytest.mark.dist
def test_every_rank_gets_the_same_statistics(tmp_path, processes):
    folder = write_log(tmp_path, [[5, 7], [4, 20]])
    first, second = processes.run(_standardized, folder)
    assert first == second
    mean, std = dense_moments(discover(folder, None, SCHEMA2), SCHEMA2).float()
    assert first == [[mean[0].item(), 0.0], [std[0].item(), 1.0]], "only the column that wants it"


def _standardized(runtime, folder):
    dense = DenseExpansion((True, False), 4)
    standardize(torch.nn.ModuleList([dense]), discover(folder, None, SCHEMA2), SCHEMA2, runtime)
    return [buffer.tolist() for buffer in dense.buffers()]
