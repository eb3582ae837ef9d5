"""Run the tests of PyTorch's operators by the oldest PyTorch that pyproject.toml claims, on the CPU.

A newer PyTorch is installed where this runs, and what that depends on is enough for the old one.
An index that has old releases has them with CUDA, whose libraries are 2.5 GB more. Nothing on a CPU calls them, but the
loader wants each, so stubs are in their place: all functions in them answer that there is no device.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Of tests/pytorch those that depend on how PyTorch registers, transforms and compiles operators; not those of bench/.
TESTS = [
    f"tests/pytorch/test_{name}.py"
    for name in ("backward", "in_place", "operator", "packed", "paged", "paged_write", "sdpa", "transforms")
]
NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
OF_CUDA = re.compile("lib(cu|nv|nccl)|NVSHMEM")  # libraries, and the versions of their symbols


def main() -> int:
    [oldest] = re.findall(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "--retries", "1"]
        done = subprocess.run([*pip, "--only-binary=:all:", "--dest", name, f"torch=={oldest}.*"])
        if done.returncode:
            print(f"skipped: tests/pytorch by PyTorch {oldest}, which is not to be had here", flush=True)
            return 0
        [wheel] = folder.glob("torch-*.whl")
        zipfile.ZipFile(wheel).extractall(folder / "site")
        wheel.unlink()
        make_stubs(folder / "site" / "torch" / "lib", folder / "stubs")
        print(f"tests/pytorch by {wheel.name}:", flush=True)
        command = [sys.executable, "-m", "pytest", "--numprocesses=1", "--quiet", *TESTS]
        paths = {"PYTHONPATH": str(folder / "site"), "LD_LIBRARY_PATH": str(folder / "stubs")}
        return subprocess.run(command, cwd=ROOT, env=os.environ | paths | {"CI": ""}).returncode  # a sample will do


def make_stubs(libraries: Path, folder: Path) -> None:
    """One library in ``folder``, by the names of all those of CUDA's that ``libraries`` need, with what they want."""
    needed, defined, wanted = set(), set(), defaultdict(set)
    for path in libraries.glob("*.so*"):
        needed.update(re.findall(r"NEEDED +(\S+)", said("objdump", "-p", path)))
        for line in said("nm", "-D", path).splitlines():
            kind, name = line.split()[-2:]
            symbol, _, version = name.partition("@")
            if kind in "Uw":
                wanted[version].add(symbol)
            else:
                defined.add(symbol)
    ours = {version: wanted[version] for version in wanted if OF_CUDA.match(version)}
    loose = {symbol for symbol in wanted[""] - defined if re.match("cu|nccl|nv", symbol)} | {"cuInit"}  # flashcli's
    folder.mkdir()
    functions = sorted(loose.union(*ours.values()))
    (folder / "stub.c").write_text("".join(f"int {name}(void) {{ return {NO_DEVICE}; }}\n" for name in functions))
    nodes = [f"{version} {{ global: {'; '.join(sorted(names))}; }};\n" for version, names in ours.items()]
    (folder / "stub.map").write_text("".join(nodes))
    options = ["-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,--version-script={folder}/stub.map"]
    subprocess.run(["cc", *options, "-o", folder / "stub.so", folder / "stub.c"], check=True)
    for name in {"libcuda.so.1", *filter(OF_CUDA.match, needed)}:
        if not (libraries / name).exists():
            (folder / name).symlink_to("stub.so")


def said(*command: object) -> str:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    sys.exit(main())
