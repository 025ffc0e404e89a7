# SPDX-License-Identifier: MIT
"""Faults of every kind leave what they must; `make faults` injects all of them."""

from pathlib import Path

import pytest

from tests.faults.catalogue import FAULTS
from tests.faults.harness import Failed, Harness
from tests.faults.run import row

pytestmark = pytest.mark.dist
QUICK = [fault for fault in FAULTS if fault.quick]


@pytest.fixture(scope="module")
def harness(tmp_path_factory):
    harness = Harness(tmp_path_factory.mktemp("faults"))
    yield harness
    harness.close()


@pytest.mark.parametrize("fault", QUICK, ids=[fault.name for fault in QUICK])
def test_nothing_is_lost_by(fault, harness):
    place = harness.place(f"quick-{QUICK.index(fault)}")
    try:
        assert fault.check(place)
    finally:
        place.kill(place.started)


def test_there_are_many_faults_each_with_a_name_and_an_expectation_of_its_own():
    assert len(FAULTS) >= 30
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert all(fault.expected for fault in FAULTS)
    assert row("a" * 50, "b", "c").count("\n") == 1


def test_the_readme_lists_every_fault_with_what_is_expected_of_it():
    text = (Path(__file__).parent / "README.md").read_text()
    for fault in FAULTS:
        mark = " *" if fault.quick else ""
        assert f"| {fault.name}{mark} | {fault.expected} |" in text
    assert text.count("\n|") == len(FAULTS) + 2


def test_a_fault_that_does_not_happen_is_a_failure(harness):
    place = harness.place("never")
    never = {"name": "never", "kind": "step", "step": 99, "action": "kill", "rank": 0}
    with pytest.raises(Failed, match="the fault did not fire"):
        place.fail(never, logs=place.folder / "nowhere")  # fails, but of something else
