# SPDX-License-Identifier: MIT
"""What the repository promises of itself: who imports what, and that documents are true."""

import ast
import importlib.util
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("embeddings", "models", "trainer", "pipelines", "deploy")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
README = (ROOT / "README.md").read_text(encoding="utf-8")
PACKAGE_READMES = tuple(f"{package}/README.md" for package in PACKAGES)
DOCUMENTS = (
    *(
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "deploy/RUNBOOK.md",
        "tests/faults/README.md",
    ),
    *PACKAGE_READMES,
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def tracked() -> list[Path]:
    """Files that are, or would be, committed."""
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / line for line in listing.splitlines() if (ROOT / line).is_file()]


def imports(path: Path) -> set[str]:
    """Full names of what a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_every_import_is_one_that_its_package_may_make() -> None:
    words = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"]
    done = subprocess.run([*words, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_models_are_single_device_code() -> None:
    guilty = {
        name(path)
        for path in MODULES
        if path.is_relative_to(ROOT / "models")
        and any(module.startswith("torch.distributed") for module in imports(path))
    }
    assert not guilty


def test_only_the_runtime_reads_the_environment() -> None:
    reads = re.compile(r"\bos\.(environ|getenv)\b|\bfrom os import .*\b(environ|getenv)\b")
    guilty = {name(path) for path in MODULES if reads.search(path.read_text(encoding="utf-8"))}
    assert guilty <= {"trainer/runtime/runtime.py"}


def test_the_launch_component_stands_alone() -> None:
    allowed = {*sys.stdlib_module_names, "torchx"}
    found = {module.split(".")[0] for module in imports(ROOT / "deploy" / "components.py")}
    assert found <= allowed


def test_no_package_file_where_it_would_shadow_another() -> None:
    # docker/ would shadow the SDK that torchx imports; tests/ would shadow tests of other packages.
    assert not list((ROOT / "tests").rglob("__init__.py"))
    assert not list((ROOT / "docker").rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_a_file_opens_with_its_role(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    docstring = ast.get_docstring(ast.parse(source))
    assert docstring
    if path.name != "__init__.py":
        assert source.startswith("# SPDX-License-Identifier: MIT\n")


def test_no_file_names_a_machine_or_a_package_host() -> None:
    # Written apart so that this file does not find itself.
    words = [
        "/wo" + "rk/",
        "/ro" + "ot/",
        "/ho" + "me/",
        "py" + "pi.org",
        "python" + "hosted",
        "npm" + "js.org",
    ]
    words += ["download." + "pytorch.org", "docker" + ".io", "nvcr" + ".io", "gh" + "cr.io"]
    guilty = {
        f"{name(path)}: {word}"
        for path in tracked()
        for word in words
        if word.encode() in path.read_bytes()
    }
    assert not guilty


def anchors(path: Path) -> set[str]:
    """The anchors of a document's headings, as code hosts make them."""
    found = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in found}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_between_documents_lead_somewhere(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    missing = []
    for link, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text):
        target = (ROOT / document).parent.joinpath(link) if link else ROOT / document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            missing.append(f"{link}#{anchor}")
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_that_documents_name_exist(document: str) -> None:
    # Paths in backticks from a package on; `mean.py` is what a how-to tells readers to write.
    text = (ROOT / document).read_text(encoding="utf-8")
    tops = "|".join((*PACKAGES, "tests", "docs", "docker", "requirements"))
    paths = re.findall(rf"`((?:{tops})/[\w./-]*)`", text)
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert not [path for path in missing if not path.endswith("/mean.py")]


@pytest.mark.parametrize("document", PACKAGE_READMES)
def test_modules_that_a_readme_of_a_package_names_are_in_the_package(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    known = {path.name for path in (ROOT / document).parent.rglob("*.py")}
    assert not sorted(set(re.findall(r"`(\w+\.py)`", text)) - known)


def test_contributing_quotes_the_list_of_commands_that_ci_runs() -> None:
    commands = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert f"```bash\n{commands}```" in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111


@pytest.mark.parametrize("document", DOCUMENTS)
def test_make_targets_in_documents_exist(document: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^([a-z]+):", makefile, re.MULTILINE)
    text = (ROOT / document).read_text(encoding="utf-8")
    spans = re.findall(r"```bash\n.*?```|`[^`\n]+`", text, re.DOTALL)
    goals = [goal for span in spans for goal in re.findall(r"\bmake((?: [a-z]+)+)", span)]
    assert {word for goal in goals for word in goal.split()} <= set(targets)


def test_every_marker_of_tests_is_used_and_explained() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    markers = settings["tool"]["pytest"]["ini_options"]["markers"]
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    tests = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")]
    for marker in (marker.partition(":")[0] for marker in markers):
        assert f"`{marker}`" in contributing, marker
        assert any(f"pytest.mark.{marker}" in text for text in tests), marker


def module_strings() -> dict[str, str]:
    """Modules that are named as strings: `-m trainer.train`, in files that import nothing."""
    places = [ROOT / document for document in DOCUMENTS] + [ROOT / "Makefile"]
    places += [path for folder in ("deploy", "docker") for path in (ROOT / folder).rglob("*.*")]
    found = {}
    for path in places:
        if path.suffix in {".md", ".py", ".yaml", ".sbatch", ".cpu", ".gpu", ""}:
            text = path.read_text(encoding="utf-8")
            # A shell line, a JSON list or a YAML list.
            for module in re.findall(
                r'(?<![-\w])-m(?:",?\s*"?|\s*\n?\s*-?\s*)([a-z_]+(?:\.[a-z_]+)+)', text
            ):
                found[module] = name(path)
    from deploy.components import TRAINER_MODULE

    return found | {TRAINER_MODULE: "deploy/components.py"}


def test_modules_named_as_strings_exist() -> None:
    named = module_strings()
    assert {"trainer.train", "trainer.doctor", "pipelines.demo"} <= named.keys()
    missing = {module: place for module, place in named.items() if not find(module)}
    assert not missing


def find(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def test_readme_has_every_figure_filled_in() -> None:
    assert not re.findall(r"FIGURE:.*", README)


def test_readme_shows_every_folder_of_code_and_no_other() -> None:
    (tree,) = re.findall(r"## The files\n.*?```\n(.*?)```", README, re.DOTALL)
    shown, parent = set(), ""
    for line in tree.splitlines():
        folder = line.split()[0].rstrip("/")
        parent = parent if line.startswith(" ") else folder
        shown.add(f"{parent}/{folder}" if line.startswith(" ") else folder)
    exist = {
        name(path.parent)
        for path in MODULES
        if path.parent.parts[-1] not in {"airflow_dags", "dagster_jobs"}
    }
    assert not {f"add to README: {folder}" for folder in exist - shown}
    assert not {f"not there: {folder}" for folder in shown if not (ROOT / folder).is_dir()}


def test_the_schema_in_the_readme_loads(tmp_path: Path) -> None:
    from embeddings.schema.schema import load_schema

    (text,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    path = tmp_path / "schema.yaml"
    path.write_text("\n".join(line.removeprefix("   ") for line in text.splitlines()))
    schema = load_schema(path)
    assert [label.name for label in schema.labels] == ["click"]


def test_lists_of_packages_are_exact_and_agree() -> None:
    lists = {}
    for path in sorted((ROOT / "requirements").glob("*.txt")):
        lines = [s for s in path.read_text(encoding="utf-8").splitlines() if s and s[0] != "#"]
        pins = [re.fullmatch(r"([A-Za-z0-9._-]+)==(\S+)", line) for line in lines]
        assert all(pins), f"{path.name}: expected NAME==VERSION on every line"
        lists[path.stem] = {pin[1].lower().replace("_", "-"): pin[2] for pin in pins if pin}
        assert len(lists[path.stem]) == len(lines), f"{path.name}: a package is there twice"
    cpu, gpu = lists["cpu"], lists["gpu"]
    assert {package for package in cpu if gpu.get(package) != cpu[package]} == {"fbgemm-gpu-cpu"}
    assert cpu["fbgemm-gpu-cpu"] == gpu["fbgemm-gpu"]
    assert not lists["mlflow"].keys() & (cpu.keys() | gpu.keys())
    assert not lists["dev"].keys() & (cpu.keys() | gpu.keys() | lists["mlflow"].keys())


@pytest.mark.parametrize("script", [ROOT / ".ci" / "run", *ROOT.glob("deploy/slurm/*")], ids=name)
def test_scripts_parse(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)


def test_no_folder_of_code_holds_more_than_16_modules() -> None:
    counts = Counter(name(path.parent) for path in MODULES if path.name != "__init__.py")
    assert not {folder: number for folder, number in counts.items() if number > 16}


@pytest.mark.parametrize("folder", sorted({name(path.parent) for path in MODULES}))
def test_a_folder_of_code_says_what_is_in_it(folder: str) -> None:
    path = ROOT / folder / "__init__.py"
    assert not path.exists() or ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


def test_no_file_has_more_than_400_lines_and_no_file_of_tests_more_than_600() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES}
    long = {name(path): number for path, number in lengths.items() if number > 400}
    for path in (ROOT / "tests").rglob("*.py"):
        number = len(path.read_text(encoding="utf-8").splitlines())
        long |= {name(path): number} if number > 600 else {}
    assert not long


def test_no_function_has_more_than_60_lines() -> None:
    found = {}
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found[f"{name(path)}:{node.name}"] = (node.end_lineno or 0) - node.lineno + 1
    assert not {place: number for place, number in found.items() if number > 60}


def towers() -> set[str]:
    """Names of the classes of towers and of their configurations."""
    found = set()
    for folder in ("towers", "baselines"):
        for path in (ROOT / "models" / folder).rglob("*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            names = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
            found |= {n.removesuffix("Config") for n in names if n.endswith("Config")} & names
    return found | {f"{tower}Config" for tower in found}


def test_no_tower_is_named_outside_models_and_recipes() -> None:
    assert {"SpecFormer", "DLRMConfig"} <= towers()
    allowed = [ROOT / "models", ROOT / "trainer" / "recipes"]
    guilty = {}
    for path in MODULES:
        if any(path.is_relative_to(folder) for folder in allowed):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        names |= {module.rpartition(".")[2] for module in imports(path)}
        texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
        names |= {text for text in texts if isinstance(text, str)}
        guilty[name(path)] = sorted(names & towers())
    assert not {path: names for path, names in guilty.items() if names}


def test_the_readme_is_short_and_package_readmes_have_60_to_120_lines() -> None:
    assert len(README.splitlines()) < 250
    lengths = {
        path: len((ROOT / path).read_text(encoding="utf-8").splitlines())
        for path in PACKAGE_READMES
    }
    assert not {path: number for path, number in lengths.items() if not 60 <= number <= 120}
