# SPDX-License-Identifier: MIT
"""Assign the columns of a sample: labels, user, time, features, and columns to leave out.

The user's choices have priority. Guesses are marked.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pyarrow as pa

from embeddings.schema.plain import suggest
from pipelines.schema_proposal import guesses
from pipelines.schema_proposal.column_profile import Profile, pc, profile, told
from pipelines.schema_proposal.sampling import Sample

GUESS = "GUESS"
_LEAK = 0.95
_LONG_TEXT = 64
_PER_DAY = {"s": 86_400, "ms": 86_400_000, "us": 86_400_000_000, "ns": 86_400_000_000_000}
_MOST_DAYS = 400  # of a log, beyond which its times are doubted
_UNITS = {"s": "seconds", "us": "microseconds", "ns": "nanoseconds"}


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The user's choices; empty ones are guessed.

    Args:
        labels: columns of the labels.
        user: column of the user.
        timestamp: column of the rows' time.
        drop: columns to leave out.
    """

    labels: tuple[str, ...] = ()
    user: str = ""
    timestamp: str = ""
    drop: tuple[str, ...] = ()


@dataclass(kw_only=True)
class Roles:
    """Labels, user and time of a log, and the profiles of the columns that may be features.

    Args:
        left_out: a reason for each column that is none of these.
        remarks: by section and name.
        time: the profile of the rows' time, also if it is not read as it is (then `timestamp` is
            empty).
    """

    columns: dict[str, Profile]
    labels: tuple[str, ...] = ()
    user: str = ""
    timestamp: str = ""
    time: Profile | None = None
    time_unit: str = ""
    left_out: dict[str, str] = field(default_factory=dict)
    remarks: dict[tuple[str, str], str] = field(default_factory=dict)

    def leave_out(self, name: str, reason: str) -> None:
        """Take a column out of the candidates for features."""
        self.columns.pop(name, None)
        self.left_out[name] = reason

    def remark(self, section: str, name: str, text: str) -> None:
        """Add a remark to those on a part of the schema."""
        before = self.remarks.get((section, name))
        self.remarks[section, name] = f"{before}; {text}" if before else text


def assign(sample: Sample, choices: Choices) -> Roles:
    """Return the roles of the sample's columns.

    Raises:
        ValueError: no label can be found, or a column that `choices` names is not there or does
            not fit.
    """
    wanted = [*choices.labels, choices.user, choices.timestamp, *choices.drop]
    for name in filter(None, wanted):
        if name not in sample.columns:
            why = sample.unread.get(name, "there is no such column")
            raise ValueError(
                f"{name!r}: {why}{suggest(name, sample.columns)}; columns: {list(sample.columns)}"
            )
    roles = Roles(
        columns={
            name: profile(name, column, sample.scale) for name, column in sample.columns.items()
        },
        left_out=dict(sample.unread),
    )
    _assign_labels(roles, sample, choices)
    for name in choices.drop:
        roles.leave_out(name, "as asked (--drop)")
    _assign_time(roles, sample, choices)
    _assign_user(roles, choices)
    for one in list(roles.columns.values()):
        reason = _useless(one, sample, roles.labels[0])
        if reason:
            roles.leave_out(one.name, reason)
    return roles


def _assign_labels(roles: Roles, sample: Sample, choices: Choices) -> None:
    named = [one.name for one in roles.columns.values() if guesses.is_label(one)]
    binary = [one.name for one in roles.columns.values() if one.is_binary]
    likely = [name for name in binary if not guesses.is_marker(roles.columns[name])]
    labels, why = list(choices.labels), "as asked (--label)"
    for name in labels:
        if name not in binary:
            one = roles.columns[name]
            raise ValueError(
                f"label {name!r}: expected values 0 and 1, both of them, got {one.kind} with "
                f"{one.distinct:,} values, such as {', '.join(one.examples)}; write a column "
                "of 0 and 1 (rating >= 4, say) and name that"
            )
    if not labels and named:
        labels, why = named, f"{GUESS}, by its name"
    elif not labels and likely:
        labels, why = likely[:1], f"{GUESS}: the first column of 0 and 1 ({', '.join(likely)})"
    if not labels:
        unread = "".join(f"; {name} cannot be: {why}" for name, why in roles.left_out.items())
        differ = any(why.endswith("every file must") for why in roles.left_out.values())
        alone = ", and if the files are not of one log, pass those that are" if differ else ""
        raise ValueError(
            "no column holds 0 and 1 and nothing else, so there is no label: expected one such "
            f"column in every file; name it with --label{alone}, or add one (of a rating: 1 where "
            f"it is 4 or more). Columns: {list(roles.columns)}"
            f"{unread}"
        )
    for name in labels:
        one = roles.columns.pop(name)
        mean = pc.mean(sample.columns[name].cast(pa.float64())).as_py()
        missing = f", {one.nulls / one.rows:.1%} null" if one.nulls else ""
        roles.remark("labels", name, f"{why}; {mean:.2%} of the rows are 1{missing}")
    roles.labels = tuple(labels)


def _assign_time(roles: Roles, sample: Sample, choices: Choices) -> None:
    """Find the rows' time; every other time is of no use as a feature."""
    asked = choices.timestamp
    times = [one for one in roles.columns.values() if guesses.is_time(one, asked)]
    chosen = next((one for one in times if one.name == asked), None)
    if asked and chosen is None:
        one = roles.columns[asked]
        raise ValueError(
            f"timestamp {asked!r}: expected times since 1970 (integers), an Arrow timestamp or "
            f"ISO dates, got {one.kind}, such as {', '.join(one.examples)}"
        )
    # Training reads no row without a time; ingestion sets such rows apart.
    whole = [one for one in times if sample.is_text or not one.nulls]
    if chosen is not None and chosen not in whole:
        raise ValueError(
            f"timestamp {asked!r}: expected a time in every row, got none in "
            f"{chosen.nulls / chosen.rows:.1%} of them; choose another, or write the log again"
        )
    chosen = chosen or max(whole, key=lambda one: one.distinct, default=None)
    for one in times:
        missing = f"a time, and {one.nulls / one.rows:.1%} of the rows have none"
        reason = "a time; the rows' own is another column" if one in whole else missing
        roles.leave_out(one.name, reason)
    if chosen is None:
        return
    del roles.left_out[chosen.name]
    roles.time, roles.time_unit = chosen, guesses.time_unit(chosen)
    unit = roles.time_unit
    days = (chosen.high - chosen.low) / _PER_DAY[unit] if unit else 0.0
    if days > _MOST_DAYS:
        roles.remark(
            "timestamp",
            chosen.name,
            f"{GUESS}: {days:,.0f} days if it is in {unit}; are these times, and of that unit?",
        )
    if chosen.kind == "timestamp" or unit == "ms" or sample.is_text:
        roles.timestamp = chosen.name
        why = "as asked (--timestamp)" if asked else f"{GUESS}, by its name and values"
        roles.remark("timestamp", chosen.name, why)
        return
    option = f" and --timestamp-unit {unit}" if unit else ""
    roles.left_out[chosen.name] = (
        f"the rows' time in {_UNITS.get(unit, 'text')}, and training reads milliseconds. `python "
        "-m pipelines.ingest`, given this schema with the line "
        f"`timestamp: {chosen.name}`{option}, converts it and cuts the log into days"
    )


def _assign_user(roles: Roles, choices: Choices) -> None:
    """Find the column that groups rows for GAUC."""
    users = [one.name for one in roles.columns.values() if guesses.is_user(one)]
    roles.user = choices.user or next(iter(users), "")
    if roles.user:
        why = "as asked (--user)" if choices.user else f"{GUESS}, by its name"
        roles.remark("user", roles.user, f"{why}; GAUC is the AUC within users")


def _useless(one: Profile, sample: Sample, label: str) -> str:
    """Return why a column is not a feature: constant, reveals the label, or is never repeated."""
    if not one.values or (one.distinct < 2 and not one.is_list and not one.nulls):
        return "the same value in every row of the sample"
    known = 0.0 if one.is_list else told(sample.columns[one.name], sample.columns[label])
    if known > _LEAK:
        return (
            f"it tells {label!r} by itself ({known:.0%} of its entropy): surely it is known only "
            "afterwards"
        )
    if guesses.is_marker(one):
        return "it marks rows of training and test, and serving has no such column"
    policy = guesses.logging_policy(one)
    if policy:
        return (
            f"{policy}: it belongs to the policy that filled the log, and serving has another; "
            "to weigh rows by it, write a column of weights and name it as the label's weight"
        )
    if one.kind == "decimal" and (not guesses.is_measure(one) or one.high >= 2.0**53):
        return (
            "ids as decimals, and training reads ids as integers or text: `python -m "
            "pipelines.ingest`, given this schema with the column as an id, makes integers of them"
        )
    if guesses.is_passing(one):
        return "it names a request, a session or a row, and none comes back"
    if not one.finite:
        return "it holds infinite numbers; replace them by nulls"
    if one.kind in ("timestamp", "date") or one.is_date_text:
        return "a date: that of tomorrow has not been seen in training"
    if one.text_length > _LONG_TEXT:
        return f"long text, {one.text_length:.0f} letters on average"
    unique = one.distinct > 0.95 * one.values and one.values > 1_000
    if unique and one.kind == "text" and not one.is_list and sample.scale == 1:
        return "another value in nearly every row"
    return ""
