# SPDX-License-Identifier: MIT
"""Stages are made once, committed whole, made anew when what they are made from changes."""

import json

import pytest

from pipelines.orchestration import stage
from pipelines.orchestration.fingerprints import of_path
from pipelines.orchestration.lock import Lock, LockedError
from pipelines.orchestration.stage import MANIFEST, Stage, StageError, plan


def numbers(work):
    (work.folder / "numbers.txt").write_text(f"{work.config['count']}\n")
    return {"count": work.config["count"]}


def double_numbers(work):
    count = int((work.inputs["numbers"] / "numbers.txt").read_text())
    (work.folder / "double.txt").write_text(f"{2 * count}\n")
    return {"count": 2 * work.metrics["numbers"]["count"]}


def other_owner(folder):
    """Write the record of another owner."""
    record = {"token": "x", "host": "elsewhere", "pid": 1}
    record |= {"since": 0.0, "expiry_seconds": 300.0, "beat": 0}
    (folder / ".lock").write_text(json.dumps(record))


def stages(count=1, source=None):
    return [
        Stage(make=numbers, config={"count": count}, sources=(source,) if source else ()),
        Stage(make=double_numbers, inputs=("numbers",)),
    ]


def run(folder, *arguments, first=""):
    """Make all stages; return the names of those that were made."""
    made = []
    with Lock(folder) as lock:
        for one in stages(*arguments):
            if stage.make(one, folder, lock, print, anew=one.name == first)[0]:
                made.append(one.name)
    return made


def wills(folder, *arguments, first=""):
    return [step.will for step in plan(stages(*arguments), folder, first)]


def test_a_stage_is_made_once_and_its_manifest_says_from_what(tmp_path):
    assert run(tmp_path) == ["numbers", "double-numbers"]
    assert run(tmp_path) == []
    assert wills(tmp_path) == ["done", "done"]
    manifest = stage.read(tmp_path / "double-numbers")
    first = stage.read(tmp_path / "numbers")
    assert manifest["request"]["inputs"] == {"numbers": first["output"]}
    assert first["request"]["config"] == {"count": 1}
    assert manifest["metrics"] == {"count": 2}
    assert manifest["files"] == {"double.txt": 2}
    assert manifest["seconds"] >= 0
    assert {"python", "torch", "pyarrow"} <= manifest["versions"].keys()


def test_a_manifest_holds_no_password_and_another_one_makes_nothing_anew(tmp_path):
    def of(password):
        words = ("--export.push-url", f"http://me:{password}@gateway")
        return Stage(make=numbers, config={"count": 1, "overrides": words})

    with Lock(tmp_path) as lock:
        assert stage.make(of("s3cret"), tmp_path, lock, print)[0]
        assert not stage.make(of("new s3cret"), tmp_path, lock, print)[0]
    kept = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"]
    assert kept
    assert not any(b"s3cret" in path.read_bytes() for path in kept)


def test_what_changed_is_made_anew_with_all_that_needs_it(tmp_path):
    source = tmp_path / "source.csv"
    source.write_text("a")
    folder = tmp_path / "out"
    run(folder, 1, source)
    assert wills(folder, 2, source) == ["make", "make"]
    (step, _) = plan(stages(2, source), folder)
    assert "config.count: 1, now 2" in step.why
    assert run(folder, 2, source) == ["numbers", "double-numbers"]
    source.write_text("b")
    assert run(folder, 2, source) == ["numbers"]  # whose output is the same as before
    assert (folder / "double-numbers/double.txt").read_text() == "4\n"


def test_from_makes_a_stage_anew_even_if_it_is_done(tmp_path):
    run(tmp_path)
    assert wills(tmp_path, first="double-numbers") == ["done", "make"]
    assert run(tmp_path, first="double-numbers") == ["double-numbers"]
    with pytest.raises(ValueError, match="no stage 'dubble'; stages: numbers, double-numbers"):
        plan(stages(), tmp_path, "dubble")


def test_an_artifact_whose_files_were_lost_or_whose_manifest_is_damaged_is_made_anew(tmp_path):
    run(tmp_path)
    (tmp_path / "double-numbers/double.txt").unlink()
    (step,) = plan(stages(), tmp_path)[1:]
    assert (step.will, step.why) == ("make", "its files are not as made: double.txt: 2, now None")
    (tmp_path / "numbers" / MANIFEST).write_text("{")
    assert wills(tmp_path) == ["make", "make"]
    assert run(tmp_path) == ["numbers", "double-numbers"]


def test_a_stage_that_fails_leaves_the_old_artifact_and_its_work_for_the_next_attempt(tmp_path):
    run(tmp_path)
    attempts = []

    def numbers(work):
        attempts.append(sorted(path.name for path in work.folder.iterdir()))
        (work.folder / "half.txt").write_text("half")
        if len(attempts) == 1:
            raise OSError("disk full")
        return {"count": 5}

    changed = Stage(make=numbers, config={"count": 5})
    with Lock(tmp_path) as lock:
        with pytest.raises(OSError, match="disk full"):
            stage.make(changed, tmp_path, lock, print)
        assert stage.read(tmp_path / "numbers")["metrics"] == {"count": 1}
        made, manifest = stage.make(changed, tmp_path, lock, print)
    assert made and manifest["metrics"] == {"count": 5}
    assert attempts == [["request.json"], ["half.txt", "request.json"]]
    assert sorted(path.name for path in (tmp_path / "numbers").iterdir()) == ["half.txt", MANIFEST]


def test_work_for_another_request_is_thrown_away(tmp_path):
    seen = []

    def half(work):
        seen.append(sorted(path.name for path in work.folder.iterdir()))
        (work.folder / "half.txt").write_text("half")
        raise OSError("disk full")

    with Lock(tmp_path) as lock:
        for count in (1, 2):
            with pytest.raises(OSError):
                stage.make(Stage(make=half, config={"count": count}), tmp_path, lock, print)
    assert seen == [["request.json"], ["request.json"]]


@pytest.mark.parametrize("moment", ["before the new one", "after the new one"])
def test_a_commit_that_was_killed_is_finished_or_undone(moment, tmp_path):
    run(tmp_path)
    if moment == "before the new one":
        (tmp_path / "numbers").rename(tmp_path / ".numbers.replaced")
    else:
        (tmp_path / ".numbers.replaced").mkdir()
    stage.recover(tmp_path, ["numbers", "double-numbers"])
    assert run(tmp_path) == []
    assert not (tmp_path / ".numbers.replaced").exists()


def test_stages_that_do_not_fit_together_are_refused(tmp_path):
    with pytest.raises(ValueError, match="needs 'numbers', which is no stage before it"):
        plan(stages()[1:], tmp_path)
    with pytest.raises(ValueError, match="there are two of that name"):
        plan([stages()[0], stages()[0]], tmp_path)


def test_a_stage_is_not_committed_by_a_run_that_lost_its_folder(tmp_path):
    def numbers(work):
        other_owner(tmp_path)
        return {}

    lock = Lock(tmp_path).__enter__()
    with pytest.raises(LockedError, match="taken over"):
        stage.make(Stage(make=numbers), tmp_path, lock, print)
    assert not (tmp_path / "numbers").exists()
    assert not lock.renew()
    lock.__exit__()
    left = lock.owner()
    assert left and left["host"] == "elsewhere"  # whose record stays


def test_a_manifest_that_is_missing_is_named(tmp_path):
    with pytest.raises(StageError, match=r"manifest\.json: cannot be read"):
        stage.read(tmp_path)


def test_a_folders_fingerprint_changes_with_names_and_content_at_both_ends(tmp_path):
    folder = tmp_path / "log"
    folder.mkdir()
    (folder / "a").write_bytes(bytes(200_000))
    prints = [of_path(folder)]
    for place in (0, 199_999):
        content = bytearray(200_000)
        content[place] = 1
        (folder / "a").write_bytes(content)
        prints.append(of_path(folder))
    (folder / "a").rename(folder / "b")
    prints.append(of_path(folder))
    assert len(set(prints)) == 4
    assert of_path(tmp_path / "nothing") == ""


@pytest.mark.parametrize("key", ["request", "metrics", "files", "started", "output"])
@pytest.mark.parametrize("value", [None, []])
def test_a_manifest_without_what_every_manifest_has_is_made_anew(tmp_path, key, value):
    one = Stage(name="one", make=lambda work: {})
    with Lock(tmp_path) as lock:
        stage.make(one, tmp_path, lock, print)
        manifest = tmp_path / "one" / MANIFEST
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {key: value}))
        (step,) = plan([one], tmp_path)
        assert step.will == "make" and "lacks what every manifest has" in step.why
        assert stage.make(one, tmp_path, lock, print)[0]
