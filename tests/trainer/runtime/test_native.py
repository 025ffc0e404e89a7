# SPDX-License-Identifier: MIT
"""Compiled code: made once for a machine, by one process, in a folder of the user's own."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from trainer.runtime import native
from trainer.runtime.native import NoLibraryError, find_compiler, load, own_folder

SOURCE = 'extern "C" int answer() { return 42; }\n'
COMPILER = """#!/bin/sh
echo compiled >> "{log}"
[ "$1" = --version ] || sleep 0.3
exec "{real}" "$@"
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "answer.cpp"
    path.write_text(SOURCE)
    return path


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {"HOME": str(tmp_path / "home"), "PATH": os.environ.get("PATH", os.defpath)}


@pytest.fixture
def real() -> str:
    """Return the machine's compiler."""
    try:
        return find_compiler(os.environ)
    except NoLibraryError as error:
        pytest.skip(str(error))


def script(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def answer(source: Path, environment: Mapping[str, str]) -> None:
    assert load(source, environment).answer() == 42


@pytest.mark.usefixtures("real")
def test_a_library_is_compiled_into_a_folder_of_the_user_s_own(
    source: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    answer(source, environment)
    folder = tmp_path / "home" / ".cache" / "fullrank" / "native"
    assert folder.stat().st_mode & 0o777 == 0o700
    (library,) = folder.glob("*.so")
    assert library.stat().st_mode & 0o777 == 0o600
    elsewhere = {**environment, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    answer(source, elsewhere)
    assert own_folder(elsewhere) == tmp_path / "cache" / "fullrank" / "native"


def test_two_processes_compile_once(
    source: Path, environment: dict[str, str], real: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    compiler = script(tmp_path / "cxx", COMPILER.format(log=log, real=real))
    environment["CXX"] = compiler
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=answer, args=(source, environment)) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0, 0]
    # Each asks for the version; one compiles.
    assert log.read_text().count("compiled") == 4
    assert len(list(own_folder(environment).glob("*.so"))) == 1


@pytest.mark.usefixtures("real")
def test_another_source_or_cpu_is_another_library(
    source: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answer(source, environment)
    source.write_text(SOURCE + "// changed\n")
    answer(source, environment)
    cpu = tmp_path / "cpuinfo"
    cpu.write_text("model name : another\nflags : sse2 avx512_bf16\n")
    monkeypatch.setattr(native, "_CPU", cpu)
    assert "avx512_bf16" in native.cpu_features()
    answer(source, environment)
    assert len(list(own_folder(environment).glob("*.so"))) == 3


@pytest.mark.usefixtures("real")
def test_an_error_of_the_compiler_is_one_line_and_leaves_nothing(
    source: Path, environment: dict[str, str]
) -> None:
    source.write_text("no C++\x1b[31m\n")
    with pytest.raises(NoLibraryError, match=r"ended with exit code 1: .*error") as caught:
        load(source, environment)
    assert "\n" not in str(caught.value) and "\x1b" not in str(caught.value)
    assert not list(own_folder(environment).glob("*.so"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("#!/bin/sh\nexit 3\n", "exit status 3"),
        ('#!/bin/sh\n[ "$1" = --version ] || exit 4\n', "exit code 4: no message"),
        ('#!/bin/sh\n[ "$1" = --version ] || echo > "$9"\n', "ended with exit code|too short|ELF"),
    ],
    ids=["dies at once", "compiles nothing", "writes no library"],
)
def test_a_broken_compiler_is_a_reason(
    source: Path, environment: dict[str, str], tmp_path: Path, text: str, message: str
) -> None:
    environment["CXX"] = script(tmp_path / "cxx", text)
    with pytest.raises(NoLibraryError, match=message):
        load(source, environment)


def test_no_compiler_and_no_home_are_reasons(
    source: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    with pytest.raises(NoLibraryError, match=r"no C\+\+ compiler found \(looked for g\+\+"):
        load(source, {**environment, "PATH": str(tmp_path)})
    with pytest.raises(NoLibraryError, match=r"looked for /nowhere/cxx\)"):
        load(source, {**environment, "CXX": "/nowhere/cxx"})
    with pytest.raises(NoLibraryError, match="neither HOME nor XDG_CACHE_HOME"):
        own_folder({"HOME": "relative"})


@pytest.mark.parametrize("kind", ["writable", "link", "library"])
def test_what_others_may_have_written_is_not_loaded(
    source: Path, environment: dict[str, str], tmp_path: Path, real: str, kind: str
) -> None:
    folder = own_folder(environment)
    if kind == "writable":
        folder.chmod(0o777)
    elif kind == "link":
        folder.rmdir()
        (tmp_path / "elsewhere").mkdir()
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        answer(source, environment)
        next(folder.glob("*.so")).chmod(0o666)
    with pytest.raises(NoLibraryError, match="expected it to be this user's own"):
        load(source, environment)
