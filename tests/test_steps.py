"""The registry of steps, their differences and the digest of what a step is made of."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from mila_kernels import paths, steps

HEADER = "// Change: c.\n// Prediction: p.\n// Measured: m.\n// Verdict: v.\n"
COMMON = """#pragma once
// A comment.
#ifdef __CUDACC__
#define DEVICE __device__
#else
#define DEVICE inline
#endif

namespace tools {

constexpr int WIDTH = 32;  // lanes

template <int width = WIDTH>
DEVICE float sum(float x) {
  for (int i = width; i > 0; i /= 2) {
    x += i;
  }
  return x;
}

DEVICE float unused(float x) { return x * 3.0f; }

}  // namespace tools

struct Pair { float a, b; };
DEVICE Pair pair(float x) { return {tools::sum(x), x}; }
"""
CODE = (
    '#include "../common.cuh"\nextern "C" const char* launch_step() { return pair(1.0f).a > 0 ? "a // b" : nullptr; }\n'
)


@pytest.fixture
def csrc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A source tree of its own with two steps of one op."""
    monkeypatch.setattr(paths, "CSRC", tmp_path)
    steps.forget()
    (tmp_path / "common.cuh").write_text(COMMON)
    (tmp_path / "op").mkdir()
    (tmp_path / "op/01_first.cu").write_text(HEADER + CODE)
    (tmp_path / "op/02_second.cu").write_text(HEADER + CODE.replace("> 0", ">= 0"))
    yield tmp_path
    steps.forget()


def write(path: Path, text: str) -> None:
    path.write_text(text)
    steps.forget()


def test_every_step_of_the_project_is_described() -> None:
    found = steps.steps()
    assert [s.id for s in steps.steps("prefill")][:2] == ["prefill/01_scalar", "prefill/02_smem_tiles"]
    for s in found:
        assert s.path == paths.CSRC / s.op / f"{s.name}.cu"
        assert s.change and s.prediction and s.measured and s.verdict
        assert s.predecessor is None or steps.step(s.predecessor).id == s.predecessor
        assert len(s.source_sha) == 12 and int(s.source_sha, 16) >= 0
    assert len({s.source_sha for s in found}) == len(found)


def test_ops_are_those_with_steps(csrc: Path) -> None:
    (csrc / "empty").mkdir()
    (csrc / "other").mkdir()
    write(csrc / "other/10_x.cu", HEADER + CODE)
    assert steps.ops() == ["op", "other"]
    assert [s.id for s in steps.steps()] == ["op/01_first", "op/02_second", "other/10_x"]
    assert [s.order for s in steps.steps("other")] == [10]


@pytest.mark.parametrize("name", ["op/01_first", "01_first", "op/01", "op/1", " op/01_first "])
def test_names_that_find_a_step(csrc: Path, name: str) -> None:
    assert steps.step(name).id == "op/01_first"
    assert steps.step(steps.step(name)).id == "op/01_first"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("op/01_frist", "close: op/01_first"),
        ("first", "close: op/01_first"),
        ("zzz", "known: op/01_first, op/02_second"),
    ],
)
def test_an_unknown_step_lists_close_names(csrc: Path, name: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        steps.step(name)


def test_an_unknown_op_is_named(csrc: Path) -> None:
    with pytest.raises(ValueError, match="'opp' has no steps; known: op"):
        steps.steps("opp")


def test_a_name_in_two_ops_is_ambiguous(csrc: Path) -> None:
    (csrc / "other").mkdir()
    write(csrc / "other/01_first.cu", HEADER + CODE)
    with pytest.raises(ValueError, match="op/01_first or other/01_first"):
        steps.step("01_first")


def test_a_step_must_be_named_by_a_string(csrc: Path) -> None:
    with pytest.raises(TypeError, match="not int"):
        steps.step(1)  # type: ignore[arg-type]


def test_the_first_lines_are_read(csrc: Path) -> None:
    extra = (
        "// Architectures: sm_80, sm_90a\n// Head dims: 64 512\n// Dtypes: bf16\n"
        "// Spills: on purpose,\n//   to show it.\n"
        "// Alignment: 2\n// Predecessor: none\n"
    )
    write(
        csrc / "op/03_third.cu", HEADER.replace("p.", "p1\n//   p2: and more.") + extra + "// Note: not read.\n" + CODE
    )
    with pytest.raises(ValueError, match="'Note' in the first lines must be one of Change"):
        steps.step("op/03")
    write(csrc / "op/03_third.cu", HEADER.replace("p.", "p1\n//   p2: and more.") + extra + "\n// Note: free.\n" + CODE)
    third = steps.step("op/03")
    assert third.prediction == "p1 p2: and more."
    assert third.architectures == ("sm_80", "sm_90a") and third.head_dims == (64, 512) and third.dtypes == ("bf16",)
    assert third.spills == "on purpose, to show it." and third.alignment == 2 and third.predecessor is None
    assert steps.step("op/02").predecessor == "op/01_first"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("// Change: c.\n", "'// Prediction: ...', '// Measured: ...', '// Verdict: ...'"),
        ("", "'// Change: ...'"),
        (HEADER + "// Architectures: sm90\n", "'// Architectures:' 'sm90' must look like"),
        (HEADER + "// Head dims: many\n", "'many' must be a positive integer"),
        (HEADER + "// Alignment: 12\n", "12 must be a power of two"),
        (HEADER + "// Dtypes: float\n", "'float' is not a dtype"),
        (HEADER.replace("Verdict: v.", "Verdict:"), "'// Verdict: ...'"),
    ],
)
def test_a_badly_described_step_names_file_and_line(csrc: Path, text: str, said: str) -> None:
    write(csrc / "op/03_third.cu", text + CODE)
    with pytest.raises(ValueError) as raised:
        steps.steps("op")
    assert "03_third.cu" in str(raised.value) and said in str(raised.value)


def test_two_steps_of_one_order_are_refused(csrc: Path) -> None:
    write(csrc / "op/02_again.cu", HEADER + CODE)
    with pytest.raises(ValueError, match="02_again and 02_second have the same order"):
        steps.steps()


def test_a_verdict_can_drop_a_step(csrc: Path) -> None:
    write(csrc / "op/02_second.cu", HEADER.replace("v.", "Slower by 57%: the softmax is on one warp.") + CODE)
    assert [s.kept for s in steps.steps("op")] == [True, False]


@pytest.mark.parametrize(
    ("architectures", "capability", "target"),
    [
        (("sm_80", "sm_90a"), (9, 0), "90a"),
        (("sm_80", "sm_90a"), (8, 0), "80"),
        (("sm_80", "sm_90a"), (8, 6), "86"),
        (("sm_80",), (9, 0), None),
        (("sm_90a",), (8, 9), None),
        (("sm_100a",), (10, 3), None),
        (("sm_89",), (8, 6), None),
        (("sm_120",), (12, 1), "121"),
    ],
)
def test_what_a_gpu_runs(architectures: tuple[str, ...], capability: tuple[int, int], target: str | None) -> None:
    assert steps.target(architectures, capability) == target


def test_diff_is_unified_text_and_side_by_side_html(csrc: Path) -> None:
    write(csrc / "op/02_second.cu", HEADER + CODE.replace("> 0", "< 0") + "// <b>&\n")
    shown = steps.diff("op/01", "op/02")
    lines = str(shown).splitlines()
    assert lines[:2] == ["--- op/01_first", "+++ op/02_second"]
    assert [line[0] for line in lines if ".a" in line] == ["-", "+"]
    page = shown._repr_html_()
    assert "&lt;b&gt;&amp;" in page and "<b>" not in page
    assert page.count('class="c"') == 2 and page.count('class="b"') == 1
    assert str(steps.diff("op/02")) == str(shown)
    assert str(steps.diff("op/01", "op/01")) == "" and "no difference" in steps.diff("op/01", "op/01")._repr_html_()
    with pytest.raises(ValueError, match="op/01_first has no predecessor"):
        steps.diff("op/01")


def test_headers_are_found_through_includes(csrc: Path) -> None:
    write(csrc / "op/args.cuh", '#include "../common.cuh"\n#include <vector>\n#include "no_such.h"\n')
    write(csrc / "op/01_first.cu", HEADER + '#include "args.cuh"\n  #  include "common.cuh"\n')
    assert steps.headers(csrc / "op/01_first.cu") == [csrc / "op/args.cuh", csrc / "common.cuh"]


NEUTRAL = {
    "comments": lambda text: text.replace("// A comment.", "/* another\n one */"),
    "a trailing comment": lambda text: text.replace("// lanes", "// threads"),
    "white space": lambda text: text.replace("  for (int i = width;", "\n\tfor ( int i=width ;"),
    "an unrelated function": lambda text: text + "\nDEVICE float other(float x) { return x; }\n",
    "a changed unused function": lambda text: text.replace("3.0f", "4.0f"),
    "an unused macro": lambda text: text + "\n#define OTHER(x) \\\n  (x)\n",
    "an unused type": lambda text: text + "\nenum Kind { KIND_A, KIND_B };\nusing other_t = float;\n",
}
MATERIAL = {
    "a used function": lambda text: text.replace("{tools::sum(x), x}", "{x, tools::sum(x)}"),
    "a function used through another": lambda text: text.replace("x += i;", "x -= i;"),
    "a constant used through others": lambda text: text.replace("WIDTH = 32", "WIDTH = 16"),
    "a macro in one branch": lambda text: text.replace("#define DEVICE inline", "#define DEVICE static inline"),
    "the condition of a branch": lambda text: text.replace("#ifdef __CUDACC__", "#ifdef OTHER"),
    "a used type": lambda text: text.replace("float a, b;", "float b, a;"),
    "an overload": lambda text: text + "\nDEVICE Pair pair(double x) { return {}; }\n",
    "a specialisation": lambda text: text + "\ntemplate <>\nDEVICE float tools::sum<1>(float x) { return x; }\n",
    "a static_assert": lambda text: text + "\nstatic_assert(sizeof(Pair) == 8);\n",
}


@pytest.mark.parametrize("change", NEUTRAL)
def test_source_sha_ignores(csrc: Path, change: str) -> None:
    before = steps.step("op/01").source_sha
    text = NEUTRAL[change](COMMON)
    assert text != COMMON
    write(csrc / "common.cuh", text)
    assert steps.step("op/01").source_sha == before


@pytest.mark.parametrize("change", MATERIAL)
def test_source_sha_sees(csrc: Path, change: str) -> None:
    before = steps.step("op/01").source_sha
    text = MATERIAL[change](COMMON)
    assert text != COMMON
    write(csrc / "common.cuh", text)
    assert steps.step("op/01").source_sha != before


def test_source_sha_of_the_step_itself(csrc: Path) -> None:
    before = steps.step("op/01").source_sha
    write(csrc / "op/01_first.cu", HEADER.replace("m.", "26.9 ms, 2026-11-29.") + "// more\n" + CODE)
    assert steps.step("op/01").source_sha == before
    write(csrc / "op/01_first.cu", HEADER + CODE.replace("a // b", "a // c"))  # not a comment: it is in a string
    assert steps.step("op/01").source_sha != before


def test_names_made_by_a_macro_count_as_used(csrc: Path) -> None:
    made = "\n#define MAKE(name, value) DEVICE float name() { return value; }\nMAKE(one, 1.0f)\n"
    write(csrc / "common.cuh", COMMON + made)
    before = steps.step("op/01").source_sha
    write(csrc / "common.cuh", COMMON + made.replace("1.0f", "2.0f"))
    assert steps.step("op/01").source_sha != before


def test_a_wrapper_of_the_project_only_touches_its_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the project's own sources: cp.async changes, and exactly the steps that copy with it do."""
    shutil.copytree(paths.CSRC, tmp_path / "csrc")
    monkeypatch.setattr(paths, "CSRC", tmp_path / "csrc")
    steps.forget()
    before = {s.id: s.source_sha for s in steps.steps()}
    wrappers = tmp_path / "csrc/ptx.cuh"
    text = wrappers.read_text()
    assert "cp.async.commit_group;" in text
    wrappers.write_text(text.replace("cp.async.commit_group;", "cp.async.commit_group ;"))
    steps.forget()
    changed = {s.id for s in steps.steps() if s.source_sha != before[s.id]}
    steps.forget()
    assert "prefill/05_cp_async" in changed and not {"prefill/01_scalar", "prefill/02_smem_tiles"} & changed


def test_a_step_that_includes_its_predecessor_differs_by_what_it_adds() -> None:
    """Not by the predecessor's code, which it has as well."""
    added = str(steps.diff("matvec_fp4/22"))
    removed = [line for line in added.splitlines() if line.startswith("-") and not line.startswith(("-//", "---"))]
    assert not removed
    assert "+struct TileCut {" in added and "matvec_x_in_registers" not in added


def test_a_step_is_another_when_the_step_that_it_includes_is(tmp_path: Path) -> None:
    head = "// Change: c\n// Prediction: p\n// Measured: m\n// Verdict: v\n"
    first, second = tmp_path / "01_first.cu", tmp_path / "02_second.cu"
    launcher = 'extern "C" const char* launch_step(const int* n) {{ return *n == {n} ? "n" : nullptr; }}\n'
    first.write_text(head + launcher.format(n=1))
    second.write_text(
        head + '#define launch_step launch_predecessor\n#include "01_first.cu"\n#undef launch_step\n\n'
        'extern "C" const char* launch_step(const int* n) { return launch_predecessor(n); }\n'
    )
    before = steps.from_file(second).source_sha
    first.write_text(head + launcher.format(n=2))
    steps.forget()
    assert steps.from_file(second).source_sha != before
