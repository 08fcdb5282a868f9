"""Build ``rlkernels._C``: torch ops and host data structures from ``csrc``.

Everything about flags lives here. The sources fall into three groups:

* ``csrc/ops``, ``csrc/runtime``, ``csrc/bindings``, ``csrc/module.cpp``: ordinary extension sources.
* ``csrc/cpu``: compiled once per instruction set (``ISA_FLAGS``) by this script, because one extension
  cannot give two sets of flags to one file. ``csrc/include/dispatch.h`` picks the copy to run.
* ``csrc/cuda``: compiled by nvcc and linked only into a CUDA build of torch. Elsewhere
  ``python setup.py check_cuda`` compiles them as a check.

The extension fits the torch that it is built with. pip hides that torch from an isolated build, but runs its Python, so
it is found there; a front end with a Python of its own needs --no-build-isolation.

Environment: ``DEBUG=1`` (no optimisation, symbols), ``MAX_JOBS``, ``TORCH_CUDA_ARCH_LIST`` (read as torch does; without
it the visible GPUs', else 8.0, 9.0 and PTX), ``RLKERNELS_NO_CUDA=1`` (leave the CUDA kernels out),
``RLKERNELS_NO_EXTENSION=1`` (pure Python install).
"""

import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar, NoReturn

import setuptools
from setuptools import Command, setup


def stop(message: str) -> NoReturn:
    sys.exit(f"rlkernels: {message}")


WITH_EXTENSION = os.environ.get("RLKERNELS_NO_EXTENSION") != "1"
# of setuptools and of the hooks that pip calls: what needs torch unless the extension is left out
BUILDS = {"build", "build_ext", "bdist_wheel", "dist_info", "editable_wheel", "develop", "install", "check_cuda"}
NEEDS_TORCH = WITH_EXTENSION and BUILDS & set(sys.argv)
if importlib.util.find_spec("torch") is None:
    sys.path.append(sysconfig.get_path("purelib"))
try:
    import torch

    if NEEDS_TORCH and tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < (2, 11):
        stop(f"torch must be 2.11 or newer, got {torch.__version__}: pip install --upgrade torch")
    from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, _get_cuda_arch_flags
except ImportError as error:
    if NEEDS_TORCH:
        stop(
            f"this Python has no torch to build with ({error}): pip install torch setuptools wheel ninja, then "
            "pip install --no-build-isolation . (RLKERNELS_NO_EXTENSION=1 leaves the compiled code out)"
        )
    torch, CUDA_HOME, BuildExtension, WITH_EXTENSION = None, None, Command, False

ROOT = Path(__file__).parent.resolve()
CSRC = ROOT / "csrc"
DEBUG = os.environ.get("DEBUG") == "1"
JOBS = int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)
TORCH_CUDA = torch.version.cuda if torch is not None else None
WITH_CUDA = bool(TORCH_CUDA) and CUDA_HOME is not None and os.environ.get("RLKERNELS_NO_CUDA") != "1"

COMMON_FLAGS = ["-std=c++20", "-fvisibility=hidden", "-Wall", "-fopenmp", f"-I{CSRC / 'include'}"]
COMMON_FLAGS += ["-O0", "-g"] if DEBUG else ["-O3", "-g0", "-DNDEBUG"]
# No errno or trap semantics in kernels; NaN and infinity keep theirs.
KERNEL_FLAGS = ["-fPIC", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-fno-exceptions", "-fno-rtti"]
X86 = platform.machine().lower() in {"x86_64", "amd64"}
ISA_FLAGS: dict[str, list[str]] = {"portable": []}
if X86:
    ISA_FLAGS["avx2"] = ["-mavx2", "-mfma", "-mf16c"]
    ISA_FLAGS["avx512"] = [
        *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"),
        "-mprefer-vector-width=512",
    ]
    # Sapphire Rapids and later: bf16 dot products and AMX tiles.
    ISA_FLAGS["amx"] = [*ISA_FLAGS["avx512"], "-mavx512bf16", "-mamx-tile", "-mamx-bf16"]
# A source whose name says so is compiled for that instruction set only: csrc/cpu/NAME.amx.cpp
NVCC_FLAGS = ["-std=c++20", "-O3", "--expt-relaxed-constexpr", "-Xcompiler=-fPIC", f"-I{CSRC / 'include'}"]


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    if done.stderr.strip():
        print(done.stderr, file=sys.stderr)


def is_stale(target: Path, sources: list[Path], command: str) -> bool:
    """Return False if the object is newer than its sources and was made by the same command (flags, architectures)."""
    if not target.exists() or target.stat().st_mtime < max(s.stat().st_mtime for s in sources):
        return True
    made_by = target.with_suffix(".command")
    return not made_by.exists() or made_by.read_text() != command


def compile_all(jobs: list[tuple[Path, Path, list[str]]]) -> None:
    """Run (source, object, command) jobs side by side; skip objects that are up to date."""
    headers = [*CSRC.rglob("*.h"), *CSRC.rglob("*.cuh")]

    def compile_one(job: tuple[Path, Path, list[str]]) -> None:
        source, target, command = job
        if is_stale(target, [source, *headers], " ".join(command)):
            run(command)
            target.with_suffix(".command").write_text(" ".join(command))

    with ThreadPoolExecutor(JOBS) as pool:
        list(pool.map(compile_one, jobs))


def isa_jobs(out: Path) -> list[tuple[Path, Path, list[str]]]:
    compiler = os.environ.get("CXX", "g++")
    jobs = []
    for source in sorted((CSRC / "cpu").glob("*.cpp")):
        name, _, only = source.stem.partition(".")
        for isa, flags in ISA_FLAGS.items():
            if only and isa != only:
                continue
            target = out / f"{name}.{isa}.o"
            command = [compiler, *COMMON_FLAGS, *KERNEL_FLAGS, *flags, f"-DRLK_ISA={isa}", "-c", str(source)]
            jobs.append((source, target, [*command, "-o", str(target)]))
    return jobs


def cuda_arch_flags() -> list[str]:
    if os.environ.get("TORCH_CUDA_ARCH_LIST") in (None, "", "native") and not torch.cuda.device_count():
        os.environ["TORCH_CUDA_ARCH_LIST"] = "8.0;9.0+PTX"
    try:
        return _get_cuda_arch_flags()
    except ValueError as error:
        stop(f"TORCH_CUDA_ARCH_LIST must be a list that torch knows, such as '8.0;9.0+PTX' or 'Hopper': {error}")


def check_nvcc(nvcc: str) -> None:
    """Stop if nvcc has an older major version than torch's CUDA; warn if its minor version is older."""
    try:
        text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        stop(f"{nvcc} does not run ({error}): set CUDA_HOME to a CUDA toolkit, or RLKERNELS_NO_CUDA=1")
    found = re.search(r"release (\d+)\.(\d+)", text)
    if found is None or TORCH_CUDA is None:
        return
    own, wanted = tuple(map(int, found.groups())), tuple(map(int, TORCH_CUDA.split(".")[:2]))
    message = (
        f"{nvcc} is of CUDA {found[1]}.{found[2]}, older than the {TORCH_CUDA} of torch: set CUDA_HOME to a toolkit of "
        f"CUDA {TORCH_CUDA}, or RLKERNELS_NO_CUDA=1 to leave the CUDA kernels out"
    )
    if own[0] < wanted[0]:
        stop(message)
    if own < wanted:  # builds for the GPUs that it knows
        print(f"rlkernels: {message}", file=sys.stderr)


def toolkit_folders(nvcc: str) -> tuple[list[str], list[str]]:
    """Return the folders of nvcc's headers and of its libraries; CUDA_HOME lacks them if its nvcc starts another."""
    # what a compilation would run, and before it the settings, a line each
    plan = subprocess.run([nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True).stderr
    flags = shlex.split(" ".join(re.findall(r"^#\$ (?:INCLUDES|LIBRARIES)=(.*)$", plan, re.MULTILINE)))
    headers, libraries = ([flag[2:] for flag in flags if flag.startswith(start)] for start in ("-I", "-L"))
    return headers, libraries


def cuda_jobs(out: Path, nvcc: str) -> list[tuple[Path, Path, list[str]]]:
    jobs = []
    for source in sorted((CSRC / "cuda").glob("*.cu")):
        target = out / f"{source.stem}.cu.o"
        jobs.append((source, target, [nvcc, *NVCC_FLAGS, *cuda_arch_flags(), "-c", str(source), "-o", str(target)]))
    return jobs


class BuildKernels(BuildExtension):
    """Compile the per-ISA and CUDA objects, then let torch build and link the rest."""

    def build_extensions(self):
        out = Path(self.build_temp).resolve() / "kernels"
        out.mkdir(parents=True, exist_ok=True)
        jobs = isa_jobs(out)
        headers, libraries = [], []
        if WITH_CUDA:
            nvcc = str(Path(CUDA_HOME) / "bin" / "nvcc")
            check_nvcc(nvcc)
            headers, libraries = toolkit_folders(nvcc)
            jobs += cuda_jobs(out, nvcc)
        compile_all(jobs)
        for extension in self.extensions:
            extension.extra_objects = [str(target) for _, target, _ in jobs]
            extension.include_dirs += headers
            extension.library_dirs += libraries
        super().build_extensions()


class CheckCuda(Command):
    """Compile every CUDA source with plain nvcc; needs no GPU and no CUDA build of torch."""

    description = "compile the CUDA sources with nvcc as a check"
    user_options: ClassVar = [("out=", None, "folder for the objects")]

    def initialize_options(self):
        self.out = str(ROOT / "build" / "check_cuda")

    def finalize_options(self):
        pass

    def run(self):
        nvcc = shutil.which("nvcc") or sys.exit("check_cuda: nvcc was not found on PATH; install the CUDA toolkit")
        out = Path(self.out)
        out.mkdir(parents=True, exist_ok=True)
        jobs = cuda_jobs(out, nvcc)
        compile_all(jobs)
        print(f"check_cuda: {len(jobs)} CUDA sources compiled by {nvcc}")


def extension() -> setuptools.Extension:
    sources = [CSRC / "module.cpp"]
    for folder in ("ops", "runtime", "bindings"):
        sources += (CSRC / folder).glob("*.cpp")
    macros = [(f"RLK_HAVE_{isa.upper()}", "1") for isa in ISA_FLAGS]
    link = ["-fopenmp"]
    if WITH_CUDA:
        macros.append(("RLK_WITH_CUDA", "1"))
        # static: the toolkit's libcudart need not be where the CPU code is used, nor be torch's
        link += ["-lcudart_static", "-ldl", "-lrt", "-lpthread", "-lc10_cuda", "-ltorch_cuda"]
    return CppExtension(
        "rlkernels._C",
        sorted(str(s.relative_to(ROOT)) for s in sources),
        define_macros=macros,
        extra_compile_args=COMMON_FLAGS,
        extra_link_args=link,
        depends=[str(p) for p in [*CSRC.rglob("*.h"), *(CSRC / "cpu").glob("*.cpp"), *(CSRC / "cuda").glob("*.cu*")]],
    )


class Unread(setuptools.Distribution):
    """For ``build_ext`` of a setuptools before 77, which refuses the licence that pyproject.toml names."""

    def parse_config_files(self, *_, **__):
        pass  # nothing in it says how the extension is built


def describe() -> str:
    """Return README for a package index, without its picture and its links to files."""
    text = re.sub(r"^!\[.*\n\n", "", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    return re.sub(r"\[([^]]*)\]\((?!https?:)[^)]*\)", r"\1", text)


OLD = int(setuptools.__version__.partition(".")[0]) < 77
setup(
    **({"distclass": Unread} if OLD and "build_ext" in sys.argv else {}),
    long_description=describe(),
    long_description_content_type="text/markdown",
    ext_modules=[extension()] if WITH_EXTENSION else [],
    cmdclass={"build_ext": BuildKernels, "check_cuda": CheckCuda},
)
