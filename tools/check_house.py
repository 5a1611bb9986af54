"""Check that what is declared twice agrees, and that the files which start everything are sound.

``python tools/check_house.py`` prints one line a fault and exits 1 where there is any. The checks are functions from
parsed files to a list of faults, so that tests can hand them broken ones.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent

MISSION_PACKAGES = (
    "torch",
    "flashinfer-python",
    "mamba-ssm",
    "jupyterlab",
    "ipywidgets",
    "plotly",
    "nvtx",
    "pytest",
)
"""What the project says it is built on; each must be declared in both places."""
GPU_PACKAGES = ("flashinfer-python", "mamba-ssm")
"""Only for Linux with CUDA: in the extra ``gpu`` alone, and behind a marker."""
EXTRAS = ("gpu", "notebook", "demo", "dev")
TARGETS = ("demo", "test", "lab", "check", "fmt", "lint", "type", "bench")
TORCH_RANGE = ">=2.11,<2.15"
PYTHON_RANGE = ">=3.11"
DECISION_STATUS = re.compile(r"^Status: (proposed|accepted|replaced by \d{4})\b", re.MULTILINE)

Requirements = dict[str, Requirement]


def parse_requirements(lines: Iterable[str], *, source: str) -> tuple[Requirements, list[str]]:
    """Read requirement lines by canonical name; what cannot be read, or comes twice, is a fault."""
    found: Requirements = {}
    faults = []
    for line in lines:
        try:
            requirement = Requirement(line)
        except InvalidRequirement as error:
            faults.append(f"{source}: {line!r} is not a requirement ({str(error).splitlines()[0]})")
            continue
        name = canonicalize_name(requirement.name)
        if name in found:
            faults.append(f"{source}: {name} is declared twice")
        found[name] = requirement
    return found, faults


def pyproject_requirements(project: Mapping[str, Any]) -> tuple[Requirements, list[str]]:
    """Base dependencies and all extras of a ``[project]`` table."""
    lines = list(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        lines += extra
    return parse_requirements(lines, source="pyproject.toml")


def environment_requirements(environment: Mapping[str, Any]) -> tuple[Requirements, list[str]]:
    """The pip part of a conda environment, without the line that installs the project itself."""
    parts = [item["pip"] for item in environment["dependencies"] if isinstance(item, dict) and "pip" in item]
    lines = [line for part in parts for line in part]
    installs_itself = [line for line in lines if re.fullmatch(r"(-e|--editable)[ =]\.", line)]
    faults = [] if installs_itself else ["environment.yml: the pip part does not install the project (--editable .)"]
    found, more = parse_requirements((line for line in lines if line not in installs_itself), source="environment.yml")
    return found, faults + more


def compare_sets(pyproject: Requirements, environment: Requirements) -> list[str]:
    """Name every package that one side lacks or asks for differently."""
    faults = []
    for name in sorted(pyproject.keys() | environment.keys()):
        ours, theirs = pyproject.get(name), environment.get(name)
        if ours is None:
            faults.append(f"{name} is in environment.yml and not in pyproject.toml")
        elif theirs is None:
            faults.append(f"{name} is in pyproject.toml and not in environment.yml")
        elif (ours.specifier, str(ours.marker)) != (theirs.specifier, str(theirs.marker)):
            faults.append(f"{name}: pyproject.toml says {str(ours)!r}, environment.yml says {str(theirs)!r}")
    return faults


def check_mission(found: Requirements, *, source: str) -> list[str]:
    """All packages of the mission are declared, those for CUDA behind a Linux marker, and torch in its range."""
    faults = [f"{source}: {name} is not declared" for name in MISSION_PACKAGES if name not in found]
    for name in GPU_PACKAGES:
        marker = found[name].marker if name in found else None
        if name in found and (marker is None or marker.evaluate({"platform_system": "Darwin"})):
            faults.append(f'{source}: {name} needs the marker platform_system == "Linux"')
    if "torch" in found and found["torch"].specifier != SpecifierSet(TORCH_RANGE):
        faults.append(f"{source}: torch must be {TORCH_RANGE}, is {found['torch'].specifier}")
    return faults


def check_project(project: Mapping[str, Any]) -> list[str]:
    """Python range, the extras, where the CUDA packages stand, and that dev pins exactly."""
    faults = []
    if SpecifierSet(project["requires-python"]) != SpecifierSet(PYTHON_RANGE):
        faults.append(f"pyproject.toml: requires-python must be {PYTHON_RANGE}, is {project['requires-python']}")
    extras = project["optional-dependencies"]
    faults += [f"pyproject.toml: the extra {name} is missing" for name in EXTRAS if name not in extras]
    gpu = {canonicalize_name(Requirement(line).name) for line in extras.get("gpu", ())}
    faults += [f"pyproject.toml: {name} belongs to the extra gpu" for name in GPU_PACKAGES if name not in gpu]
    for line in extras.get("dev", ()):
        if not re.fullmatch(r"==[^*,]+", str(Requirement(line).specifier)):
            faults.append(f"pyproject.toml: {line!r} in dev is not pinned with ==")
    return faults


def check_environment_python(environment: Mapping[str, Any]) -> list[str]:
    """The conda part asks for the same Python as pyproject.toml."""
    wanted = f"python{PYTHON_RANGE}"
    if wanted in environment["dependencies"]:
        return []
    return [f"environment.yml: {wanted} is not among the dependencies"]


def check_makefile(text: str) -> list[str]:
    """Every promised target has a rule and a line in ``make help``."""
    documented = set(re.findall(r"^([a-z-]+):.*## ", text, re.MULTILINE))
    return [f"Makefile: no documented target {name}" for name in TARGETS if name not in documented]


def check_hooks(config: Mapping[str, Any], makefile: str) -> list[str]:
    """Commit hooks are local and run targets that exist."""
    faults = []
    for repo in config["repos"]:
        if repo["repo"] != "local":
            faults.append(f".pre-commit-config.yaml: {repo['repo']} is not local; its versions would be a second pin")
            continue
        for hook in repo["hooks"]:
            target = hook["entry"].split()[-1]
            if not re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE):
                faults.append(f".pre-commit-config.yaml: {hook['id']} runs make {target}, which the Makefile lacks")
    return faults


def check_decisions(pages: Mapping[str, str]) -> list[str]:
    """Pages, by file name, are numbered from 0001 without gaps and carry a status."""
    faults = []
    for number, (name, text) in enumerate(sorted(pages.items()), start=1):
        if not re.fullmatch(rf"{number:04}-[a-z0-9-]+\.md", name):
            faults.append(f"docs/decisions/{name}: expected {number:04}-title.md, numbers have no gaps and no twins")
        if not DECISION_STATUS.search(text):
            faults.append(f"docs/decisions/{name}: no line 'Status: proposed', 'accepted' or 'replaced by NNNN'")
    return faults


def check_shell(script: Path) -> list[str]:
    """Bash can parse the script, and the script stops at its first failure."""
    answer = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
    faults = [f"{script.name}: bash -n says {answer.stderr.strip()}"] if answer.returncode else []
    if "set -euo pipefail" not in script.read_text(encoding="utf-8").splitlines():
        faults.append(f"{script.name}: no line 'set -euo pipefail'")
    return faults


def check_whitespace(root: Path) -> list[str]:
    """``git diff --check`` over every tracked file, as it is in the work tree, against an empty tree.

    A bare ``git diff --check`` sees nothing in a fresh clone, which is where CI runs.
    """

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)

    empty_tree = git("hash-object", "-t", "tree", "/dev/null")
    if empty_tree.returncode:
        return [f"git diff --check needs a git checkout: {empty_tree.stderr.strip()}"]
    answer = git("diff", "--check", empty_tree.stdout.strip())
    if answer.returncode == 0:
        return []
    lines = [line for line in answer.stdout.splitlines() if not line.startswith("+")]
    return [f"git diff --check: {line}" for line in lines or [answer.stderr.strip()]]


def check_all(root: Path) -> list[str]:
    """Every check on the tree at ``root``."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    environment = yaml.safe_load((root / "environment.yml").read_text(encoding="utf-8"))
    hooks = yaml.safe_load((root / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    makefile = (root / "Makefile").read_text(encoding="utf-8")
    pages = {path.name: path.read_text(encoding="utf-8") for path in (root / "docs" / "decisions").glob("*.md")}
    ours, faults = pyproject_requirements(project)
    theirs, more = environment_requirements(environment)
    faults += more
    faults += check_project(project)
    faults += check_environment_python(environment)
    faults += check_mission(ours, source="pyproject.toml")
    faults += check_mission(theirs, source="environment.yml")
    faults += compare_sets(ours, theirs)
    faults += check_makefile(makefile)
    faults += check_hooks(hooks, makefile)
    faults += check_decisions(pages)
    faults += check_shell(root / ".ci" / "run")
    faults += check_whitespace(root)
    return faults


def main() -> int:
    """Print the faults of this tree."""
    faults = check_all(ROOT)
    for fault in faults:
        print(f"house: {fault}", file=sys.stderr)
    if not faults:
        print(f"house: in order ({len(MISSION_PACKAGES)} packages of the mission, {len(TARGETS)} targets)")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
