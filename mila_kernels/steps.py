"""The registry of optimisation steps: one ``csrc/<op>/<order>_<technique>.cu`` each, described by its first lines."""

from __future__ import annotations

import difflib
import functools
import hashlib
import html
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from . import paths
from .files import stamp

ARCHITECTURES = ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120")
HEAD_DIMS = (64, 128, 256, 512)
DTYPES = ("bf16", "fp16")
ALIGNMENT = 16

_REQUIRED = ("Change", "Prediction", "Measured", "Verdict")
_OPTIONAL = (
    "Architectures", "Head dims", "Dtypes", "Spills", "Predecessor", "Alignment", "Bound", "Rows", "Most rows",
    "Instances",
)  # fmt: skip
_FILE_NAME = re.compile(r"(\d+)_(\w+)\.cu")
_ARCHITECTURE = re.compile(r"sm_(\d+)(\d)([af]?)")
_DROPPED = ("failed", "rejected", "slower", "dropped", "ablation")


@dataclass(frozen=True)
class Step:
    """One optimisation step, as its source file describes it.

    ``op`` and ``name`` make the ``id`` (``prefill/01_scalar``); ``path`` is the CUDA source. ``predecessor`` is the id
    of the step that it changes, or None. ``spills`` is the reason for declared register spilling, or "".
    ``alignment`` is in bytes: what the addresses and strides of its tensors must be multiples of. ``bound`` is the
    relative L2 error that a step declares for itself, with its reason, where it cannot hold its op's; else None.
    ``rows`` is the fewest query rows a KV head has for the step to be chosen by itself: with fewer another is faster.
    ``most_rows`` is the most rows, in a matvec of activations, for which a step is chosen by itself; None: any number.
    ``instances`` names arguments; a library may be built for one value of each (``-DONLY_HEAD_DIM=512``), in a fraction
    of the time that all take.
    """

    op: str
    order: int
    name: str
    path: Path
    architectures: tuple[str, ...] = ARCHITECTURES
    predecessor: str | None = None
    change: str = ""
    prediction: str = ""
    measured: str = ""
    verdict: str = ""
    spills: str = ""
    head_dims: tuple[int, ...] = HEAD_DIMS
    dtypes: tuple[str, ...] = DTYPES
    alignment: int = ALIGNMENT
    bound: float | None = None
    rows: int = 1
    most_rows: int | None = None
    instances: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        return f"{self.op}/{self.name}"

    @property
    def kept(self) -> bool:
        """False where the verdict opens with a word such as "Failed" or "Slower": the step stays as a lesson only."""
        return not self.verdict.lower().startswith(_DROPPED)

    @property
    def source(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @property
    def source_sha(self) -> str:
        """12 hex digits over the step's code and the definitions of its headers that it uses, directly or not.

        Comments, white space and definitions that the step does not use leave it as it is.
        """
        return _source_sha(tuple((path, stamp(path)) for path in (self.path, *headers(self.path))))

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Whether a GPU of this compute capability can run the step."""
        return target(self.architectures, capability) is not None

    def __str__(self) -> str:
        return self.id


def target(architectures: Iterable[str], capability: tuple[int, int]) -> str | None:
    """What to compile for on a GPU of this capability ("90a", "89"), or None where none of ``architectures`` fits.

    ``sm_90a`` runs on capability 9.0 alone; ``sm_80`` runs on 8.0 to 8.9 and is then compiled for the GPU's own.
    """
    major, minor = capability
    best = None
    for name in architectures:
        listed_major, listed_minor, suffix = parse_architecture(name)
        if (listed_major, listed_minor) == (major, minor):
            return f"{major}{minor}{suffix}"
        if listed_major == major and listed_minor < minor and not suffix:
            best = f"{major}{minor}"
    return best


def parse_architecture(name: str) -> tuple[int, int, str]:
    """``sm_100a`` -> (10, 0, "a"); TypeError or ValueError for anything else."""
    if not isinstance(name, str):
        raise TypeError(f"architecture: a str such as sm_90a is needed, not {type(name).__name__}")
    match = _ARCHITECTURE.fullmatch(name)
    if not match:
        raise ValueError(f"architecture: {name!r} must look like sm_80, sm_90a or sm_120")
    return int(match[1]), int(match[2]), match[3]


def ops() -> list[str]:
    """The operations that have steps, sorted."""
    return list(dict.fromkeys(found.op for found in _registry().values()))


def steps(op: str | None = None) -> list[Step]:
    """The steps of one operation in their order, or of all operations.

    Raises:
        ValueError: an operation that has no steps, or a source file whose first lines do not describe a step.
    """
    if op is not None and op not in (known := ops()):
        raise ValueError(f"op: {op!r} has no steps; known: {', '.join(known) or 'none'}")
    return [found for found in _registry().values() if op is None or found.op == op]


def beside() -> list[Step]:
    """The kernels in ``csrc/OP/GROUP/NN_name.cu``, of the op GROUP: no steps of a ladder, but sources of results."""
    files = sorted(path for path in paths.CSRC.glob("*/*/*.cu") if _FILE_NAME.fullmatch(path.name))
    return [from_file(path, op=path.parent.name) for path in files]


def select(names: Sequence[str]) -> list[Step]:
    """Steps by name and all steps of an op by the op's, each once, in the order asked for; without names all steps.

    Raises:
        ValueError: as :func:`step`.
    """
    if not names:
        return steps()
    found = [one for name in names for one in (steps(name) if name in ops() else [step(name)])]
    return list(dict.fromkeys(found))


def step(name: str | Step) -> Step:
    """A step by its id (``prefill/01_scalar``), its op and order (``prefill/01``), or its name if only one op has it.

    ``<step> without <stage>`` is a variant of it that :mod:`mila_kernels.ablate` declares.

    Raises:
        ValueError: no such step, or more than one; the text lists close names.
    """
    if isinstance(name, Step):
        return name
    if not isinstance(name, str):
        raise TypeError(f"step: a name or a Step is needed, not {type(name).__name__}")
    everything = _registry()
    if name in everything:
        return everything[name]
    if " without " in name:
        from .ablate import ablated

        return ablated(name)
    found = [s for s in everything.values() if _answers_to(s, name.strip())]
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(f"step: {name!r} may be {' or '.join(s.id for s in found)}")
    raise ValueError(f"step: {name!r} is unknown; {_suggestions(name, list(everything))}")


def name_of(step: str | Step | None) -> str | None:
    """The name or id that stands for a step as an argument; None stays None. TypeError for anything else."""
    if step is None or isinstance(step, str):
        return step
    if isinstance(step, Step):
        return step.id
    raise TypeError(f"step: a name or a Step is needed, not {type(step).__name__}")


def choose(op: str, name: str | Step | None, misfit: Callable[[Step], str | None], rows: int | None = None) -> Step:
    """The step asked for; without one the fastest that fits: of the kept ones, and with ``rows`` of those for so many,
    the last; without ``rows`` of those for any number. ``misfit`` says why a step cannot run, or None. ValueError where
    the one asked for, or each, cannot."""
    if name is None:
        for candidate in _best_first(op, rows):
            if misfit(candidate) is None:
                return candidate
        raise ValueError(f"{op}: no step fits: {misfit(steps(op)[0])}")
    if isinstance(name, Step):
        chosen = name
    else:
        named = str(name_of(name))
        chosen = step(named if "/" in named else f"{op}/{named}")
    if chosen.op != op:
        raise ValueError(f"step: {chosen.id} is a step of {chosen.op}, not of {op}")
    reason = misfit(chosen)
    if reason:
        raise ValueError(f"step: {chosen.id} does not fit: {reason}")
    return chosen


def _best_first(op: str, rows: int | None) -> list[Step]:
    """An op's steps as :func:`choose` goes through them. Worked out once: it is asked for at every call of the op."""
    orders = _look().orders
    if (op, rows) not in orders:
        orders[op, rows] = sorted(steps(op), key=lambda s: (s.kept and _is_for(s, rows), s.order), reverse=True)
    return orders[op, rows]


def _is_for(s: Step, rows: int | None) -> bool:
    """Whether a step is one for so many rows; without a number, for any."""
    if rows is None:
        return s.most_rows is None
    return s.rows <= rows <= (rows if s.most_rows is None else s.most_rows)


def from_file(path: Path, op: str | None = None) -> Step:
    """The step that a source file anywhere describes; ``op`` is its folder's name unless given.

    Raises:
        ValueError: a file name that is not ``<order>_<technique>.cu``, or first lines that do not describe a step.
    """
    match = _FILE_NAME.fullmatch(path.name)
    if not match:
        raise ValueError(f"{path}: the name must be <order>_<technique>.cu")
    fields = _header(path)
    op = op or path.parent.name
    return Step(
        op=op,
        order=int(match[1]),
        name=path.stem,
        path=path,
        architectures=_list(path, fields, "Architectures", ARCHITECTURES),
        predecessor=_predecessor(op, fields.get("Predecessor")),
        change=fields["Change"],
        prediction=fields["Prediction"],
        measured=fields["Measured"],
        verdict=fields["Verdict"],
        spills=fields.get("Spills", ""),
        head_dims=tuple(_number(path, "Head dims", x) for x in _list(path, fields, "Head dims", map(str, HEAD_DIMS))),
        dtypes=_list(path, fields, "Dtypes", DTYPES),
        alignment=_power_of_two(path, "Alignment", fields.get("Alignment", str(ALIGNMENT))),
        bound=_bound(path, fields["Bound"]) if "Bound" in fields else None,
        rows=_number(path, "Rows", fields.get("Rows", "1")),
        most_rows=_number(path, "Most rows", fields["Most rows"]) if "Most rows" in fields else None,
        instances=_list(path, fields, "Instances", ()) if "Instances" in fields else (),
    )


# ---- differences -----------------------------------------------------------------------------------------------------

_STYLE = """<style>
.mk-diff{border-collapse:collapse;font:12px/1.35 monospace;width:100%;table-layout:fixed}
.mk-diff td{padding:0 4px;white-space:pre-wrap;overflow-wrap:anywhere;text-align:left;vertical-align:top}
.mk-diff td.n{width:3em;color:#888;text-align:right}
.mk-diff .a{background:rgba(220,60,60,.18)}.mk-diff .b{background:rgba(40,170,80,.18)}
.mk-diff .c{background:rgba(210,160,30,.16)}.mk-diff td.gap{color:#888;text-align:center}
.mk-diff th{text-align:left;padding:2px 4px}
</style>"""


@dataclass(frozen=True, repr=False)
class Diff:
    """The difference between two steps: ``str()`` is a unified diff, in a notebook it shows side by side."""

    a: Step
    b: Step
    context: int = 3

    def __repr__(self) -> str:
        return f"the difference of {self.a.id} and {self.b.id}"

    def __str__(self) -> str:
        lines = difflib.unified_diff(
            *self._lines(), fromfile=self.a.id, tofile=self.b.id, n=self.context, lineterm=""
        )  # fmt: skip
        return "".join(f"{line}\n" for line in lines)

    def _repr_html_(self) -> str:
        old, new = self._lines()
        rows = [f"<tr><th></th><th>{html.escape(self.a.id)}</th><th></th><th>{html.escape(self.b.id)}</th></tr>"]
        groups = list(difflib.SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes(self.context))
        for number, group in enumerate(groups):
            if number:
                rows.append('<tr><td class="gap" colspan="4">&#8943;</td></tr>')
            for opcode in group:
                rows.extend(_html_rows(opcode, old, new))
        if not groups:
            rows.append('<tr><td class="gap" colspan="4">no difference</td></tr>')
        return f'{_STYLE}<table class="mk-diff">{"".join(rows)}</table>'

    def _lines(self) -> tuple[list[str], list[str]]:
        return _expanded(self.a).splitlines(), _expanded(self.b).splitlines()


_INCLUDED_STEP = re.compile(r'^#define launch_step \w+\n#include "(\d\w+\.cu)"\n#undef launch_step\n', re.MULTILINE)


def _expanded(s: Step) -> str:
    """A step's source, with that of a step that it includes, and adds to, in its place."""
    return _INCLUDED_STEP.sub(lambda match: _expanded(from_file(s.path.parent / match[1], s.op)), s.source)


def diff(a: str | Step, b: str | Step | None = None, context: int = 3) -> Diff:
    """What changed from step ``a`` to step ``b``; with ``a`` alone, from its predecessor to it.

    Raises:
        ValueError: an unknown step, or ``a`` alone without a predecessor.
    """
    first = step(a)
    if b is not None:
        return Diff(first, step(b), context)
    if first.predecessor is None:
        raise ValueError(f"b: {first.id} has no predecessor; name the step to compare it with")
    return Diff(step(first.predecessor), first, context)


def _html_rows(opcode: tuple[str, int, int, int, int], old: list[str], new: list[str]) -> Iterator[str]:
    tag, i1, i2, j1, j2 = opcode
    paired = {"equal": "", "replace": "c"}.get(tag, "")
    for offset in range(max(i2 - i1, j2 - j1)):
        both = i1 + offset < i2 and j1 + offset < j2
        left = _html_cells(old, i1 + offset, i2, paired if both else "a")
        right = _html_cells(new, j1 + offset, j2, paired if both else "b")
        yield f"<tr>{left}{right}</tr>"


def _html_cells(lines: list[str], index: int, end: int, css: str) -> str:
    if index >= end:
        return '<td class="n"></td><td></td>'
    return f'<td class="n">{index + 1}</td><td class="{css}">{html.escape(lines[index])}</td>'


# ---- reading the first lines -----------------------------------------------------------------------------------------


_RECHECK_S = 0.5


@dataclass(frozen=True)
class _Look:
    """What the files were when they were last looked at: the steps by id, and by (op, rows) those best first."""

    at: float
    found: dict[str, Step]
    orders: dict[tuple[str, int | None], list[Step]]


_known: dict[Path, _Look] = {}


def _look() -> _Look:
    """The files are looked at no more than twice a second."""
    now = time.monotonic()
    known = _known.get(paths.CSRC)
    if known is None or now - known.at >= _RECHECK_S:
        files = [path for path in paths.CSRC.glob("*/*.cu") if _FILE_NAME.fullmatch(path.name)]
        folders = sorted({path.parent for path in files})
        found = {s.id: s for folder in folders for s in _in_order(p for p in files if p.parent == folder)}
        known = _known[paths.CSRC] = _Look(now, found, {})
    return known


def _registry() -> dict[str, Step]:
    """The steps by id, ops sorted, each op's in their order."""
    return _look().found


def forget() -> None:
    """Drop what was read, so that the next call looks at the files."""
    _known.clear()


def _in_order(files: Iterable[Path]) -> list[Step]:
    found = sorted((_read(path, stamp(path)) for path in files), key=lambda s: s.order)
    for before, after in zip(found, found[1:], strict=False):
        if before.order == after.order:
            raise ValueError(f"{before.op}: {before.name} and {after.name} have the same order")
    return [_with_predecessor(s, found[i - 1] if i else None) for i, s in enumerate(found)]


@functools.lru_cache(maxsize=1024)
def _read(path: Path, stamp: tuple[int, int]) -> Step:
    return from_file(path)


@functools.lru_cache(maxsize=1024)
def _with_predecessor(step: Step, before: Step | None) -> Step:
    if step.predecessor == "":
        return Step(**{**step.__dict__, "predecessor": None})
    if step.predecessor is None and before is not None:
        return Step(**{**step.__dict__, "predecessor": before.id})
    return step


def _predecessor(op: str, text: str | None) -> str | None:
    """None: the order decides; "": declared to have none."""
    if text is None:
        return None
    if text.lower() == "none":
        return ""
    return text if "/" in text else f"{op}/{text}"


def _header(path: Path) -> dict[str, str]:
    fields: dict[str, str] = {}
    key = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        match = re.match(r"// (\w[\w ]*?):(?:\s+(.*))?$", line)
        if match:
            key = match[1]
            if key not in _REQUIRED + _OPTIONAL:
                known = ", ".join(_REQUIRED + _OPTIONAL)
                raise ValueError(f"{path}: {key!r} in the first lines must be one of {known}")
            fields[key] = (match[2] or "").strip()
        elif key and re.match(r"//\s{2,}\S", line):
            fields[key] = f"{fields[key]} {line[2:].strip()}".strip()
        else:
            break
    missing = [name for name in _REQUIRED if not fields.get(name)]
    if missing:
        lines = ", ".join(f"'// {name}: ...'" for name in missing)
        raise ValueError(f"{path}: the first lines must have {lines}")
    return fields


def _list(path: Path, fields: dict[str, str], key: str, default: Iterable[str]) -> tuple[str, ...]:
    values = tuple(fields[key].replace(",", " ").split()) if key in fields else tuple(default)
    if not values:
        raise ValueError(f"{path}: '// {key}:' is empty")
    for value in values:
        if key == "Architectures" and not _ARCHITECTURE.fullmatch(value):
            raise ValueError(f"{path}: '// {key}:' {value!r} must look like sm_80, sm_90a or sm_120")
        if key == "Dtypes" and not re.fullmatch(r"[a-z]+\d\w*", value):
            raise ValueError(f"{path}: '// {key}:' {value!r} is not a dtype such as bf16")
    return values


def _number(path: Path, key: str, text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise ValueError(f"{path}: '// {key}:' {text!r} must be a positive integer")
    return int(text)


def _power_of_two(path: Path, key: str, text: str) -> int:
    number = _number(path, key, text)
    if number & (number - 1):
        raise ValueError(f"{path}: '// {key}:' {number} must be a power of two")
    return number


def _bound(path: Path, text: str) -> float:
    """The number in "4e-2, and why"."""
    match = re.fullmatch(r"(\d[\d.]*(?:e-?\d+)?),\s+\S.*", text)
    if not match or not 0 < float(match[1]) < 1:
        raise ValueError(f"{path}: '// Bound:' {text!r} must be an error below 1 and why: 4e-2, weights are rounded")
    return float(match[1])


def _answers_to(step: Step, name: str) -> bool:
    op, _, rest = name.rpartition("/")
    if op and op != step.op:
        return False
    return rest == step.name or bool(op) and rest.isdigit() and int(rest) == step.order


def _suggestions(name: str, known: list[str]) -> str:
    short = {step_id: step_id.rpartition("/")[2] for step_id in known}
    close = difflib.get_close_matches(name, [*known, *short.values()], n=5, cutoff=0.5)
    matches = [i for i in known if i in close or short[i] in close or name.rpartition("/")[2] in short[i]]
    return f"close: {', '.join(matches)}" if matches else f"known: {', '.join(known) or 'none'}"


# ---- the digest of what a step is made of ----------------------------------------------------------------------------

_TOKEN = re.compile(
    r"""
    (?P<comment>//(?:\\\n|[^\n])*|/\*.*?\*/)
  | (?P<raw>(?:u8|[uUL])?R"(?P<mark>[^()\\\s]{0,16})\(.*?\)(?P=mark)")
  | (?P<string>(?:u8|[uUL])?"(?:\\.|[^"\\\n])*")
  | (?P<number>\.?\d(?:[eEpP][+-]|'?[\w.])*)
  | (?P<char>(?:u8|[uUL])?'(?:\\.|[^'\\\n])+')
  | (?P<word>[A-Za-z_]\w*)
  | (?P<space>(?:\\\n|\s)+)
  | (?P<mark_>\#\#|::|->|<<=|>>=|.)
    """,
    re.VERBOSE | re.DOTALL,
)
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)
_NOT_NAMES = frozenset(
    "alignas asm __asm__ __attribute__ __align__ __launch_bounds__ __declspec decltype noexcept requires sizeof "
    "static_assert explicit if while for switch return defined _Pragma __pragma".split()
)
_WORD = re.compile(r"[A-Za-z_]\w*")


class _Chunk(NamedTuple):
    """One top-level definition: its text without comments, what it defines, and every identifier in it."""

    text: str
    names: frozenset[str]
    words: frozenset[str]


def headers(path: Path) -> list[Path]:
    """The project's headers that a source reaches by ``#include "..."``, resolved, each once, in order of first use.

    An include is looked for beside the file that has it, then in ``csrc/``; what is in neither (a system header in
    quotes) is left out.
    """
    seen: dict[Path, None] = {}
    pending = [path]
    while pending:
        current = pending.pop(0)
        for name in _includes(current, stamp(current)):
            for folder in (current.parent, paths.CSRC):
                candidate = Path(_normal(folder / name))
                if candidate.is_file():
                    if candidate not in seen and candidate != path:
                        seen[candidate] = None
                        pending.append(candidate)
                    break
    return list(seen)


def _normal(path: Path) -> str:
    # Not resolve(): the layout that "../" walks is that of the names, also where folders are links.
    return os.path.abspath(path)


@functools.lru_cache(maxsize=1024)
def _includes(path: Path, stamp: tuple[int, int]) -> tuple[str, ...]:
    return tuple(_INCLUDE.findall(path.read_text(encoding="utf-8")))


@functools.lru_cache(maxsize=1024)
def _source_sha(files: tuple[tuple[Path, tuple[int, int]], ...]) -> str:
    (path, _), *reached = files
    code = _plain(path.read_text(encoding="utf-8"))
    words = set(_WORD.findall(code))
    # The emulation stands in for the language: it is not what a step is made of.
    chunks = [c for header, stamp in reached if paths.EMULATION not in header.parents for c in _chunks(header, stamp)]
    used = _closure(words, chunks)
    return hashlib.sha256("\0".join([code, *sorted(used)]).encode()).hexdigest()[:12]


def _closure(words: set[str], chunks: list[_Chunk]) -> set[str]:
    used: set[str] = set()
    waiting = chunks
    while True:
        hit = [c for c in waiting if not c.names or c.names & words]
        if not hit:
            return used
        waiting = [c for c in waiting if c not in hit]
        for chunk in hit:
            used.add(chunk.text)
            words |= chunk.words


def _plain(text: str) -> str:
    """Code without comments, tokens one space apart, a line for each preprocessor directive."""
    out: list[str] = []
    line_start, directive = True, False
    for match in _TOKEN.finditer(text):
        kind, token = match.lastgroup, match[0]
        if kind in ("comment", "space"):
            newline = "\n" in (token.replace("\\\n", "") if kind == "space" else "")
            if newline and directive:
                out.append("\n")
                directive = False
            line_start = line_start or newline
            continue
        if token == "#" and line_start and not directive:
            directive = True
            out.append("\n")
        out.append(token)
        line_start = False
    return re.sub(r" ?\n[ \n]*", "\n", " ".join(out)).strip()


@functools.lru_cache(maxsize=256)
def _chunks(path: Path, stamp: tuple[int, int]) -> tuple[_Chunk, ...]:
    """A header cut into its top-level definitions; the condition of an enclosing ``#if`` belongs to each."""
    pieces: list[str] = []
    current: list[str] = []
    conditions: list[str] = []
    depths: list[int] = []
    depth = 0

    def close() -> None:
        text = " ".join(current).strip()
        if text:
            pieces.append("\n".join([*conditions, text]))
        current.clear()

    for line in _plain(path.read_text(encoding="utf-8")).split("\n"):
        if line.startswith("#"):
            keyword = (line[1:].split() or [""])[0]
            if keyword in ("if", "ifdef", "ifndef"):
                depths.append(depth)
                if depth == 0 and not current:
                    conditions.append(line)
                    continue
                conditions.append("")
            elif keyword in ("else", "elif", "elifdef", "elifndef") and depths:
                depth = depths[-1]
                if conditions[-1]:
                    conditions[-1] += f" {line}"
                    continue
            elif keyword == "endif" and depths:
                depths.pop()
                if conditions.pop():
                    continue
            elif keyword in ("include", "pragma") and depth == 0 and not current:
                continue
            elif keyword in ("define", "undef") and depth == 0 and not current:
                pieces.append("\n".join([*filter(None, conditions), line]))
                continue
            current.append(f"\n{line}\n")
            continue
        depth = _split_statements(line, depth, current, close)
    close()
    chunks = [_chunk(piece) for piece in pieces]
    macros = {name for c in chunks if _defines_macro(c.text) for name in c.names}
    # What a macro call defines cannot be told from here.
    return tuple(c if _defines_macro(c.text) or not c.names & macros else c._replace(names=frozenset()) for c in chunks)


def _defines_macro(text: str) -> bool:
    return text.rpartition("\n")[2].startswith(("# define", "# undef"))


def _split_statements(line: str, depth: int, current: list[str], close: Callable[[], None]) -> int:
    tokens = [m[0] for m in _TOKEN.finditer(line) if m.lastgroup != "space"]
    for i, token in enumerate(tokens):
        following = tokens[i + 1] if i + 1 < len(tokens) else ""
        if token == "{" and depth == 0 and _is_transparent(current):
            current.clear()  # a namespace or extern "C" block only wraps definitions
            continue
        if token == "}" and depth == 0:
            continue  # the end of such a block
        current.append(token)
        if token in "({[":
            depth += 1
        elif token in ")}]":
            depth = max(0, depth - 1)
        if depth == 0 and (token == ";" or token == "}" and following not in (";", ",", "(", ")")):
            close()
    return depth


def _is_transparent(current: list[str]) -> bool:
    words = [t for t in current if t not in ("::", "inline")]
    return bool(words) and (words[0] == "namespace" and "=" not in words or words == ["extern", '"C"'])


def _chunk(text: str) -> _Chunk:
    body = [line for line in text.split("\n") if line.strip()]
    return _Chunk(text, frozenset(_names("\n".join(body))), frozenset(_WORD.findall(text)))


def _names(text: str) -> set[str]:
    """What a top-level piece defines; empty (then it counts as always used) where that cannot be told."""
    lines = text.split("\n")
    if _defines_macro(text):
        return {lines[-1].split()[2]}
    code = " ".join(line for line in lines if not line.startswith("#"))
    code = re.sub(r"^(?:template < (?:.*? )?> (?=[A-Za-z_]))+", "", code) if code.startswith("template") else code
    if re.match(r"using namespace|static_assert|template", code):
        return set()
    alias = re.match(r"using (\w+)", code)
    if alias:
        return {alias[1]}
    enum = re.match(r"enum (?:class |struct )?(\w+)?", code)
    if enum:
        return set(_WORD.findall(code.partition("{")[2])) | ({enum[1]} if enum[1] else set())
    record = re.match(r"(?:typedef )?(?:struct|class|union) (?:\w+ \( .*? \) )*(\w+)(?: final)?(?= [{:;<])", code)
    if record:
        return {record[1], *re.findall(r"} (\w+) ;$", code)}
    if code.startswith("typedef"):
        return set(re.findall(r"(\w+)(?: \[ \w* \])* ;$", code))
    head = re.split(r" [={]", code, maxsplit=1)[0]
    if "operator" in head.split():
        return set()
    called = [m[1] for m in re.finditer(r"(\w+)(?: <(?: [\w:,*&<>]+)* >)? \(", f"{head} ") if m[1] not in _NOT_NAMES]
    if called:
        return {called[0]} if _WORD.fullmatch(called[0]) else set()
    return set(re.findall(r"(\w+)(?: \[[^\]]*\])*(?= ;|$)", head)) - _NOT_NAMES
