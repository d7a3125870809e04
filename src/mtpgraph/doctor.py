"""Check the installation: versions, devices, which kernels run where, compilers, caches, extras.

Every problem comes with what to do about it. Exit status: 0 if steps can be compiled and run here,
1 if not.
"""

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import tempfile
from pathlib import Path
from typing import Any, Literal

import torch

from . import ops
from ._version import __version__

EXTRAS = {
    "demo": ("rich", "safetensors", "numpy"),
    "cli": ("rich",),
    "test": ("pytest", "hypothesis"),
    "tensorrt": ("torch_tensorrt",),
}
_OLDEST_TORCH = (2, 11)
_OLDEST_CARD = (8, 0)
_NATIVE_FP8 = (8, 9)


@dataclasses.dataclass(frozen=True)
class Problem:
    """Something that is missing or too old.

    Attributes:
        level: "error", nothing works without it; "warning", something is slower or left out
        what: is wrong
        remedy: what to do
    """

    level: Literal["error", "warning"]
    what: str
    remedy: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``mtpgraph doctor``."""
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    report = examine()
    print(json.dumps(report, indent=2) if args.json else render(report), end="\n")
    return 0 if report["usable"] else 1


def examine() -> dict[str, Any]:
    """All that the command says, as plain data."""
    problems: list[Problem] = []
    report = {
        "versions": _versions(problems),
        "devices": _devices(problems),
        "inductor": _inductor(problems),
        "caches": _caches(problems),
        "extras": _extras(),
    }
    report["usable"] = all(problem.level != "error" for problem in problems)
    report["problems"] = [dataclasses.asdict(problem) for problem in problems]
    return report


def _versions(problems: list[Problem]) -> dict[str, str | None]:
    release = torch.__version__.split("+")[0].split(".")
    if tuple(int(part) for part in release[:2]) < _OLDEST_TORCH:
        problems.append(
            Problem("error", f"torch {torch.__version__} is too old", "pip install 'torch>=2.11'")
        )
    return {
        "mtpgraph": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": _version_of("triton"),
        "cuda": torch.version.cuda,
    }


def _version_of(package: str) -> str | None:
    if importlib.util.find_spec(package) is None:
        return None
    try:
        return importlib.metadata.version(package.replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        return "installed"


def _devices(problems: list[Problem]) -> list[dict[str, Any]]:
    devices = [_device("cpu", platform.machine() or "CPU", None, problems)]
    if torch.version.cuda is None or not torch.cuda.is_available():
        built = torch.version.cuda is not None
        problems.append(
            Problem(
                "warning",
                "no CUDA card, so every op runs its reference and there are no CUDA graphs",
                "check the driver with nvidia-smi" if built else "install a CUDA build of torch",
            )
        )
        return devices
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        name = torch.cuda.get_device_name(index)
        devices.append(_device(f"cuda:{index}", name, capability, problems))
    return devices


def _device(
    device: str, name: str, capability: tuple[int, int] | None, problems: list[Problem]
) -> dict[str, Any]:
    """One device; the rules are those by which the ops choose."""
    has_triton = importlib.util.find_spec("triton") is not None
    if capability is not None and not has_triton:
        problems.append(
            Problem("warning", f"no Triton: {device} runs references", "pip install triton")
        )
    if capability is not None and capability < _OLDEST_CARD:
        problems.append(
            Problem(
                "warning",
                f"{device} ({name}) has capability {_dotted(capability)}, and the kernels need "
                f"{_dotted(_OLDEST_CARD)}: it runs references",
                "use a card of the Ampere generation or newer",
            )
        )
    kernels = capability is not None and has_triton and capability >= _OLDEST_CARD
    return {
        "device": device,
        "name": name,
        "capability": None if capability is None else _dotted(capability),
        "fp8": None if capability is None else capability >= _NATIVE_FP8,
        "cuda_graphs": capability is not None,
        "ops": {op: _serves(op) if kernels else "reference" for op in op_names()},
    }


def op_names() -> list[str]:
    """The ops of the package, sorted."""
    return sorted(name for name in ops.__all__ if hasattr(torch.ops.mtpgraph, name))


def _serves(op: str) -> str:
    kernel = f"{__package__}.kernels.{op.removesuffix('_')}"
    return "triton" if importlib.util.find_spec(kernel) is not None else "reference"


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def _inductor(problems: list[Problem]) -> dict[str, Any]:
    """Whether Inductor can generate code for the devices here."""
    from .compile_passes._compat import cpp_compiler

    compiler = cpp_compiler()
    if compiler is None:
        problems.append(
            Problem(
                "warning",
                "no C++ compiler, so Inductor cannot compile steps for the CPU",
                "install g++ or clang and put it on PATH, name it in the variable CXX, or compile "
                'with engine="eager"',
            )
        )
    gpu = torch.version.cuda is not None and importlib.util.find_spec("triton") is not None
    return {"cpu": compiler, "cuda": gpu and torch.cuda.is_available()}


def _caches(problems: list[Problem]) -> dict[str, dict[str, Any]]:
    """Where compiled code is kept, and whether it can be."""
    from .compile_passes._compat import inductor_cache_dir

    triton = os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache"
    caches = {}
    for name, folder in (("inductor", Path(inductor_cache_dir())), ("triton", Path(triton))):
        writable = _writable(folder)
        caches[name] = {"path": str(folder), "writable": writable}
        if not writable:
            variable = {"inductor": "TORCHINDUCTOR_CACHE_DIR", "triton": "TRITON_CACHE_DIR"}[name]
            problems.append(
                Problem(
                    "error" if name == "inductor" else "warning",
                    f"the cache of {name} cannot be written: {folder}",
                    f"set {variable} to a folder that you may write to",
                )
            )
    return caches


def _writable(folder: Path) -> bool:
    """A file can be made there, or in the nearest folder above that exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _extras() -> dict[str, dict[str, str | None]]:
    return {
        extra: {package: _version_of(package) for package in packages}
        for extra, packages in EXTRAS.items()
    }


def render(report: dict[str, Any]) -> str:
    """The report as text."""
    versions = [f"{name} {version or 'missing'}" for name, version in report["versions"].items()]
    lines = ["  ".join(versions), ""]
    for device in report["devices"]:
        lines += _render_device(device)
    compiler = report["inductor"]["cpu"] or "no C++ compiler"
    lines.append(f"Inductor: {compiler} for the CPU")
    for name, cache in report["caches"].items():
        lines.append(f"cache of {name}: {cache['path']}{'' if cache['writable'] else ' (!)'}")
    for extra, packages in report["extras"].items():
        missing = [package for package, version in packages.items() if version is None]
        state = f"misses {', '.join(missing)}: pip install 'mtpgraph[{extra}]'" if missing else "ok"
        lines.append(f"extra {extra}: {state}")
    lines.append("")
    for problem in report["problems"]:
        lines += [f"{problem['level']}: {problem['what']}", f"    {problem['remedy']}"]
    lines.append("usable" if report["usable"] else "not usable")
    return "\n".join(lines)


def _render_device(device: dict[str, Any]) -> list[str]:
    facts = []
    if device["capability"] is not None:
        fp8 = "native fp8" if device["fp8"] else "fp8 decoded by the kernels"
        facts = [f"capability {device['capability']}", fp8]
    lines = [", ".join([f"{device['device']}: {device['name']}", *facts])]
    for kind in ("triton", "reference"):
        names = [name for name, served in device["ops"].items() if served == kind]
        if names and len(names) == len(device["ops"]):
            lines.append(f"    every op: {kind}")
        elif names:
            lines.append(f"    {kind}: {', '.join(names)}")
    return [*lines, ""]
