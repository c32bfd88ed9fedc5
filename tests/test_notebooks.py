"""The notebooks: clean as committed, right as executed, with and without recorded figures."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import nbformat
import pandas as pd
import pytest

from mila_kernels import ablate, bench, knobs, notebook, ops, paths, peers, results, shapes, steps
from mila_kernels import reproduce as batch
from mila_kernels.paths import NOTEBOOKS
from mila_kernels.results import CounterRow, RunRow, TimingRow

FILES = batch.find((), NOTEBOOKS)
DEFAULTS = {"device": "auto", "gpu": "h200", "preset": "quick", "seed": 0}
INSTANCE = shapes.workload("prefill/published-instance")
LAST_QUERIES = (INSTANCE.name, "prefill/d512-16x1-n8192", "prefill_ring/d256-16x8-w1024-n8192")


# The first of these to run waits for all notebooks, which build every step in emulation.
RUNS_ALL = pytest.mark.timeout(600)


def cells(path: Path, kind: str) -> list[Any]:
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == kind]


# ---------------------------------------------------------------------------------------------- as committed


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_committed_without_outputs_and_traces_of_a_machine(path: Path) -> None:
    content = nbformat.read(path, as_version=4)
    nbformat.validate(content)
    assert content.metadata.kernelspec.name == "python3"
    assert set(content.metadata) <= {"kernelspec", "language_info"}
    for cell in content.cells:
        assert set(cell.metadata) <= {"tags"}
        assert re.fullmatch(r"cell-\d\d", cell.id), "fixed ids keep differences small"
    for cell in cells(path, "code"):
        assert cell.outputs == [] and cell.execution_count is None, "make strip"
    assert not re.search(r"/home/|/root/|/Users/|/tmp/|C:\\\\", path.read_text())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_opens_with_title_question_and_parameters(path: Path) -> None:
    content = nbformat.read(path, as_version=4)
    first, second = content.cells[:2]
    assert first.cell_type == "markdown" and first.source.startswith(f"# {path.stem.partition('_')[0]} ")
    title, question = batch.heading(path)
    assert title and question.endswith("?")
    assert second.metadata.tags == ["parameters"]
    assert DEFAULTS.items() <= batch.parameters(path).items()  # one may have more of its own


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_holds_no_kernel_and_little_logic(path: Path) -> None:
    for cell in cells(path, "code"):
        tree = ast.parse(cell.source)
        kinds = (ast.FunctionDef, ast.ClassDef, ast.For, ast.While, ast.Try)
        assert not any(isinstance(node, kinds) for node in ast.walk(tree)), cell.source
        assert "__global__" not in cell.source and len(cell.source.splitlines()) <= 30
    predicted = [i for i, cell in enumerate(nbformat.read(path, as_version=4).cells) if "rediction" in cell.source]
    measured = [i for i, cell in enumerate(nbformat.read(path, as_version=4).cells) if "session.time(" in cell.source]
    assert predicted and all(predicted[0] < i for i in measured), "the prediction stands before the measurement"


# ---------------------------------------------------------------------------------------------- as executed


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> batch.Report:
    """All notebooks, in emulation, from a folder that is not the repository's."""
    folder = tmp_path_factory.mktemp("all notebooks")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return batch.reproduce(given={"device": "emulation"}, out=folder / "run", say=lambda line: None)


@RUNS_ALL
def test_every_notebook_runs_in_emulation(report: batch.Report) -> None:
    assert report.ok, str(report)


@RUNS_ALL
def test_emulation_proves_and_times_nothing(report: batch.Report) -> None:
    rows = results.read(report.folder, "parity")
    assert {row.step for row in rows} >= {"01_scalar", "02_smem_tiles"}
    assert {row.backend for row in rows} == {"emulation"}
    assert results.read(report.folder, "timings") == []


@RUNS_ALL
def test_executed_notebook_says_where_its_figures_come_from(report: batch.Report) -> None:
    for path in FILES:
        executed = (report.folder / "notebooks" / path.name).read_text()
        assert "in emulation" in executed, path.name
        assert "no recorded rows for h200 yet" in executed or "recorded on NVIDIA H200" in executed, path.name


@RUNS_ALL
def test_index_has_every_notebook_and_chart(report: batch.Report) -> None:
    page = (report.folder / "index.html").read_text()
    for path in FILES:
        assert f"notebooks/{path.stem}.html" in page
    images = [image for path in FILES for image in batch.charts(report.folder / "notebooks" / path.name)]
    assert images and all(image in page for image in images)
    assert (report.folder / "figures" / "00_roofline.svg").exists()


# ---------------------------------------------------------------------------------------------- with recorded figures


def timing(run_id: str, step: str, workload: str, shape: str, us: float, sha: str | None = None) -> TimingRow:
    work = notebook.work(shapes.workload(workload) if workload else shapes.parse_shape("prefill", shape))
    return TimingRow(
        run_id=run_id, op="prefill", step=step, source_sha=sha or steps.step(f"prefill/{step}").source_sha,
        workload=workload, shape=shape, dtype="bf16", cache="cold", warmup=3, n=10, median_us=us, p10_us=us * 0.99,
        p90_us=us * 1.02, min_us=us * 0.98, flops=work.flops, bytes=work.bytes, status="ok",
    )  # fmt: skip


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A results folder with two runs of an H200."""
    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    for variable in (results.RUN_FOLDER_VARIABLE, results.RUN_ID_VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    folder = tmp_path / "h200"
    for day, us in ((1, 30_000.0), (2, 20_000.0)):
        run_id = f"run-{day}"
        results.append(
            folder,
            RunRow(run_id=run_id, utc=f"2026-12-0{day}T10:00:00Z", gpu="NVIDIA H200", read_gbps=4500.0,
                   bf16_tflops=700.0, fp8_tflops=1300.0),
        )  # fmt: skip
        results.append(folder, timing(run_id, "01_scalar", INSTANCE.name, INSTANCE.shape, us))
    results.append(folder, timing("run-2", "02_smem_tiles", INSTANCE.name, INSTANCE.shape, 16_000.0, sha="0" * 12))
    for n in (512, 1024, 2048, 4096):
        shape = f"b1 q{n}h16 kv{n}h1 d512 causal bf16"
        results.append(folder, timing("run-2", "01_scalar", "", shape, n * n / 100))
    for step, value in (("01_scalar", 99.1), ("02_smem_tiles", 42.5)):
        metric = "lts__t_sector_hit_rate.pct"
        row = CounterRow(
            run_id="run-2", op="prefill", step=step, workload=INSTANCE.name, metric=metric, value=value, unit="%"
        )
        results.append(folder, row)
    yield tmp_path


def test_recorded_rows_are_shown_latest_run_first_and_stale_ones_marked(recorded: Path) -> None:
    session = notebook.start("emulation")
    rows = session.time(["prefill/01_scalar", "prefill/02_smem_tiles"], [INSTANCE])
    assert rows["median_us"].tolist() == [20_000.0, 16_000.0]
    table = session.ladder(["prefill/01_scalar", "prefill/02_smem_tiles"], INSTANCE, rows)
    assert table.loc["01_scalar", "recorded, h200"].startswith("20.0 ms")
    assert "stale" not in table.loc["01_scalar", "recorded, h200"]
    assert table.loc["02_smem_tiles", "recorded, h200"].endswith("(stale)")
    assert table.loc["02_smem_tiles", "gain"] == "1.25 x"
    share = notebook.work(INSTANCE).flops / 700e6 / 20_000
    assert table.loc["01_scalar", "share of the limit"] == f"{100 * share:.2g} %"
    assert table.loc["02_smem_tiles", "published gain"] == "1.23 x", "127 ms to 103 ms"
    ablation = session.ladder(["prefill/05", "prefill/06"], INSTANCE, rows).iloc[1]
    assert ablation["published, RTX 4070"] == "about 36 ms: 57 % slower than the step before"
    assert ablation["published gain"] == "0.64 x"


def test_the_best_library_of_a_workload() -> None:
    table = notebook.best_libraries([INSTANCE, shapes.workload("prefill/d512-16x1-n8192")])
    assert table.to_dict("index") == {
        "prefill/d512-16x1-n8192": {"best library": "FFPA CuTe", "its figure": "547 TFLOP/s"}
    }


def test_mean_over_chunks_is_not_taken_for_the_launch_whose_shape_it_bears(recorded: Path) -> None:
    session = notebook.start("emulation")
    last_chunk = shapes.parse_shape("prefill", INSTANCE.shape)
    assert session.time(["prefill/01_scalar"], [last_chunk]).empty
    results.append(recorded / "h200", timing("run-2", "01_scalar", "", INSTANCE.shape, 35_000.0))
    assert session.time(["prefill/01_scalar"], [last_chunk])["median_us"].tolist() == [35_000.0]
    assert session.time(["prefill/01_scalar"], [INSTANCE])["median_us"].tolist() == [20_000.0]


def test_peers_stand_below_the_steps_and_are_never_the_fastest_step(all_recorded: Path) -> None:
    session = notebook.start("emulation")
    names = ["prefill/01_scalar", "prefill/02_smem_tiles"]
    alone, rows = session.time(names, [INSTANCE]), session.time(names, [INSTANCE], peers=True)
    assert alone["step"].tolist() == ["01_scalar", "02_smem_tiles"]
    assert rows["step"].tolist() == ["01_scalar", "02_smem_tiles", "torch three calls", "torch SDPA"]
    assert not rows["stale"].any()
    table = session.ladder(names, INSTANCE, rows)
    assert table.loc["torch SDPA", "recorded, h200"] == "5.00 ms" and table.loc["torch SDPA", "gain"] == ""
    slow = shapes.workload("prefill/d512-16x1-n8192")
    results.append(all_recorded / "h200", timed("torch SDPA", slow, 0.0))
    fastest = session.points().set_index("workload")["median_us"]
    mine = results.table("timings", "h200", results=all_recorded)
    mine = mine[(mine["workload"] == slow.name) & mine["step"].str.match(r"\d\d_")]
    assert fastest[slow.name] == mine["median_us"].min()


def test_stages_left_out_are_set_against_the_whole(all_recorded: Path) -> None:
    session = notebook.start("emulation")
    rows = session.without(["prefill/06", "prefill/07"], INSTANCE)
    assert rows["stage"].tolist() == ["copies", "scores", "softmax", "values"] * 2
    assert rows["whole_us"].tolist() == [5000.0] * 4 + [pytest.approx(30_000 / 7)] * 4
    table = notebook.stages_table(rows)
    assert table.loc["waited for softmax", "06_qk_mma"] == "4.10 ms, 82 %"
    assert table.loc["neither", "06_qk_mma"] == "-11.4 ms, -228 %"
    assert notebook.start("emulation", gpu="a100").without(["prefill/06"], INSTANCE).empty


def test_what_fits_is_said_for_each_architecture(all_recorded: Path) -> None:
    session = notebook.start("emulation")
    table = session.fits(["prefill/05_cp_async", "prefill/03"], ("sm_90a", "sm_89"), "bf16, 512")
    assert table.index.tolist() == [("05_cp_async", "sm_90a"), ("03_wmma_hs_split", "sm_90a")]
    assert table["blocks an SM"].tolist() == [2, 2]
    assert table["no room for more"].tolist() == ["registers, shared memory"] * 2
    assert "make static" in session.fits(["prefill/03"], ("sm_120",), "bf16, 512").iloc[0, 0]


def test_a_ladder_leaves_out_what_the_recorded_gpu_cannot_run(recorded: Path) -> None:
    everything = [step.id for step in steps.steps("prefill")]
    assert notebook.start("emulation").ladder_of("prefill") == everything
    results.append(
        recorded / "h200", RunRow(run_id="run-3", utc="2026-12-03T10:00:00Z", gpu="NVIDIA H200", sm="sm_120")
    )
    shown = notebook.start("emulation").ladder_of("prefill", first=9)
    assert shown == [step.id for step in steps.steps("prefill") if step.order >= 9 and step.runs_on((12, 0))]
    assert notebook.start("emulation").ladder_of("prefill", 2, 3) == [
        "prefill/02_smem_tiles",
        "prefill/03_wmma_hs_split",
    ]


def test_a_prompt_through_a_ring_and_the_chunk_that_is_refused() -> None:
    table = notebook.through_ring(notebook.start("emulation"), tokens=20, capacity=9, window=6, chunks=(3, 4, 5))
    assert table["verdict"].tolist()[:2] == ["ok", "ok"] and "between 1 and 4" in table.loc[5, "verdict"]


def test_rows_of_one_shape_stand_together_in_the_order_in_which_shapes_came() -> None:
    rows = pd.DataFrame({"shape": ["b64", "b1", "b64", "b1"], "step": ["ours", "ours", "theirs", "theirs"]})
    table = notebook.together(rows)
    assert table["shape"].tolist() == ["b64", "b64", "b1", "b1"]
    assert table["step"].tolist() == ["ours", "theirs", "ours", "theirs"] and table.index.tolist() == [0, 1, 2, 3]


def test_peers_are_compared_on_the_same_inputs(recorded: Path) -> None:
    rows = notebook.start("emulation").check_peers("prefill", ["b1 q9h2 kv21h1 d64 causal bf16"])
    assert rows["step"].tolist() == ["torch three calls"] and rows["passed"].all()
    assert rows["backend"].tolist() == ["torch, CPU"]


def test_counters_stand_beside_each_other_in_words(recorded: Path) -> None:
    table = notebook.start("emulation").counters(["prefill/01_scalar", "prefill/02_smem_tiles"], INSTANCE)
    assert table.loc["L2 hit rate (%)"].tolist() == ["99.1", "42.5"]
    absent = notebook.start("emulation", gpu="a100").counters(["prefill/01_scalar"], INSTANCE)
    assert "no recorded counters for a100" in absent.iloc[0, 0]


def test_compiled_facts_stand_beside_each_other(recorded: Path) -> None:
    names = ["prefill/01_scalar", "prefill/02_smem_tiles"]
    assert "make static" in notebook.start("emulation").compiled(names).iloc[0, 0]
    for name, registers, threads, smem in (("01_scalar", 80, 128, 0), ("02_smem_tiles", 91, 512, 65536)):
        sha = steps.step(f"prefill/{name}").source_sha
        facts = dict.fromkeys(("HMMA", "HGMMA", "QGMMA", "LDSM", "LDGSTS", "UTMALDG", "spill_bytes"), 0)
        for kernel in ("k<bf16, 512>", "k<fp16, 64>"):
            row = results.StaticRow(
                op="prefill", step=name, source_sha=sha, arch="sm_90a", kernel=kernel, registers=registers,
                smem_bytes=smem, threads=threads, FFMA=62, **facts,
            )  # fmt: skip
            results.append(recorded, row)
    table = notebook.start("emulation").compiled(names, kernel="bf16, 512")
    assert table["warps"].to_dict() == {"01_scalar": 24, "02_smem_tiles": 16}
    assert list(table.columns)[-1] == "FFMA" and "HMMA" not in table


def test_ceilings_are_measured_ones_where_recorded_else_the_data_sheet(recorded: Path) -> None:
    measured = notebook.start("emulation").ceilings()
    assert (measured.measured, measured.read_gbps, measured.bf16_tflops) == (True, 4500.0, 700.0)
    sheet = notebook.start("emulation", gpu="rtx-4090").ceilings()
    assert (sheet.measured, sheet.gpu, sheet.read_gbps) == (False, "NVIDIA GeForce RTX 4090", 1008.0)
    with pytest.raises(ValueError, match="nothing is known of 'abacus'"):
        notebook.start("emulation", gpu="abacus").ceilings()


@pytest.fixture
def all_recorded(recorded: Path) -> Path:
    """The same with a row of every step, peer, stage left out and kernel."""
    folder = recorded / "h200"
    workloads = {
        "prefill": ["prefill/published-instance", "prefill/d512-16x1-n8192"],
        "prefill_ring": [f"prefill_ring/d256-16x8-w1024-n{n}" for n in (8192, 32768)],
        "decode": [workload.name for workload in shapes.workloads("decode")],
        "gemm_w4a8": [workload.name for workload in shapes.workloads("gemm_w4a8")],
        "matvec_fp4": [workload.name for workload in shapes.workloads("matvec_fp4")],
        "matvec_fp8": [workload.name for workload in shapes.workloads("matvec_fp8")],
    }
    by_tokens = [shapes.linear_workload("gemm_w4a8", n=3840, k=3840, m=m) for m in (16, 4096)]
    static = []
    for op, names in workloads.items():
        for case in [*map(shapes.workload, names), *(by_tokens if op == "gemm_w4a8" else ())]:
            for place, step in enumerate(steps.steps(op)):
                results.append(folder, timed(step.name, case, 30_000.0 / (1 + place), step.source_sha))
                if case in by_tokens:
                    results.append(folder, compared(step, case.shape))
                if case.name in LAST_QUERIES:
                    results.append(folder, compared(step, f"{case.shape} last 256"))
            for peer in notebook.peers_of([case]):
                results.append(folder, timed(peer.name, case, 5000.0))
            for name in (name for name in ablate.names() if name.startswith(f"{op}/")):
                variant = steps.step(name)
                row = asdict(timed(variant.name, case, 900.0, variant.source_sha))
                results.append(folder, results.AblationRow(**row))
            if op == "decode":
                turned = knobs.splits([8, 16, 32, 64, 128, 256]) | knobs.capacities([4096, 16384, 65536, 262144])
                for last in [step for step in steps.steps(op) if step.kept][-2:]:
                    for label in (*turned, knobs.EAGER):
                        row = asdict(timed(f"{last.name}{knobs.WITH}{label}", case, 900.0, last.source_sha))
                        results.append(folder, results.AblationRow(**row))
        for step in steps.steps(op):
            facts = dict.fromkeys(("HMMA", "HGMMA", "QGMMA", "LDSM", "LDGSTS", "UTMALDG", "FFMA", "spill_bytes"), 0)
            static += [
                results.StaticRow(
                    op=op, step=step.name, source_sha=step.source_sha, arch="sm_90a", kernel=f"k<bf16, {head_dim}>",
                    registers=128, smem_bytes=90_624, threads=256, **facts,
                )
                for head_dim in (256, 512)
            ]  # fmt: skip
            counted = (
                ("lts__t_sector_hit_rate.pct", "%", workloads[op][0]),
                (bench.SECOND_CLOCK, "us", workloads[op][-1]),
            )
            for metric, unit, name in counted:
                row = CounterRow(
                    run_id="run-2", op=op, step=step.name, source_sha=step.source_sha, workload=name, metric=metric,
                    value=50.0, unit=unit,
                )  # fmt: skip
                results.append(folder, row)
    results.write(recorded, "static", static)
    return recorded


def compared(step: steps.Step, shape: str) -> results.ParityRow:
    return results.ParityRow(
        run_id="run-2", op=step.op, step=step.name, source_sha=step.source_sha, backend="cuda", shape=shape,
        seed=0, rel_l2=1.7e-3, max_abs=0.1, nonfinite=0, bound=1.8e-3, passed=True,
    )  # fmt: skip


def timed(step: str, case: shapes.Workload, us: float, sha: str = "") -> TimingRow:
    work = notebook.work(case)
    us = max(us, 1.2 * work.flops / 700e6, 1.2 * work.bytes / 4500e3)
    return TimingRow(
        run_id="run-2", op=case.op, step=step, source_sha=sha, workload=case.name, shape=case.shape, dtype="bf16",
        cache="cold", warmup=3, n=10, median_us=us, p10_us=us * 0.99, p90_us=us * 1.02, min_us=us * 0.98,
        flops=work.flops, bytes=work.bytes, status="ok",
    )  # fmt: skip


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_notebook_shows_recorded_rows(path: Path, all_recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cells run here, in this process, over the folder above: every table and chart has rows to show."""
    shown: list[Any] = []
    monkeypatch.setattr("IPython.display.display", lambda *values, **options: shown.extend(values))
    monkeypatch.setattr("matplotlib.pyplot.switch_backend", lambda backend: None)
    scope: dict[str, Any] = {}
    for cell in cells(path, "code"):
        tree = ast.parse(cell.source)
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, path.name, "exec"), scope)
        if isinstance(last, ast.Expr):
            shown.append(eval(compile(ast.Expression(last.value), path.name, "eval"), scope))
    assert any(isinstance(value, dict) and "image/svg+xml" in value for value in shown), "a chart"
    assert any(isinstance(value, pd.DataFrame) and len(value) for value in shown), "a table"
    texts = "\n".join(value.to_string() for value in shown if isinstance(value, pd.DataFrame))
    assert "not recorded" not in texts and "failed" not in texts
    said = "\n".join(str(getattr(value, "data", "")) for value in shown)
    assert "There are no recorded" not in said and "no rows of them" not in texts


# ---------------------------------------------------------------------------------------------- what they count


@pytest.mark.parametrize("workload", shapes.workloads(), ids=lambda workload: workload.name)
def test_work_is_positive_and_the_limit_is_the_floor_of_the_table(workload: shapes.Workload) -> None:
    needed = notebook.work(workload)
    assert needed.flops > 0 and needed.bytes > 0
    if workload.op == "decode" and workload.floor:
        assert needed.bytes / 4535e3 == pytest.approx(workload.floor, rel=0.02, abs=0.1)


@pytest.mark.parametrize("op", sorted({workload.op for workload in shapes.workloads()}))
def test_bound_of_each_kind_of_work(op: str) -> None:
    ceilings = notebook.Ceilings("any", 4535.0, 687.0, 1276.0, True, "")
    expected = "arithmetic" if op in ("prefill", "prefill_ring", "gemm_w4a8") else "memory"
    assert {ceilings.bound(op, notebook.work(workload)) for workload in shapes.workloads(op)} == {expected}


def test_work_counts_what_an_exhaustive_mask_counts() -> None:
    w = shapes.attention_workload(q_heads=4, kv_heads=2, head_dim=64, q_len=5, kv_len=9, window=3)
    pairs = sum(1 for i in range(5) for j in range(9) if 4 + i - 3 < j <= 4 + i)
    assert notebook.work(w).flops == 4 * 4 * 64 * pairs
    assert math.isclose(notebook.work(w).flops, ops.OPS["prefill"].flops(w))


def test_work_of_several_parts_is_their_mean() -> None:
    whole = shapes.attention_workload(q_heads=16, kv_heads=1, head_dim=512, q_len=8192, kv_len=8192)
    assert notebook.work(INSTANCE).flops == pytest.approx(notebook.work(whole).flops / 16)


@pytest.mark.parametrize(
    ("arguments", "named"), [({"preset": "fast"}, "preset"), ({"seed": -1}, "seed"), ({"device": "gpu"}, "device")]
)
def test_wrong_parameters_are_named(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named}"):
        notebook.start(**{"device": "emulation", **arguments})


def test_check_fails_loudly_after_all_cases_have_run(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strict = replace(ops.OPS["prefill"], bound=lambda workload: 1e-9)
    monkeypatch.setitem(ops.OPS, "prefill", strict)
    session = notebook.start("emulation")
    texts = ["b1 q3h1 kv5h1 d64 causal bf16", "b1 q2h1 kv4h1 d64 causal bf16"]
    with pytest.raises(AssertionError, match=r"q3h1.*q2h1"):
        session.check(["prefill/01_scalar"], texts)
    assert len(results.read(session.run.folder, "parity")) == 4, "each case, plain and poisoned"


@pytest.mark.parametrize(
    ("op", "text"),
    [("prefill", "b1 q40h2 kv50h1 d64 causal bf16"), ("prefill_ring", "b1 q40h2 kv50h1 d64 w16 causal bf16")],
)
def test_the_last_queries_stand_for_a_whole_prompt(
    op: str, text: str, recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, but for SDPA, which needs one: rows of steps and peers, and a step that is wrong is named."""
    session, workload = notebook.start("emulation"), shapes.parse_shape(op, text)
    names = [step.id for step in steps.steps(op)][:1] + (["prefill/18_two_blocks"] if op == "prefill" else [])
    assert session.check_last(names, workload, 7).empty, "nothing is recorded"
    monkeypatch.setattr(notebook.Session, "live", True)
    rows = session.check_last(names, workload, 7)
    assert rows["step"].tolist() == [steps.step(names[0]).name, "torch three calls"], "18 does not take head dim 64"
    assert (
        set(rows["shape"]) == {f"{text} last 7"} and rows["passed"].all() and rows["rel_l2"].between(1e-4, 4e-3).all()
    )
    entry = ops.OPS[op]
    shifted = replace(entry, run=lambda **given: tuple(out.roll(1, 1) for out in entry.run(**given)))
    monkeypatch.setitem(ops.OPS, op, shifted)
    with pytest.raises(AssertionError, match=rf"above the bound on {text} last 7: {rows['step'].iloc[0]}"):
        session.check_last(names, workload, 7)


def test_recorded_errors_of_a_changed_source_are_marked(recorded: Path) -> None:
    session = notebook.start("emulation")
    rows = session.check(["prefill/01_scalar"], ["b1 q3h1 kv5h1 d64 causal bf16"])
    assert set(notebook.parity_table(rows).index) == {"01_scalar"}
    assert set(notebook.parity_table(rows.assign(stale=True)).index) == {"01_scalar (stale)"}


def test_a_peer_that_refuses_a_shape_is_reported(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(**inputs: Any) -> Any:
        raise RuntimeError("no kernel for head dim 512\nat some place")

    refusing = peers.Peer("prefill", "torch three calls", prepare)
    monkeypatch.setattr(peers, "PEERS", [refusing, *(peer for peer in peers.PEERS if peer.name != refusing.name)])
    rows = notebook.start("emulation").check_peers("prefill", ["b1 q9h2 kv21h1 d64 causal bf16"])
    assert rows["refusal"].tolist() == ["no kernel for head dim 512"]
    assert notebook.parity_table(rows)["verdict"].tolist() == ["none, it refuses"]
