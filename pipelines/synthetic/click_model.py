# SPDX-License-Identifier: MIT
"""A population of users and items whose click probability is known exactly.

Why: on a real log nobody knows how good a model could be. Here every label is drawn from a
probability that can be written down, so a training run can be held against the best reachable
AUC. What is needed to come near it is what ranking models are for: user x item interactions (a
dot product of latent vectors), taste read from past actions (short-term interest), generalisation
to items born this morning (category and brand), and position and context effects.

The logit of a click of user u on item i, shown at position p of a page at hour h on device d:
  z = bias + quality_i + brand_i + mood_u + taste * <u, v_i> + interest * <s_u, v_i> + position_p
      + device[d, category_i] + hour[h, category_i] - price_u * price_i + fresh * exp(-age_i)
with |v_i| = 1, s_u the moving average of the vectors of the items u clicked. A like needs a click:
P(like) = P(click) * sigmoid(like_bias + like_taste * <u, v_i> + charm_i).

Shapes: U users, N items alive, P pages of one round, S slots of a page, H history length, D latent.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipelines.synthetic.impressions import Array, Pages, in_time_order

DAY_MS = 86_400_000


@dataclass(frozen=True, kw_only=True)
class ClickConfig:
    """Sizes and strengths of the population; the defaults put the best click AUC near .80."""

    num_users: int = 3_000
    num_items: int = 1_500
    num_categories: int = 16
    num_brands: int = 150
    num_countries: int = 12
    latent_dim: int = 4
    page_size: int = 5
    history_length: int = 20
    births_per_day: float = 0.08  # share of the items replaced by new ones every night
    drift: float = 0.2  # how far a taste moves in a night, 1 = forgotten
    skips_in_history: float = 0.1  # share of the items seen and not clicked that a history keeps
    bias: float = -2.4
    taste: float = 0.5
    interest: float = 3.0
    quality: float = 0.35
    seed: int = 7

    def __post_init__(self) -> None:
        """Check what would otherwise end in an empty draw or a crash deep inside NumPy."""
        for name in ("num_users", "num_categories", "num_brands", "num_countries", "page_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_items < 10 * self.page_size:
            raise ValueError(
                f"num_items must be at least 10 * page_size = {10 * self.page_size} so that a page "
                f"can be filled without repeats, got {self.num_items}"
            )
        for name in ("births_per_day", "drift", "skips_in_history"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie in [0, 1], got {getattr(self, name)}")

    def build(self, start_ms: int) -> Population:
        """Return the population as it is at `start_ms` (milliseconds since the epoch, UTC)."""
        return Population(self, start_ms)


class Population:
    """Users, items and everybody's past; `run_day` shows pages and draws what is done on them."""

    def __init__(self, config: ClickConfig, start_ms: int) -> None:
        self.config, self.now_ms = config, start_ms
        self.rng = rng = np.random.default_rng(config.seed)
        users, categories = config.num_users, config.num_categories
        self.taste_UD = rng.standard_normal((users, config.latent_dim))
        self.mood_U = 0.2 * rng.standard_normal(users)
        self.price_U = 0.25 + 0.15 * rng.standard_normal(users)
        self.activity_U = rng.lognormal(0.0, 0.8, users)
        self.country_U = rng.choice(config.num_countries, users, p=_zipf(config.num_countries, 1.0))
        self.device_U = rng.choice(3, users, p=[0.6, 0.3, 0.1])
        self.interest_UD = np.zeros((users, config.latent_dim))
        self.clicks_U = np.zeros(users, np.int64)
        self.last_ms_U = np.full(users, -1, np.int64)
        self.centre_CD = _unit(rng.standard_normal((categories, config.latent_dim)))
        self.brand_B = 0.25 * rng.standard_normal(config.num_brands)
        self.brand_category_B = rng.integers(0, categories, config.num_brands)
        self.device_category = 0.2 * rng.standard_normal((3, categories))
        self.hour_category = 0.25 * rng.standard_normal((4, categories))
        self.position_S = -0.4 * np.log1p(np.arange(config.page_size))
        self._start_items()
        shape = (users, config.history_length)
        self.hist_item = np.zeros(shape, np.int64)
        self.hist_category = np.zeros(shape, np.int64)
        self.hist_action = np.zeros(shape, np.int64)
        self.hist_ms = np.full(shape, -1, np.int64)

    def _start_items(self) -> None:
        n, dim = self.config.num_items, self.config.latent_dim
        self.next_item = 1
        self.item_N, self.brand_N = np.zeros(n, np.int64), np.zeros(n, np.int64)
        self.category_N, self.born_ms_N = np.zeros(n, np.int64), np.zeros(n, np.int64)
        self.vector_ND, self.quality_N = np.zeros((n, dim)), np.zeros(n)
        self.charm_N, self.price_N = np.zeros(n), np.zeros(n)
        self.rank_N = self.rng.permutation(n)
        self._give_birth(np.arange(n))
        self.born_ms_N -= (self.rng.exponential(5.0, n) * DAY_MS).astype(np.int64)

    def _give_birth(self, places: NDArray[np.int64]) -> None:
        """Fill `places` with new items; an id is never used again."""
        rng, count = self.rng, len(places)
        self.item_N[places] = np.arange(self.next_item, self.next_item + count)
        self.next_item += count
        self.brand_N[places] = brand = rng.choice(
            self.config.num_brands, count, p=_zipf(self.config.num_brands, 0.7)
        )
        self.category_N[places] = category = self.brand_category_B[brand]
        noise = rng.standard_normal((count, self.config.latent_dim))
        self.vector_ND[places] = _unit(self.centre_CD[category] + 0.12 * noise)
        self.quality_N[places] = self.config.quality * rng.standard_normal(count)
        self.charm_N[places] = 0.6 * rng.standard_normal(count)
        self.price_N[places] = rng.standard_normal(count)
        self.born_ms_N[places] = self.now_ms - rng.integers(0, DAY_MS // 4, count)

    def end_day(self) -> None:
        """Move to the next day: tastes drift, some items die and as many are born."""
        self.now_ms += DAY_MS
        keep = np.sqrt(1 - self.config.drift**2)
        noise = self.rng.standard_normal(self.taste_UD.shape)
        self.taste_UD = keep * self.taste_UD + self.config.drift * noise
        dying = self.rng.random(self.config.num_items) < self.config.births_per_day
        self._give_birth(np.flatnonzero(dying))

    def run_day(self, num_rows: int) -> Pages:
        """Show `num_rows` impressions on pages of the current day.

        The r-th pages of all users are one vectorised round, so a page sees the history its user
        had left behind before it and nothing later.
        """
        size = self.config.page_size
        num_pages = -(-num_rows // size)
        share = self.activity_U / self.activity_U.sum()
        pages_U = self.rng.multinomial(num_pages, share)
        user_R = np.repeat(np.arange(self.config.num_users), pages_U)
        first_U = np.cumsum(pages_U) - pages_U
        round_R = np.arange(num_pages) - first_U[user_R]
        time_R = self._page_times(user_R, round_R)
        # The last page of the day is cut short when the rows are no multiple of the page size.
        slots_R = np.full(num_pages, size)
        slots_R[np.argmax(time_R)] = size - (num_pages * size - num_rows)
        by_round = np.argsort(round_R, kind="stable")
        bounds = np.cumsum(np.bincount(round_R))
        popularity_N = np.cumsum(self._popularity())
        shown = [
            self._show(user_R[pages], time_R[pages], slots_R[pages], popularity_N)
            for pages in np.split(by_round, bounds[:-1])
        ]
        return in_time_order(shown, size)

    def _page_times(self, user_R: Array, round_R: Array) -> NDArray[np.int64]:
        """Return times in milliseconds that grow by at least one second along a user's rounds."""
        hours = np.arange(24)
        curve = 1.6 + np.cos((hours - 20) * np.pi / 12) + 0.5 * np.cos((hours - 12) * np.pi / 6)
        hour_R = self.rng.choice(24, len(user_R), p=curve / curve.sum())
        room = DAY_MS - 1_000 * (int(round_R.max()) + 1)
        within = (hour_R + self.rng.random(len(user_R))) / 24 * room
        order = np.lexsort((within, user_R))
        return self.now_ms + within[order].astype(np.int64) + 1_000 * round_R.astype(np.int64)

    def _popularity(self) -> NDArray[np.float64]:
        weight = _zipf(self.config.num_items, 0.8)[self.rank_N]
        weight = weight * self.rng.lognormal(0.0, 0.3, len(weight))
        weight = np.minimum(weight / weight.sum(), 0.5 / self.config.page_size)
        return weight / weight.sum()

    def _show(
        self, user_P: Array, time_P: Array, slots_P: Array, cumulative_N: NDArray[np.float64]
    ) -> dict[str, Array]:
        """Show one page to each of P different users, draw the actions, remember them."""
        rng, size = self.rng, self.config.page_size
        # Systematic sampling: one offset a page, evenly spaced, so no item is shown twice on it.
        point_PS = (rng.random((len(user_P), 1)) + np.arange(size)) / size
        item_PS = np.minimum(np.searchsorted(cumulative_N, point_PS), self.config.num_items - 1)
        item_PS = rng.permuted(item_PS, axis=1)
        other = rng.random(len(user_P)) < 0.15
        device_P = np.where(other, rng.integers(0, 3, len(user_P)), self.device_U[user_P])
        click_PS, like_PS = self._probabilities(user_P, time_P, item_PS, device_P)
        drawn_PS = rng.random((2, *item_PS.shape))
        clicked_PS = drawn_PS[0] < click_PS
        liked_PS = clicked_PS & (drawn_PS[1] < like_PS)
        seen_PS = np.arange(size) < slots_P[:, None]
        page: dict[str, Array] = {
            "user_id": user_P + 1,
            "timestamp": time_P,
            "country": self.country_U[user_P],
            "device": device_P,
            "user_clicks": self.clicks_U[user_P],
            "since_last_s": np.where(
                self.last_ms_U[user_P] < 0, np.nan, (time_P - self.last_ms_U[user_P]) / 1_000
            ),
            "item_id": self.item_N[item_PS],
            "category_id": self.category_N[item_PS],
            "brand_id": self.brand_N[item_PS],
            "price": np.where(
                rng.random(item_PS.shape) < 0.1, np.nan, np.exp(2 + self.price_N[item_PS])
            ),
            "item_age_h": (time_P[:, None] - self.born_ms_N[item_PS]) / 3_600_000,
            "click": clicked_PS,
            "like": liked_PS,
            "p_click": click_PS,
            "p_like": click_PS * like_PS,
            "seen": seen_PS,
            "hist_item": self.hist_item[user_P],
            "hist_category": self.hist_category[user_P],
            "hist_action": self.hist_action[user_P],
            "hist_ms": self.hist_ms[user_P],
        }
        action_PS = np.where(seen_PS, clicked_PS + 2 * liked_PS, 0)
        self._remember(user_P, time_P, item_PS, action_PS, seen_PS)
        return page

    def _probabilities(
        self, user_P: Array, time_P: Array, item_PS: Array, device_P: Array
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return P(click) and P(like | click), (P, S) each, by the equations of this file's top."""
        config = self.config
        vector_PSD, category_PS = self.vector_ND[item_PS], self.category_N[item_PS]
        fit_PS = np.einsum("pd,psd->ps", self.taste_UD[user_P], vector_PSD)
        recent_PS = np.einsum("pd,psd->ps", self.interest_UD[user_P], vector_PSD)
        block_P = (time_P // (DAY_MS // 4)) % 4
        age_PS = (time_P[:, None] - self.born_ms_N[item_PS]) / DAY_MS
        z_PS = (
            config.bias
            + self.quality_N[item_PS]
            + self.brand_B[self.brand_N[item_PS]]
            + self.mood_U[user_P][:, None]
            + config.taste * fit_PS
            + config.interest * recent_PS
            + self.position_S
            + self.device_category[device_P[:, None], category_PS]
            + self.hour_category[block_P[:, None], category_PS]
            - self.price_U[user_P][:, None] * self.price_N[item_PS]
            + 0.5 * np.exp(-age_PS)
        )
        like_PS = _sigmoid(-0.4 + 0.7 * fit_PS + self.charm_N[item_PS])
        return _sigmoid(z_PS), like_PS

    def _remember(
        self, user_P: Array, time_P: Array, item_PS: Array, action_PS: Array, seen_PS: Array
    ) -> None:
        """Append what was clicked, and some of what was skipped, to the users' histories."""
        length = self.config.history_length
        clicked_PS = action_PS > 0
        kept_PS = self.rng.random(item_PS.shape) < self.config.skips_in_history
        kept_PS = clicked_PS | (seen_PS & kept_PS)
        old_PH = self.hist_ms[user_P] >= 0
        # Absent events sort first and the order of the others stays: the newest H are at the end.
        present = np.concatenate([old_PH, kept_PS], axis=1)
        newest = np.argsort(present, axis=1, kind="stable")[:, -length:]
        for store, new_PS in (
            (self.hist_item, self.item_N[item_PS]),
            (self.hist_category, self.category_N[item_PS]),
            (self.hist_action, action_PS),
            (self.hist_ms, np.where(kept_PS, time_P[:, None], -1)),
        ):
            both = np.concatenate([store[user_P], new_PS], axis=1)
            store[user_P] = np.take_along_axis(both, newest, axis=1)
        clicks_P = clicked_PS.sum(axis=1)
        vector_PD = np.einsum("ps,psd->pd", clicked_PS, self.vector_ND[item_PS])
        mean_PD = vector_PD / np.maximum(clicks_P, 1)[:, None]
        moved_PD = 0.8 * self.interest_UD[user_P] + 0.2 * mean_PD
        self.interest_UD[user_P] = np.where(
            clicks_P[:, None] > 0, moved_PD, self.interest_UD[user_P]
        )
        self.clicks_U[user_P] += clicks_P
        self.last_ms_U[user_P] = time_P


def _zipf(count: int, power: float) -> NDArray[np.float64]:
    weight = np.arange(1, count + 1) ** -power
    return weight / weight.sum()


def _unit(vectors: NDArray[np.float64]) -> NDArray[np.float64]:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def _sigmoid(z: NDArray[np.float64]) -> NDArray[np.float64]:
    return 1 / (1 + np.exp(-z))
