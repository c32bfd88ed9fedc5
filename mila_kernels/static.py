"""What the compiler alone tells of a step: registers, shared memory, spills and the instruction mix. No GPU is needed.

A row describes one kernel of one step, compiled for one architecture: a step has a kernel for each head dim and element
type. ``smem_bytes`` is what a block takes: the static part that ptxas reports and the struct that the kernel casts its
dynamic block to (``dynamic_smem`` leaves its size in the PTX). ``threads`` is the largest block that the launch bounds
allow, which is the one that our steps launch. ``spill_bytes`` is what ptxas reports as spill stores plus spill
loads. The other columns count instructions in the SASS, once each however often they run.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import inspect
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from . import build, paths, results, toolchain
from . import steps as registry
from .errors import BuildError
from .files import write_atomically
from .results import StaticRow
from .steps import Step

T = TypeVar("T")
Say = Callable[[str], object]

# A column of the table that is written in capitals is the count of that instruction.
INSTRUCTIONS = tuple(column for column in results.columns("static") if column.isupper())
TABLED = ("sm_89", "sm_90a")
# What kernels are built with for a GPU, less the line table, which would only make the PTX harder to read.
FLAGS = (*(flag for flag in build.CUDA_FLAGS if flag != "-lineinfo"), "-Xptxas=-v")

# wgmma serialised by the compiler and setmaxnreg ignored: the step is not what it says it is. C7519 only tells of a
# warpgroup.arrive that the compiler put in by itself.
BROKEN_PROMISE = re.compile(r"\((C7508|C751[0-8]|C7520)\)")


class ToolError(RuntimeError):
    """A compiler or disassembler is missing, or failed; the text says which, and what to install."""


@dataclass(frozen=True)
class Compiled:
    """What one compilation of a step for one architecture printed and left."""

    log: str
    ptx: str
    sass: str


@dataclass(frozen=True)
class Resources:
    """ptxas' report on one kernel."""

    registers: int
    static_smem: int
    spill_bytes: int


# --- the tools ---


def find_nvcc() -> Path | None:
    """The nvcc that kernels are built with, or None."""
    try:
        return toolchain.nvcc_path()
    except BuildError:
        return None


def find_cuobjdump() -> Path | None:
    """cuobjdump of the PyPI package, else of the toolkit, or None."""
    nvcc = find_nvcc()
    return _find("cuobjdump", [*_wheel_folders(), *([nvcc.parent] if nvcc else [])])


def _wheel_folders() -> list[Path]:
    sites = [Path(entry) for entry in sys.path if entry.endswith("-packages")]
    return [folder for site in sites for folder in sorted((site / "nvidia").glob("*/bin"))]


def _find(tool: str, folders: Sequence[Path]) -> Path | None:
    for folder in folders:
        if os.access(folder / tool, os.X_OK):
            return folder / tool
    found = shutil.which(tool)
    return Path(found) if found else None


def _need(tool: str, found: Path | None, install: str) -> Path:
    if found is None:
        raise ToolError(f"{tool} was not found; {install}")
    return found


def _nvcc() -> Path:
    return _need("nvcc", find_nvcc(), "install the CUDA toolkit 12.8 or newer (no GPU is needed)")


def _cuobjdump() -> Path:
    return _need("cuobjdump", find_cuobjdump(), "pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")


def _run(command: Sequence[str | Path], cwd: Path | None = None) -> str:
    """stdout, then stderr, of a command that must succeed."""
    # cuobjdump starts nvdisasm, which lies beside it in the wheel and is not on the PATH of a venv never activated.
    folders = [str(folder) for folder in _wheel_folders()]
    env = os.environ | {"LC_ALL": "C", "PATH": os.pathsep.join([os.environ.get("PATH", ""), *folders])}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        name = Path(command[0]).name
        raise ToolError(f"{name} ended with code {done.returncode}:\n{(done.stderr or done.stdout).strip()}")
    return done.stdout + done.stderr


@functools.cache
def nvcc_version() -> str:
    """Such as ``13.0.88``."""
    found = re.search(r"V(\d+\.\d+\.\d+)", _run([_nvcc(), "--version"]))
    if not found:
        raise ToolError(f"{_nvcc()} --version does not name a version")
    return found[1]


@functools.cache
def _cuobjdump_version() -> str:
    return _run([_cuobjdump(), "--version"])


# --- one compilation ---


def compile_step(step: Step, arch: str, only: Mapping[str, int] | None = None) -> Compiled:
    """nvcc's log, the PTX and the SASS of a step for an architecture such as ``sm_90a``; host code is compiled too.

    ``only`` names values of the step's instances (``{"column_tiles": 1}``), the only ones that are then compiled.

    ValueError for an architecture that the step does not list, ToolError where a tool is missing or fails.
    """
    if arch not in step.architectures:
        raise ValueError(f"arch={arch!r}: {step.id} is written for {', '.join(step.architectures)}")
    target = f"arch={arch.replace('sm_', 'compute_')},code={arch}"
    with tempfile.TemporaryDirectory(prefix="mila_static_") as folder:
        work = Path(folder)
        options = ["-gencode", target, "--keep", "--keep-dir", ".", "-c", "-o", "step.o"]
        options += [f"-DONLY_{name.upper()}={value}" for name, value in (only or {}).items()]
        log = _run([_nvcc(), *FLAGS, *options, step.path.resolve()], cwd=work)
        ptx = next(work.glob("*.ptx")).read_text(encoding="utf-8")
        sass = _run([_cuobjdump(), "-sass", "step.o"], cwd=work)
    return Compiled(log, ptx, sass)


def parse_log(log: str) -> dict[str, Resources]:
    """Mangled kernel name to its resources, out of ``ptxas -v``."""
    report = {}
    for part in re.split(r"Compiling entry function '", log)[1:]:
        spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", part)
        registers = re.search(r"Used (\d+) registers", part)
        if not spills or not registers:
            raise ToolError(f"ptxas -v reports no registers or spills for {part.splitlines()[0]}")
        smem = re.search(r"(\d+) bytes smem", part)
        report[part.split("'")[0]] = Resources(
            int(registers[1]), int(smem[1]) if smem else 0, int(spills[1]) + int(spills[2])
        )
    return report


def parse_ptx(ptx: str) -> dict[str, int]:
    """Mangled kernel name to the bytes of the struct that it casts its dynamic shared memory to."""
    sizes = {}
    for body in re.split(r"\.entry\s+", ptx)[1:]:
        name = re.match(r"[\w$]+", body)
        found = [int(size) for size in re.findall(r"// dynamic shared memory: (\d+) bytes", body)]
        if name:
            sizes[name[0]] = max(found, default=0)
    return sizes


def parse_threads(ptx: str) -> dict[str, int]:
    """Mangled kernel name to the largest block that its launch bounds allow; those without bounds are left out."""
    found = {}
    for body in re.split(r"\.entry\s+", ptx)[1:]:
        head = body.partition("{")[0]
        name, bounds = re.match(r"[\w$]+", head), re.search(r"\.maxntid\s+(\d+(?:\s*,\s*\d+)*)", head)
        if name and bounds:
            found[name[0]] = math.prod(map(int, bounds[1].split(",")))
    return found


def parse_sass(sass: str) -> dict[str, Counter[str]]:
    """Mangled kernel name to how often each instruction stands in it; ``HMMA.16816.F32`` counts as ``HMMA``."""
    line = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[0-9T]\s+)?([A-Z][A-Z0-9_]*)", re.MULTILINE)
    mixes = {}
    for part in re.split(r"^\s*Function : ", sass, flags=re.MULTILINE)[1:]:
        mixes[part.split(None, 1)[0]] = Counter(line.findall(part))
    return mixes


def demangle(names: Sequence[str]) -> dict[str, str]:
    """Mangled kernel name to a short one, such as ``prefill_scalar<bf16, 512>``."""
    if not names:
        return {}
    tool = _need("c++filt", _find("c++filt", []), "install binutils")
    return {name: short_name(full) for name, full in zip(names, _run([tool, *names]).splitlines(), strict=True)}


def short_name(signature: str) -> str:
    """A demangled signature without return type, parameters and namespaces of the toolkit's types."""
    name = signature.removeprefix("void ").replace("(anonymous namespace)::", "")
    depth = 0
    for i, letter in enumerate(name):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0:
            name = name[:i]
            break
    for long, short in (("__nv_bfloat16", "bf16"), ("__half", "fp16"), ("__nv_fp8_e4m3", "e4m3")):
        name = name.replace(long, short)
    return re.sub(r"\((?:int|bool|unsigned int|\w+)\)", "", name)


# --- rows ---


def analyse(step: Step, arch: str, say: Say = str) -> tuple[list[StaticRow], list[str]]:
    """The rows of a step for an architecture, in the order of their names, and the compiler warnings that matter.

    Cached by the digest of everything that is compiled and everything that compiles it; ``say`` hears of what was not.
    """
    cached = paths.cache_dir() / "static" / f"{_digest(step, arch)}.json"
    try:
        kernels, warnings = json.loads(cached.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        kernels, warnings = _measure(compile_step(step, arch))
        _store(cached, json.dumps([kernels, warnings]))
        say(f"compiled {step.id} {arch}")
    where: dict[str, Any] = {"op": step.op, "step": step.name, "source_sha": step.source_sha, "arch": arch}
    rows = [StaticRow(**where, nvcc=nvcc_version(), **facts) for facts in kernels]
    return rows, warnings


def _measure(compiled: Compiled) -> tuple[list[dict[str, Any]], list[str]]:
    resources, dynamic, mixes = parse_log(compiled.log), parse_ptx(compiled.ptx), parse_sass(compiled.sass)
    if not resources or resources.keys() != mixes.keys() or resources.keys() != dynamic.keys():
        raise ToolError(f"kernels differ: ptxas {sorted(resources)}, PTX {sorted(dynamic)}, SASS {sorted(mixes)}")
    threads = parse_threads(compiled.ptx)
    kernels = []
    for mangled, kernel in demangle(sorted(resources)).items():
        found = resources[mangled]
        facts = {"kernel": kernel, "registers": found.registers, "spill_bytes": found.spill_bytes}
        facts |= {"smem_bytes": found.static_smem + dynamic[mangled], "threads": threads.get(mangled)}
        kernels.append(facts | {name: mixes[mangled][name] for name in INSTRUCTIONS})
    warnings = [line.strip() for line in compiled.log.splitlines() if BROKEN_PROMISE.search(line)]
    return sorted(kernels, key=lambda facts: natural(str(facts["kernel"]))), warnings


def natural(text: str) -> list[tuple[int, str]]:
    """A sort key under which 64 comes before 128."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]


def _digest(step: Step, arch: str) -> str:
    digest = hashlib.sha256()
    tools = (nvcc_version(), _cuobjdump_version())
    readers: tuple[Any, ...] = (compile_step, _measure, parse_log, parse_ptx, parse_threads, parse_sass, short_name)
    for text in (arch, *FLAGS, *INSTRUCTIONS, BROKEN_PROMISE.pattern, *tools, *map(inspect.getsource, readers)):
        digest.update(text.encode() + b"\0")
    for file in (step.path, *registry.headers(step.path)):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def _store(file: Path, text: str) -> None:
    """Writes a whole file or nothing; a cache that cannot be written is no error."""
    with contextlib.suppress(OSError):
        write_atomically(file, text.encode())


def tabled(step: Step) -> tuple[str, ...]:
    """The architectures that a step has rows for: of the published card and of the one that results are recorded on.

    All five would take an hour of one core. A step for neither has rows for all of its own.
    """
    return tuple(arch for arch in step.architectures if arch in TABLED) or step.architectures


def collect(
    chosen: Iterable[Step] | None = None, jobs: int | None = None, say: Say = str
) -> tuple[list[StaticRow], list[str]]:
    """All rows, in a fixed order, and what must not be: a step that does not compile, undeclared spills, broken
    promises of the compiler. ToolError where there is no compiler or no disassembler at all."""
    cases = [(step, arch) for step in (registry.steps() if chosen is None else chosen) for arch in tabled(step)]
    _nvcc(), _cuobjdump(), nvcc_version(), _cuobjdump_version()  # so that a missing tool is said once

    def attempt(case: tuple[Step, str]) -> tuple[list[StaticRow], list[str]]:
        step, arch = case
        try:
            rows, warnings = analyse(step, arch, say)
        except ToolError as error:
            return [], [f"{step.id} {arch}: {error}"]
        return rows, undeclared_spills(step, rows) + [f"{step.id} {arch}: {warning}" for warning in warnings]

    with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
        analysed = list(pool.map(attempt, cases))
    rows = [row for found, _ in analysed for row in found]
    return sorted(rows, key=_order), [problem for _, problems in analysed for problem in problems]


def _order(row: StaticRow) -> tuple[str, list[tuple[int, str]], list[tuple[int, str]], list[tuple[int, str]]]:
    return row.op, natural(row.step), natural(row.arch), natural(row.kernel)


def undeclared_spills(step: Step, rows: Iterable[StaticRow]) -> list[str]:
    """A line for each kernel that spills although its step's header has no ``// Spills:``."""
    if step.spills:
        return []
    return [
        f"{step.id} {row.arch} {row.kernel}: {row.spill_bytes} bytes of spills, no `// Spills: reason` in the header"
        for row in rows
        if row.spill_bytes
    ]


# --- the table ---


def differences(recorded: Iterable[StaticRow], measured: Iterable[StaticRow]) -> list[str]:
    """One line for each row that was added, lost or changed, with the columns that changed."""
    before = {(row.op, row.step, row.arch, row.kernel): row for row in recorded}
    after = {(row.op, row.step, row.arch, row.kernel): row for row in measured}
    lines = []
    for key in sorted(before.keys() | after.keys()):
        name = f"{key[0]}/{key[1]} {key[2]} {key[3]}"
        if key not in after:
            lines.append(f"{name}: recorded, but no longer there")
        elif key not in before:
            lines.append(f"{name}: not recorded")
        elif before[key] != after[key]:
            old, new = asdict(before[key]), asdict(after[key])
            changed = [f"{column} {old[column]} -> {new[column]}" for column in old if old[column] != new[column]]
            lines.append(f"{name}: {', '.join(changed)}")
    return lines


# --- for notebooks ---


def sass(name: Step | str, arch: str = "sm_90a", kernel: str = "") -> str:
    """The SASS of a step's kernels whose short name contains ``kernel``, without encodings.

    ValueError if there is none; the text lists the kernels.
    """
    text = compile_step(_step(name), arch).sass
    parts = re.split(r"^\s*Function : ", text, flags=re.MULTILINE)[1:]
    chosen = _choose({part.split(None, 1)[0]: part for part in parts}, kernel)
    line = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?;)", re.MULTILINE)
    return "\n\n".join(f"{short}\n" + "\n".join(line.findall(part)) for short, part in chosen.items())


def ptx(name: Step | str, arch: str = "sm_90a", kernel: str = "") -> str:
    """The PTX of a step's kernels whose short name contains ``kernel``. ValueError if there is none."""
    text = compile_step(_step(name), arch).ptx
    bodies = re.split(r"^(?:\.visible |\.weak )?\.entry\s+", text, flags=re.MULTILINE)[1:]
    chosen = _choose({re.split(r"\W", body, maxsplit=1)[0]: body for body in bodies}, kernel)
    return "\n\n".join(f"// {short}\n.entry {body.rstrip()}" for short, body in chosen.items())


def instruction_mix(name: Step | str, arch: str = "sm_90a", kernel: str = "") -> dict[str, Counter[str]]:
    """Short kernel name to the count of every instruction in its SASS."""
    return _choose(parse_sass(compile_step(_step(name), arch).sass), kernel)


def _step(name: Step | str) -> Step:
    return registry.step(name) if isinstance(name, str) else name


def _choose(by_mangled: dict[str, T], kernel: str) -> dict[str, T]:
    names = demangle(sorted(by_mangled))
    chosen = {short: by_mangled[mangled] for mangled, short in names.items() if kernel in short}
    if not chosen:
        raise ValueError(f"kernel={kernel!r}: the step has {', '.join(sorted(names.values(), key=natural))}")
    return dict(sorted(chosen.items(), key=lambda item: natural(item[0])))


# --- the command ---


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``python -m mila_kernels static``."""
    parser.add_argument(
        "steps",
        nargs="*",
        metavar="STEP|OP",
        help="only these steps, or those of an operation; the rows of others stay as they are",
    )
    parser.add_argument("--check", action="store_true", help="compare with results/static.csv and write nothing")
    parser.add_argument("--jobs", type=int, default=None, metavar="N", help="compilations at once (default: the cores)")


def main(args: argparse.Namespace) -> int:
    """Writes or checks the table. 0: right; 1: it differs, or a step spills undeclared; 2: a tool is missing.

    ValueError for an unknown step.
    """
    chosen = registry.select(args.steps)
    try:
        rows, problems = collect(chosen, args.jobs, lambda line: print(line, file=sys.stderr, flush=True))
    except ToolError as error:
        print(f"static: {error}", file=sys.stderr)
        return 2
    # A whole new table is written without a look at the old one, whose columns may be others.
    recorded: list[StaticRow] = results.read(paths.RESULTS, "static") if args.check or args.steps else []
    names = {(step.op, step.name) for step in chosen}
    others = [row for row in recorded if args.steps and (row.op, row.step) not in names]
    if args.check:
        problems += _compare([row for row in recorded if row not in others], rows)
    else:
        every: list[StaticRow] = sorted(others + rows, key=_order)
        results.write(paths.RESULTS, "static", every)
        print(f"{len(rows)} kernels of {len(chosen)} steps in results/static.csv, nvcc {nvcc_version()}")
    for problem in problems:
        print(f"static: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _compare(recorded: list[StaticRow], rows: list[StaticRow]) -> list[str]:
    compilers = {row.nvcc for row in recorded}
    if recorded and nvcc_version() not in compilers:
        # Another compiler allocates otherwise; only what holds under every compiler is checked then.
        print(f"static.csv is of nvcc {', '.join(sorted(compilers))}, here is {nvcc_version()}: figures not compared")
        return []
    lines = differences(recorded, rows)
    if not lines:
        print(f"{len(rows)} kernels as recorded, nvcc {nvcc_version()}")
        return []
    return [*lines, "`make static` writes the table anew"]
