# SPDX-License-Identifier: MIT
"""The spectral operator's compiled form in tests: used where a compiler is, never silently not."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from models.spectral import fused
from trainer.runtime.native import NoLibraryError, find_compiler
from trainer.runtime.runtime import find_spectral


def with_compiled() -> Iterator[None]:
    """Use the compiled form within; skip without a compiler, fail where one does not do it."""
    try:
        find_compiler(os.environ)
    except NoLibraryError as error:
        pytest.skip(str(error))
    library, reason = find_spectral()
    assert library is not None, reason
    fused.provide(lambda: library)
    yield
    fused.provide(None)
