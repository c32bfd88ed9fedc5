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
from .counters import kernel_names
from .shapes import parse_shape
from .steps import Step

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
SECONDS = 1200
GROUP = 6  # steps a process
_SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")


class SanitizerMissing(RuntimeError):
    """compute-sanitizer, or the GPU that it needs, is not here."""


@dataclass(frozen=True)
class Finding:
    """How one tool ended on its steps: ``errors`` is its own count, ``passed`` that it also ran to its end."""

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


def check_command(chosen: Sequence[Step], shapes: Sequence[str]) -> list[str]:
    """The command whose kernels are watched."""
    named = [word for shape in shapes for word in ("--shape", shape)]
    return [sys.executable, "-m", "mila_kernels", "check", *(step.id for step in chosen), "--device", "cuda", *named]


def shapes_of(step: Step, given: Sequence[str]) -> str:
    """The shapes that a step is checked on, as its row names them: the given ones, else those of ``check``."""
    from .__main__ import CHECK_SHAPES

    default = (parse_shape(step.op, text) for text in CHECK_SHAPES[step.op])
    return "; ".join(given or (workload.shape for workload in default if workload.fits(step)))


def sanitize(chosen: Sequence[Step], tool: str, shapes: Sequence[str] = ()) -> Finding:
    """Runs one tool over the check of steps of one operation, in one process. ValueError for an unknown tool."""
    if tool not in TOOLS:
        raise ValueError(f"tool must be one of {', '.join(TOOLS)}, not {tool!r}")
    command = [str(find_sanitizer()), "--tool", tool, *_only_ours(chosen, tool), *check_command(chosen, shapes)]
    # torch's caching allocator would hand out pieces of large blocks, between which an overrun goes unseen.
    env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", paths.WATCHED: tool}
    try:
        done = subprocess.run(
            command, cwd=paths.ROOT, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return judge(f"{tool} was stopped after {SECONDS} s", 124)
    return judge(done.stdout, done.returncode)


def _only_ours(chosen: Sequence[Step], tool: str) -> list[str]:
    """Filters that leave out torch's kernels, of which there are many; only initcheck must see their writes."""
    if tool == "initcheck":
        return []
    names = {name for step in chosen for name in kernel_names(step)}
    return [word for name in sorted(names) for word in ("--kernel-name", f"kernel_substring={name}")]


def groups(chosen: Sequence[Step]) -> list[list[Step]]:
    """Steps that one process looks at: of one operation, at most GROUP. Starting a tool costs most of its time."""
    by_op: dict[str, list[Step]] = {}
    for step in chosen:
        by_op.setdefault(step.op, []).append(step)
    return [of[i : i + GROUP] for of in by_op.values() for i in range(0, len(of), GROUP)]


def run(chosen: Sequence[Step], tools: Sequence[str], shapes: Sequence[str], jobs: int = 1) -> int:
    """Every tool over every step, ``jobs`` processes at a time: a row a step and tool, a log a process.

    A process looks at several steps; where it finds anything, each of them is run again by itself, which says whose it
    is. 0 if all passed, else 1.
    """

    def prepare(group: Sequence[Step]) -> None:
        # Built before anything watches, so that the compiler does not run under the tool.
        command = check_command(group, shapes)
        subprocess.run(command, cwd=paths.ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=False)

    failed = 0
    with results.RunWriter() as writer, ThreadPoolExecutor(jobs) as pool:
        list(pool.map(prepare, groups(chosen)))
        cases = {
            pool.submit(sanitize, group, tool, shapes): (group, tool) for group in groups(chosen) for tool in tools
        }
        while cases:
            done = next(as_completed(cases))
            group, tool = cases.pop(done)
            finding = done.result()
            names = "-".join(dict.fromkeys([group[0].name, group[-1].name]))
            log = writer.folder / "sanitizer" / f"{group[0].op}-{names}-{tool}.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text(finding.log, encoding="utf-8")
            if len(group) > 1 and not finding.passed:
                cases |= {pool.submit(sanitize, [step], tool, shapes): ([step], tool) for step in group}
                continue
            for step in group:
                writer.add(
                    results.SanitizerRow(
                        run_id=writer.run_id, op=step.op, step=step.name, source_sha=step.source_sha, tool=tool,
                        workload=shapes_of(step, shapes), errors=finding.errors, passed=finding.passed,
                    )
                )  # fmt: skip
                failed += not finding.passed
                verdict = "ok    " if finding.passed else "FAILED"
                print(f"{verdict}  {step.id}  {tool}  {finding.errors} errors", flush=True)
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
