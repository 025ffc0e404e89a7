# SPDX-License-Identifier: MIT
"""Which arm of an experiment a user is in: a salted hash of the user, the same in every process.

A user's place in [0, 1) is a hash of the user's id and of the experiment's name and salt. Places in
two experiments are independent, so experiments can run on the same users at the same time. Two
places decide: one whether the user takes part (`traffic`), one which arm the user gets. So raising
the traffic adds users and moves nobody from one arm to another.

Source: Kohavi, Tang and Xu, "Trustworthy Online Controlled Experiments", 2020, chapter 4 (hashed,
salted, orthogonal assignment).

Shapes: N users.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trainer.data.hashing import hash_strings, is_text, mix64

_TRAFFIC, _ARM = b"traffic", b"arm"


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """An experiment and the shares of its arms.

    Args:
        name: Its name. Another name gives another, independent, assignment.
        arms: The share of each arm, by name. Shares are relative: 1 and 1 are two halves.
        traffic: The share of users who take part, from 0 to 1.
        salt: Repeats the assignment anew under the same name.

    Raises:
        ValueError: Fewer than two arms, a share that is not positive, or a traffic outside [0, 1].
    """

    name: str
    arms: Mapping[str, float] = field(default_factory=lambda: {"A": 1.0, "B": 1.0})
    traffic: float = 1.0
    salt: str = ""

    def __post_init__(self) -> None:
        """Check name, shares and traffic."""
        if not self.name:
            raise ValueError("experiment: expected a name, got an empty one")
        if len(self.arms) < 2:
            raise ValueError(f"arms: expected two or more, got {list(self.arms)}")
        for arm, share in self.arms.items():
            if not (math.isfinite(share) and share > 0):
                raise ValueError(f"arms: the share of {arm!r} must be above 0, got {share}")
        if not 0 <= self.traffic <= 1:
            raise ValueError(f"traffic: expected a share from 0 to 1, got {self.traffic}")

    def assign(self, users: pa.Array | pa.ChunkedArray) -> pa.DictionaryArray:
        """Return the arm of each of N users; null for a user who does not take part.

        Args:
            users: (N,) integers, strings or bytes. A null takes no part. The integer 7 and the text
                "7" are different users.

        Raises:
            ValueError: Ids of another type.
        """
        ids, missing = _to_ids(users)
        ends = np.cumsum(list(self.arms.values()))  # (arms,)
        arm = np.searchsorted(ends / ends[-1], self._places(ids, _ARM), side="right")
        arm = np.minimum(arm, len(ends) - 1).astype(np.int32)  # (N,)
        outside = missing | (self._places(ids, _TRAFFIC) >= self.traffic)
        return pa.DictionaryArray.from_arrays(pa.array(arm, mask=outside), list(self.arms))

    def _places(self, ids: NDArray[np.int64], purpose: bytes) -> NDArray[np.float64]:
        """Return N uniform places in [0, 1) of 53 bits."""
        # Lengths first, so that no two pairs of name and salt give the same text.
        parts = (purpose, self.name.encode(), self.salt.encode())
        text = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
        key = np.frombuffer(hashlib.blake2b(text, digest_size=16).digest(), "<u8")  # (2,)
        # The finaliser on both sides of each key: ids and keys cannot cancel.
        mixed = mix64(mix64(ids.view(np.uint64) ^ key[0]) + key[1])  # (N,)
        return (mix64(mixed) >> np.uint64(11)).astype(np.float64) / 2.0**53


def _to_ids(users: pa.Array | pa.ChunkedArray) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return N 64-bit ids and whether each user is null."""
    if isinstance(users, pa.ChunkedArray):
        users = users.combine_chunks()
    missing = users.is_null().to_numpy(zero_copy_only=False)
    if is_text(users.type):
        users = hash_strings(users)
    elif pa.types.is_uint64(users.type):
        return users.fill_null(0).to_numpy(zero_copy_only=False).view(np.int64), missing
    elif not pa.types.is_integer(users.type):
        raise ValueError(
            f"users: expected integers, strings or bytes, got {users.type}; cast the column"
        )
    return users.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False), missing
