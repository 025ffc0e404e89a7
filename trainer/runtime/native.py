# SPDX-License-Identifier: MIT
"""Compiles the kernels of this repository for this machine, once, and loads them.

Only sources that lie in this repository are compiled. The result goes into a folder of the user's
own (`$XDG_CACHE_HOME/fullrank/native`, ~/.cache by default, mode 700), never into a run's: a
library is code, and nothing that we read may bring code along. Its name is a hash of the source,
the compiler, its flags and the CPU's features, so that a home folder that several kinds of machines
share never gives one of them instructions that it does not have. Processes that need it at the same
time wait for the one that compiles.

Where anything is missing (no compiler, no home, a folder that others may write), the reason is one
line, and the reference implementation runs.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer.runtime.printable import printable

_COMPILERS = ("g++", "clang++", "c++")
_FLAGS = ("-O3", "-std=c++17", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared")
_CPU = Path("/proc/cpuinfo")
_SECONDS = 300.0
_LOOK_SECONDS = 0.05


class NoLibraryError(Exception):
    """Why there is no library, in one line."""


def load(source: Path, environment: Mapping[str, str]) -> ctypes.CDLL:
    """Return a source file's library, compiled if this machine has not compiled it yet.

    Args:
        source: a C++ file of this repository.
        environment: names the cache (XDG_CACHE_HOME, HOME) and the compiler (CXX).

    Raises:
        NoLibraryError: it cannot be had; the message is one line.
    """
    try:
        compiler, flags = find_compiler(environment), (*_FLAGS, *_native_flags())
        folder = own_folder(environment)
        target = folder / f"{source.stem}-{_key(source, compiler, flags)}.so"
        if not target.exists():
            _compile_once(source, compiler, flags, target)
        _check_owner(target)
        return ctypes.CDLL(str(target))
    except (OSError, subprocess.SubprocessError) as error:
        raise NoLibraryError(printable(str(error).splitlines()[0])) from error


def find_compiler(environment: Mapping[str, str]) -> str:
    """Return the path of a C++ compiler: CXX, or the first known one that is installed."""
    names = [environment["CXX"]] if environment.get("CXX") else list(_COMPILERS)
    for name in names:
        if found := shutil.which(name, path=environment.get("PATH", os.defpath)):
            return found
    raise NoLibraryError(f"no C++ compiler found (looked for {', '.join(map(printable, names))})")


def own_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder of libraries, made where it is missing, to which nobody else can write."""
    cache = environment.get("XDG_CACHE_HOME") or ""
    if not os.path.isabs(cache):
        home = environment.get("HOME") or ""
        if not os.path.isabs(home):
            raise NoLibraryError("no folder for compiled code: neither HOME nor XDG_CACHE_HOME")
        cache = os.path.join(home, ".cache")
    folder = Path(cache, "fullrank", "native")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_owner(folder)
    return folder


def _check_owner(path: Path) -> None:
    """Refuse what others own or may write."""
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise NoLibraryError(
            f"{printable(str(path))}: expected it to be this user's own, not a link, and writable "
            "by nobody else; remove it"
        )


def _native_flags() -> tuple[str, ...]:
    """Return the flags for this machine's own instructions."""
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64"):
        return ("-march=native",)
    return ("-mcpu=native",) if machine in ("aarch64", "arm64") else ()


def cpu_features() -> str:
    """Return what a compiler may tune for: the CPU's model and its features."""
    known = ("model name", "cpu family", "model", "flags", "Features", "CPU part")
    found: dict[str, str] = {}
    try:
        for line in _CPU.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in known:
                found.setdefault(name.strip(), value.strip())
    except OSError:
        pass
    return repr(
        (platform.system(), platform.machine(), platform.processor(), sorted(found.items()))
    )


def _key(source: Path, compiler: str, flags: Sequence[str]) -> str:
    """Return the hash of everything that a library depends on."""
    answer = subprocess.run([compiler, "--version"], capture_output=True, timeout=60, check=True)
    parts = (source.read_bytes(), answer.stdout, repr(flags).encode(), cpu_features().encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:32]


def _compile_once(source: Path, compiler: str, flags: Sequence[str], target: Path) -> None:
    """Compile, unless another process does so first."""
    deadline = time.monotonic() + _SECONDS
    with target.with_suffix(".lock").open("ab") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise NoLibraryError("another process compiles it and does not end") from None
                time.sleep(_LOOK_SECONDS)
        if target.exists():
            return
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = Path(folder, "library.so")
            command = [compiler, *flags, "-o", str(made), str(source)]
            done = subprocess.run(
                command, capture_output=True, timeout=_SECONDS, check=False, cwd=folder
            )
            if done.returncode or not made.exists():
                lines = done.stderr.decode(errors="replace").splitlines() or ["no message"]
                said = next((line for line in lines if "error" in line.lower()), lines[-1])
                raise NoLibraryError(
                    f"{printable(compiler)} ended with exit code {done.returncode}: "
                    f"{printable(said)[:300]}"
                )
            made.chmod(0o600)
            os.replace(made, target)
