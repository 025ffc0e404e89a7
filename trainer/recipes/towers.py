# SPDX-License-Identifier: MIT
"""The towers that recipes train, each with settings that suit any log: `towers.specformer()`.

`TOWERS` has one line a tower. With `datasets.DATASETS` it makes the recipes TOWER.DATASET.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from models.baselines.fields.autoint import AutoIntConfig
from models.baselines.fields.dcn import DCNConfig
from models.baselines.fields.dcnv2 import DCNv2Config
from models.baselines.fields.deepfm import DeepFMConfig
from models.baselines.fields.dlrm import DLRMConfig
from models.baselines.fields.dnn import DNNConfig
from models.baselines.fields.finalmlp import FinalMLPConfig
from models.baselines.fields.fm import FMConfig
from models.baselines.fields.gdcn import GDCNConfig
from models.baselines.fields.lr import LRConfig
from models.baselines.fields.masknet import MaskNetConfig
from models.baselines.fields.wide_deep import WideDeepConfig
from models.baselines.fields.wukong import WuKongConfig
from models.baselines.fields.xdeepfm import XDeepFMConfig
from models.baselines.sequences.bert4rec import BERT4RecConfig
from models.baselines.sequences.din import DINConfig
from models.baselines.sequences.hstu import HSTUConfig
from models.baselines.sequences.onetrans import OneTransConfig
from models.baselines.sequences.sasrec import SASRecConfig
from models.baselines.tokens.rankmixer import RankMixerConfig
from models.heads import HeadConfig
from models.ranking import ModelConfig
from models.tokens import TokenizerConfig
from models.tower import StreamTowerConfig, TowerConfig
from models.towers.rankelastor import RankElastorConfig
from models.towers.specformer import SpecFormerConfig
from models.towers.tokenformer import TokenFormerConfig


class Entry(NamedTuple):
    """A tower in recipes.

    Attributes:
        title: its name in the list of recipes.
        model: returns the tower with its tokenizer and head, for any log.
    """

    title: str
    model: Callable[[], ModelConfig]


def fields(tower: TowerConfig, token_dim: int = 32, num_tokens: int = 0) -> ModelConfig:
    """Return a field tower with its tokenizer.

    Args:
        tower: its settings.
        token_dim: width of a token.
        num_tokens: slices of all fields that are a token each; 0 for a token a field.
    """
    return ModelConfig(
        tower=tower, tokenizer=TokenizerConfig(token_dim=token_dim, num_tokens=num_tokens)
    )


def stream(
    tower: StreamTowerConfig, token_dim: int = 32, stream_fields: tuple[str, ...] = ()
) -> ModelConfig:
    """Return a stream tower with its tokenizer; its target token is the whole impression.

    Args:
        tower: its settings. A dataset sets `max_length` to that of its histories.
        token_dim: width of a token.
        stream_fields: fields that are a token each; () for those that the dataset chooses.
    """
    return ModelConfig(
        tower=tower,
        tokenizer=TokenizerConfig(
            token_dim=token_dim, target_fields="all", stream_fields=stream_fields
        ),
    )


def linear_head(tower: TowerConfig, token_dim: int = 16) -> ModelConfig:
    """Return a field tower whose last linear map is the head, and a history's mean one field.

    This is the form in which LR, FM and their successors were published: a history is a feature
    with several values, and the logit is linear in what the tower returns.

    Args:
        tower: its settings.
        token_dim: width of a token; where the tower has first-order weights, one column of it.
    """
    return ModelConfig(
        tower=tower,
        tokenizer=TokenizerConfig(token_dim=token_dim, history_pooling=("mean",)),
        head=HeadConfig(hidden_units=()),
    )


def target_of_item(tower: StreamTowerConfig, token_dim: int = 32) -> ModelConfig:
    """Return a stream tower that matches the item alone with the events, and reads fields beside.

    Where a schema has no feature of the item, the target is one learned vector.

    Args:
        tower: its settings. A dataset sets `max_length` to that of its histories.
        token_dim: width of a token.
    """
    return ModelConfig(tower=tower, tokenizer=TokenizerConfig(token_dim=token_dim))


def specformer(token_dim: int = 32, num_tokens: int = 0) -> ModelConfig:
    """Return SpecFormer: two layers, logits scaled by 1/√D, the paper's warm-up."""
    tower = SpecFormerConfig(num_layers=2, ffn_ratio=2.0, logit_scale="rsqrt_dim", warmup=0.05)
    return fields(tower, token_dim, num_tokens)


def rankelastor(token_dim: int = 32, num_tokens: int = 0, depth: int = 2) -> ModelConfig:
    """Return RankElastor by the paper's equations, of `depth` blocks."""
    return fields(RankElastorConfig(variant="paper", depth=depth), token_dim, num_tokens)


def tokenformer(
    window: int = 16,
    user_centric: bool = False,
    stream_fields: tuple[str, ...] = (),
    token_dim: int = 32,
) -> ModelConfig:
    """Return TokenFormer 1F1S: a full layer, then one with a sliding window of `window` tokens."""
    tower = TokenFormerConfig(
        mode="user_centric" if user_centric else "impression",
        num_layers=2,
        num_full_layers=1,
        windows=(window,),
        num_heads=2,
        expansion=2.0,
    )
    return stream(tower, token_dim, stream_fields)


def rankmixer(num_tokens: int = 13) -> ModelConfig:
    """Return RankMixer. The number of tokens must divide their width.

    13 slices of the fields and the three summaries of a history make 16 tokens of width 32; without
    a history 16 slices do.
    """
    return fields(RankMixerConfig(), num_tokens=num_tokens)


# One line a tower.
TOWERS = {
    "specformer": Entry("SpecFormer", specformer),
    "rankelastor": Entry("RankElastor", rankelastor),
    "tokenformer": Entry("TokenFormer", tokenformer),
    "dlrm": Entry("DLRM (baseline)", lambda: fields(DLRMConfig(), token_dim=16)),
    "rankmixer": Entry("RankMixer (baseline)", rankmixer),
    "onetrans": Entry("OneTrans (baseline)", lambda: stream(OneTransConfig())),
    "hstu": Entry("HSTU (baseline)", lambda: stream(HSTUConfig())),
    "dcnv2": Entry("DCNv2 (baseline)", lambda: fields(DCNv2Config(), token_dim=16)),
    "gdcn": Entry("GDCN (baseline)", lambda: fields(GDCNConfig(), token_dim=16)),
    "autoint": Entry("AutoInt (baseline)", lambda: fields(AutoIntConfig(), token_dim=16)),
    "masknet": Entry("MaskNet (baseline)", lambda: fields(MaskNetConfig(), token_dim=16)),
    "wukong": Entry("WuKong (baseline)", lambda: fields(WuKongConfig(), token_dim=16)),
    "lr": Entry("Logistic regression (baseline)", lambda: linear_head(LRConfig(), token_dim=1)),
    "fm": Entry("FM (baseline)", lambda: linear_head(FMConfig())),
    "dnn": Entry("DNN (baseline)", lambda: linear_head(DNNConfig())),
    "wide_deep": Entry("Wide & Deep (baseline)", lambda: linear_head(WideDeepConfig())),
    "deepfm": Entry("DeepFM (baseline)", lambda: linear_head(DeepFMConfig())),
    "dcn": Entry("DCN (baseline)", lambda: linear_head(DCNConfig())),
    "xdeepfm": Entry("xDeepFM (baseline)", lambda: linear_head(XDeepFMConfig())),
    "finalmlp": Entry("FinalMLP (baseline)", lambda: linear_head(FinalMLPConfig())),
    "din": Entry("DIN (baseline)", lambda: target_of_item(DINConfig())),
    "sasrec": Entry("SASRec (baseline)", lambda: target_of_item(SASRecConfig())),
    "bert4rec": Entry("BERT4Rec (baseline)", lambda: target_of_item(BERT4RecConfig())),
}
