# SPDX-License-Identifier: MIT
"""A policy of inheritance as a word of the command line, and as words for the trainer.

A policy is a name of `trainer/warm_start/policies.py`, or one of your own: NAME:GROUP=SOURCE,...
lists the differences from `naive`, where a source is previous, warmup, fresh or a path.

  progressive      half:embedding_optimizer=fresh,dense_optimizer=fresh
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from trainer.warm_start.policies import POLICIES, InheritConfig, Policy

# `nightly` begins at the first row again, which is a night's, not an epoch's.
NAMED = tuple(name for name in POLICIES if name != "nightly")


@dataclass(frozen=True, kw_only=True)
class EpochPolicy:
    """What the epochs after the first take from where.

    Args:
        name: of the policy, and of its stages.
        based_on: the policy of `trainer/warm_start/policies.py`.
        sources: group -> source where it differs.
        settings: of the recipe, for these epochs.
    """

    name: str
    based_on: str
    sources: dict[str, str] = field(default_factory=dict)
    settings: tuple[str, ...] = ()

    def words(self, previous: Path, warmup: Path, restart: bool = False) -> list[str]:
        """Return the words that let an epoch inherit from the one before and the warm-up.

        Args:
            restart: whether the epoch begins at step 0 of a schedule of its own.
        """
        words = ["--inherit.path", str(previous), "--inherit.policy", self.based_on]
        sources = {**self.sources, **({"data_position": "fresh"} if restart else {})}
        if sources:
            words += ["--inherit.sources", *(w for pair in sources.items() for w in pair)]
        if self._takes_warmup:
            words += ["--inherit.warmup", str(warmup)]
        return [*words, *self.settings]

    @property
    def _takes_warmup(self) -> bool:
        return "warmup" in {**POLICIES[self.based_on], **self.sources}.values()


def parse_policy(text: str, settings: tuple[str, ...] = ()) -> EpochPolicy:
    """Return the policy that a word means; `settings` are of the recipe, for its epochs.

    Raises:
        ValueError: no policy has this name, or a group or source is unknown.
    """
    name, colon, mapping = text.partition(":")
    if not colon:
        if name not in NAMED:
            raise ValueError(
                f"--policies: expected one of {', '.join(NAMED)} or NAME:GROUP=SOURCE,..., got "
                f"{text!r}"
            )
        return EpochPolicy(name=name, based_on=name, settings=settings)
    pairs = [pair.partition("=") for pair in mapping.split(",") if pair]
    if not name or name in POLICIES or not all(one and two and three for one, two, three in pairs):
        raise ValueError(
            f"--policies: expected NAME:GROUP=SOURCE,... with a name of its own, got {text!r}"
        )
    policy = EpochPolicy(
        name=name,
        based_on="naive",
        sources={group: source for group, _, source in pairs},
        settings=settings,
    )
    InheritConfig(  # checks the groups
        path="epoch-1",
        warmup="warmup" if policy._takes_warmup else "",
        policy=cast(Policy, policy.based_on),
        sources=policy.sources,
    )
    return policy


def parse_policies(texts: list[str], later: list[list[str]]) -> tuple[EpochPolicy, ...]:
    """Return the policies of the command line, each with its settings.

    Args:
        later: pairs of a policy's name and the settings of its epochs after the first, as one text.

    Raises:
        ValueError: as `parse_policy`; a policy is named twice, or `later` names none of them.
    """
    settings = {name: tuple(text.split()) for name, text in later}
    names = [text.partition(":")[0] for text in texts]
    if len(set(names)) < len(names):
        raise ValueError(f"--policies: expected different names, got {', '.join(names)}")
    unknown = sorted(settings.keys() - set(names))
    if unknown:
        raise ValueError(f"--later: no policy {unknown[0]!r}; policies: {', '.join(names)}")
    return tuple(
        parse_policy(text, settings.get(name, ())) for name, text in zip(names, texts, strict=True)
    )
