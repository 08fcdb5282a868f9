"""Make the wheels of dist/, for machines without a compiler: ``make wheel``.

One has the compiled CPU code. Torch's C++ interface changes between minor versions, so it asks for the torch and the
Python that it was built with, and claims no other. Torch's own libraries, and the OpenMP that comes with torch, are not
put into it. auditwheel chooses the oldest manylinux tag that is true of the compiled code: as new as the C and C++
libraries of this machine make it. The other one (``py3-none-any``) has Python and Triton alone, for other platforms.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
OF_TORCH = ("libtorch*.so", "libc10*.so", "libgomp.so.1")


def run(*command: str | Path, **env: str) -> None:
    subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, env={**os.environ, **env}, check=True)


def pin(wheel: Path, torch_version: str, python: str) -> Path:
    """Change the wheel so that it asks for the torch of this minor version, and claims this Python ("3.12") alone."""
    major, minor = torch_version.split(".")[:2]
    with tempfile.TemporaryDirectory() as folder:
        run("-m", "wheel", "unpack", "--dest", folder, wheel)
        (metadata,) = Path(folder).glob("*/*.dist-info/METADATA")
        lines = metadata.read_text(encoding="utf-8").splitlines(keepends=True)
        wanted = [i for i, line in enumerate(lines) if line.startswith("Requires-Dist: torch>=")]
        assert len(wanted) == 1, "pyproject.toml must name torch once"
        lines[wanted[0]] = f"Requires-Dist: torch<{major}.{int(minor) + 1},>={major}.{minor}\n"
        claim = "Classifier: Programming Language :: Python :: "
        kept = [line for line in lines if not line.startswith(claim) or line == f"{claim}{python}\n"]
        metadata.write_text("".join(kept), encoding="utf-8")
        run("-m", "wheel", "pack", "--dest-dir", wheel.parent, metadata.parents[1])
    return wheel


def repair(wheel: Path, dist: Path) -> None:
    """Put the wheel with its true tag into ``dist``."""
    excluded = [word for name in OF_TORCH for word in ("--exclude", name)]
    run("-m", "auditwheel", "repair", *excluded, "--wheel-dir", dist, wheel)


def build(folder: str, **env: str) -> Path:
    """Build a wheel in a folder of its own: setuptools leaves files of earlier builds where they are."""
    # skip-build: it would build the extension a second time, with flags that have changed by then
    wheel_of = ("bdist_wheel", "--skip-build", "--bdist-dir", f"{folder}/wheel", "--dist-dir", folder)
    run("setup.py", "-q", "build", "--build-lib", f"{folder}/lib", *wheel_of, **env)
    (wheel,) = Path(folder).glob("*.whl")
    return wheel


def main() -> None:
    dist, python = ROOT / "dist", f"{sys.version_info[0]}.{sys.version_info[1]}"
    dist.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        # the CUDA kernels would need the libraries of one CUDA version
        repair(pin(build(folder, RLKERNELS_NO_CUDA="1"), torch.__version__, python), dist)
    with tempfile.TemporaryDirectory() as folder:
        wheel = build(folder, RLKERNELS_NO_EXTENSION="1")
        shutil.move(wheel, dist / wheel.name)
    print(f"in dist: {', '.join(sorted(path.name for path in (ROOT / 'dist').glob('*.whl')))}")


if __name__ == "__main__":
    main()
