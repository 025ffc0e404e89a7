# SPDX-License-Identifier: MIT
"""Draw docs/dataflow.svg and docs/cluster.svg: python -m tests.site.drawings.

Plain SVG of boxes and arrows, in light and dark, that needs no script and no address. The text of
a box is checked against its width, so a longer word is noticed here and not on the page.
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).resolve().parents[2] / "docs"
_STYLE = """
text{font:13px system-ui,sans-serif;fill:#1f2430}.t{font-weight:600}.s{font-size:12px}
.b{fill:#f4f6fb;stroke:#5b6b8c}.g{fill:none;stroke:#9aa6bf;stroke-dasharray:5 4}
.a{fill:none;stroke:#3f51b5;stroke-width:1.6;marker-end:url(#h)}#h path{fill:#3f51b5}
@media(prefers-color-scheme:dark){text{fill:#e3e7f0}.b{fill:#262b38;stroke:#8793ad}
.g{stroke:#66708a}.a{stroke:#9fa8da}#h path{fill:#9fa8da}}
"""
_HEAD = (
    '<marker id="h" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
    'orient="auto"><path d="M0 0 8 4 0 8z"/></marker>'
)
# Width of a character, at most, in the two sizes.
_TITLE, _SMALL = 7.6, 6.7


class Box(NamedTuple):
    """A box with a title and lines below it; coordinates of its corner, and its size."""

    x: int
    y: int
    width: int
    height: int
    title: str
    lines: tuple[str, ...] = ()
    frame: bool = False

    def draw(self) -> str:
        """Return it as SVG.

        Raises:
            ValueError: its text does not fit.
        """
        longest = max([len(self.title) * _TITLE, *(len(line) * _SMALL for line in self.lines)])
        if longest > self.width - 16 or 26 + 17 * len(self.lines) > self.height:
            raise ValueError(f"box {self.title!r}: its text does not fit; make it larger")
        kind = "g" if self.frame else "b"
        parts = [
            f'<rect class="{kind}" x="{self.x}" y="{self.y}" width="{self.width}" '
            f'height="{self.height}" rx="6"/>',
            f'<text class="t" x="{self.x + 10}" y="{self.y + 20}">{escape(self.title)}</text>',
        ]
        parts += [
            f'<text class="s" x="{self.x + 10}" y="{self.y + 38 + 17 * number}">'
            f"{escape(line)}</text>"
            for number, line in enumerate(self.lines)
        ]
        return "".join(parts)


def drawing(title: str, size: tuple[int, int], boxes: list[Box], arrows: list[str]) -> str:
    """Return an SVG document.

    Args:
        title: what it shows, for those who do not see it.
        size: width and height.
        boxes: drawn in order, frames first.
        arrows: paths, `M x y L x y`.
    """
    drawn = [box.draw() for box in boxes]
    drawn += [f'<path class="a" d="{path}"/>' for path in arrows]
    width, height = size
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style><defs>{_HEAD}</defs>\n"
        + "\n".join(drawn)
        + "\n</svg>\n"
    )


def dataflow() -> str:
    """Return the way of a row: from raw logs to a published model."""
    row, low = 40, 250
    boxes = [
        Box(10, row, 160, 100, "raw logs", ("CSV, TSV, JSON,", "Parquet")),
        Box(210, row, 190, 100, "pipelines.ingest", ("typed Parquet by day", "bad rows set aside")),
        Box(440, row, 200, 100, "trainer/data", ("files, order, transforms", "ids to table rows")),
        Box(680, row, 200, 100, "embeddings", ("sharded tables", "rows to vectors")),
        Box(680, low, 200, 100, "models", ("tokens, tower, heads", "probabilities, loss")),
        Box(440, low, 200, 100, "trainer", ("backward, optimizers,", "metrics, checkpoints")),
        Box(210, low, 190, 100, "a run's folder", ("metrics.json, curves", "checkpoints/step-N")),
        Box(10, low, 160, 100, "pipelines", ("report, compare,", "nightly, publish")),
        Box(210, 160, 190, 70, "schema.yaml", ("names the columns",)),
    ]
    arrows = ["M170 90L206 90", "M400 90L436 90", "M640 90L676 90", "M780 140L780 246"]
    arrows += ["M680 300L644 300", "M440 300L404 300", "M210 300L174 300"]
    arrows += ["M305 160L305 144", "M400 195L500 144", "M560 250L700 144"]
    return drawing("From raw logs to a published model", (890, 370), boxes, arrows)


def cluster() -> str:
    """Return what runs where in a job of many nodes."""
    boxes: list[Box] = []
    arrows: list[str] = []
    for number, left in enumerate((10, 460)):
        boxes.append(Box(left, 40, 430, 330, f"node {number}", (), True))
        for rank in (0, 1):
            x = left + 15 + 205 * rank
            name = f"rank {2 * number + rank}"
            lines = (
                "loader workers",
                "its shards of tables",
                "dense weights (DDP,",
                "FSDP2, ZeRO)",
            )
            boxes.append(Box(x, 75, 190, 110, name, lines))
            arrows.append(f"M{x + 95} 185L{x + 95} 226")
        boxes.append(
            Box(left + 15, 310, 245, 55, "Prometheus metrics", ("one exporter for its ranks",))
        )
    collectives = (
        "ids and vectors: all-to-all of TorchRec",
        "gradients: all-reduce, sharded or not",
    )
    boxes.append(Box(25, 230, 850, 62, "collectives of all ranks (NCCL or gloo)", collectives[:2]))
    boxes.append(Box(10, 400, 280, 80, "the log", ("every rank reads its share of rows",)))
    shared = ("config, metrics, curves: rank 0", "checkpoints: every rank its shards")
    boxes.append(Box(310, 400, 280, 80, "the run's folder", shared))
    boxes.append(Box(610, 400, 280, 80, "launcher", ("torchrun, torchx, Slurm, Kubernetes",)))
    arrows += ["M150 400L150 374", "M380 370L430 396", "M520 370L480 396", "M750 400L750 374"]
    return drawing("What runs where in a job of two nodes", (900, 490), boxes, arrows)


DRAWINGS = {"dataflow.svg": dataflow, "cluster.svg": cluster}


def main() -> int:
    """Write the files and return the exit code."""
    for name, draw in DRAWINGS.items():
        (DOCS / name).write_text(draw(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
