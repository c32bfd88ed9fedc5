"""What the notebooks share: where they run, whose figures they show, and where their rows go.

A notebook opens a :class:`Session`. On a GPU it measures, and what it shows is what it has just written. Anywhere else
kernels run in emulation, for their results only, and times are the recorded ones of the GPU that the notebook names.
"""

from __future__ import annotations

import base64
import contextlib
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from . import ablate, occupancy, paths, peaks, results, shapes, steps
from .counters import SECTIONS, ProfileError, label, profile, rows_of
from .files import write_atomically
from .results import RunRow, RunWriter, TimingRow
from .shapes import Workload

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure

    from .bench import Cache
    from .parity import Parity
    from .peers import Peer

PRESETS = ("quick", "full")
GROUP = 128  # columns of a weight matrix that share one scale
_OPEN_CASE = ".open_case.json"


# ---------------------------------------------------------------------------------------------- a case and its end


@contextlib.contextmanager
def open_case(run: RunWriter, failed: TimingRow) -> Iterator[None]:
    """While a case runs, keep the row that it leaves should its process be killed: close_open_case writes it."""
    note = run.folder / _OPEN_CASE
    write_atomically(note, json.dumps({"table": failed.TABLE, **asdict(failed)}).encode())
    try:
        yield
    finally:
        note.unlink(missing_ok=True)


def close_open_case(folder: Path, run_id: str, error: str) -> None:
    """Write the failed row of a case whose process died before it could, if there is one."""
    note = folder / _OPEN_CASE
    if not note.exists():
        return
    case = json.loads(note.read_text(encoding="utf-8"))
    kind = results.TABLES[case.pop("table")]
    RunWriter(folder, run_id).add(kind(**{**case, "status": "failed", "error": error}))
    note.unlink()


# ---------------------------------------------------------------------------------------------- work and limits


@dataclass(frozen=True)
class Work:
    """What one figure of a workload needs at least: operations, and bytes through device memory."""

    flops: float
    bytes: float

    @property
    def intensity(self) -> float:
        """Operations a byte."""
        return self.flops / self.bytes


@dataclass(frozen=True)
class Ceilings:
    """What bounds every kernel of a GPU: GB/s and TFLOP/s, measured or (``measured`` False) from its data sheet."""

    gpu: str
    read_gbps: float
    bf16_tflops: float
    fp8_tflops: float | None
    measured: bool
    source: str

    def limit_us(self, op: str, work: Work) -> float:
        """The least time for some work, in microseconds: the larger of its arithmetic's and its memory's."""
        return max(work.flops / self.tflops(op) / 1e6, work.bytes / self.read_gbps / 1e3)

    def bound(self, op: str, work: Work) -> str:
        """Which of the two it is: memory or arithmetic."""
        return "arithmetic" if work.flops / self.tflops(op) > work.bytes * 1e3 / self.read_gbps else "memory"

    def tflops(self, op: str) -> float:
        """The arithmetic ceiling that an operation runs under: FP8 where its products are FP8, else BF16."""
        return self.fp8_tflops if self.fp8_tflops and op in results.FP8_OPS else self.bf16_tflops


def work(workload: Workload) -> Work:
    """Operations and fewest bytes of a workload; of one with several parts, their mean.

    The operation's own count where there is one. Else attention is 4 operations a column for each pair of a query and
    a key inside the mask, Q, K and V read once and O written once; a matrix product is 2 operations a weight and row,
    with packed weights, a BF16 scale a group of 128 columns, x and y moved once.
    """
    from . import ops

    op = ops.OPS.get(workload.op)
    count = (op.flops, op.bytes) if op else _ATTENTION if workload.is_attention else _LINEAR
    parts = workload.parts()
    flops, moved = (sum(of(part) for part in parts) / len(parts) for of in count)
    return Work(flops, moved)


_BYTES = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "fp4": 0.5, "fp32": 4.0}


def _attention_flops(w: Workload) -> float:
    return 4.0 * w.batch * w.q_heads * w.head_dim * w.pairs


def _attention_bytes(w: Workload) -> float:
    seen = min(w.kv_len, w.window + w.q_len - 1) if w.window and w.causal else w.kv_len
    queries = 2 * w.q_len * w.q_heads * _BYTES[w.dtype]
    return w.batch * w.head_dim * (queries + 2 * seen * w.kv_heads * _BYTES[w.kv_dtype or w.dtype])


def _linear_flops(w: Workload) -> float:
    return 2.0 * w.n * w.k * w.m


def _linear_bytes(w: Workload) -> float:
    return w.n * w.k * (_BYTES["fp4"] + 2.0 / GROUP) + (w.m * w.k + w.m * w.n) * _BYTES[w.dtype]


_ATTENTION, _LINEAR = (_attention_flops, _attention_bytes), (_linear_flops, _linear_bytes)


# ---------------------------------------------------------------------------------------------- the session


def start(device: str = "auto", gpu: str = "h200", preset: str = "quick", seed: int = 0) -> Session:
    """Open a notebook's session; show it, and it says what the notebook can and cannot know here.

    Args:
        device: auto, cuda or emulation.
        gpu: whose recorded figures to show where nothing is measured, a folder of results/.
        preset: quick or full: how many and how large the cases are.
        seed: of all random inputs.

    Raises:
        ValueError: an unknown device or preset, a seed that is no natural number.
    """
    import torch

    from . import build

    if preset not in PRESETS:
        raise ValueError(f"preset: {preset!r} must be one of {', '.join(PRESETS)}")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed: {seed!r} must be an integer of at least 0")
    if device == "auto" and not torch.cuda.is_available():
        device = "emulation"  # the session itself says so
    pd.set_option("display.max_colwidth", None)  # a table's sentence is shown whole
    warnings.formatwarning = _warning  # what a reader needs is the sentence, not the line of ours that says it
    return Session(build.resolve_device(device), gpu, preset, seed, RunWriter())


def _warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    return f"{message}\n"


@dataclass(frozen=True)
class Session:
    """One notebook at work. See :func:`start`."""

    device: torch.device
    gpu: str
    preset: str
    seed: int
    run: RunWriter

    @property
    def live(self) -> bool:
        """Whether times are measured here."""
        return self.device.type == "cuda"

    @property
    def full(self) -> bool:
        """Whether the preset is full."""
        return self.preset == "full"

    @property
    def source(self) -> Path:
        """The folder whose tables are shown: this run's where it measures, else that of the recorded GPU."""
        return self.run.folder if self.live else paths.RESULTS / self.gpu

    def _repr_markdown_(self) -> str:
        if self.live:
            return f"**Measured here**, in run `{self.run.run_id}`: every time below is of this machine."
        here = "No GPU is used here. Kernels run **in emulation**: their results are proved, their speed is not known."
        if not self.runs():
            return f"{here} There are **no recorded rows for {self.gpu} yet**, so measured times are missing below."
        latest = max(self.runs(), key=lambda row: row.utc)
        return f"{here} Times are those **recorded on {latest.gpu}** (`results/{self.gpu}`), last on {latest.utc[:10]}."

    def ladder_of(self, op: str, first: int = 1, last: int | None = None) -> list[str]:
        """The ids of an operation's steps from order ``first`` to ``last`` that run on the GPU whose figures are shown.

        Where nothing is recorded of that GPU, those of every architecture.
        """
        capability = self._capability()
        return [
            step.id
            for step in steps.steps(op)
            if first <= step.order <= (last or step.order) and (capability is None or step.runs_on(capability))
        ]

    def _capability(self) -> tuple[int, int] | None:
        if self.live:
            import torch

            return torch.cuda.get_device_capability(self.device)
        known = [row.sm for row in self.runs() if row.sm]
        return steps.parse_architecture(known[-1])[:2] if known else None

    def runs(self) -> list[RunRow]:
        """The runs that the shown figures are of."""
        return results.read(self.source, "runs")

    def missing(self, what: str = "rows", command: str = "make reproduce") -> str:
        """The sentence for a table or chart without data."""
        if self.live:
            return f"This run has no {what} to show."
        return f"There are no recorded {what} for {self.gpu} yet. On such a GPU `{command}` writes them."

    # -- results are proved everywhere

    def check(self, names: Sequence[str], texts: Sequence[str]) -> pd.DataFrame:
        """Compare steps with float64 on the shapes that they take, here and now; a row each, written to the run.

        Raises AssertionError naming the cases that failed, after all of them have run.
        """
        from . import parity

        chosen = [steps.step(name) for name in names]
        with self.run as run:
            rows = [
                row
                for step in chosen
                for workload in (shapes.parse_shape(step.op, text) for text in texts)
                if workload.fits(step)
                for row in parity.check(step, workload, self.seed, self.device, run)
            ]
        failed = [f"{row.step} on {row.shape}: {row.rel_l2:.2e}" for row in rows if not row.passed]
        if failed:
            raise AssertionError(f"above the bound, or a guard zone written: {'; '.join(failed)}")
        return pd.DataFrame([asdict(row) for row in rows])

    def check_last(self, names: Sequence[str], workload: Workload, queries: int = 256) -> pd.DataFrame:
        """Errors of steps and peers on a workload too long for a float64 of all of it: those of its last ``queries``.

        On a GPU each row is written to the run; elsewhere the recorded ones. Raises AssertionError naming the steps
        that failed, after all have run.
        """
        shape = f"{workload.shape} last {queries}"
        chosen = [step for step in map(steps.step, names) if workload.fits(step)]
        others = peers_of([workload])
        if self.live:
            with self.run as run:
                rows = [run.add(row) for row in self._last_rows(chosen, others, workload, queries, shape)]
            failed = [f"{row.step}: {row.rel_l2:.2e}" for row in rows if row.source_sha and not row.passed]
            if failed:
                raise AssertionError(f"above the bound on {shape}: {'; '.join(failed)}")
        rows_of_all = results.table("parity", self.source)
        known = [*(step.name for step in chosen), *(peer.name for peer in others)]
        mine = rows_of_all[(rows_of_all["op"] == workload.op) & (rows_of_all["shape"] == shape)]
        return mine[mine["step"].isin(known)].drop_duplicates(["step"], keep="last")

    def _last_rows(
        self, chosen: Sequence[steps.Step], others: Sequence[Peer], workload: Workload, queries: int, shape: str
    ) -> Iterator[results.ParityRow]:
        from . import ops, parity

        entry = ops.op(workload.op)
        inputs = entry.make_inputs(workload, self.seed, self.device)
        truth = entry.reference(**{**inputs, "q": inputs["q"][:, -queries:]})[0]
        bound = entry.bound(workload)
        for step in chosen:
            found = parity.compare(entry.run(step=step, **inputs)[0][:, -queries:], truth, bound)
            yield self._parity_row(workload.op, step.name, shape, found, step.source_sha)
        for peer in others:
            if peer.runs_on(self.device):
                found = parity.compare(peer.prepare(**inputs)()[:, -queries:], truth, 2 * bound)
                yield self._parity_row(workload.op, peer.name, shape, found)

    def _parity_row(self, op: str, step: str, shape: str, found: Parity, source_sha: str = "") -> results.ParityRow:
        return results.ParityRow(
            run_id="", op=op, step=step, source_sha=source_sha, backend="cuda", shape=shape, seed=self.seed,
            **asdict(found),
        )  # fmt: skip

    def check_peers(self, op: str, texts: Sequence[str]) -> pd.DataFrame:
        """The same comparison for an operation's peers, on the same inputs; on a GPU each row is written to the run.

        Their bound is twice that of steps: they round scores to 16 bits. One that rounds weights to a format of its own
        is held against the product of those. A peer above its bound, or one that refuses a shape, is reported and not
        raised. On a machine without a GPU torch's own CPU code is compared.
        """
        table = []
        for text in texts:
            workload = shapes.parse_shape(op, text)
            for peer in peers_of([workload]):
                if not peer.runs_on(self.device):
                    continue
                row: dict[str, Any] = {"op": op, "step": peer.name, "shape": workload.shape, "seed": self.seed}
                try:
                    row |= self._check_peer(peer, workload)
                except Exception as error:  # torch, or a package, has no implementation for this shape
                    if not peer.package and not isinstance(error, RuntimeError):
                        raise
                    table.append({**row, **_refused(error), "backend": "cuda" if self.live else "torch, CPU"})
                    continue
                if self.live:
                    with self.run as run:
                        run.add(results.ParityRow(run_id="", backend="cuda", **row))
                table.append({**row, "backend": "cuda" if self.live else "torch, CPU"})
        return pd.DataFrame(table)

    def _check_peer(self, peer: Peer, workload: Workload) -> dict[str, Any]:
        from . import ops, parity

        entry = ops.op(workload.op)
        inputs = entry.make_inputs(workload, self.seed, self.device)
        return asdict(parity.compare(peer.prepare(**inputs)(), peer.truth(**inputs), 2 * entry.bound(workload)))

    # -- times are measured on a GPU, and read elsewhere

    def time(
        self, names: Sequence[str], workloads: Sequence[Workload], cache: Cache = "cold", peers: bool = False
    ) -> pd.DataFrame:
        """Timings of steps on workloads with rates, limit and share beside them; those of failed cases have none.

        Measured here on a GPU, each row written as its case ends; elsewhere the latest recorded ones, perhaps none.
        With ``peers`` those of the workloads follow, with an empty ``source_sha``; one that this run has timed before,
        perhaps in another notebook, is not timed again.
        """
        chosen = [steps.step(name) for name in names]
        others = peers_of(workloads) if peers else []
        if self.live:
            from . import bench

            with self.run as run:
                for step in chosen:
                    for workload in workloads:
                        bench.bench(step, workload, cache=cache, seed=self.seed, run=run)
                self._time_peers(others, workloads, cache)
        found = self._timings("timings", cache)
        kept = [
            row
            for op, name in [*((step.op, step.name) for step in chosen), *((peer.op, peer.name) for peer in others)]
            for workload in workloads
            for row in _records(found)
            if (row["op"], row["step"]) == (op, name) and _is_of(row, workload)
        ]
        return pd.DataFrame(kept, columns=found.columns).drop_duplicates(
            ["step", "shape", "workload"], keep="last", ignore_index=True
        )

    def clocks(self, name: str, workloads: Sequence[Workload]) -> pd.DataFrame:
        """A step's cold times by this project's clock and by ``triton.testing.do_bench``, a row a workload, in us.

        Measured here on a GPU that has triton; elsewhere recorded, perhaps none.
        """
        from . import bench

        step = steps.step(name)
        if self.live:
            with self.run as run, contextlib.suppress(bench.NoDevice):  # without triton there is one clock
                for workload in workloads:
                    bench.second_clock(step, workload, seed=self.seed, run=run, device=self.device)
        counted = results.table("counters", self.source)
        counted = counted[counted["metric"] == bench.SECOND_CLOCK]
        counted = counted[(counted["op"] == step.op) & (counted["step"] == step.name)]
        theirs = dict(zip(counted["workload"], counted["value"], strict=True))
        table = []
        for row in _records(self.time([name], workloads)):
            us = theirs.get(row["workload"] or row["shape"])
            if us and row["status"] == "ok":
                table.append({
                    "step": row["step"], "workload": row["workload"] or row["shape"], "ours (us)": row["median_us"],
                    "do_bench (us)": us, "do_bench / ours": us / row["median_us"],
                })  # fmt: skip
        return pd.DataFrame(table).round(2)

    def _timings(self, table: str, cache: str) -> pd.DataFrame:
        found = results.with_rates(results.table(table, self.source), self.source)
        return found[found["cache"] == cache]

    def _time_peers(self, others: Sequence[Peer], workloads: Sequence[Workload], cache: Cache) -> None:
        from . import bench

        there = [row for row in results.read(self.run.folder, "timings") if row.status == "ok" and row.cache == cache]
        for peer in others:
            for workload in workloads:
                known = any(
                    (row.op, row.step) == (peer.op, peer.name) and _is_of(asdict(row), workload) for row in there
                )
                if not known and workload.op == peer.op and peer.fits(workload) and peer.runs_on(self.device):
                    bench.bench_peer(peer, workload, cache=cache, seed=self.seed, run=self.run)

    def without(self, names: Sequence[str], workload: Workload, cache: Cache = "cold") -> pd.DataFrame:
        """What steps take with a stage left out: a row a step and stage, microseconds in ``median_us``.

        ``whole_us`` is the step's own time; the difference is what it waited for that stage. Measured here on a GPU
        (the steps too, unless this run has), elsewhere recorded; without rows of both there is none of that step.
        """
        chosen = [steps.step(name) for name in names]
        variants = {name: step for step in chosen for name in ablate.names(step)}
        if self.live:
            from . import bench

            with self.run as run:
                for name in [*(step.id for step in chosen if not self._whole(step, workload, cache)), *variants]:
                    bench.bench(name, workload, cache=cache, seed=self.seed, run=run)
        found = _records(self._timings("ablations", cache))
        table = []
        for step in chosen:
            whole = self._whole(step, workload, cache)
            for row in found if whole else ():
                base, _, stage = str(row["step"]).partition(ablate.WITHOUT)
                if (row["op"], base) == (step.op, step.name) and _is_of(row, workload) and row["status"] == "ok":
                    table.append({
                        "step": step.name, "stage": stage, "whole_us": whole, "median_us": row["median_us"],
                        "stale": row["stale"],
                    })  # fmt: skip
        rows = pd.DataFrame(table, columns=["step", "stage", "whole_us", "median_us", "stale"])
        return rows.drop_duplicates(["step", "stage"], keep="last", ignore_index=True)

    def _whole(self, step: steps.Step, workload: Workload, cache: str) -> float | None:
        rows = [
            row
            for row in _records(self._timings("timings", cache))
            if (row["op"], row["step"], row["status"]) == (step.op, step.name, "ok") and _is_of(row, workload)
        ]
        return float(rows[-1]["median_us"]) if rows else None

    def ceilings(self) -> Ceilings:
        """Measured here once a run, else recorded, else from the data sheet of the GPU named (``measured`` False).

        Raises ValueError where nothing is known of that GPU.
        """
        if self.live:
            from . import bench

            with self.run as run:
                bench.run_ceilings(run)
        known = [row for row in self.runs() if row.read_gbps and row.bf16_tflops]
        if known:
            row = max(known, key=lambda one: one.utc)
            source = f"measured in run {row.run_id} on {row.utc[:10]}"
            return Ceilings(row.gpu, row.read_gbps or 0, row.bf16_tflops or 0, row.fp8_tflops, True, source)
        sheet = data_sheet(self.gpu)
        if not sheet.dram_gbps or not sheet.bf16_tflops:
            raise ValueError(f"gpu: data/peaks.csv lacks the memory or BF16 peak of {sheet.gpu}")
        return Ceilings(sheet.gpu, sheet.dram_gbps, sheet.bf16_tflops, sheet.fp8_tflops, False, sheet.source)

    def counters(self, names: Sequence[str], workload: Workload) -> pd.DataFrame:
        """Hardware counters of steps on a workload, a column a step; without any, one row that says why.

        Taken here by ncu on a GPU that has it; elsewhere the recorded ones.
        """
        rows, why = self.counted([(name, workload) for name in names])
        if rows.empty:
            return pd.DataFrame({"counters": [why]})
        pairs = zip(rows["metric"], rows["unit"], strict=True)
        named = _stale_marked(rows).assign(
            counter=[f"{label(metric)} ({unit})" if unit else label(metric) for metric, unit in pairs]
        )
        wide = named.pivot_table(index="counter", columns="step", values="value", sort=False)
        return wide[sorted(wide.columns)].map(lambda value: f"{value:,.4g}")

    def counted(
        self, calls: Sequence[tuple[str, Workload]], sections: Sequence[str] = SECTIONS
    ) -> tuple[pd.DataFrame, str]:
        """The rows of the hardware counters of steps on workloads, and what to say where there are none.

        Taken here by ncu on a GPU that has it, all in one run of it; elsewhere the recorded ones.
        """
        chosen = [(steps.step(name), workload) for name, workload in calls]
        folder, why = self.source, self.missing("counters", "python -m mila_kernels profile STEP")
        if self.live:
            try:
                with self.run as run:
                    there = results.read(run.folder, "counters")  # some are of the timings: power, clocks
                    known = {(row.step, row.workload) for row in there if label(row.metric) != row.metric}
                    unknown = [(step, w) for step, w in chosen if (step.name, w.name or w.shape) not in known]
                    found = profile(unknown, self.seed, sections) if unknown else []
                    for (step, workload), counters in zip(unknown, found, strict=True):
                        for row in rows_of(step, workload, counters):
                            run.add(row)
            except ProfileError as error:
                folder, why = paths.RESULTS / self.gpu, str(error)
        table = results.table("counters", folder)
        wanted = {(step.name, workload.name or workload.shape) for step, workload in chosen}
        pairs = zip(table["step"], table["workload"], table["metric"], strict=True)
        mine = [(step, workload) in wanted and label(metric) != metric for step, workload, metric in pairs]
        return table[pd.Series(mine, index=table.index, dtype=bool)], why

    def compiled(self, names: Sequence[str], arch: str = "sm_90a", kernel: str = "") -> pd.DataFrame:
        """What the compiler says of steps' kernels whose name contains ``kernel``, and the warps that then fit an SM.

        Instructions are counted in the code, not in its execution; those that none of the kernels has are left out.
        """
        rows = self._static(names, [arch], kernel)
        if rows.empty:
            return _no_static(arch)
        shown = rows.assign(warps=[_occupancy(row).warps for row in _records(rows)])
        used = [name for name in ("HMMA", "HGMMA", "QGMMA", "LDSM", "LDGSTS", "UTMALDG", "FFMA") if shown[name].any()]
        return shown.set_index("step")[["kernel", "registers", "threads", "smem_bytes", "spill_bytes", "warps", *used]]

    def fits(self, names: Sequence[str], archs: Sequence[str], kernel: str) -> pd.DataFrame:
        """How many blocks of steps' kernels fit on a multiprocessor, and what stops the next: a row a step and arch.

        From the static table's registers, shared memory and threads; ``kernel`` picks by what the kernel's name holds.
        """
        rows = self._static(names, archs, kernel)
        if rows.empty:
            return _no_static(", ".join(archs))
        table = []
        for row in _records(rows):
            found = _occupancy(row)
            table.append({
                "step": row["step"], "arch": row["arch"], "registers a thread": row["registers"],
                "threads a block": row["threads"], "shared memory a block": f"{row['smem_bytes'] / 1024:.1f} KB",
                "bytes spilled": row["spill_bytes"], "blocks an SM": found.blocks,
                "warps an SM": f"{found.warps} of {occupancy.limits(row['arch']).warps}",
                "occupancy": f"{100 * found.share:.3g} %", "no room for more": ", ".join(found.limited_by),
            })  # fmt: skip
        return pd.DataFrame(table).set_index(["step", "arch"])

    def _static(self, names: Sequence[str], archs: Sequence[str], kernel: str) -> pd.DataFrame:
        """Static rows of the chosen steps on the architectures, step by step, stale ones marked."""
        table = results.table("static")
        chosen = {steps.step(name).name: place for place, name in enumerate(names)}
        rows = table[table["step"].isin(chosen) & table["arch"].isin(archs) & table["op"].isin(_ops_of(names))]
        rows = rows[rows["kernel"].str.contains(kernel, regex=False)]
        places = [(chosen[row["step"]], archs.index(row["arch"])) for row in _records(rows)]
        return _stale_marked(rows.iloc[[i for _, i in sorted((place, i) for i, place in enumerate(places))]])

    # -- charts and tables

    def ladder(self, names: Sequence[str], workload: Workload, rows: pd.DataFrame) -> pd.DataFrame:
        """Steps on one workload as text: time, rate, share of the limit, gain on the step before; published beside.

        The peers of the workload, as far as there are rows of them, stand at the end.
        """
        from . import report

        published = report.published(workload.op, workload.name) if workload.name else pd.DataFrame()
        theirs = {str(row["step"]): row for row in _records(published)}
        ours = {str(row["step"]): row for row in _records(rows) if _is_of(row, workload)}
        table = []
        our_last = their_last = None
        for name in (steps.step(name).name for name in names):
            line = {"step": name, **self._time_cells(ours.get(name))}
            our_ms, their_ms = _ms(ours.get(name)), theirs.get(name, {}).get("ms")
            line["gain"] = _gain(our_last, our_ms)
            if theirs:
                gpu = next(iter(theirs.values()))["gpu"]
                line |= {f"published, {gpu}": _published_cell(theirs.get(name)),
                         "published gain": _gain(their_last, their_ms)}  # fmt: skip
            table.append(line)
            our_last, their_last = our_ms, their_ms
        for peer in peers_of([workload]):
            if peer.name in ours:
                table.append({"step": peer.name, **self._time_cells(ours[peer.name])})
        return pd.DataFrame(table).fillna("").set_index("step")

    def _time_cells(self, timed: dict[str, Any] | None) -> dict[str, str]:
        """Time, spread, rate and share of the limit of one timing, in words where it has none."""
        what = f"measured here ({self.device})" if self.live else f"recorded, {self.gpu}"
        cells = dict.fromkeys((what, "p10 to p90", "rate", "share of the limit"), "")
        if timed is None or timed["status"] != "ok":
            return cells | {what: "not recorded" if timed is None else f"failed: {timed['error']}"}
        share = "" if pd.isna(timed["share"]) else f"{100 * timed['share']:.2g} %"
        values = (
            _cell(_ms(timed)) + (" (stale)" if timed["stale"] else ""),
            f"{timed['p10_us'] / 1e3:.4g} to {timed['p90_us'] / 1e3:.4g} ms",
            f"{timed['tflops']:.3g} TFLOP/s",
            share,
        )
        return dict(zip(cells, values, strict=True))

    def points(self) -> pd.DataFrame:
        """Every named workload: its work, its limit and, where known for this GPU, the time of its fastest step."""
        ceilings = self.ceilings()
        best = self._fastest(ceilings.gpu)
        table = []
        for workload in shapes.workloads():
            needed = work(workload)
            table.append({
                "op": workload.op, "workload": workload.name, "flops": needed.flops, "bytes": needed.bytes,
                "intensity": needed.intensity, "bound": ceilings.bound(workload.op, needed),
                "limit_us": ceilings.limit_us(workload.op, needed),
                "median_us": best.get(workload.name, float("nan")), "unit": workload.unit, "peer": workload.peer,
                "peer_name": workload.peer_name,
            })  # fmt: skip
        return pd.DataFrame(table)

    def peers(self) -> pd.DataFrame:
        """The best peers of the named workloads as points of the same kind; they were measured on an H200 alone."""
        points = self.points()
        if "H200" not in self.ceilings().gpu:
            return points.iloc[:0]
        rows = points[points["peer"].notna()]
        as_rate = rows["flops"] / rows["peer"] / 1e6
        return rows.assign(op="best peer", median_us=rows["peer"].where(rows["unit"] == "us", as_rate))

    def _fastest(self, gpu: str) -> dict[str, float]:
        """Workload to the least cold median, of this run or of the recorded ones of the same GPU."""
        found: dict[str, float] = {}
        ours = {step.name for step in steps.steps()}
        for folder in dict.fromkeys((self.source, paths.RESULTS / self.gpu)):
            same = {row.run_id for row in results.read(folder, "runs") if row.gpu == gpu}
            rows = results.table("timings", folder)
            rows = rows[rows["run_id"].isin(same) & (rows["status"] == "ok") & (rows["cache"] == "cold")]
            rows = rows[(rows["workload"] != "") & ~rows["stale"] & rows["step"].isin(ours)]
            for name, micros in rows.groupby("workload")["median_us"].min().items():
                found[str(name)] = min(float(micros), found.get(str(name), float("inf")))
        return found

    def show(self, name: str, rows: pd.DataFrame, draw: Callable[[pd.DataFrame], Figure]) -> None:
        """Draw rows, save the chart as ``figures/<name>`` of the run, and display it; without rows say that."""
        from IPython.display import Markdown, display

        from . import plots

        if rows.empty:
            display(Markdown(self.missing()))
            return
        figure = draw(rows)
        with self.run as run:
            svg, png = plots.save(figure, run.folder / "figures" / name)
        # Both forms: a notebook that is not trusted shows no SVG.
        image = base64.b64encode(png.read_bytes()).decode()
        display({"image/svg+xml": svg.read_text(encoding="utf-8"), "image/png": image}, raw=True)


def _stale_marked(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with those of changed sources marked in the step's name."""
    pairs = zip(rows["step"], rows["stale"], strict=True)
    return rows.assign(step=[f"{name} (stale)" if old else name for name, old in pairs])


def _no_static(archs: str) -> pd.DataFrame:
    return pd.DataFrame({"static": [f"results/static.csv has no rows of them for {archs} yet: `make static`."]})


def _occupancy(row: dict[str, Any]) -> occupancy.Occupancy:
    facts = {name: int(row[name]) for name in ("threads", "registers", "smem_bytes")}
    return occupancy.occupancy(row["arch"], **facts)


def _ops_of(names: Sequence[str]) -> set[str]:
    return {steps.step(name).op for name in names}


def _refused(error: Exception) -> dict[str, Any]:
    nothing = dict.fromkeys(("rel_l2", "max_abs", "bound"), float("nan"))
    return {
        **nothing,
        "nonfinite": 0,
        "passed": None,
        "refusal": (str(error).splitlines() or [type(error).__name__])[0],
    }


def peers_of(workloads: Sequence[Workload]) -> list[Peer]:
    """What a user would call instead for any of the workloads, each once."""
    from . import peers

    return list(dict.fromkeys(peer for workload in workloads for peer in peers.peers(workload.op, workload)))


def _is_of(row: dict[str, Any], workload: Workload) -> bool:
    """Whether a timing is of a workload. The published instance is a mean and not the launch whose shape it bears."""
    if row["shape"] != workload.shape:
        return False
    return row["workload"] == workload.name if workload.name else row["workload"] != shapes.PUBLISHED_INSTANCE


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(name): value for name, value in row.items()} for row in frame.to_dict("records")]


def _ms(timed: dict[str, Any] | None) -> float | None:
    return float(timed["median_us"]) / 1e3 if timed and timed["status"] == "ok" else None


def _cell(ms: float | None) -> str:
    from .plots import number

    return "not known" if ms is None else f"{number(ms)} ms"


def _published_cell(row: dict[str, Any] | None) -> str:
    if row is None or pd.isna(row["slower"]):
        return _cell(row["ms"] if row else None)
    return f"about {row['ms']:.2g} ms: {row['slower']:g} % slower than the step before"


def _gain(before: float | None, after: float | None) -> str:
    return f"{before / after:.2f} x" if before and after else ""


def best_libraries(workloads: Sequence[Workload]) -> pd.DataFrame:
    """The best library known for each workload and its figure on an H200, of ``data/published.csv``, as text."""
    units = {"tflops": "TFLOP/s", "us": "us"}
    table = [
        {"workload": w.name, "best library": w.peer_name, "its figure": f"{w.peer:g} {units[w.unit]}"}
        for w in workloads
        if w.peer is not None
    ]
    return pd.DataFrame(table).set_index("workload")


def ceilings_table(ceilings: Ceilings) -> pd.DataFrame:
    """The ceilings beside the data sheet's figures, as text."""
    sheet = peaks.peak(ceilings.gpu)
    given = {
        "read, GB/s": (ceilings.read_gbps, sheet.dram_gbps if sheet else None),
        "BF16 matmul, TFLOP/s": (ceilings.bf16_tflops, sheet.bf16_tflops if sheet else None),
        "FP8 matmul, TFLOP/s": (ceilings.fp8_tflops, sheet.fp8_tflops if sheet else None),
    }
    table = [
        {
            "ceiling": name,
            "measured": f"{reached:,.0f}" if reached and ceilings.measured else "not recorded",
            "data sheet": f"{peak:,.0f}" if peak else "",
            "share": f"{100 * reached / peak:.0f} %" if reached and peak and ceilings.measured else "",
        }
        for name, (reached, peak) in given.items()
    ]
    ridge = 1e3 * ceilings.bf16_tflops / ceilings.read_gbps
    table.append(
        {"ceiling": "BF16 ridge, FLOP a byte", "measured" if ceilings.measured else "data sheet": f"{ridge:.0f}"}
    )
    return pd.DataFrame(table).fillna("").set_index("ceiling")


def costs_table(session: Session, workload: Workload, costs: dict[str, tuple[str, float]]) -> pd.DataFrame:
    """What resources need for some work, each as if it were the only one: amount, time, multiple of the limit.

    A cost is a resource and an amount: ``arithmetic`` (operations on tensor cores), ``fma`` (scalar multiply-adds),
    ``warp loads`` (load instructions of a warp), ``shared`` (bytes into or out of shared memory), ``memory`` (bytes of
    device memory). Clock and multiprocessors are the data sheet's: 128 FMA, one warp's load and 128 bytes of shared
    memory a clock and multiprocessor.
    """
    ceilings = session.ceilings()
    sheet = peaks.peak(ceilings.gpu) or data_sheet(session.gpu)
    clocks_us = (sheet.sms or 0) * (sheet.sm_mhz or 0)  # of all multiprocessors in a microsecond
    rates = {
        "arithmetic": (ceilings.tflops(workload.op) * 1e6, "operations"),
        "fma": (128 * clocks_us, "FMA"),
        "warp loads": (clocks_us, "warp instructions"),
        "shared": (128 * clocks_us, "bytes"),
        "memory": (ceilings.read_gbps * 1e3, "bytes"),
    }
    limit = ceilings.limit_us(workload.op, work(workload))
    table = []
    for name, (resource, amount) in costs.items():
        rate, unit = rates[resource]
        micros = amount / rate
        times = f"{micros / limit:.3g}"
        table.append(
            {"resource": name, "amount": f"{amount:.3g} {unit}", "time": _cell(micros / 1e3), "x limit": times}
        )
    return pd.DataFrame(table).set_index("resource")


def workloads_table(points: pd.DataFrame) -> pd.DataFrame:
    """Session.points() as text: intensity, which ceiling, least time, the best peer and ours in the workload's unit."""
    from .plots import number

    table = []
    for row in _records(points):
        rate = row["unit"] == "tflops"
        ours = row["flops"] / row["median_us"] / 1e6 if rate else row["median_us"]
        unit = "TFLOP/s" if rate else "us"
        table.append({
            "workload": row["workload"], "FLOP/byte": number(row["intensity"]), "limit": row["bound"],
            "least time": f"{number(row['limit_us'])} us",
            "best peer": f"{number(row['peer'])} {unit}, {row['peer_name']}" if pd.notna(row["peer"]) else "",
            "ours": f"{number(ours)} {unit}" if pd.notna(ours) else "",
        })  # fmt: skip
    return pd.DataFrame(table).set_index("workload")


def stages_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Session.without() as text: what each step waited for each stage, a column a step, and what hides behind others.

    The last row is the whole time less all of the waits: above 0 it is what no single stage is waited for (barriers,
    addresses, stages that overlap), below 0 stages were waited for together.
    """
    columns = {}
    for name, group in rows.groupby("step", sort=False):
        whole = float(group["whole_us"].iloc[0])
        waits = {str(row["stage"]): whole - row["median_us"] for row in _records(group)}
        cells = {f"waited for {stage}": _part(wait, whole) for stage, wait in waits.items()}
        label = f"{name} (stale)" if group["stale"].any() else str(name)
        columns[label] = {"whole": _cell(whole / 1e3), **cells, "neither": _part(whole - sum(waits.values()), whole)}
    return pd.DataFrame(columns)


def _part(micros: float, whole: float) -> str:
    from .plots import number

    return f"{number(micros / 1e3)} ms, {number(100 * micros / whole, 2)} %"


def parity_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Session.check() as text: one row a step and shape; recorded ones of changed sources are marked."""
    if "stale" in rows:
        rows = _stale_marked(rows)
    table = rows.assign(
        error=[f"{value:.1e}" for value in rows["rel_l2"]],
        bound=[f"{value:.1e}" for value in rows["bound"]],
        verdict=["none, it refuses" if pd.isna(x) else "ok" if x else "FAILED" for x in rows["passed"]],
    )
    return table[["step", "shape", "backend", "error", "bound", "verdict"]].set_index("step")


def together(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of one shape after each other, shapes in the order of their first rows: steps and peers side by side."""
    order = {shape: place for place, shape in enumerate(rows["shape"].unique())}
    return rows.sort_values("shape", key=lambda shapes: shapes.map(order), kind="stable", ignore_index=True)


def through_ring(
    session: Session, *, tokens: int, capacity: int, window: int, chunks: Sequence[int], step: str | None = None
) -> pd.DataFrame:
    """A prompt through a ring that is smaller than it, in chunks of several sizes: error against float64, or refusal.

    Random normal inputs, 4 query heads on 2, head dim 64; the ring is full of NaN at first. Raises AssertionError where
    a chunk that was taken is wrong.
    """
    import torch

    from . import parity, reference
    from .attention_ring import largest_chunk, prefill_through_ring
    from .cache import RingCache

    generator = torch.Generator(session.device).manual_seed(session.seed)
    q, k, v = (
        torch.randn((1, tokens, heads, 64), generator=generator, device=session.device).bfloat16()
        for heads in (4, 2, 2)
    )
    truth = reference.attention(q, k, v, causal=True, window=window)[0]
    none = torch.zeros(1, dtype=torch.int32, device=session.device)
    table = []
    for chunk in chunks:
        ring = RingCache(*(torch.full((1, capacity, 2, 64), torch.nan, device=session.device).bfloat16() for _ in "kv"))
        line = {"chunk": chunk, "largest": largest_chunk(capacity, window)}
        try:
            o = prefill_through_ring(q, k, v, ring, none, window=window, chunk=chunk, step=step)
        except ValueError as error:
            if not str(error).startswith("chunk:"):
                raise
            table.append({**line, "error": "", "verdict": f"refused: {error}"})
            continue
        assert isinstance(o, torch.Tensor)
        found = parity.compare(o, truth, 2.0**-8)
        assert found.passed, f"chunks of {chunk}: {found}"
        table.append({**line, "error": f"{found.rel_l2:.1e}", "verdict": "ok"})
    return pd.DataFrame(table).set_index("chunk")


def only(published: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """The published figures of the steps that are among the rows."""
    return published[published["step"].isin(rows["step"])]


def data_sheet(gpu: str) -> peaks.Peak:
    """The peaks of the GPU that a folder of results/ is named after (h200, h200-x2); ValueError lists those known."""
    name = gpu.partition("-x")[0].replace("-", "").lower()
    known = peaks.known()
    for peak in known:
        if name and name in peak.gpu.replace(" ", "").replace("-", "").lower():
            return peak
    raise ValueError(f"gpu: nothing is known of {gpu!r}; data/peaks.csv has {', '.join(peak.gpu for peak in known)}")


def cards(names: Sequence[str], *parts: str) -> str:
    """:func:`card` of several steps, one after the other."""
    return "\n\n".join(card(name, *parts) for name in names)


def card(name: str, *parts: str) -> str:
    """What a step's source says of itself, as Markdown; parts are of change, prediction, measured, verdict."""
    step = steps.step(name)
    lines = [f"**{step.id}**"] + [f"*{part.capitalize()}:* {getattr(step, part)}" for part in parts]
    return "\n\n".join(lines)
