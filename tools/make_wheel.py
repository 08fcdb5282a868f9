"""Makes dist/rlkernels-*.whl with the compiled CPU code, for machines without a compiler: ``make wheel``.

Torch's C++ interface changes between minor versions, so the wheel asks for the one that it was built with. Torch's own
libraries, and the OpenMP that comes with torch, are not put into it. auditwheel chooses the oldest manylinux tag that
is true of the compiled code: as new as the C and C++ libraries of this machine make it.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
OF_TORCH = ("libtorch*.so", "libc10*.so", "libgomp.so.1")


def run(*command: str | Path, **env: str) -> None:
    subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, env={**os.environ, **env}, check=True)


def pin_torch(wheel: Path, version: str) -> Path:
    """The wheel again, asking for the torch of this minor version."""
    major, minor = version.split(".")[:2]
    with tempfile.TemporaryDirectory() as folder:
        run("-m", "wheel", "unpack", "--dest", folder, wheel)
        (metadata,) = Path(folder).glob("*/*.dist-info/METADATA")
        lines = metadata.read_text(encoding="utf-8").splitlines(keepends=True)
        wanted = [i for i, line in enumerate(lines) if line.startswith("Requires-Dist: torch>=")]
        assert len(wanted) == 1, "pyproject.toml must name torch once"
        lines[wanted[0]] = f"Requires-Dist: torch<{major}.{int(minor) + 1},>={major}.{minor}\n"
        metadata.write_text("".join(lines), encoding="utf-8")
        run("-m", "wheel", "pack", "--dest-dir", wheel.parent, metadata.parents[1])
    return wheel


def repair(wheel: Path, dist: Path) -> None:
    """Puts the wheel with its true tag into ``dist``."""
    excluded = [word for name in OF_TORCH for word in ("--exclude", name)]
    run("-m", "auditwheel", "repair", *excluded, "--wheel-dir", dist, wheel)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        # the CUDA kernels would need the libraries of one CUDA version
        # in folders of its own: setuptools leaves files of earlier builds, whose sources may be gone, where they are
        build = ("build", "--build-lib", f"{folder}/lib")
        # skip-build: it would build the extension a second time, with flags that have changed by then
        wheel_of = ("bdist_wheel", "--skip-build", "--bdist-dir", f"{folder}/wheel", "--dist-dir", folder)
        run("setup.py", "-q", *build, *wheel_of, RLKERNELS_NO_CUDA="1")
        (wheel,) = Path(folder).glob("*.whl")
        repair(pin_torch(wheel, torch.__version__), ROOT / "dist")
    print(f"in dist: {', '.join(sorted(path.name for path in (ROOT / 'dist').glob('*.whl')))}")


if __name__ == "__main__":
    main()
