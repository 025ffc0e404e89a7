# SPDX-License-Identifier: MIT
"""Launch training on any scheduler torchx knows: `torchx run deploy/components.py:train ...`.

torchx executes this file by itself, off the import path and inside the namespace of one of its
own modules. So it imports nothing of the project, names the trainer as a string, and keeps its own
names apart from those of torchx.

Each node runs `python -m torch.distributed.run -m trainer.train RECIPE --output DIR [overrides]`
under a short bash line, because only a node knows the address of node 0: torchx hands it over in
an environment variable.
"""

import datetime
import os
import re
import shlex
import socket
import sys

from torchx import specs
from torchx.specs.finder import ComponentValidationException

TRAINER_MODULE = "trainer.train"


# The parameters are the command's flags, hence their number and torchx's own spelling of memMB.
def train(
    *overrides: str,
    recipe: str,
    output: str = "",
    j: str = "1x1",
    image: str = "",
    cpu: int = 0,
    gpu: int = 0,
    memMB: int = 8192,
    max_retries: int = 0,
    port: int = 0,
) -> specs.AppDef:
    """Train a recipe on N nodes x M processes.

    Args:
        overrides: settings of the recipe to change, after `--`: -- --data.path logs --epochs 2
        recipe: a shipped recipe such as specformer.demo, or package.module:function from outside
        output: run folder that every node sees; runs/RECIPE-TIMESTAMP by default
        j: NODESxPROCESSES, or MINIMUM:NODESxPROCESSES for an elastic job
        image: image for docker and kubernetes; fullrank:cpu, or fullrank:gpu with --gpu, by default
        cpu: processor cores per node; 0 divides this machine's cores among the nodes
        gpu: GPUs per node
        memMB: memory per node in MiB, for schedulers that enforce it
        max_retries: restarts after a failure, by torchrun in the job and by schedulers that requeue
        port: rendezvous port on node 0; 0 picks one that is free on this machine
    """
    minimum, nodes, processes = parse_topology(j)
    cores = cpu or max(1, (os.cpu_count() or 1) // nodes)
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", recipe).strip("-.")
    words = [
        *("--rdzv-backend", "c10d", "--rdzv-id", specs.macros.app_id),
        *("--nnodes", str(nodes) if minimum == nodes else f"{minimum}:{nodes}"),
        *("--nproc-per-node", str(processes), "--max-restarts", str(max_retries)),
        *("--tee", "3", "--role", ""),
        *("-m", TRAINER_MODULE, recipe, "--output", output or f"runs/{slug}-{timestamp()}"),
        *overrides,
    ]
    port = port or free_port()
    role = specs.Role(
        name="train",
        image=image or ("fullrank:gpu" if gpu else "fullrank:cpu"),
        entrypoint="bash",
        args=["-c", node_script(words, nodes, port, threads=max(1, cores // processes))],
        num_replicas=nodes,
        min_replicas=minimum if minimum != nodes else None,
        max_retries=max_retries,
        resource=specs.Resource(cpu=cores, gpu=gpu, memMB=memMB),
        port_map={"c10d": port},
    )
    return specs.AppDef(name=slug.replace(".", "-"), roles=[role])


def parse_topology(j: str) -> tuple[int, int, int]:
    """Return (least nodes, nodes, processes per node) of `2x1` or `1:4x8`.

    Raises:
        ComponentValidationException: anything else, a zero, or a minimum above the nodes.
    """
    match = re.fullmatch(r"(?:(\d+):)?(\d+)x(\d+)", j)
    if match:
        nodes, processes = int(match[2]), int(match[3])
        minimum = int(match[1] or nodes)
        if 1 <= minimum <= nodes and processes >= 1:
            return minimum, nodes, processes
    raise ComponentValidationException(
        f"-j: expected NODESxPROCESSES such as 2x1, or MINIMUM:NODESxPROCESSES such as 1:4x8, "
        f"each at least 1 and the minimum not above the nodes; got {j!r}"
    )


def node_script(words: list[str], nodes: int, port: int, threads: int) -> str:
    """Return the bash line of one node; torchx turns `$$` into a dollar sign as it fills macros."""
    # The interpreter that submits is the right one wherever its path exists: on this machine and on
    # a cluster with a shared file system. In an image it does not exist; the image's python does.
    lines = [
        f"python={shlex.quote(sys.executable)}",
        '[ -x "$$python" ] || python=python',
        # Unset, torchrun would give each of several processes one thread, however many cores.
        # Threads that wait for each other must not spin: on shared cores that costs tenfold.
        f"export OMP_NUM_THREADS=$${{OMP_NUM_THREADS:-{threads}}} "
        "OMP_WAIT_POLICY=$${OMP_WAIT_POLICY:-passive} LOGLEVEL=$${LOGLEVEL:-WARNING}",
    ]
    if nodes == 1:
        rendezvous = "--rdzv-endpoint localhost:0"  # one agent: it binds a free port itself
    else:
        # On one machine every node must be reached over loopback: a laptop's own host name often
        # resolves to an address that does not answer. (Node 0 being called localhost says nothing:
        # Kubernetes calls it so in its own pod.)
        lines.append(
            "address=; case $$TORCHX_JOB_ID in local_cwd:*) address=--local-addr=localhost; esac"
        )
        lines.append(f"host=$${{{specs.macros.rank0_env}:-localhost}}")
        rendezvous = f'$$address --rdzv-endpoint "$$host:{port}"'
    quoted = " ".join(quote(word) for word in words)
    lines.append(f'exec "$$python" -m torch.distributed.run {rendezvous} {quoted}')
    return "; ".join(lines)


def quote(word: str) -> str:
    """Quote a word for bash and, unless it is torchx's job id, for torchx's macros."""
    return word if word == specs.macros.app_id else shlex.quote(word).replace("$", "$$")


def free_port() -> int:
    """Return a TCP port free on this machine, so that two jobs started side by side do not meet."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def timestamp() -> str:
    """Return the UTC time to the millisecond, sortable and safe in a file name."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S-%f")[:-3]
