"""What was recorded, for people: the table of steps, the charts, and the generated parts of the README.

Generated parts stand between ``<!-- generated: NAME -->`` and ``<!-- end: NAME -->``; nothing else is touched.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import sys
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from . import paths, plots, probes, results, shapes, steps
from .plots import number
from .steps import Step

README = paths.ROOT / "README.md"
MAKEFILE = paths.ROOT / "Makefile"
PUBLISHED = paths.DATA / "published.csv"
NOT_RECORDED = "not recorded"
_PART = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end: \2 -->)", re.DOTALL)


@dataclass(frozen=True)
class Line:
    """One step in the table: figures of its op's first workload, cold; NaN and "" where nothing is recorded."""

    step: Step
    ms: float
    share: float
    rel_l2: float
    bound: float
    passed: bool
    probed: bool
    stale: bool
    failure: str


# --- recorded figures ---


def main_workload(op: str) -> shapes.Workload:
    """The workload that an op's ladder is measured on: the first of its rows in ``data/workloads.csv``.

    ValueError for an op that has none.
    """
    return shapes.workloads(op)[0]


def recorded(op: str, gpu: str, workload: str) -> pd.DataFrame:
    """Cold timings of one workload with their rates and limits, one row a step, our steps in order, then others'."""
    timings = results.table("timings", gpu)
    chosen = timings[(timings["op"] == op) & (timings["workload"] == workload) & (timings["cache"] == "cold")]
    chosen = results.with_rates(chosen, gpu)
    chosen = chosen.assign(step=[name.rpartition("/")[2] for name in chosen["step"]])
    order = {step.name: place for place, step in enumerate(_steps(op))}
    return chosen.sort_values(
        "step", key=lambda names: names.map(lambda name: order.get(name, len(order))), kind="stable"
    )


def _steps(op: str) -> list[Step]:
    return steps.steps(op) if op in steps.ops() else []


def published(op: str, workload: str) -> pd.DataFrame:
    """Other people's figures for a workload: ``step``, ``ms``, ``gpu``, ``source``; empty where there are none.

    ``slower`` is the percentage over the step before where only that was published: ``ms`` is then worked out from it.
    """
    columns = ["step", "ms", "gpu", "source", "slower"]
    if not PUBLISHED.exists():
        return pd.DataFrame(columns=columns)
    table = pd.read_csv(PUBLISHED, dtype=str, keep_default_na=False)
    rows = table[(table["op"] == op) & (table["workload"] == workload) & (table["step"] != "")]
    found: list[dict[str, Any]] = []
    for row in rows.sort_values("step", kind="stable").to_dict("records"):
        line = {"step": row["step"], "gpu": short(row["gpu"]), "source": row["source"]}
        if row["unit"] == "ms":
            found.append({**line, "ms": float(row["value"]), "slower": float("nan")})
        elif row["quantity"] == "slowdown" and found:
            slower = float(row["value"])
            found.append({**line, "ms": found[-1]["ms"] * (1 + slower / 100), "slower": slower})
    return pd.DataFrame(found, columns=columns)


def lines(op: str, gpu: str) -> list[Line]:
    """The table of an op's steps, in order."""
    timings = {str(row["step"]): row for row in recorded(op, gpu, main_workload(op).name).to_dict("records")}
    parity = results.table("parity", gpu)
    parity = parity[(parity["op"] == op) & (parity["backend"] == "cuda")]
    parity = parity.assign(step=[name.rpartition("/")[2] for name in parity["step"]])
    return [_line(step, timings.get(step.name), parity[parity["step"] == step.name]) for step in _steps(op)]


def _line(step: Step, timed: dict[Hashable, Any] | None, parity: pd.DataFrame) -> Line:
    ok = timed if timed and timed["status"] == "ok" else None
    probed = parity["shape"].map(probes.is_probe).astype(bool)
    probe, parity = parity[probed], parity[~probed]  # a probe's errors are those of an element, with bounds of its own
    return Line(
        step=step,
        ms=float(ok["median_us"]) / 1e3 if ok else float("nan"),
        share=float(ok["share"]) if ok else float("nan"),
        rel_l2=float(parity["rel_l2"].max()) if len(parity) else float("nan"),
        bound=float(parity["bound"].min()) if len(parity) else float("nan"),
        passed=bool(parity["passed"].all()) if len(parity) else False,
        probed=bool(probe["passed"].all()),
        stale=bool(timed["stale"]) if timed else False,
        failure="" if ok or not timed else str(timed["error"]),
    )


def steps_table(op: str, gpu: str) -> pd.DataFrame:
    """The table of an op's steps as text cells: step, change, ms, share of the limit, error, verdict."""
    return pd.DataFrame([_cells(line) for line in lines(op, gpu)])


def _cells(line: Line) -> dict[str, str]:
    mark = " (stale)" if line.stale else ""
    time = f"{number(line.ms)}{mark}" if line.ms == line.ms else "failed" if line.failure else NOT_RECORDED
    error = f"{line.rel_l2:.1e}" + ("" if line.passed else ", above its bound") if line.rel_l2 == line.rel_l2 else ""
    error += "" if line.probed else ", fails a probe"
    return {
        "step": line.step.name,
        "change": headline(line.step.change),
        "ms": time,
        "share of the limit": f"{number(100 * line.share, 2)} %" if line.share == line.share else "",
        "error": error or NOT_RECORDED,
        "verdict": headline(line.step.verdict),
    }


def peers_error(op: str, gpu: str) -> str:
    """Errors of peers and of steps on the inputs that both were compared on, in a sentence; "" where there are none.

    A peer that fails on some, as torch does where a query sees no key, is shown by the others.
    """
    parity = results.table("parity", gpu)
    parity = parity[(parity["op"] == op) & (parity["backend"] == "cuda")]
    names = {step.name for step in _steps(op)}
    ours = parity[parity["step"].isin(names)]
    theirs = parity[(parity["source_sha"] == "") & parity["passed"] & parity["shape"].isin(ours["shape"])]
    if theirs.empty:
        return ""
    same = ours[ours["shape"].isin(theirs["shape"])]
    worst = [f"{name} {rows['rel_l2'].max():.1e}" for name, rows in theirs.groupby("step", sort=True)]
    return f"Error on the inputs that both were compared on: steps {same['rel_l2'].max():.1e}, {', '.join(worst)}.\n"


def headline(text: str, least: int = 20) -> str:
    """The first clause of a step's line, and those after it up to ``least`` letters; the rest is in its file."""
    clauses = re.split(r"(?<=[.:;])\s+", text.strip())
    taken = clauses[0]
    for clause in clauses[1:]:
        if len(taken) >= least:
            break
        taken += f" {clause}"
    taken = taken.rstrip(".:;")
    is_name = re.match(r"\w+\.\w", taken)  # an instruction, such as cp.async, is written as it is
    return taken if is_name else taken[:1].upper() + taken[1:]


# --- charts ---


def figures(gpu: str) -> Iterator[tuple[str, Figure]]:
    """Name and chart of everything that can be drawn from the recorded rows of a GPU, in a fixed order."""
    timings = results.table("timings", gpu)
    timings = results.with_rates(timings[timings["status"] == "ok"], gpu)
    for op in sorted(timings["op"].unique()):
        workload = main_workload(op)
        ladder = recorded(op, gpu, workload.name)
        ladder = ladder[(ladder["status"] == "ok") & ladder["limit_us"].notna()]
        if len(ladder):
            title = f"{op}: {workload.note or workload.shape}"
            yield f"ladder-{op}", plots.ladder(ladder, published(op, workload.name), gpu=device(gpu), title=title)
        sizes = _by_length(timings[(timings["op"] == op) & (timings["cache"] == "cold")])
        for heads, rows in sizes.groupby("geometry", sort=True):
            if rows["length"].nunique() > 1:
                chart = plots.scaling(rows, "length", xlabel="sequence length N (tokens)", title=f"{op}: {heads}")
                yield f"scaling-{op}-{str(heads).replace(' ', '-')}", chart
    yield from _roofline(gpu, timings)
    yield from _errors(gpu)


def _by_length(timings: pd.DataFrame) -> pd.DataFrame:
    """The rows whose queries are the whole sequence, with its ``length`` and the ``geometry`` of the rest."""
    found = []
    for row in timings.to_dict("records"):
        if row["op"] not in shapes.ATTENTION_OPS:
            continue
        shape = shapes.parse_shape(row["op"], row["shape"])
        if shape.q_len == shape.kv_len:
            rest = re.sub(r"\b(q|kv)\d+h", r"\1h", row["shape"])
            found.append(row | {"step": row["step"].rpartition("/")[2], "length": shape.kv_len, "geometry": rest})
    return pd.DataFrame(found, columns=[*timings.columns, "length", "geometry"])


def _roofline(gpu: str, timings: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    ceilings = _ceilings(gpu)
    cold = timings[(timings["cache"] == "cold") & (timings["source_sha"] != "")]  # peers have none
    if ceilings is None or cold.empty:
        return
    peaks = {"BF16 matmul": ceilings.bf16_tflops, "FP8 matmul": ceilings.fp8_tflops}
    best = cold.loc[cold.groupby(["op", "workload", "shape"])["median_us"].idxmin()]
    measured = {name: peak for name, peak in peaks.items() if peak}
    if ceilings.read_gbps and measured:
        title = f"{device(gpu)}: measured ceilings, and the fastest step of each workload"
        yield (
            "roofline",
            plots.roofline(best, read_gbps=ceilings.read_gbps, peaks=measured, gpu=device(gpu), title=title),
        )


def _errors(gpu: str) -> Iterator[tuple[str, Figure]]:
    parity = results.table("parity", gpu)
    parity = parity[~parity["shape"].map(probes.is_probe).astype(bool)]
    for op, rows in parity.groupby("op", sort=True):
        named = rows.assign(step=[name.rpartition("/")[2] for name in rows["step"]]).sort_values("step", kind="stable")
        yield f"errors-{op}", plots.errors(named, title=f"{op}: every recorded comparison")


def _ceilings(gpu: str) -> results.RunRow | None:
    """The latest run of a GPU that measured its ceilings."""
    runs = [row for row in results.read(paths.RESULTS / gpu, "runs") if row.read_gbps and row.bf16_tflops]
    return max(runs, key=lambda row: row.utc, default=None)


def device(gpu: str) -> str:
    """The GPU's name for a chart: what its runs report, in short."""
    run = _ceilings(gpu)
    return short(run.gpu) if run and run.gpu else gpu.upper()


def short(gpu: str) -> str:
    """A GPU's name as people say it: ``RTX 4070`` for ``NVIDIA GeForce RTX 4070``."""
    return gpu.removeprefix("NVIDIA ").removeprefix("GeForce ").strip()


def draw(gpu: str, folder: Path | None = None) -> list[Path]:
    """Writes every chart of a GPU's rows as SVG and PNG into ``results/<gpu>/figures/``; returns the files."""
    target = folder or paths.RESULTS / gpu / "figures"
    return [file for name, figure in figures(gpu) for file in plots.save(figure, target / name)]


# --- the README ---


def _part_ladder(gpu: str) -> str:
    chart = f"results/{gpu}/figures/ladder-prefill.svg"
    if not (paths.ROOT / chart).exists():
        return f"No run on `{gpu}` is recorded yet; `make reproduce` on such a GPU writes one.\n"
    name = f"Prefill on one {device(gpu)}: milliseconds and share of the limit for every step, published figures beside"
    return f"![{name}]({chart})\n"


def _part_steps(gpu: str) -> str:
    return _steps_of_readme(_ops()[0], gpu)


def _part_others(gpu: str) -> str:
    return "\n".join(_steps_of_readme(op, gpu) for op in _ops()[1:]) or "There are none yet.\n"


def _ops() -> list[str]:
    """The ops that have steps and workloads, in the order of the workloads: prefill first."""
    named = dict.fromkeys(workload.op for workload in shapes.workloads())
    return [op for op in named if op in steps.ops()]


def _steps_of_readme(op: str, gpu: str) -> str:
    table = []
    for line in lines(op, gpu):
        source = line.step.path.relative_to(paths.ROOT).as_posix()
        cells = _cells(line) | {"step": f"[{line.step.name}]({source})"}
        notebook = notebook_of(line.step)
        table.append(cells | {"notebook": f"[{notebook.stem}]({_notebook_link(notebook, gpu)})" if notebook else ""})
    workload = main_workload(op)
    what = f"{workload.note} ({workload.shape})" if workload.note else workload.shape
    beside = peers_error(op, gpu)
    return f"`{op}`: {what}\n\n{results.export(pd.DataFrame(table), 'md')}" + (f"\n{beside}" if beside else "")


def _notebook_link(notebook: Path, gpu: str) -> str:
    executed = paths.RESULTS / gpu / "notebooks" / notebook.name
    return (executed if executed.exists() else notebook).relative_to(paths.ROOT).as_posix()


@functools.cache
def _notebook_texts() -> dict[Path, str]:
    found = {}
    for file in sorted(paths.NOTEBOOKS.glob("*.ipynb")):
        cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
        found[file] = "\n".join("".join(cell["source"]) for cell in cells)
    return found


_LADDER = re.compile(r"""ladder_of\("(\w+)"(?:, first=(\d+))?\)""")


def notebook_of(step: Step) -> Path | None:
    """The first notebook that names a step, or whose ladder holds it; None where none does."""
    for file, text in _notebook_texts().items():
        ladders = (match for match in _LADDER.finditer(text) if match[1] == step.op)
        if step.id in text or any(step.order >= int(match[2] or 1) for match in ladders):
            return file
    return None


def _part_machine(gpu: str) -> str:
    run = _ceilings(gpu)
    if run is None:
        return f"No run on `{gpu}` is recorded yet.\n"
    fp8 = f", FP8 matmul {number(run.fp8_tflops)} TFLOP/s" if run.fp8_tflops else ""
    return (
        f"Measured on one {run.gpu} on {run.utc[:10]} (driver {run.driver}, CUDA {run.cuda}, torch {run.torch}). "
        f"Ceilings of the same run: read {number(run.read_gbps or 0)} GB/s, BF16 matmul {number(run.bf16_tflops or 0)} "
        f"TFLOP/s{fp8}.\n"
    )


def _part_targets(gpu: str) -> str:
    text = MAKEFILE.read_text(encoding="utf-8")
    rows = re.findall(r"^([a-z]+):.*?## (.+)$", text, re.MULTILINE)
    return "```\n" + "".join(f"make {name:10} {what}\n" for name, what in rows) + "```\n"


PARTS: dict[str, Callable[[str], str]] = {
    "ladder": _part_ladder,
    "machine": _part_machine,
    "steps": _part_steps,
    "others": _part_others,
    "targets": _part_targets,
}


def readme(text: str, gpu: str) -> str:
    """The README's text with every generated part made anew. ValueError for a part that is unknown, missing or open."""
    opened = re.findall(r"<!-- generated: (\w+) -->", text)
    closed = re.findall(r"<!-- end: (\w+) -->", text)
    if opened != closed or sorted(opened) != sorted(PARTS):
        raise ValueError(
            f"README: each of {', '.join(PARTS)} must be opened and ended once; opened: {opened}, {closed}"
        )
    return _PART.sub(lambda part: f"{part[1]}\n{PARTS[part[2]](gpu).strip()}\n\n{part[3]}", text)


# --- executed notebooks ---


def stale_cards(gpu: str) -> list[str]:
    """Which executed notebooks show a step's words as they no longer stand in its source: notebook, step and part each.

    Words change without a run, so this is told and fails nothing; the next recording brings them up to date.
    """
    known = {step.id: step for step in steps.steps()}
    found = []
    for file in sorted((paths.RESULTS / gpu / "notebooks").glob("*.ipynb")):
        for cell in json.loads(file.read_text(encoding="utf-8"))["cells"]:
            for output in cell.get("outputs", []) if "cards(" in "".join(cell["source"]) else []:
                step = None
                for line in "".join(output.get("data", {}).get("text/markdown", "")).split("\n\n"):
                    part, _, text = line[1:].partition(":* ")
                    if line.startswith("**"):
                        step = known.get(line.strip("*"))
                    elif step and text and getattr(step, part.lower()) != text:
                        found.append(f"{file.stem}: {step.id}, {part.lower()}")
    return found


# --- the command ---


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``python -m mila_kernels report``."""
    tables = ", ".join(("steps", *results.TABLES))
    parser.add_argument("table", nargs="?", default="steps", help=f"which table to print: {tables} (default: steps)")
    parser.add_argument("--op", default=None, help="only rows of one operation, such as prefill")
    parser.add_argument("--gpu", default="h200", help="whose results: a folder of results/ (default: h200)")
    parser.add_argument("--format", choices=("md", "csv", "latex"), default="md", help="default: md")
    parser.add_argument("--figures", action="store_true", help="draw the charts into results/<gpu>/figures/")
    parser.add_argument("--readme", action="store_true", help="make the generated parts of README.md anew")
    parser.add_argument("--check", action="store_true", help="with --readme: only say whether they are current")


def main(args: argparse.Namespace) -> int:
    """Prints a table, or draws, or writes the README's parts. 0: done; 1: README.md is not current; 2: wrong use."""
    if args.check and not args.readme:
        print("report: --check goes with --readme", file=sys.stderr)
        return 2
    if args.figures:
        files = draw(args.gpu)
        print(f"{len(files)} files in results/{args.gpu}/figures" if files else f"no rows of {args.gpu} to draw")
    if args.readme:
        return _readme(args.gpu, args.check)
    if not args.figures:
        print(render(args.table, args.gpu, args.op, args.format), end="")
    return 0


def render(table: str, gpu: str, op: str | None = None, format: str = "md") -> str:
    """A recorded table, or ``steps``, as Markdown, CSV or LaTeX. ValueError for an unknown table, op or format."""
    if table == "steps":
        wanted = [op] if op else _ops()
        frame = pd.concat([steps_table(name, gpu).assign(op=name) for name in wanted])
        return results.export(frame[["op", *(name for name in frame.columns if name != "op")]], format)
    frame = results.table(table, None if table == "static" else gpu)
    return results.export(frame[frame["op"] == op] if op and "op" in frame.columns else frame, format)


def _readme(gpu: str, check: bool) -> int:
    old = README.read_text(encoding="utf-8")
    new = readme(old, gpu)
    if check and new != old:
        print("README.md: generated parts are not current; `make figures` writes them", file=sys.stderr)
        return 1
    if not check and new != old:
        README.write_text(new, encoding="utf-8")
    print("README.md is current")
    old_words = stale_cards(gpu)
    if old_words:
        print(f"older words of steps in executed notebooks: {'; '.join(old_words)}")
    return 0


def _command() -> int:
    parser = argparse.ArgumentParser(prog="python -m mila_kernels.report", description=__doc__)
    add_arguments(parser)
    return main(parser.parse_args())


if __name__ == "__main__":
    sys.exit(_command())
