"""Steps with a stage left out: what the rest then takes tells how much of the whole that stage was waited for.

The result of such a step is wrong, and meant to be. Nothing but its time is of interest, which has a table of its own,
``ablations``, so that it is never taken for a step's. A variant is called ``<step> without <stage>``, as in
``prefill/07_softmax_spread without softmax``, and is looked up by that name like any step. Its source is the step's
with the edits declared here. Each must find its text exactly once, so that a step that changes cannot lose its
ablations unnoticed.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from . import paths, steps
from .files import stamp, write_atomically
from .steps import Step

WITHOUT = " without "
WITH = " with "  # before the argument that a row's step was called with: its source is the step's own

Edits = tuple[tuple[str, str], ...]  # (text that stands once in the source, what takes its place)

_UNTIL = "\n...\n"  # in a text: all from what stands before it to the first place of what stands after it


_COPIES: Edits = (("    cp_async_cg_zfill(smem_u32(&tile[j][column]), source, j < count ? 16 : 0);\n", ""),)
_SCORES: Edits = (("        mma_m16n8k16<T>(s_regs, q_regs[k]\n...\n[column + 8]));\n", ""),)
_VALUES: Edits = (("#pragma unroll\n    for (int k = 0; k < Bc; k += 16) {\n...\n      }\n    }\n  }\n", "  }\n"),)
_NEXT_COPY = "    cp_async_wait_group<1>();\n"
_STORES = "  }\n\n#pragma unroll\n  for (int i = 0; i < S_GROUPS; ++i) {\n"

# The codes as they come, two registers from a word.
_W4A8_RAW_WORDS = """      for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 4; ++j) a[i][j] = j < 2 ? (i % 2 ? words[i / 2].z : words[i / 2].x) : words[i / 2].y;
"""
_W4A8_RAW = f"""      uint4 words[2];
      load_block(words, scale, smem.w[stage][my_block]);
{_W4A8_RAW_WORDS}"""
# Step to stage to edits. A stage is all that would go with it: its loads from shared memory, its arithmetic and what it
# writes. Barriers stay, so that the rest runs in the same order.
ABLATIONS: Mapping[str, Mapping[str, Edits]] = {
    "prefill/06_qk_mma": {
        "copies": _COPIES,
        "scores": _SCORES,
        "softmax": (("    if (threadIdx.x < Br) {  // one thread a row\n...\n" + _NEXT_COPY, _NEXT_COPY),),
        "values": _VALUES,
    },
    "prefill/07_softmax_spread": {
        "copies": _COPIES,
        "scores": _SCORES,
        "softmax": (("#pragma unroll\n    for (int i = 0; i < ROWS; ++i) {\n...\n" + _NEXT_COPY, _NEXT_COPY),),
        "values": _VALUES,
    },
    "prefill/15_split_qk": {
        "copies": (
            ("      cp_async_cg(swizzled<T, HS>(tile_smem, r + i, chunk), source + i * stride);\n", "      ;\n"),
            ("      cp_async_cg_zfill(swizzled<T, HS>(tile_smem\n...\nr + i < live ? 16 : 0);\n", "      ;\n"),
        ),
        "scores": (("    load_fragments(0);\n...\n    // Of its two partial sums", "    // Of its two partial sums"),),
        "softmax": (
            ("    const bool masked = tile < last_row.begin\n...\n    __syncthreads();", "    __syncthreads();"),
            # With it goes the rescale of O, which reads a factor that is nearly always 1.
            (
                "there\n\n#pragma unroll\n    for (int i = 0; i < S_GROUPS; ++i) {\n...\n" + _NEXT_COPY,
                "there\n" + _NEXT_COPY,
            ),
            (
                "#pragma unroll\n    for (int i = 0; i < ROW_GROUPS; ++i) {\n...\n    constexpr int V_PAIRS",
                "    constexpr int V_PAIRS",
            ),
        ),
        "values": (("    load_v_fragment(0);\n...\n" + _STORES, _STORES),),
    },
    "gemm_w4a8/08_warp_specialised": {
        "additions": (("        add_scaled(acc_regs[batch], scale, sums);\n", ""),),
        "decoding": (("      load_a(a, scale, smem.w[stage][my_block]);\n", _W4A8_RAW),),
    },
    "gemm_w4a8/10_batches_in_flight": {
        "additions": (
            (
                "        if (batch == 0) {\n          add_scaled(acc_regs[BATCHES - 1], last_scale, sums[1]);\n",
                "        if (batch == 0) {\n",
            ),
            ("          add_scaled(acc_regs[batch - 1], scale, sums[(batch - 1) % 2]);\n", ""),
        ),
        "decoding": (("      unfold(a, words);\n", _W4A8_RAW_WORDS),),
    },
    # Without its decoding, whose registers the next group's words take, the compiler would serialise its products.
    "gemm_w4a8/12_codes_early": {"additions": (("        add_scaled(acc_regs[batch], scale, sums);\n", ""),)},
}


@dataclass(frozen=True)
class Ablated(Step):
    """A step without one of its stages. ``path`` is its source, in the cache; ``source_sha`` is the variant's own."""

    base: str = ""
    stage: str = ""

    @property
    def source_sha(self) -> str:
        return digest(self.base, self.stage)


def names(step: str | Step | None = None) -> list[str]:
    """The ids of the variants of a step, or of all, in the order in which they are declared."""
    chosen = ABLATIONS if step is None else [steps.step(step).id]
    return [f"{name}{WITHOUT}{stage}" for name in chosen for stage in ABLATIONS.get(name, ())]


def ablated(name: str) -> Ablated:
    """The variant of that name: ``prefill/07_softmax_spread without softmax``, or ``prefill/07 without softmax``.

    ValueError for a step or stage that has none (the text lists those there are), and where an edit's text does not
    stand exactly once in the step's source.
    """
    of, _, stage = name.partition(WITHOUT)
    base = steps.step(of.strip())
    stage = stage.strip()
    if stage not in ABLATIONS.get(base.id, ()):
        known = ", ".join(names(base)) or f"none of it; there are {', '.join(names())}"
        raise ValueError(f"step: {name!r} is not declared; known: {known}")
    found = _ablated(base, stage, stamp(base.path), paths.cache_dir())
    if not found.path.is_file():  # the cache was emptied under a living process
        _ablated.cache_clear()
        found = _ablated(base, stage, stamp(base.path), paths.cache_dir())
    return found


@functools.lru_cache(maxsize=64)
def _ablated(base: Step, stage: str, stamp: tuple[int, int], cache: Path) -> Ablated:
    same = {field.name: getattr(base, field.name) for field in fields(Step)}
    told = {
        "name": f"{base.name}{WITHOUT}{stage}", "path": _file(base, stage), "predecessor": base.id,
        "change": f"the step without its stage '{stage}'", "prediction": "wrong results; its time is what is asked for",
        "measured": "", "verdict": "ablation: the result is wrong",
    }  # fmt: skip
    return Ablated(**{**same, **told}, base=base.id, stage=stage)


def digest(base: str, stage: str) -> str:
    """What a variant is made of, as 12 hex digits: its step's ``source_sha`` and the edits. Reads no variant's file."""
    parts = [steps.step(base).source_sha, *(text for edit in ABLATIONS[base][stage] for text in edit)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def digests() -> Iterator[tuple[tuple[str, str], str]]:
    """(op, name) and digest of every variant whose step there is."""
    known = {step.id: step for step in steps.steps()}
    for base, stages in ABLATIONS.items():
        for stage in stages if base in known else ():
            yield (known[base].op, f"{known[base].name}{WITHOUT}{stage}"), digest(base, stage)


def source(base: str | Step, stage: str) -> str:
    """The step's source without the stage. ValueError naming the edit whose text does not stand exactly once."""
    step = steps.step(base)
    text = step.source
    for old, new in ABLATIONS[step.id][stage]:
        text = _replaced(text, old, new, f"{step.id}{WITHOUT}{stage}")
    return re.sub(r'^(#include ")([^"\n]+)"', lambda found: _include(step.path, found), text, flags=re.MULTILINE)


def _replaced(text: str, old: str, new: str, what: str) -> str:
    first, gap, last = old.partition(_UNTIL)
    if text.count(first) != 1:
        raise ValueError(f"{what}: {text.count(first)} places in the source read {first.strip()!r}, not one")
    start = text.index(first)
    if not gap:
        return text[:start] + new + text[start + len(first) :]
    end = text.find(last, start + len(first))
    if end < 0:
        raise ValueError(f"{what}: nothing after {first.strip()!r} reads {last.strip()!r}")
    return text[:start] + new + text[end + len(last) :]


def _include(source: Path, found: re.Match[str]) -> str:
    """The variant lies elsewhere: its includes are looked up from csrc/."""
    header = Path(os.path.abspath(source.parent / found[2]))
    return f'{found[1]}{header.relative_to(paths.CSRC).as_posix()}"' if header.is_file() else found[0]


def _file(base: Step, stage: str) -> Path:
    """The variant's source as a file in the cache, written whole or not at all."""
    from .build_cache import writable_cache

    text = source(base, stage)
    folder = writable_cache() / "ablations" / hashlib.sha256(text.encode()).hexdigest()[:16] / base.op
    file = folder / f"{base.name}_without_{re.sub(r'[^a-z0-9]+', '_', stage)}.cu"
    if not file.is_file() or file.read_text(encoding="utf-8") != text:
        write_atomically(file, text.encode())
    return file
