"""The batch runner: what goes in is checked before anything runs, and what failed is called failed."""

from __future__ import annotations

import csv
import html
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest

from mila_kernels import reproduce as batch
from mila_kernels.paths import NOTEBOOKS, ROOT

PARAMETERS = 'device = "auto"\npreset = "quick"\nseq = 128\nscale: float = 1.0\nfast = False'
ROW = """from mila_kernels.results import ParityRow, RunWriter
with RunWriter() as run:
    run.add(ParityRow(op="prefill", step="01_scalar", backend="emulation", shape="any", seed=seq,
                      rel_l2=0.0, max_abs=0.0, nonfinite=0, bound=1.0, passed=True))"""
TIMED = """from mila_kernels.notebook import open_case
from mila_kernels.results import RunWriter, TimingRow
case = TimingRow(op="prefill", step="01_scalar", shape="any", dtype="bf16", cache="cold", status="failed", error="?")
with RunWriter() as run, open_case(run, case):
    import os; os._exit(137)"""
CHART = """import base64
from IPython.display import Image
Image(data=base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNkYAAAAAYAAjCB0C8AAAAASUVORK5CYII="))"""

Write = Callable[..., Path]
Faulty = tuple[Path, batch.Report, dict[str, dict[str, str]]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    there = tmp_path / "note books é"
    there.mkdir()
    return there


def writer(folder: Path) -> Write:
    def make(name: str, *cells: str, tag: str | None = "parameters", first: str = PARAMETERS) -> Path:
        head = nbformat.v4.new_code_cell(first, metadata={"tags": [tag] if tag else []})
        body = [nbformat.v4.new_code_cell(cell) for cell in cells]
        title = nbformat.v4.new_markdown_cell(f"# {name}, a title\n\nWhat does {name} show?")
        path = folder / f"{name}.ipynb"
        nbformat.write(nbformat.v4.new_notebook(cells=[title, head, *body]), path)
        return path

    return make


@pytest.fixture
def write(folder: Path) -> Write:
    return writer(folder)


def run(folder: Path, out: Path, **options: object) -> batch.Report:
    return batch.reproduce(notebooks=folder, out=out, say=lambda line: None, **options)  # type: ignore[arg-type]


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def command(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    line = [sys.executable, "-m", "mila_kernels", "reproduce", *map(str, arguments)]
    return subprocess.run(line, cwd=cwd, env=env, capture_output=True, text=True, timeout=120)


def test_a_long_notebook_says_how_far_it_is(
    folder: Path, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("01_first", ROW, "", "import time; time.sleep(3)")
    monkeypatch.setattr(batch, "SILENT_S", 0.2)
    said: list[str] = []
    assert batch.reproduce(notebooks=folder, out=tmp_path / "out", say=said.append).outcomes[0].status == "ok"
    assert any("01_first: 2 of 3 code cells, " in line for line in said[1:-1])


# ---------------------------------------------------------------------------------------------- what goes in


@pytest.mark.parametrize("given", [{"seqlen": 64}, {"seq": 64, "Seq": 1}, {"seq ": 64}])
def test_misspelt_parameter_runs_nothing(folder: Path, write: Write, tmp_path: Path, given: dict[str, int]) -> None:
    write("01_first", ROW)
    out = tmp_path / "out"
    with pytest.raises(batch.ParameterError) as caught:
        run(folder, out, given=given)
    unknown = next(key for key in given if key != "seq")
    assert repr(unknown) in str(caught.value)
    assert "device, fast, preset, scale, seq" in str(caught.value)
    assert not out.exists()


def test_one_notebook_without_the_parameter_stops_the_batch(folder: Path, write: Write, tmp_path: Path) -> None:
    write("01_first", ROW)
    write("02_second", ROW, first="other = 1")
    with pytest.raises(batch.ParameterError, match=r"02_second.*'seq'.*other"):
        run(folder, tmp_path / "out", given={"seq": 3})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("tag", [None, "parameter", "Parameters"])
def test_notebook_without_parameters_cell_runs_nothing(folder: Path, write: Write, tmp_path: Path, tag: str) -> None:
    write("01_first", "seq = 1", ROW, tag=tag)
    with pytest.raises(batch.ParameterError, match="no cell tagged 'parameters'"):
        run(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_two_parameters_cells_are_ambiguous(folder: Path, write: Write, tmp_path: Path) -> None:
    path = write("01_first")
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell("seq = 2", metadata={"tags": ["parameters"]}))
    nbformat.write(notebook, path)
    with pytest.raises(batch.ParameterError, match="2 cells"):
        run(folder, tmp_path / "out")


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ({"seq": "64"}, {"seq": 64}),
        ({"scale": "2"}, {"scale": 2.0}),
        ({"fast": "true"}, {"fast": True}),
        ({"preset": "full", "seq": 7}, {"preset": "full", "seq": 7}),
    ],
)
def test_values_take_the_type_of_the_default(write: Write, given: dict[str, object], taken: dict[str, object]) -> None:
    assert batch.check_parameters(write("01_first"), given) == taken


@pytest.mark.parametrize(
    "given", [{"seq": "many"}, {"seq": "1.5"}, {"fast": "1"}, {"preset": "quik"}, {"device": "gpu"}, {"seq": True}]
)
def test_values_that_do_not_fit_are_refused(write: Write, given: dict[str, object]) -> None:
    with pytest.raises(batch.ParameterError, match=next(iter(given))):
        batch.check_parameters(write("01_first"), given)


def test_notebooks_are_found_by_number_name_or_start(folder: Path, write: Write) -> None:
    for name in ("00_a", "01_b", "02_c"):
        write(name)
    assert [path.stem for path in batch.find(["02", "00_a.ipynb", "02_c"], folder)] == ["00_a", "02_c"]
    assert [path.stem for path in batch.find((), folder)] == ["00_a", "01_b", "02_c"]
    for wrong in ("03", "", "ipynb"):
        with pytest.raises(ValueError, match="00_a, 01_b, 02_c"):
            batch.find([wrong], folder)
    with pytest.raises(ValueError, match="no notebooks"):
        batch.find((), folder / "none")


# ---------------------------------------------------------------------------------------------- what comes out


def test_parameters_reach_the_notebook_and_all_is_left_in_a_new_folder(
    folder: Path, write: Write, tmp_path: Path
) -> None:
    write("01_first", ROW, CHART)
    out = tmp_path / "a" / "new folder"
    report = run(folder, out, given={"seq": "77"})
    assert report.ok
    written = rows(out / "parity.csv")
    assert [(row["run_id"], row["seed"]) for row in written] == [(report.run_id, "77")]
    outcome = rows(out / "notebooks.csv")[0]
    assert (outcome["status"], outcome["rows"], outcome["error"]) == ("ok", "parity 1", "")
    assert outcome["cells_run"] == outcome["cells"]
    page = (out / "index.html").read_text()
    assert "notebooks/01_first.html" in page and "What does 01_first show?" in page
    assert "data:image/png;base64,iVBORw0KGgo" in page, "the chart is in view"
    assert "data:image/png;base64,iVBORw0KGgo" in (out / "notebooks" / "01_first.html").read_text()
    before = (out / "parity.csv").read_bytes()
    with pytest.raises(ValueError, match="already holds a run"):
        run(folder, out)
    assert (out / "parity.csv").read_bytes() == before, "figures of an earlier run cannot pass as new"


FAILED_CASE = """from mila_kernels.results import RunWriter, TimingRow
with RunWriter() as run:
    run.add(TimingRow(op="prefill", step="01_scalar", shape="any", dtype="bf16", cache="cold", status="failed",
                      error="CUDA out of memory"))"""

WITH_ROW = 2  # so many of the faults come after a finished row; it costs each kernel an import of torch
FAULTS = {
    "raises": ("raise RuntimeError('no luck')", "RuntimeError: no luck"),
    "killed": ("import os; os._exit(137)", "DeadKernelError"),
    "memory": (
        "import torch; raise torch.cuda.OutOfMemoryError('CUDA out of memory. Tried to allocate 9 GiB')",
        "out of memory",
    ),
    "quiet exit": ("import sys; sys.exit(0)", "SystemExit"),
}


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Faulty:
    """One batch: a notebook that works, one for each fault, and one that works."""
    folder = tmp_path_factory.mktemp("faulty")
    write = writer(folder)
    write("00_first", ROW)
    for number, (source, _) in enumerate(FAULTS.values(), 1):
        write(f"{number:02}_fault", ROW if number <= WITH_ROW else "before = 1", source, "after = 1")
    write("97_killed_case", TIMED)
    write("98_failed_case", FAILED_CASE, "after = 1")
    write("99_last", ROW)
    report = run(folder, folder / "out")
    return folder / "out", report, {row["notebook"]: row for row in rows(folder / "out" / "notebooks.csv")}


def test_the_others_finish(faulty: Faulty) -> None:
    out, report, outcomes = faulty
    assert not report.ok
    assert [row["status"] for row in outcomes.values()] == ["ok", *["failed"] * (len(FAULTS) + 2), "ok"]
    written = rows(out / "parity.csv")
    assert [row["run_id"] for row in written] == [report.run_id] * (WITH_ROW + 2), "finished rows are kept"


@pytest.mark.parametrize("fault", FAULTS)
def test_failure_is_called_a_failure(faulty: Faulty, fault: str) -> None:
    out, _, outcomes = faulty
    source, error = FAULTS[fault]
    name = f"{list(FAULTS).index(fault) + 1:02}_fault"
    assert error in outcomes[name]["error"]
    assert outcomes[name]["rows"] == ("parity 1" if list(FAULTS).index(fault) < WITH_ROW else "")
    assert (outcomes[name]["cells_run"], outcomes[name]["cells"]) == ("2", "4")
    executed = nbformat.read(out / "notebooks" / f"{name}.ipynb", as_version=4)
    assert executed.metadata["mila_kernels"]["status"] == "failed"
    assert "failed" in executed.cells[0].source
    status = {cell.source: cell.metadata.get("papermill", {}).get("status") for cell in executed.cells}
    assert status[source] == "failed"
    assert status["after = 1"] == "pending", "a cell that never ran is not called completed"
    page = (out / "index.html").read_text()
    assert html.escape(error) in page and f"notebooks/{name}.html" in page


def test_case_that_kills_its_kernel_leaves_a_failed_row(faulty: Faulty) -> None:
    out, report, _ = faulty
    killed, _ = rows(out / "timings.csv")
    assert (killed["run_id"], killed["status"], killed["median_us"]) == (report.run_id, "failed", "")
    assert "DeadKernelError" in killed["error"]


def test_notebook_that_goes_on_after_a_failed_case_has_failed(faulty: Faulty) -> None:
    out, _, outcomes = faulty
    outcome = outcomes["98_failed_case"]
    assert "CUDA out of memory" in outcome["error"]
    assert outcome["cells_run"] == outcome["cells"]
    executed = nbformat.read(out / "notebooks" / "98_failed_case.ipynb", as_version=4)
    assert "CUDA out of memory" in executed.cells[0].source


def test_cell_that_takes_too_long_fails(folder: Path, write: Write, tmp_path: Path) -> None:
    write("01_first", "import time; time.sleep(60)")
    report = run(folder, tmp_path / "out", timeout=2)
    assert [outcome.status for outcome in report.outcomes] == ["failed"]
    assert "Timeout" in report.outcomes[0].error


def test_kernel_is_this_interpreter_whatever_is_installed(
    folder: Path, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = tmp_path / "jupyter" / "kernels" / "python3"
    wrong.mkdir(parents=True)
    (wrong / "kernel.json").write_text('{"argv": ["/nowhere/python"], "display_name": "x", "language": "python"}')
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.chdir(tmp_path)
    check = f"import sys, mila_kernels; assert sys.executable == {sys.executable!r}"
    write("01_first", check)
    report = run(folder, tmp_path / "out")
    assert report.ok, report
    assert os.environ["JUPYTER_PATH"] == str(tmp_path / "jupyter"), "the caller's environment is left as it was"


# ---------------------------------------------------------------------------------------------- the command


def test_command_says_what_failed_and_exits_1(folder: Path, write: Write, tmp_path: Path) -> None:
    write("01_first", "1 + 1")
    write("02_middle", "import os; os._exit(137)")
    done = command("--notebooks", folder, "--out", "out", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "[1/2] 01_first: ok" in done.stdout
    assert "[2/2] 02_middle: failed" in done.stdout
    assert str(tmp_path / "out" / "index.html") in done.stdout


def test_interrupt_ends_the_batch_and_says_what_was_not_run(folder: Path, write: Write, tmp_path: Path) -> None:
    write("01_first", "print('here', flush=True)", "import time; time.sleep(100)")
    write("02_second", "after = 1")
    out = tmp_path / "out"
    line = [sys.executable, "-m", "mila_kernels", "reproduce", "--notebooks", folder, "--out", out]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    # A test run in the background of a shell ignores Ctrl-C, and so would its children.
    options = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL), "start_new_session": True}
    with subprocess.Popen(line, env=env, stdout=subprocess.PIPE, text=True, **options) as process:
        executed, deadline = out / "notebooks" / "01_first.ipynb", time.monotonic() + 60
        while not (executed.exists() and "here" in executed.read_text()) and time.monotonic() < deadline:
            time.sleep(0.2)
        os.killpg(process.pid, signal.SIGINT)
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 130, said
    first, second = rows(out / "notebooks.csv")
    assert (first["status"], first["error"], second["status"]) == ("failed", "interrupted", "not run")
    assert "not run" in (out / "index.html").read_text()


def test_command_with_a_misspelt_parameter_exits_2(folder: Path, write: Write, tmp_path: Path) -> None:
    write("01_first", ROW)
    done = command("--notebooks", folder, "--out", tmp_path / "out", "-p", "seqlen=64")
    assert done.returncode == 2
    assert "unknown parameter 'seqlen'; it knows: device, fast, preset, scale, seq" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_notebooks_of_the_project_take_the_four_parameters() -> None:
    for path in batch.find((), NOTEBOOKS):
        assert set(batch.parameters(path)) >= {"device", "gpu", "preset", "seed"}, path.name
