"""What was compiled and which backend each op would use here."""

import importlib.util
import os
from typing import Any

import torch

from rlkernels import __version__
from rlkernels import backend as _backend
from rlkernels.verdicts import load, summary

PACKAGES = {  # module -> what needs it
    "triton": "Triton kernels on a GPU",
    "safetensors": "checkpoints: stream_top1, python -m rlkernels extrapolate, the trainer",
    "transformers": "rlkernels.integrations.transformers, the trainer",
    "pydantic": "the trainer",
    "peft": "model.lora of the trainer",
    "trl": "rlkernels.integrations.trl",
    "vllm": "rlkernels.integrations.vllm, rollout.engine vllm of the trainer",
    "math_verify": "the reward math of the trainer",
}


def info() -> dict[str, Any]:
    """Return versions, what was compiled, and the backend of each op for CPU and CUDA tensors.

    Returns:
        A dictionary of plain strings, numbers and lists, ready for ``json.dumps``. ``ops[name]`` has
        ``written`` (backends that exist), ``cpu`` (what ``auto`` takes for CPU tensors) and, where a GPU is
        present, ``cuda`` (the same for the current one), ``from`` (run, verdict, record or default) and ``verdicts``
        (text about each that :func:`rlkernels.prove` left). ``missing`` has what is not installed, and what for.
    """
    missing = _backend.extension_error()
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    native = torch.ops.rlkernels
    absent = {"the compiled extension": "C++ on CPUs; the references in Python run in its place"} if missing else {}
    if devices and not _backend.built_with_cuda():
        absent["the CUDA kernels"] = "dtw by CUDA C++; Triton runs in their place"
    ops = {}
    for name, op in _backend.OPS.items():
        row: dict[str, Any] = {"written": [b for b in ("cuda", "triton", "cpu") if getattr(op, b)] + ["torch"]}
        row["cpu"] = _backend.choose(name, torch.device("cpu"))
        if devices:
            row["cuda"] = _backend.choose(name, torch.device("cuda"))
            row["from"] = _backend.settled(name, torch.cuda.current_device())[1]
            known = load(name, torch.cuda.current_device()) if op.cuda or op.triton else []
            row["verdicts"] = [summary(found) for found in known]
        ops[name] = row
    return {
        "version": __version__,
        "torch": torch.__version__,
        "extension": missing or "loaded",
        "cpu_isa": None if missing else native.cpu_isa(),
        "threads": None if missing else native.parallel_threads(),
        "cuda_kernels": _backend.built_with_cuda(),
        "triton": importlib.util.find_spec("triton") is not None,
        "gpus": devices,
        "backend": os.environ.get("RLKERNELS_BACKEND", "auto"),
        "missing": absent | {name: what for name, what in PACKAGES.items() if importlib.util.find_spec(name) is None},
        "ops": ops,
    }


def print_info() -> None:
    """Prints :func:`info` as text."""
    facts = info()
    ops, absent = facts.pop("ops"), facts.pop("missing")
    for key, value in facts.items():
        print(f"{key:<13} {', '.join(value) or 'none' if isinstance(value, list) else value}")
    print(f"\n{'op':<25} {'written':<26} {'CPU tensors':<12}" + (" GPU tensors" if facts["gpus"] else ""))
    for name, row in ops.items():
        gpu = f"{row['cuda']} ({row['from']})" if "cuda" in row else ""
        print(f"{name:<25} {', '.join(row['written']):<26} {row['cpu']:<12} {gpu}".rstrip())
        for text in row.get("verdicts", []):
            print(f"{'':<25} {text}")
    for name, what in absent.items():
        print(f"missing: {name}, for {what}")
