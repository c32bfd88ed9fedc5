"""Runs the notebooks in batch: papermill, under our own checks of what goes in and of what came out.

papermill alone runs a notebook with its defaults when a parameter is misspelt, and marks the cell that killed its
kernel "completed". Here a whole batch is checked before its first cell runs, and a notebook counts as finished only
when every one of its code cells has run; everything else is a failure, and the notebooks after it still run.

A run lies in one folder::

    <folder>/*.csv               the tables that the notebooks wrote (their rows carry the run's id)
    <folder>/notebooks.csv       one row a notebook: status, seconds, cells run, rows written, error
    <folder>/notebooks/*.ipynb   as executed, and *.html of each with its charts inside
    <folder>/figures/            charts that the notebooks saved
    <folder>/index.html          all of it on one page
"""

from __future__ import annotations

import ast
import base64
import html
import json
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import results
from .notebook import close_open_case
from .paths import NOTEBOOKS, RESULTS, python_path
from .results import NotebookRow

ALLOWED = {"device": ("auto", "cuda", "emulation"), "preset": ("quick", "full")}
IMAGE_TYPES = ("image/svg+xml", "image/png")
SILENT_S = 30.0  # a notebook that takes longer says how far it is, and again after as long
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


class ParameterError(ValueError):
    """A notebook cannot take these parameters; nothing was executed and no row was written."""


@dataclass(frozen=True)
class Report:
    """A finished batch: where it lies, and how each notebook ended."""

    run_id: str
    folder: Path
    outcomes: tuple[NotebookRow, ...]
    interrupted: bool = False

    @property
    def ok(self) -> bool:
        """True when every notebook ran to its end."""
        return not self.interrupted and all(outcome.status == "ok" for outcome in self.outcomes)

    def __str__(self) -> str:
        return summary(self.outcomes)


# ---------------------------------------------------------------------------------------------- what goes in


def find(only: Sequence[str] = (), folder: Path = NOTEBOOKS) -> list[Path]:
    """The notebooks of ``folder`` in order; ``only`` picks some by number ("01"), name or start of a name.

    Raises ValueError when the folder holds none, or when a name picks none (the message lists those there are).
    """
    there = sorted(path for path in folder.glob("*.ipynb") if not path.name.startswith("."))
    if not there:
        raise ValueError(f"no notebooks in {folder}")
    if not only:
        return there
    picked: list[Path] = []
    for name in only:
        stem = name.removesuffix(".ipynb")
        exact = [path for path in there if path.stem == stem]
        matches = exact or [path for path in there if stem and path.stem.startswith(stem)]
        if not matches:
            raise ValueError(f"no notebook {name!r}; there are: {', '.join(path.stem for path in there)}")
        picked += matches
    return [path for path in there if path in picked]


def parameters(path: Path) -> dict[str, Any]:
    """The parameters that a notebook declares, with their defaults, from its one cell tagged ``parameters``.

    A default that is not a literal is given as None. Raises ParameterError when there is no such cell or more than one.
    """
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    if len(cells) != 1:
        count = "no cell" if not cells else f"{len(cells)} cells"
        raise ParameterError(f"{path.name}: {count} tagged 'parameters'; a notebook needs exactly one")
    try:
        body = ast.parse(cells[0].source).body
    except SyntaxError as error:
        raise ParameterError(f"{path.name}: its parameters cell does not parse: {error}") from error
    found: dict[str, Any] = {}
    for node in body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        found.update({target.id: _literal(node.value) for target in targets if isinstance(target, ast.Name)})  # type: ignore[attr-defined]
    return found


def check_parameters(path: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """``given`` as the notebook at ``path`` takes it: text converted to the type of the default.

    Raises ParameterError that names an unknown key and the known ones, or a value that does not fit.
    """
    known = parameters(path)
    unknown = sorted(set(given) - set(known))
    if unknown:
        names = ", ".join(map(repr, unknown))
        raise ParameterError(f"{path.name}: unknown parameter {names}; it knows: {', '.join(sorted(known)) or 'none'}")
    return {key: _fit(path, key, value, known[key]) for key, value in given.items()}


def _literal(node: ast.expr | None) -> Any:
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return None


def _fit(path: Path, key: str, value: Any, default: Any) -> Any:
    if isinstance(value, str) and not isinstance(default, str):
        lowered = value.lower()
        if isinstance(default, bool) and lowered in ("true", "false"):
            value = lowered == "true"
        else:
            try:
                value = ast.literal_eval(value)
            except (ValueError, SyntaxError):
                pass
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if default is not None and type(value) is not type(default):
        raise ParameterError(f"{path.name}: {key}={value!r} does not fit; its default is {default!r}")
    if key in ALLOWED and isinstance(default, str) and value not in ALLOWED[key]:
        raise ParameterError(f"{path.name}: {key}={value!r}; allowed are {', '.join(ALLOWED[key])}")
    return value


# ---------------------------------------------------------------------------------------------- the batch


def reproduce(
    only: Sequence[str] = (),
    *,
    given: Mapping[str, Any] | None = None,
    out: Path | None = None,
    notebooks: Path = NOTEBOOKS,
    timeout: int | None = None,
    say: Callable[[str], None] = print,
    progress: bool = False,
) -> Report:
    """Run notebooks one after the other, each in a fresh kernel of this interpreter, and leave one folder of results.

    Args:
        only: numbers or names of notebooks; none means all.
        given: parameters for every notebook chosen (text is converted to the type of the notebook's default).
        out: the run's folder, made when missing, refused when it already holds a run; default results/local/<run id>.
        notebooks: folder to take notebooks from.
        timeout: seconds that one cell may take; none means no limit.
        say: called with each line of progress.
        progress: papermill's bar of cells on stderr, in place of a line of progress every SILENT_S seconds.

    Raises:
        ParameterError, ValueError: a wrong name, parameter or folder, before anything is executed or written.
    """
    chosen = find(only, notebooks)
    taken = {path: check_parameters(path, given or {}) for path in chosen}
    run_id, folder = _new_run(out)
    outcomes: list[NotebookRow] = []
    interrupted = False
    say(f"run {run_id}: {len(chosen)} notebook{'s' if len(chosen) != 1 else ''} -> {folder}")
    with results.RunWriter(folder, run_id), _kernel_of_this_interpreter(), _environment(run_id, folder):
        for number, path in enumerate(chosen, 1):
            if interrupted:
                cells = _code_cells(path)
                outcomes.append(
                    _outcome(run_id, path, "not run", seconds=0, cells_run=0, cells=cells, error="interrupted before")
                )
                continue
            say(f"[{number}/{len(chosen)}] {path.stem} ...")
            outcome = _run_one(path, run_id, folder, taken[path], timeout, None if progress else say)
            interrupted = outcome.error == "interrupted"
            outcomes.append(outcome)
            say(f"[{number}/{len(chosen)}] {_ending(outcome)}")
            results.write(folder, "notebooks", outcomes)
    results.write(folder, "notebooks", outcomes)
    (folder / "index.html").write_text(index(run_id, folder, outcomes, chosen), encoding="utf-8")
    return Report(run_id, folder, tuple(outcomes), interrupted)


def _new_run(out: Path | None) -> tuple[str, Path]:
    run_id = results.new_run_id()
    try:
        folder = (out if out is not None else RESULTS / "local" / run_id).expanduser().resolve()
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"out: {folder} is not a folder")
        if any((folder / name).exists() for name in ("index.html", "notebooks.csv", "runs.csv")):
            raise ValueError(
                f"out: {folder} already holds a run; name another folder, so that its figures cannot pass as new"
            )
        (folder / "notebooks").mkdir(parents=True, exist_ok=True)
        (folder / "figures").mkdir(exist_ok=True)
    except (OSError, RuntimeError) as error:  # a RuntimeError where ~user has no home
        raise ValueError(f"out: {out or RESULTS / 'local'} cannot be made: {error}") from error
    return run_id, folder


def _run_one(
    path: Path, run_id: str, folder: Path, given: dict[str, Any], timeout: int | None,
    say: Callable[[str], None] | None,
) -> NotebookRow:  # fmt: skip
    """Run a notebook, with lines of progress, or with papermill's bar where there is no ``say``."""
    import papermill

    target = folder / "notebooks" / path.name
    before = _row_counts(folder)
    begun = time.monotonic()
    error = ""
    try:
        with nullcontext() if say is None else _saying_how_far(target, say):
            papermill.execute_notebook(
                path,
                target,
                parameters=given,
                kernel_name="python3",
                language="python",
                progress_bar=say is None and {"desc": path.stem},
                cwd=folder,
                start_timeout=120,
                execution_timeout=timeout,
            )
    except KeyboardInterrupt:
        error = "interrupted"
    except Exception as caught:
        error = _one_line(caught)
    seconds = time.monotonic() - begun
    cells_run, cells, problem = _judge(target, error)
    if problem:
        close_open_case(folder, run_id, problem)
    elif cases := _failed_cases(folder, before):
        problem = results.clean(f"{len(cases)} failed: {'; '.join(cases)}")
        _mark_failed(target, problem)
    try:
        _export_html(target)
    except Exception as caught:  # the page is missing, the notebooks after it are not
        problem = problem or f"executed, but not exported as HTML: {_one_line(caught)}"
    rows = "; ".join(f"{table} {count}" for table, count in _new_rows(before, _row_counts(folder)).items())
    status = "failed" if problem else "ok"
    return _outcome(run_id, path, status, seconds=seconds, cells_run=cells_run, cells=cells, rows=rows, error=problem)


@contextmanager
def _saying_how_far(target: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Meanwhile, a line every SILENT_S seconds, from the copy that papermill saves as a cell begins."""
    begun, ended = time.monotonic(), threading.Event()

    def report() -> None:
        while not ended.wait(SILENT_S):
            with suppress(OSError, ValueError):  # not there yet, or being written
                marks = [cell.get("metadata", {}).get("papermill", {}) for cell in _cells(target)]
                done = sum(mark.get("status") == "completed" for mark in marks)
                say(f"      {target.stem}: {done} of {len(marks)} code cells, {time.monotonic() - begun:.0f} s")

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _judge(target: Path, error: str) -> tuple[int, int, str]:
    """Code cells run, code cells, and what went wrong (empty: nothing), read from the executed copy, then put right.

    papermill's own marks are not believed: it calls the killing cell, and all that never began, completed.
    """
    import nbformat

    if not target.exists():
        return 0, 0, error or "the notebook was not executed"
    notebook = nbformat.read(target, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]
    begun = [cell for cell in code if cell.metadata.get("papermill", {}).get("start_time")]
    failed = [cell for cell in begun if any(output.output_type == "error" for output in cell.outputs)]
    complete = len(begun) == len(code) and all(cell.execution_count is not None for cell in code)
    if not error and failed:
        output = next(output for output in failed[-1].outputs if output.output_type == "error")
        error = results.clean(f"{output.ename}: {output.evalue}")
    if not error and not complete:
        error = f"stopped after {len(begun)} of {len(code)} code cells"
    if not error:
        return len(code), len(code), ""
    culprit = failed[-1] if failed else begun[-1] if begun else None
    for cell in notebook.cells:
        marks = cell.metadata.get("papermill", {})
        if cell is culprit:
            marks.update(status="failed", exception=True)
        elif not marks.get("start_time"):
            marks.update(status="pending", exception=None)
    nbformat.write(notebook, target)
    _mark_failed(target, error)
    finished = [cell for cell in begun if cell is not culprit and cell.execution_count is not None]
    return len(finished), len(code), error


def _mark_failed(target: Path, error: str) -> None:
    """Say in the executed copy itself that it failed."""
    import nbformat

    notebook = nbformat.read(target, as_version=4)
    notebook.metadata["mila_kernels"] = {"status": "failed", "error": error}
    text = f"**This notebook failed, and is not complete:** `{error}`"
    notebook.cells.insert(0, nbformat.v4.new_markdown_cell(text, metadata={"tags": ["mila-failed"]}))
    nbformat.write(notebook, target)


def _failed_cases(folder: Path, before: Mapping[str, int]) -> list[str]:
    """Cases that the rows since ``before`` call failed: a notebook that goes on after them has failed all the same.

    A peer that is wrong (its rows have no ``source_sha``) is a finding, not a failure of ours.
    """
    timings = [row for name in ("timings", "ablations") for row in results.read(folder, name)[before.get(name, 0) :]]
    parity = results.read(folder, "parity")[before.get("parity", 0) :]
    found = [
        f"{row.op}/{row.step} {row.workload or row.shape}: {row.error}" for row in timings if row.status == "failed"
    ]
    return found + [
        f"{row.op}/{row.step} {row.shape}: rel_l2 {row.rel_l2:.2e}"
        for row in parity
        if row.source_sha and not row.passed
    ]


def _outcome(run_id: str, path: Path, status: str, *, seconds: float, error: str, **counts: Any) -> NotebookRow:
    return NotebookRow(
        run_id=run_id, notebook=path.stem, status=status, seconds=round(seconds, 2), error=error, **counts
    )


def _one_line(error: BaseException) -> str:
    ename, evalue = getattr(error, "ename", ""), getattr(error, "evalue", "")
    text = f"{ename}: {evalue}" if ename else f"{type(error).__name__}: {error}"
    return results.clean(_ANSI.sub("", text))


def _ending(outcome: NotebookRow) -> str:
    text = f"{outcome.notebook}: {outcome.status}, {outcome.seconds or 0:.1f} s"
    return f"{text} ({outcome.error})" if outcome.error else text


def _code_cells(path: Path) -> int:
    return len(_cells(path))


def _cells(path: Path) -> list[dict[str, Any]]:
    """The code cells that are not empty."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code" and "".join(cell["source"]).strip()]


def _row_counts(folder: Path) -> dict[str, int]:
    tables = [path for path in sorted(folder.glob("*.csv")) if path.name != "notebooks.csv"]
    return {path.stem: max(0, path.read_bytes().count(b"\n") - 1) for path in tables}


def _new_rows(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    return {table: n - before.get(table, 0) for table, n in after.items() if n > before.get(table, 0)}


@contextmanager
def _kernel_of_this_interpreter() -> Iterator[None]:
    """A kernel named python3 that is this very interpreter, whatever kernels are installed, seen before all others."""
    from ipykernel.kernelspec import get_kernel_dict

    spec = get_kernel_dict(extra_arguments=["--log-level=ERROR"])  # else a line about transport for every kernel
    spec["argv"][0] = sys.executable
    with tempfile.TemporaryDirectory(prefix="mila_kernels_") as folder:
        place = Path(folder) / "kernels" / "python3"
        place.mkdir(parents=True)
        (place / "kernel.json").write_text(json.dumps(spec), encoding="utf-8")
        path = os.pathsep.join(filter(None, [folder, os.environ.get("JUPYTER_PATH")]))
        with _variables(JUPYTER_PATH=path):
            yield


@contextmanager
def _environment(run_id: str, folder: Path) -> Iterator[None]:
    """What the kernels inherit: the run's folder, and this package first on the path."""
    run = {results.RUN_FOLDER_VARIABLE: str(folder), results.RUN_ID_VARIABLE: run_id}
    with _variables(PYTHONPATH=python_path(), **run):
        yield


@contextmanager
def _variables(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


# ---------------------------------------------------------------------------------------------- what comes out


def summary(outcomes: Sequence[NotebookRow]) -> str:
    """The outcomes as a table for a terminal."""
    head = ("notebook", "status", "seconds", "cells", "rows written", "error")
    body = [
        (o.notebook, o.status, f"{o.seconds or 0:.1f}", f"{o.cells_run}/{o.cells}", o.rows or "-", o.error[:100] or "-")
        for o in outcomes
    ]
    widths = [max(len(row[i]) for row in [head, *body]) for i in range(len(head))]
    lines = [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in [head, *body]
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def _export_html(target: Path) -> None:
    """``target`` as one HTML page beside it; the charts are inside the page, and no script is fetched to show it."""
    from nbconvert import HTMLExporter

    if not target.exists():
        return
    folders = _template_folders()
    exporter = HTMLExporter(
        embed_images=True, require_js_url="", jquery_url="", mathjax_url="", mermaid_js_url="",
        extra_template_basedirs=folders, extra_template_paths=folders,
    )  # fmt: skip
    exporter.log.setLevel("ERROR")  # it warns of images without a description, which they get below
    body, _ = exporter.from_filename(str(target))
    title = html.escape(heading(target)[0], quote=True)
    body = body.replace('alt="No description has been provided for this image"', f'alt="chart of {title}"')
    target.with_suffix(".html").write_text(body, encoding="utf-8")


def _template_folders() -> list[str]:
    """Where nbconvert's templates lie besides its own search path: beside the packages of ``pip install --target``."""
    folders = (Path(entry) / "share" / "jupyter" / "nbconvert" / "templates" for entry in sys.path if entry)
    return [str(folder) for folder in folders if folder.is_dir()]


def charts(path: Path) -> list[str]:
    """The images that an executed notebook shows, as data URLs, in order (the vector form where a cell has both)."""
    import nbformat

    found = []
    for cell in nbformat.read(path, as_version=4).cells:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            kind = next((kind for kind in IMAGE_TYPES if kind in data), None)
            if kind == "image/svg+xml":
                found.append(f"data:{kind};base64,{base64.b64encode(data[kind].encode()).decode()}")
            elif kind:
                found.append(f"data:{kind};base64,{''.join(data[kind].split())}")
    return found


def heading(path: Path) -> tuple[str, str]:
    """Title and question of a notebook: the first line and the rest of its first markdown cell."""
    import nbformat

    markdown = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown"]
    cells = [cell for cell in markdown if "mila-failed" not in cell.metadata.get("tags", [])]
    lines = cells[0].source.strip().splitlines() if cells else []
    title = lines[0].lstrip("# ").strip() if lines else path.stem
    return title, " ".join(line.strip() for line in lines[1:] if line.strip())


_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { text-align: left; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid #8886; vertical-align: top; }
section { margin: 2.5rem 0; } img { max-width: 100%; background: #fff; }
.failed, .not { font-weight: 600; color: #c0392b; } code { overflow-wrap: anywhere; }
"""


def index(run_id: str, folder: Path, outcomes: Sequence[NotebookRow], sources: Sequence[Path]) -> str:
    """The run on one page: provenance, how each notebook ended, and its charts; links are relative to ``folder``."""
    parts = [f"<h1>mila_kernels, run {html.escape(run_id)}</h1>", _provenance(folder), _outcome_table(outcomes)]
    for outcome, source in zip(outcomes, sources, strict=True):
        title, question = heading(source)
        parts.append(f"<section id='{html.escape(outcome.notebook)}'><h2>{html.escape(title)}</h2>")
        parts.append(f"<p>{html.escape(question)}</p><p>{_links(folder, outcome)}</p>")
        if outcome.error:
            parts.append(f"<p class='failed'>{outcome.status}: <code>{html.escape(outcome.error)}</code></p>")
        executed = folder / "notebooks" / source.name
        images = charts(executed) if executed.exists() else []
        parts += [f"<p><img src='{image}' alt='chart of {html.escape(title)}'></p>" for image in images]
        parts.append("</section>")
    head = f"<meta charset='utf-8'><title>mila_kernels, run {html.escape(run_id)}</title><style>{_STYLE}</style>"
    return f"<!doctype html>\n<html lang='en'><head>{head}</head>\n<body>\n" + "\n".join(parts) + "\n</body></html>\n"


def _links(folder: Path, outcome: NotebookRow) -> str:
    names = [f"notebooks/{outcome.notebook}.{kind}" for kind in ("html", "ipynb")]
    return " · ".join(
        f"<a href='{html.escape(name)}'>{html.escape(name)}</a>" for name in names if (folder / name).exists()
    )


def _outcome_table(outcomes: Sequence[NotebookRow]) -> str:
    head = "<tr><th>notebook<th>status<th>seconds<th>cells run<th>rows written</tr>"
    rows = [
        f"<tr><td><a href='#{html.escape(o.notebook)}'>{html.escape(o.notebook)}</a><td class='{o.status}'>{o.status}"
        f"<td>{o.seconds or 0:.1f}<td>{o.cells_run} of {o.cells}<td>{html.escape(o.rows) or '–'}</tr>"
        for o in outcomes
    ]
    return f"<table>{head}{''.join(rows)}</table>"


def _provenance(folder: Path) -> str:
    row = asdict(results.read(folder, "runs")[-1])
    pairs = [f"{key} {value}" for key, value in row.items() if value not in (None, "")]
    return f"<p>{html.escape(', '.join(pairs))}</p>"
