# SPDX-License-Identifier: MIT
"""Import and run each native piece once, in the child process of trainer/doctor.py.

Each probe writes one JSON line to standard output as soon as it ends. If a broken library crashes
the process, the parent knows which probe it was. Probes import packages by name, so that a failed
import is the result of that probe. The module itself needs only the standard library.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any


class Unfit(Exception):
    """A warning or a failure with a known remedy: (state, detail, remedy)."""


def probe_torch() -> str:
    """Multiply two matrices."""
    torch = importlib.import_module("torch")
    torch.ones(8, 8).matmul(torch.ones(8, 8))
    build = f"CUDA {torch.version.cuda} build" if torch.version.cuda else "CPU build"
    return f"{torch.__version__}, {build}, {torch.get_num_threads()} threads"


def probe_allocator() -> str:
    """Say whether freed memory is kept for the next step."""
    return importlib.import_module("trainer.runtime.runtime").describe_allocator()


def probe_spectral() -> str:
    """Say which form of the spectral operator runs on the CPU; compile it where it is not yet."""
    return importlib.import_module("trainer.runtime.runtime").describe_spectral()


def probe_format() -> str:
    """Say which number format `precision.dtype auto` computes in here."""
    torch = importlib.import_module("torch")
    able = importlib.import_module("trainer.distributed.precision").multiplies_bf16
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if able(device):
        return f"bf16, in which this machine's {device.type} multiplies"
    lacks = "has neither avx512_bf16 nor AMX" if device.type == "cpu" else "does not multiply bf16"
    return f"fp32, since the {device.type} {lacks}"


def probe_fbgemm() -> str:
    """Call a native operator: importing alone may succeed while the library is not loaded."""
    torch = importlib.import_module("torch")
    importlib.import_module("fbgemm_gpu")
    lengths = torch.tensor([2, 0, 1])
    offsets = torch.ops.fbgemm.asynchronous_complete_cumsum(lengths)
    if offsets.tolist() != [0, 2, 2, 3]:
        raise RuntimeError(f"cumulative sum of [2, 0, 1]: got {offsets.tolist()}")
    return "operators run"


def probe_torchrec() -> str:
    """Look one jagged feature up in a table."""
    torch = importlib.import_module("torch")
    torchrec = importlib.import_module("torchrec")
    table = torchrec.EmbeddingBagConfig(
        name="t", embedding_dim=4, num_embeddings=8, feature_names=["f"]
    )
    tables = torchrec.EmbeddingBagCollection(tables=[table], device=torch.device("cpu"))
    features = torchrec.KeyedJaggedTensor.from_lengths_sync(
        ["f"], torch.tensor([1, 2, 3]), torch.tensor([2, 0, 1])
    )
    return f"a lookup gives {tuple(tables(features).values().shape)}"


def probe_gloo() -> str:
    """Sum over two ranks (threads) through the network stack that training would use."""
    torch = importlib.import_module("torch")
    dist = importlib.import_module("torch.distributed")
    store, results, errors = dist.HashStore(), {}, []

    def run(rank: int) -> None:
        try:
            group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=30))
            values = torch.full((4,), float(rank + 1))
            group.allreduce([values]).wait()
            results[rank] = values[0].item()
        except Exception as error:  # any failure is the answer
            errors.append(error)

    ranks = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(timeout=60)
    if results != {0: 3.0, 1: 3.0}:
        reason = errors[0] if errors else f"expected a sum of 3 on both ranks, got {results}"
        raise Unfit(
            "fail",
            f"two ranks on this machine cannot talk: {reason}",
            "this machine's host name may resolve to an address that does not answer; name a "
            "network interface that does: GLOO_SOCKET_IFNAME=lo (or eth0)",
        )
    return "two ranks agree"


def probe_gpu() -> str:
    """Name the GPUs."""
    torch = importlib.import_module("torch")
    if torch.cuda.is_available():
        devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        names = ", ".join(f"{d.name} {d.total_memory / 2**30:.0f} GiB" for d in devices)
        torch.ones(8, 8, device="cuda").matmul(torch.ones(8, 8, device="cuda"))
        return names
    if torch.version.cuda is None and shutil.which("nvidia-smi"):
        raise Unfit(
            "warn",
            "this machine has NVIDIA tools and torch is the CPU build",
            "make clean install PLATFORM=gpu",
        )
    return "none; training runs on the CPU"


def probe_nccl() -> str:
    """Sum on one GPU through NCCL."""
    torch = importlib.import_module("torch")
    dist = importlib.import_module("torch.distributed")
    if not torch.cuda.is_available():
        return "not needed without a GPU"
    if not dist.is_nccl_available():
        raise Unfit("fail", "torch has no NCCL on a GPU machine", "make clean install PLATFORM=gpu")
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    values = torch.ones(4, device="cuda")
    dist.all_reduce(values)
    torch.cuda.synchronize()
    dist.destroy_process_group()
    return ".".join(map(str, torch.cuda.nccl.version()))


def probe_flash() -> str:
    """Run the flash kernel, and only it, forward and backward on every kind of device present."""
    torch = importlib.import_module("torch")
    attention = importlib.import_module("torch.nn.attention")
    devices = {"cpu": torch.float32}
    if torch.cuda.is_available():
        devices["cuda"] = torch.bfloat16
    for device, dtype in devices.items():
        shape = (1, 2, 16, 32)
        query = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
        try:
            with attention.sdpa_kernel([attention.SDPBackend.FLASH_ATTENTION]):
                out = torch.nn.functional.scaled_dot_product_attention(
                    query, query, query, is_causal=True
                )
            out.sum().backward()
        except RuntimeError as error:
            raise Unfit(
                "warn",
                f"no flash kernel on {device}: {error}",
                "training works with slower attention; a GPU needs compute capability 8.0 for it",
            ) from error
    return f"flash kernels run on {' and '.join(devices)}"


def probe_deepspeed() -> str:
    """Import DeepSpeed, which looks for an accelerator as it loads."""
    deepspeed = importlib.import_module("deepspeed")
    accelerator = importlib.import_module("deepspeed.accelerator").get_accelerator()
    return f"{deepspeed.__version__}, accelerator {accelerator.device_name()}"


def probe_torchx() -> str:
    """Load the launcher and find its command beside this interpreter."""
    torchx = importlib.import_module("torchx.version")
    importlib.import_module("torchx.runner")
    command = Path(sys.executable).with_name("torchx")
    if not command.exists():
        raise Unfit(
            "fail", f"torchx {torchx.__version__} has no command at {command}", "make clean install"
        )
    return f"{torchx.__version__}, {command}"


def probe_pyarrow() -> str:
    """Write a Parquet file to memory and read it back."""
    pyarrow = importlib.import_module("pyarrow")
    parquet = importlib.import_module("pyarrow.parquet")
    table = pyarrow.table({"id": ["a", None, "b"], "history": [[1, 2], [], None]})
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(table, sink)
    if not parquet.read_table(pyarrow.BufferReader(sink.getvalue())).equals(table):
        raise RuntimeError("a Parquet table read back is not the one written")
    return f"{pyarrow.__version__}, Parquet round trip"


PROBES: dict[str, Callable[[], str]] = {
    "torch": probe_torch,
    "allocator": probe_allocator,
    "spectral": probe_spectral,
    "number format": probe_format,
    "fbgemm_gpu": probe_fbgemm,
    "torchrec": probe_torchrec,
    "gloo": probe_gloo,
    "gpu": probe_gpu,
    "nccl": probe_nccl,
    "flash": probe_flash,
    "deepspeed": probe_deepspeed,
    "torchx": probe_torchx,
    "pyarrow": probe_pyarrow,
}


def answer(name: str, probe: Callable[[], str]) -> dict[str, Any]:
    """Run one probe; return its state, detail and, where it knows one, the way out."""
    try:
        return {"probe": name, "state": "ok", "detail": probe()}
    except Unfit as unfit:
        state, detail, remedy = unfit.args
        return {"probe": name, "state": state, "detail": detail, "remedy": remedy}
    except BaseException as error:  # a broken package may raise anything, SystemExit included
        return {"probe": name, "state": "fail", "detail": describe(error)}


def describe(error: BaseException) -> str:
    """Return an error's first line and, since packages hide it behind their own, its cause's."""
    lines = []
    seen: BaseException | None = error
    while seen is not None:
        first = (str(seen).strip().splitlines() or [""])[0]
        lines.append(f"{type(seen).__name__}: {first}")
        seen = seen.__cause__ or seen.__context__
    return lines[0] if len(lines) == 1 else f"{lines[0]} <- {lines[-1]}"


def main(names: list[str]) -> None:
    """Answer for the named probes, in order."""
    # Libraries print to standard output when they load. Reserve it for the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in names:
        print(json.dumps(answer(name, PROBES[name])), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
