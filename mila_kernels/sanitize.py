"""compute-sanitizer over every step: four tools, a row each. It needs a GPU whose machine lets the tool attach.

python -m mila_kernels.sanitize [STEP ...] [--tool memcheck ...] [--shape TEXT ...]
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from . import paths, results
from . import steps as registry
from .steps import Step

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
SECONDS = 1200
_SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")


class SanitizerMissing(RuntimeError):
    """compute-sanitizer, or the GPU that it needs, is not here."""


@dataclass(frozen=True)
class Finding:
    """How one tool ended on one step: ``errors`` is its own count, ``passed`` that it also ran to its end."""

    errors: int
    passed: bool
    log: str


def find_sanitizer() -> Path:
    """compute-sanitizer of PATH, CUDA_HOME or /usr/local/cuda; SanitizerMissing says where it was looked for."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    candidates = [shutil.which("compute-sanitizer"), *(f"{home}/bin/compute-sanitizer" for home in homes if home)]
    for candidate in candidates:
        if candidate and os.access(candidate, os.X_OK):
            return Path(candidate)
    raise SanitizerMissing(
        "compute-sanitizer is in neither PATH, CUDA_HOME nor /usr/local/cuda; it comes with the toolkit"
    )


def judge(log: str, code: int) -> Finding:
    """Reads a tool's output. A run without a summary, or one that ended with an error, has not passed."""
    counts = [int(first or second) for first, second in _SUMMARY.findall(log)]
    errors = sum(counts)
    return Finding(errors, bool(counts) and errors == 0 and code == 0, log)


def check_command(step: Step, shapes: Sequence[str]) -> list[str]:
    """The command whose kernels are watched."""
    named = [word for shape in shapes for word in ("--shape", shape)]
    return [sys.executable, "-m", "mila_kernels", "check", step.id, "--device", "cuda", *named]


def sanitize(step: Step, tool: str, shapes: Sequence[str] = ()) -> Finding:
    """Runs one tool over the check of one step. ValueError for an unknown tool."""
    if tool not in TOOLS:
        raise ValueError(f"tool must be one of {', '.join(TOOLS)}, not {tool!r}")
    command = [str(find_sanitizer()), "--tool", tool, *_only_ours(step, tool), *check_command(step, shapes)]
    # torch's caching allocator would hand out pieces of large blocks, between which an overrun goes unseen.
    env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(
            command, cwd=paths.ROOT, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return judge(f"{tool} was stopped after {SECONDS} s", 124)
    return judge(done.stdout, done.returncode)


def _only_ours(step: Step, tool: str) -> list[str]:
    """racecheck is slow, so it looks at our kernels alone; the others must see torch's writes to judge ours."""
    kernels = re.findall(r"__global__[^;{]*?\b(\w+)\s*\(const ", step.source)
    named_after_op = bool(kernels) and all(step.op in kernel for kernel in kernels)
    return ["--kernel-name", f"kernel_substring={step.op}"] if tool == "racecheck" and named_after_op else []


def run(chosen: Sequence[Step], tools: Sequence[str], shapes: Sequence[str], jobs: int = 1) -> int:
    """Every tool over every step, ``jobs`` at a time: a row and a log each. 0 if all passed, else 1."""

    def prepare(step: Step) -> None:
        # Built before anything watches, so that the compiler does not run under the tool.
        command = check_command(step, shapes)
        subprocess.run(command, cwd=paths.ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=False)

    failed = 0
    with results.RunWriter() as writer, ThreadPoolExecutor(jobs) as pool:
        list(pool.map(prepare, chosen))
        cases = {pool.submit(sanitize, step, tool, shapes): (step, tool) for step in chosen for tool in tools}
        for done in as_completed(cases):
            (step, tool), finding = cases[done], done.result()
            log = writer.folder / "sanitizer" / f"{step.op}-{step.name}-{tool}.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text(finding.log, encoding="utf-8")
            writer.add(
                results.SanitizerRow(
                    run_id=writer.run_id, op=step.op, step=step.name, source_sha=step.source_sha, tool=tool,
                    errors=finding.errors, passed=finding.passed,
                )
            )  # fmt: skip
            failed += not finding.passed
            print(f"{'ok    ' if finding.passed else 'FAILED'}  {step.id}  {tool}  {finding.errors} errors", flush=True)
        print(f"{failed} failed; rows and logs in {writer.folder}")
    return 1 if failed else 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command. 0: clean; 1: a tool found something; 2: no GPU or no compute-sanitizer here."""
    parser = argparse.ArgumentParser(prog="python -m mila_kernels.sanitize", description=__doc__)
    parser.add_argument("steps", nargs="*", metavar="STEP|OP", help="steps, or all of an operation (default: all)")
    parser.add_argument("--tool", action="append", choices=TOOLS, help="default: all four")
    parser.add_argument("--shape", action="append", default=[], help="shapes to check (default: those of `check`)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time (default 1)")
    args = parser.parse_args(argv)
    import torch

    try:
        chosen = registry.select(args.steps)
        find_sanitizer()
        if not torch.cuda.is_available():
            raise SanitizerMissing("no CUDA device is visible; compute-sanitizer watches kernels on a GPU")
    except (SanitizerMissing, ValueError) as error:
        print(f"sanitize: {error}", file=sys.stderr)
        return 2
    return run(chosen, args.tool or TOOLS, args.shape, max(1, args.jobs))


if __name__ == "__main__":
    sys.exit(main())
