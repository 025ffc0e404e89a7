# SPDX-License-Identifier: MIT
"""Launch a job on any scheduler torchx knows: `torchx run deploy/components.py:train ...`.

Components: `train`, `evaluate`, `score`, `ingest`, `nightly`. torchx executes this file by itself,
off the import path and inside the namespace of one of its own modules. So it imports nothing of the
project, names its modules as strings, and keeps its own names apart from those of torchx.

Each node runs its command under a short bash script: only it knows which interpreter it has, and
the address of node 0, which torchx hands over in an environment variable.
"""

import datetime
import os
import re
import shlex
import socket
import sys
from pathlib import Path

from torchx import specs
from torchx.specs.finder import ComponentValidationException

TRAINER_MODULE = "trainer.train"

# Cores, GPUs and MiB of memory of a node. `local` is for nodes of this machine alone: its cores,
# divided among them.
SIZES = {
    "local": (0, 0, 8 * 1024),
    "small": (4, 0, 16 * 1024),
    "medium": (16, 0, 64 * 1024),
    "large": (64, 0, 256 * 1024),
    "gpu": (12, 1, 96 * 1024),
    "gpu8": (96, 8, 960 * 1024),
}


# The parameters are the command's flags, hence their number.
def train(
    *overrides: str,
    recipe: str,
    output: str = "",
    j: str = "1x1",
    size: str = "local",
    image: str = "",
    mounts: str = "",
    max_retries: int = 0,
    port: int = 0,
    patience: int = 600,
) -> specs.AppDef:
    """Train a recipe on N nodes x M processes.

    Args:
        overrides: settings of the recipe to change, after `--`: -- --data.path logs --epochs 2
        recipe: a shipped recipe such as specformer.demo, or package.module:function from outside
        output: run folder that every node sees; runs/RECIPE-TIMESTAMP by default
        j: NODESxPROCESSES, or MINIMUM:NODESxPROCESSES for an elastic job
        size: of a node: a name in SIZES (local: of this machine only), or CORES:GPUS:MIB
        image: image for docker and kubernetes; fullrank:cpu, or fullrank:gpu with GPUs, by default
        mounts: for docker and kubernetes: type=bind|volume,src=FROM,dst=TO[,readonly][,type=...]
        max_retries: restarts after a failure, by torchrun in the job and by schedulers that requeue
        port: rendezvous port on node 0; 0 picks one that is free on this machine
        patience: seconds that the other nodes wait for node 0 to answer before the job fails
    """
    topology = parse_topology(j)
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", recipe).strip("-.") or "train"
    words = [TRAINER_MODULE, recipe, "--output", output or f"runs/{slug}-{timestamp()}", *overrides]
    node = specs.Role(name="train", image=image, max_retries=max_retries)
    node.resource = resource_of(size, topology[1])
    return job(slug, node, torchrun_script(words, topology, node, port, patience), mounts)


def evaluate(
    *options: str,
    checkpoint: str,
    data: str,
    j: str = "1x1",
    size: str = "local",
    image: str = "",
    mounts: str = "",
    port: int = 0,
    patience: int = 600,
) -> specs.AppDef:
    """Evaluate a checkpoint on N nodes x M processes; its metrics are a line of JSON in the log.

    Args:
        options: of trainer.evaluate, after `--`: -- --days 2026-01-15
        checkpoint: a folder step-N, or a run's folder for its newest checkpoint
        data: the log's folder or file
        j: NODESxPROCESSES
        size: of a node: a name in SIZES (local: of this machine only), or CORES:GPUS:MIB
        image: image for docker and kubernetes; fullrank:cpu, or fullrank:gpu with GPUs, by default
        mounts: for docker and kubernetes: type=bind|volume,src=FROM,dst=TO[,readonly][,type=...]
        port: rendezvous port on node 0; 0 picks one that is free on this machine
        patience: seconds that the other nodes wait for node 0 to answer before the job fails
    """
    topology = parse_topology(j)
    words = ["trainer.evaluate", checkpoint, "--data", data, *options]
    node = specs.Role(name="evaluate", image=image, resource=resource_of(size, topology[1]))
    return job("evaluate", node, torchrun_script(words, topology, node, port, patience), mounts)


def score(
    *options: str,
    checkpoint: str,
    data: str,
    output: str,
    j: str = "1x1",
    size: str = "local",
    image: str = "",
    mounts: str = "",
    port: int = 0,
    patience: int = 600,
) -> specs.AppDef:
    """Predict a log's rows on N nodes x M processes: Parquet in, Parquet out, a folder a day.

    Args:
        options: of trainer.score, after `--`: -- --columns user_id,item_id
        checkpoint: a folder step-N, or a run's folder for its newest checkpoint
        data: the log's folder or file; labels are not needed
        output: folder of the scores, which every node sees
        j: NODESxPROCESSES
        size: of a node: a name in SIZES (local: of this machine only), or CORES:GPUS:MIB
        image: image for docker and kubernetes; fullrank:cpu, or fullrank:gpu with GPUs, by default
        mounts: for docker and kubernetes: type=bind|volume,src=FROM,dst=TO[,readonly][,type=...]
        port: rendezvous port on node 0; 0 picks one that is free on this machine
        patience: seconds that the other nodes wait for node 0 to answer before the job fails
    """
    topology = parse_topology(j)
    words = ["trainer.score", checkpoint, "--data", data, "--output", output, *options]
    node = specs.Role(name="score", image=image, resource=resource_of(size, topology[1]))
    return job("score", node, torchrun_script(words, topology, node, port, patience), mounts)


def ingest(
    *options: str,
    raw: str,
    schema: str,
    output: str,
    j: str = "1x1",
    size: str = "local",
    image: str = "",
    mounts: str = "",
    port: int = 0,
    patience: int = 600,
) -> specs.AppDef:
    """Turn raw days into typed Parquet; N nodes x M processes share the days among them.

    Args:
        options: of pipelines.deliveries, after `--`: -- --ready watermark --list-separator "|"
        raw: folder or URL of the raw days dt=YYYY-MM-DD
        schema: the schema's YAML file
        output: folder of the typed days, which every node sees
        j: NODESxPROCESSES
        size: of a node: a name in SIZES (local: of this machine only), or CORES:GPUS:MIB
        image: image for docker and kubernetes; fullrank:cpu by default
        mounts: for docker and kubernetes: type=bind|volume,src=FROM,dst=TO[,readonly][,type=...]
        port: rendezvous port on node 0; 0 picks one that is free on this machine
        patience: seconds that the other nodes wait for node 0 to answer before the job fails
    """
    topology = parse_topology(j)
    words = ["pipelines.deliveries", raw, "--schema", schema, "--output", output, *options]
    node = specs.Role(name="ingest", image=image, resource=resource_of(size, topology[1]))
    return job("ingest", node, torchrun_script(words, topology, node, port, patience), mounts)


def nightly(
    *options: str,
    recipe: str,
    output: str,
    data: str = "",
    raw: str = "",
    date: str = "new",
    j: str = "1x1",
    size: str = "local",
    image: str = "",
    mounts: str = "",
    max_retries: int = 0,
) -> specs.AppDef:
    """Run nights on one node: train on the new days, compare, promote or refuse.

    Args:
        options: of `pipelines.run nightly`, after `--`: -- --first-days 3 -- --data.schema s.yaml
        recipe: what to train
        output: folder of nights and models
        data: typed days dt=YYYY-MM-DD
        raw: raw days instead, which are checked and typed first
        date: day to evaluate on, which earlier days train for; FIRST:LAST; new: all that are new
        j: 1xPROCESSES of a training; for more nodes: -- --launcher torchx --scheduler S -j NxM
        size: of the node: a name in SIZES (local: of this machine only), or CORES:GPUS:MIB
        image: image for docker and kubernetes; fullrank:cpu, or fullrank:gpu with GPUs, by default
        mounts: for docker and kubernetes: type=bind|volume,src=FROM,dst=TO[,readonly][,type=...]
        max_retries: restarts after a failure, by schedulers that requeue; made stages are kept
    """
    _, nodes, processes = parse_topology(j)
    if nodes != 1:
        raise ComponentValidationException(
            f"-j: a night is one process that starts trainings; expected 1xPROCESSES, got {j!r}. "
            "To train on more nodes: -- --launcher torchx --scheduler S --size SIZE -j NxM"
        )
    words = ["pipelines.run", "nightly", "--date", date, "--recipe", recipe, "--output", output]
    words += [*(("--data", data) if data else ()), *(("--raw", raw) if raw else ())]
    words += ["-j", f"1x{processes}", *options]
    resource = resource_of(size, 1)
    node = specs.Role(name="nightly", image=image, max_retries=max_retries, resource=resource)
    script = python_script(words, max(1, resource.cpu // processes))
    return job("nightly", node, script, mounts)


def resource_of(size: str, nodes: int) -> specs.Resource:
    """Return what each of `nodes` gets: a named size, or CORES:GPUS:MIB.

    Raises:
        ComponentValidationException: it is neither, or `local` for nodes of a cluster.
    """
    elsewhere = scheduler_of(sys.argv)
    if size == "local" and not elsewhere.startswith("local"):
        others = ", ".join(name for name in SIZES if name != "local")
        raise ComponentValidationException(
            f"--size: local is the size of this machine, which a node of {elsewhere} may not have; "
            f"name what each node gets: {others}, or CORES:GPUS:MIB such as 8:1:65536"
        )
    numbers = re.fullmatch(r"(\d{1,6}):(\d{1,6}):([1-9]\d{0,9})", size, re.ASCII)
    if not numbers and size not in SIZES:
        raise ComponentValidationException(
            f"--size: expected {', '.join(SIZES)} or CORES:GPUS:MIB such as 8:1:65536; got {size!r}"
        )
    cores, gpus, mib = map(int, numbers.groups()) if numbers else SIZES[size]
    return specs.Resource(cpu=cores or max(1, (os.cpu_count() or 1) // nodes), gpu=gpus, memMB=mib)


def scheduler_of(command: list[str]) -> str:
    """Return the scheduler that a command line of torchx names; local where it names none."""
    for place, word in enumerate(command):
        for option in ("-s", "--scheduler"):
            if word == option and place + 1 < len(command):
                return command[place + 1]
            if word.startswith(f"{option}=") and len(word) > len(option) + 1:
                return word.partition("=")[2]
        if word == "--" or "components.py" in word:  # what follows belongs to the component
            break
    return "local"


def job(name: str, node: specs.Role, script: str, mounts: str) -> specs.AppDef:
    """Return the job whose nodes run `script`.

    Raises:
        ComponentValidationException: it would run other code than this, or `mounts` is wrong.
    """
    here = Path.cwd()
    if not (here / ".torchxconfig").is_file() or not (here / "trainer").is_dir():
        raise ComponentValidationException(
            "torchx starts local and Slurm jobs in the current folder and lays it over images. "
            f"Expected the checkout, with .torchxconfig and trainer/; got {here}. Change into it"
        )
    try:
        node.mounts = specs.parse_mounts(mounts.split(",")) if mounts else []
    except (KeyError, ValueError) as error:
        raise ComponentValidationException(
            f"--mounts: expected type=bind|volume,src=FROM,dst=TO[,readonly], one after another; "
            f"got {mounts!r}: {error}"
        ) from error
    node.image = node.image or ("fullrank:gpu" if node.resource.gpu else "fullrank:cpu")
    node.entrypoint, node.args = "bash", ["-c", script]
    return specs.AppDef(name=name.replace(".", "-"), roles=[node])


def parse_topology(j: str) -> tuple[int, int, int]:
    """Return (least nodes, nodes, processes per node) of `2x1` or `1:4x8`.

    Raises:
        ComponentValidationException: anything else, a zero, or a minimum above the nodes.
    """
    match = re.fullmatch(r"(?:(\d{1,6}):)?(\d{1,6})x(\d{1,6})", j, re.ASCII)
    if match:
        nodes, processes = int(match[2]), int(match[3])
        minimum = int(match[1] or nodes)
        if 1 <= minimum <= nodes and processes >= 1:
            return minimum, nodes, processes
    raise ComponentValidationException(
        f"-j: expected NODESxPROCESSES such as 2x1, or MINIMUM:NODESxPROCESSES such as 1:4x8, "
        f"each at least 1 and the minimum not above the nodes; got {j!r}"
    )


def python_script(words: list[str], threads: int, meet: str = "", endpoint: str = "") -> str:
    """Return a node's bash script, `python -m WORDS`; torchx turns `$$` into a dollar sign.

    Args:
        meet: lines that find node 0.
        endpoint: options of the command that only bash can fill in.
    """
    module, *others = words
    command = [f'exec "$$python" -m {module}', endpoint, *(quote(word) for word in others)]
    return f"""\
# The interpreter that submits is the right one wherever its path exists: on this machine and on a
# cluster with a shared file system. In an image it does not exist; the image's python does.
python={shlex.quote(sys.executable)}
[ -x "$$python" ] || python=python
# Unset, torchrun would give each of several processes one thread, however many cores.
# Threads that wait for each other must not spin: on shared cores that costs tenfold.
export OMP_NUM_THREADS=$${{OMP_NUM_THREADS:-{threads}}}
export OMP_WAIT_POLICY=$${{OMP_WAIT_POLICY:-passive}} LOGLEVEL=$${{LOGLEVEL:-WARNING}}
{meet}{" ".join(filter(None, command))}
"""


def torchrun_script(
    words: list[str], topology: tuple[int, int, int], node: specs.Role, port: int, patience: int
) -> str:
    """Return the script with which each node starts its processes; say in `node` how many nodes."""
    minimum, nodes, processes = topology
    for name, value, most in (("port", port, 65535), ("max_retries", node.max_retries, 999)):
        if not 0 <= value <= most:
            raise ComponentValidationException(f"--{name}: expected 0 to {most}, got {value}")
    node.num_replicas, node.min_replicas = nodes, minimum if minimum != nodes else None
    port = port or free_port()
    node.port_map = {"c10d": port}
    agent = [
        *("torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-id", specs.macros.app_id),
        *("--nnodes", str(nodes) if minimum == nodes else f"{minimum}:{nodes}"),
        *("--nproc-per-node", str(processes), "--max-restarts", str(node.max_retries)),
        *("--tee", "3", "--role", "", "-m", *words),
    ]
    threads = max(1, node.resource.cpu // processes)
    if nodes == 1:  # one agent: it binds a free port itself
        return python_script(agent, threads, endpoint="--rdzv-endpoint localhost:0")
    meet = f"""\
node={specs.macros.replica_id} host=$${{{specs.macros.rank0_env}:-}} address=
[ $$node != 0 ] || host=$${{host:-localhost}}
case $$TORCHX_JOB_ID in
# On one machine every node must be reached over loopback: a laptop's own host name often resolves
# to an address that does not answer. (Node 0 being called localhost says nothing: Kubernetes calls
# it so in its own pod.)
local_cwd:*)
    address=--local-addr=localhost
{local_gpus(nodes, processes)} ;;
# Elsewhere node 0 may be the last to start, and until then its name may not resolve.
*) [ $$node = 0 ] || "$$python" -m deploy.wait "$$host" {port} --seconds {patience} || exit ;;
esac
"""
    return python_script(agent, threads, meet, f'$$address --rdzv-endpoint "$$host:{port}"')


def local_gpus(nodes: int, processes: int) -> str:
    """Return the lines with which a node takes its own of the GPUs that all nodes here share.

    Where there are too few for all processes, none is used: two ranks cannot share a GPU in NCCL.
    """
    return f"""\
    found=$$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | paste -sd, -)
    IFS=, read -ra gpus <<< "$${{CUDA_VISIBLE_DEVICES-$$found}}"
    if [ $${{#gpus[@]}} -ge {nodes * processes} ]; then
        export CUDA_VISIBLE_DEVICES=$$(IFS=,; echo "$${{gpus[*]:node*{processes}:{processes}}}")
    elif [ $${{#gpus[@]}} -gt 0 ]; then
        export CUDA_VISIBLE_DEVICES=
        [ $$node != 0 ] || echo "note: {nodes * processes} processes, but $${{#gpus[@]}} GPUs:" \
            "all run on the CPU; -j 1x$${{#gpus[@]}} uses the GPUs" >&2
    fi"""


def quote(word: str) -> str:
    """Quote a word for bash and, unless it is torchx's job id, for torchx's macros."""
    return word if word == specs.macros.app_id else shlex.quote(word).replace("$", "$$")


def free_port() -> int:
    """Return a TCP port free on this machine, so that two jobs started side by side do not meet."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def timestamp() -> str:
    """Return the time in UTC, to the millisecond, sortable and safe in a file name."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S-%f")[:-3]
