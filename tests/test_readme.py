"""The README: its generated parts are current, its commands exist, its links lead somewhere; and what generates it."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from mila_kernels import notebook, parity, paths, reference, report, results, shapes, steps
from mila_kernels.__main__ import main

README = (paths.ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```\w*\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
COMMANDS = [line.split("  #")[0].strip() for block in BLOCKS for line in block.splitlines()]


def test_generated_parts_are_current() -> None:
    assert report.readme(README, "h200") == README, "`make figures` writes them"


def test_links_lead_somewhere() -> None:
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert links
    assert [link for link in links if link and not (paths.ROOT / link).exists()] == []


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (paths.ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:`|^)make ([a-z]+)\b", README, re.MULTILINE))
    assert {"reproduce", "test", "lab", "static"} <= named <= targets


def usage(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", sorted(set(re.findall(r"python -m mila_kernels (\w+)", README))))
def test_commands_exist(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f" {command} " in usage(command, capsys)


def test_options_exist(capsys: pytest.CaptureFixture[str]) -> None:
    """Every command line of the README has options that its command knows."""
    lines = [shlex.split(line)[3:] for line in COMMANDS if line.startswith("python -m mila_kernels ")]
    assert lines
    for command, *words in lines:
        known = usage(command, capsys)
        assert [word for word in words if word.startswith("-") and word not in known] == []


def test_the_examples_can_be_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    examples = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert examples
    for example in examples:
        names: dict[str, Any] = {}
        exec(compile(example, "README.md", "exec"), names)
        o, q, k, v = (names[name] for name in "oqkv")
        assert parity.compare(o, reference.attention(q, k, v)[0], 2.0**-8).passed
    assert "+" in capsys.readouterr().out


def test_first_screen() -> None:
    """One sentence, chart, table, the two commands, and a machine without a GPU, before the first section."""
    first = README.partition("\n## ")[0]
    order = [
        first.index(part)
        for part in ("generated: ladder", "generated: steps", "make reproduce   ", "make test   ", "No GPU?")
    ]
    assert order == sorted(order)


def test_no_part_is_lost_or_invented() -> None:
    with pytest.raises(ValueError, match="each of .* must be opened and ended once"):
        report.readme(README.replace("<!-- end: steps -->", ""), "h200")
    with pytest.raises(ValueError, match="opened"):
        report.readme(README + "\n<!-- generated: news -->\n<!-- end: news -->\n", "h200")
    current = report.readme(README, "h200")
    aged = current.replace("make clean ", "make tidy ")
    assert aged != current and report.readme(aged, "h200") == current


def test_check_tells_an_old_readme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "README.md"
    current = report.readme(README, "h200")
    copy.write_text(current.replace("make clean ", "make tidy "))
    monkeypatch.setattr(report, "README", copy)
    parser = argparse.ArgumentParser()
    report.add_arguments(parser)
    assert report.main(parser.parse_args(["--readme", "--check"])) == 1
    assert "make tidy " in copy.read_text()  # --check writes nothing
    assert report.main(parser.parse_args(["--readme"])) == 0
    assert copy.read_text() == current
    assert report.main(parser.parse_args(["--readme", "--check"])) == 0
    assert report.main(parser.parse_args(["--check"])) == 2
    assert "--check goes with --readme" in capsys.readouterr().err


# --- the generator, on rows of its own ---


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Rows for two steps: one timed twice, one failed; results of a run that measured its ceilings."""
    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    folder = tmp_path / "h200"
    results.append(
        folder,
        results.RunRow(
            run_id="r1", utc="2026-11-29T18:00:00Z", gpu="NVIDIA H200", driver="580.1", cuda="13.0", torch="2.13.0",
            read_gbps=4500.0, bf16_tflops=700.0,
        ),
    )  # fmt: skip
    workload = shapes.workload("prefill/published-instance")
    one = steps.step("prefill/01")
    common = {
        "op": "prefill", "run_id": "r1", "workload": workload.name, "shape": workload.shape, "dtype": "bf16",
        "cache": "cold",
    }  # fmt: skip
    timed = {"warmup": 3, "n": 50, "flops": 7e10, "bytes": 3e7, "status": "ok"}
    for micros in (30_000.0, 20_000.0):
        spread = {"median_us": micros, "p10_us": micros * 0.99, "p90_us": micros * 1.1, "min_us": micros * 0.98}
        results.append(folder, results.TimingRow(step=one.name, source_sha=one.source_sha, **common, **timed, **spread))
    failed = {"step": "02_smem_tiles", "source_sha": "0" * 12, "status": "failed", "error": "out of memory"}
    results.append(folder, results.TimingRow(**common, **failed))
    for seed, error in enumerate((1.5e-3, 1.7e-3)):
        results.append(
            folder,
            results.ParityRow(
                run_id="r1", op="prefill", step=one.name, source_sha=one.source_sha, backend="cuda",
                shape=workload.shape, seed=seed, rel_l2=error, max_abs=0.1, nonfinite=0, bound=3.9e-3, passed=True,
            ),
        )  # fmt: skip
    return folder


def test_the_table_of_steps(rows: Path) -> None:
    table = report.steps_table("prefill", "h200").set_index("step")
    scalar, tiles, third = table.iloc[0], table.iloc[1], table.iloc[2]
    assert (scalar["ms"], scalar["share of the limit"], scalar["error"]) == ("20.0", "0.50 %", "1.7e-03")
    assert (tiles["ms"], tiles["share of the limit"], tiles["error"]) == ("failed", "", "not recorded")
    assert (third["ms"], third["error"]) == ("not recorded", "not recorded")
    assert scalar["change"] == report.headline(steps.step("prefill/01").change)


def test_a_row_of_older_code_is_marked(rows: Path) -> None:
    text = (rows / "timings.csv").read_text()
    (rows / "timings.csv").write_text(text.replace(steps.step("prefill/01").source_sha, "f" * 12))
    assert report.steps_table("prefill", "h200")["ms"][0] == "20.0 (stale)"


def test_an_error_above_its_bound_is_said(rows: Path) -> None:
    text = (rows / "parity.csv").read_text()
    (rows / "parity.csv").write_text(text.replace("0.0017,", "0.0047,").replace("true\n", "false\n"))
    assert report.steps_table("prefill", "h200")["error"][0] == "4.7e-03, above its bound"


def test_a_probe_is_no_error_but_fails_loudly(rows: Path) -> None:
    def add(shape: str, rel_l2: float, passed: bool, step: str = "01_scalar", sha: str = "a" * 12) -> None:
        results.append(rows, results.ParityRow(run_id="r1", op="prefill", step=step, source_sha=sha, backend="cuda",
                                               shape=shape, seed=0, rel_l2=rel_l2, max_abs=0.1, nonfinite=0,
                                               bound=0.5, passed=passed))  # fmt: skip

    shape = shapes.workload("prefill/published-instance").shape
    add(f"{shape} mean", 0.1, True)
    assert report.steps_table("prefill", "h200")["error"][0] == "1.7e-03"
    add(f"{shape} mask", 0.3, False)
    assert report.steps_table("prefill", "h200")["error"][0] == "1.7e-03, fails a probe"
    assert report.peers_error("prefill", "h200") == ""
    add(shape, 2.2e-3, True, "torch SDPA", "")
    add("b1 q7h1 kv5h1 d64 causal bf16", 0.9, False, "torch SDPA", "")
    add("b1 q9h1 kv9h1 d64 causal bf16", 2.6e-3, True, "torch SDPA", "")
    said = "Error on the inputs that both were compared on: steps 1.7e-03, torch SDPA 2.2e-03.\n"
    assert report.peers_error("prefill", "h200") == said and said in report.PARTS["steps"]("h200")


def test_charts_of_recorded_rows(rows: Path) -> None:
    files = [file.name for file in report.draw("h200")]
    assert files == [
        f"{name}.{kind}" for name in ("ladder-prefill", "roofline", "errors-prefill") for kind in ("svg", "png")
    ]
    assert report.device("h200") == "H200"
    assert report.draw("nowhere") == []


def test_older_words_in_an_executed_notebook_are_told(rows: Path) -> None:
    name = "prefill/01_scalar"
    card = notebook.cards([name, "prefill/02"], "change", "verdict")
    for stem, shown in (("01_same", card), ("02_older", card.replace("*Verdict:* Kept", "*Verdict:* Left", 1))):
        data = {"data": {"text/markdown": shown}}
        cells = [{"source": 'notebook.cards(names, "change", "verdict")', "outputs": [data]}, {"source": "# words"}]
        (rows / "notebooks").mkdir(exist_ok=True)
        (rows / "notebooks" / f"{stem}.ipynb").write_text(json.dumps({"cells": cells}))
    assert report.stale_cards("h200") == [f"02_older: {name}, verdict"]


def test_scaling_takes_whole_sequences(rows: Path) -> None:
    one = steps.step("prefill/01")
    for n in (512, 1024):
        shape = shapes.attention_workload(q_heads=16, kv_heads=1, head_dim=512, q_len=n, kv_len=n).shape
        results.append(
            rows,
            results.TimingRow(
                run_id="r1", op="prefill", step=one.name, source_sha=one.source_sha, shape=shape, dtype="bf16",
                cache="cold", warmup=3, n=50, flops=1e9 * n, bytes=1e5 * n, status="ok",
                median_us=9.0 * n, p10_us=8.9 * n, p90_us=9.1 * n, min_us=8.8 * n,
            ),
        )  # fmt: skip
    charts = dict(report.figures("h200"))
    assert "scaling-prefill-b1-qh16-kvh1-d512-causal-bf16" in charts


def test_exports(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.render("steps", "h200", "prefill").startswith("| op | step | change | ms |")
    assert report.render("timings", "h200", "prefill", "csv").count("\n") == 3
    assert r"\begin{tabular}" in report.render("parity", "h200", None, "latex")
    with pytest.raises(ValueError, match="table must be one of"):
        report.render("times", "h200")
    with pytest.raises(ValueError, match="op"):
        report.render("steps", "h200", "sorting")


def test_machine_part_names_the_run(rows: Path) -> None:
    text = report.PARTS["machine"]("h200")
    assert "NVIDIA H200 on 2026-11-29" in text and "BF16 matmul 700 TFLOP/s" in text and "FP8" not in text


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("O in registers, not in shared memory. Then more.", "O in registers, not in shared memory"),
        ("packed GQA rows of one KV head: 64 rows a block; more.", "Packed GQA rows of one KV head"),
        ("split-K. Blocks over the keys write sums. More.", "Split-K. Blocks over the keys write sums"),
        ("ring: three tiles; a barrier each.", "Ring: three tiles; a barrier each"),
        ("1.2 times faster at sm_90. And so on.", "1.2 times faster at sm_90"),
        ("cp.async for K", "cp.async for K"),
        ("not yet.", "Not yet"),
    ],
)
def test_headlines(text: str, short: str) -> None:
    assert report.headline(text) == short


def test_published_figures_stand_beside_their_steps() -> None:
    found = report.published("prefill", "prefill/published-instance")
    if not report.PUBLISHED.exists():
        pytest.skip("data/published.csv is not there")
    ms = dict(zip(found["step"], found["ms"], strict=True))
    assert ms["01_scalar"] == 127 and ms["02_smem_tiles"] == 103
    assert ms["06_qk_mma"] == pytest.approx(1.57 * 22.8), "only a percentage over the step before was published"
    assert found["slower"].dropna().tolist() == [57]
    assert list(ms) == sorted(ms) and set(found["gpu"]) == {"RTX 4070"} and found["source"].str.len().min() > 0
    assert isinstance(found, pd.DataFrame)
