# SPDX-License-Identifier: MIT
"""Inject every fault and print what was left: python -m tests.faults.run [WORDS] [--quick].

WORDS choose the faults whose names hold one of them. The exit code is 1 if one fault got something
else than expected, or did not happen.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import textwrap
import time
import traceback
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tests.faults.catalogue import FAULTS, Fault
from tests.faults.harness import Failed, Harness

_COLUMNS = (44, 58, 58)


def inject(harness: Harness, number: int, fault: Fault) -> tuple[bool, str, float]:
    """Return whether a fault left what it must, what it left, and the seconds it took."""
    started = time.monotonic()
    place = harness.place(f"fault-{number}")
    try:
        good, got = True, fault.check(place)
    except Failed as failure:
        good, got = False, f"FAILED: {failure}"
    except Exception:
        good, got = False, f"FAILED: {traceback.format_exc(limit=3)}"
    finally:
        place.kill(place.started)
    return good, got, time.monotonic() - started


def row(*cells: str) -> str:
    """Return one row of the table, of as many lines as its longest cell needs."""
    parts = [
        textwrap.wrap(cell, width) or [""] for cell, width in zip(cells, _COLUMNS, strict=True)
    ]
    lines = []
    for number in range(max(map(len, parts))):
        texts = [part[number] if number < len(part) else "" for part in parts]
        lines.append(
            "  ".join(text.ljust(width) for text, width in zip(texts, _COLUMNS, strict=True))
        )
    return "\n".join(line.rstrip() for line in lines)


def main() -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="parts of the names of faults")
    parser.add_argument("--quick", action="store_true", help="those of the tests only")
    parser.add_argument("--list", action="store_true", help="only say what there is")
    parser.add_argument("--jobs", type=int, default=2, help="faults at a time (default: 2)")
    given = parser.parse_args()
    chosen = [
        (number, fault)
        for number, fault in enumerate(FAULTS)
        if (fault.quick or not given.quick)
        and (not given.words or any(word in fault.name for word in given.words))
    ]
    print(row("fault", "expected", "got"), row("-" * 44, "-" * 58, "-" * 58), sep="\n", flush=True)
    if given.list:
        for _, fault in chosen:
            print(row(fault.name, fault.expected, ""))
        return 0
    good, started = 0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        harness = Harness(Path(name))
        try:
            harness.reference()
            with ThreadPoolExecutor(given.jobs) as pool:
                running = {pool.submit(inject, harness, *item): item[1] for item in chosen}
                for done in as_completed(running):
                    fault, (held, got, seconds) = running[done], done.result()
                    good += held
                    print(row(fault.name, fault.expected, f"{got} [{seconds:.0f} s]"), flush=True)
        finally:
            harness.close()
    minutes = (time.monotonic() - started) / 60
    print(f"\n{good} of {len(chosen)} faults lost nothing, in {minutes:.1f} minutes")
    return 0 if good == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
