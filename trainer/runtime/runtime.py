# SPDX-License-Identifier: MIT
"""The processes of a run: rank, device, process group, threads, seeds.

The only reader of the environment. A launcher (torchrun, torchx, Slurm) sets RANK, LOCAL_RANK,
WORLD_SIZE, MASTER_ADDR and MASTER_PORT; without them the run is one process with a group of one, so
that one process and many take the same path.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import random
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from models.spectral import fused
from trainer.runtime.allocator import ALLOCATORS, Allocator, keep_memory
from trainer.runtime.native import NoLibraryError, load

# Seeds that NumPy, torch and the loader all take as they are.
_MAX_SEED = 2**32 - 1
# Above it, the milliseconds of a timeout overflow in the libraries below.
_MAX_TIMEOUT_SECONDS = 30 * 86_400.0
_MAX_THREADS = 1024
# How often rank 0 looks who has come.
_LOOK_SECONDS = 0.02
# How long ranks wait for one that reads or writes slowly; a dead rank is noticed at once.
PATIENCE = timedelta(days=7)


class RunError(RuntimeError):
    """A failure that its message explains; a trace would only bury it."""


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """One process among `world_size`.

    Attributes:
        rank: 0 to world_size - 1.
        local_rank: number of the process on its machine, 0 to local_world_size - 1.
        device: where this process computes.
        seed: of model initialisation, the same on all ranks.
        restarts: how many times the launcher has started the ranks again after a failure.
        timeout_seconds: how long a collective of `group` waits for the other ranks.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    seed: int
    restarts: int = 0
    timeout_seconds: float = 600.0

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes what is written once."""
        return self.rank == 0

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of all ranks."""
        group = dist.group.WORLD
        if group is None:
            raise RunError("no process group: expected runtime.start() to have been called")
        return group

    @functools.cached_property
    def patient(self) -> dist.ProcessGroup:
        """A process group of all ranks, on the CPU, that waits for one whose disk is slow.

        Collective where it is asked for first.
        """
        group = dist.new_group(backend="gloo", timeout=PATIENCE)
        assert isinstance(group, dist.ProcessGroup)
        return group

    def seed_rank(self) -> None:
        """Give this rank its own random numbers (dropout), once the model is alike on all."""
        _seed(int(np.random.SeedSequence((self.seed, self.rank)).generate_state(1)[0]))

    def stop(self) -> None:
        """Leave the process group. Safe to call twice."""
        if dist.is_initialized():
            dist.destroy_process_group()


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """How processes start.

    Attributes:
        device: `auto` takes CUDA if there is any.
        seed: of everything random; data order has its own.
        timeout_seconds: how long a collective waits for the other ranks before the run fails.
        hang_seconds: a run that makes no step for so long prints the stacks of all ranks and ends
            with exit code 1. 0 sets no limit.
        num_threads: of computation per process. 0 keeps OMP_NUM_THREADS, and without it takes one.
            To use more cores, start more processes: the operations of a ranking model are short,
            and threads synchronize after each of them. With more than one thread, set
            OMP_WAIT_POLICY=passive in the environment of the launch.
        allocator: `keep` has glibc keep freed memory for the next step, so that a process holds
            what its largest step needs; `system` leaves the C library's allocator as it is, as
            other C libraries' always are.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    seed: int = 0
    timeout_seconds: float = 600.0
    hang_seconds: float = 300.0
    num_threads: int = 0
    allocator: Allocator = "keep"

    def __post_init__(self) -> None:
        """Check the fields."""
        if self.device not in ("auto", "cpu", "cuda"):
            raise ValueError(
                f"runtime.device: expected 'auto', 'cpu' or 'cuda', got {self.device!r}"
            )
        if not 0 <= self.seed <= _MAX_SEED:
            raise ValueError(
                f"runtime.seed: expected an integer from 0 to {_MAX_SEED}, got {self.seed}"
            )
        if not 0 < self.timeout_seconds <= _MAX_TIMEOUT_SECONDS:
            raise ValueError(
                "runtime.timeout_seconds: expected a number > 0, at most "
                f"{_MAX_TIMEOUT_SECONDS:.0f} (30 days), got {self.timeout_seconds}"
            )
        if not 0 <= self.hang_seconds <= _MAX_TIMEOUT_SECONDS:
            raise ValueError(
                "runtime.hang_seconds: expected a number >= 0 (0: no limit), at most "
                f"{_MAX_TIMEOUT_SECONDS:.0f} (30 days), got {self.hang_seconds}"
            )
        if not 0 <= self.num_threads <= _MAX_THREADS:
            raise ValueError(
                f"runtime.num_threads: expected an integer from 0 to {_MAX_THREADS}, got "
                f"{self.num_threads}"
            )
        if self.allocator not in ALLOCATORS:
            raise ValueError(
                f"runtime.allocator: expected 'keep' or 'system', got {self.allocator!r}"
            )


def place() -> tuple[int, int]:
    """Return this process's rank and the world size, without meeting the others."""
    rank, _, world_size, _ = _read_launcher(os.environ)
    return rank, world_size


def start(config: RuntimeConfig | None = None) -> Runtime:
    """Join the process group, choose the device, set threads and seeds.

    Raises:
        RunError: the launcher's variables are incomplete or not numbers, CUDA was asked for and
          is not there, or the other ranks did not come in time.
    """
    config = config or RuntimeConfig()
    if config.allocator == "keep":
        keep_memory(os.environ)
    fused.provide(_spectral_library)
    rank, local_rank, world_size, local_world_size = _read_launcher(os.environ)
    device = _choose_device(config.device, local_rank)
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    restarts = _join(rank, world_size, device, config.timeout_seconds)
    _seed(config.seed)
    # TorchRec's first batch makes torch warn, on every rank, of a function that it does not call.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    runtime = Runtime(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        device=device,
        seed=config.seed,
        restarts=restarts,
        timeout_seconds=config.timeout_seconds,
    )
    # As in `_join`: nobody goes on, and perhaps fails, before all are connected.
    dist.barrier(group=runtime.patient)
    return runtime


def prepare_deepspeed(runtime: Runtime) -> None:
    """Tell DeepSpeed, before it is first imported, this process's accelerator and its number.

    It takes both from the environment, and there alone.
    """
    os.environ["DS_ACCELERATOR"] = runtime.device.type
    os.environ["LOCAL_RANK"] = str(runtime.local_rank)


def describe_allocator() -> str:
    """Return in one line what `runtime.allocator keep` does on this machine."""
    return keep_memory(os.environ)[1]


def describe_spectral() -> str:
    """Return in one line which form of the spectral operator runs on this machine's CPU."""
    library, reason = find_spectral()
    return "compiled code runs" if library else f"the reference form runs: {reason}"


def find_spectral() -> tuple[ctypes.CDLL | None, str]:
    """Return the spectral operator's library, or None and why there is none."""
    try:
        library = load(fused.SOURCE, os.environ)
    except NoLibraryError as error:
        return None, str(error)
    wrong = fused.check(library)
    return (None, wrong) if wrong else (library, "")


def _spectral_library() -> ctypes.CDLL | None:
    """Return the library, called when a spectrum is first asked for; its absence is one line."""
    library, reason = find_spectral()
    if library is None:
        print(f"note: spectral operator: {reason}; its reference form runs", file=sys.stderr)
    return library


def set_defaults(settings: Mapping[str, str]) -> None:
    """Set what libraries read from the environment when they are imported, unless it is set."""
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def _read_launcher(environment: Mapping[str, str]) -> tuple[int, int, int, int]:
    """Return rank, local rank, world size and local world size; a lone process by default."""
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return 0, 0, 1, 1
    required = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in required if name not in environment]
    if missing:
        raise RunError(
            f"environment: expected a launcher to set {list(required)}, {missing} are missing; "
            "start with torchrun or torchx, or unset all of them for one process"
        )
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    defaults = {"LOCAL_RANK": environment["RANK"], "LOCAL_WORLD_SIZE": environment["WORLD_SIZE"]}
    values: list[int] = []
    for name in names:
        text = environment.get(name, defaults.get(name, ""))
        if not text.isdecimal():
            raise RunError(f"environment: {name}: expected a number, got {text!r}")
        values.append(int(text))
    rank, local_rank, world_size, local_world_size = values
    if rank >= world_size:
        raise RunError(f"environment: RANK must be below WORLD_SIZE, got {rank} and {world_size}")
    return rank, local_rank, world_size, local_world_size


def _choose_device(wanted: str, local_rank: int) -> torch.device:
    """Return this process's device and make it current."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RunError(
            "runtime.device: expected a CUDA GPU that torch can use, found none; install the GPU "
            "lock list, or pass --runtime.device cpu"
        )
    if local_rank >= torch.cuda.device_count():
        raise RunError(
            f"runtime.device: process {local_rank} of this machine needs a GPU of its own, found "
            f"{torch.cuda.device_count()}; start fewer processes per machine"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _restarts() -> int:
    """Return how often this process's launcher says that it has started the ranks again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _join(rank: int, world_size: int, device: torch.device, timeout_seconds: float) -> int:
    """Join the default process group and return the restarts; a lone process needs no address."""
    timeout = timedelta(seconds=timeout_seconds)
    # Host decisions and checkpoints use gloo; tensors on a GPU use NCCL.
    gpu = device.type == "cuda"
    backend, bound = ("cpu:gloo,cuda:nccl", device) if gpu else ("gloo", None)
    if world_size == 1:
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(
            backend, store=store, rank=0, world_size=1, timeout=timeout, device_id=bound
        )
        return _restarts()
    try:
        store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timeout))
        store.set_timeout(timeout)
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            store = fresh_part(store, rank, world_size, timeout_seconds)
        settings = {"store": store, "timeout": timeout, "device_id": bound}
        dist.init_process_group(backend, rank=rank, world_size=world_size, **settings)
        # Nobody goes on before all are connected: a rank that fails at once (bad data, say) would
        # close a connection that another is still making, which then reports that instead.
        # One node counts a failure as a restart, another as nodes that have changed.
        count = torch.tensor(_restarts())
        dist.all_reduce(count, op=dist.ReduceOp.MAX)
    except RuntimeError as error:
        raise RunError(
            f"process group: rank {rank} of {world_size} could not meet the others at MASTER_ADDR:"
            f"MASTER_PORT within {timeout_seconds:g} s ({str(error).partition(chr(10))[0]}); check "
            "the address and that all ranks started"
        ) from error
    return int(count)


def fresh_part(store: Any, rank: int, world_size: int, timeout_seconds: float) -> Any:
    """Return a part of a launcher's store that only this start of the ranks uses.

    torchrun keeps one store over all restarts, so a rank could read what an earlier start has left.
    Its
    count of restarts may differ between nodes. So rank 0 chooses a new name and sends it to each
    rank
    under a key that this rank has just chosen. Keys of an earlier start are answered too, and not
    read.

    Raises:
        RuntimeError: a rank did not come in time.
    """
    if rank:
        word = uuid.uuid4().hex
        store.set(f"asks/{rank}", word)
        name = store.get(f"told/{word}").decode()
        store.set(f"{name}/here/{rank}", "")
        return PrefixStore(name, store)
    name, told = uuid.uuid4().hex, dict[int, str]()
    missing, deadline = set(range(1, world_size)), time.monotonic() + timeout_seconds
    while missing:
        for other in sorted(missing):
            word = store.get(f"asks/{other}").decode() if store.check([f"asks/{other}"]) else ""
            if told.get(other, "") != word:
                told[other] = word
                store.set(f"told/{word}", name)
            if store.check([f"{name}/here/{other}"]):
                missing.remove(other)
        if missing and time.monotonic() > deadline:
            raise RuntimeError(f"ranks {sorted(missing)} did not come")
        time.sleep(_LOOK_SECONDS if missing else 0.0)
    return PrefixStore(name, store)


def _seed(seed: int) -> None:
    """Seed Python, NumPy and torch on all devices."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
