"""The command line: ``python -m mila_kernels COMMAND``; exit code 0 all well, 1 a check or case failed, 2 wrong use."""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from . import paths

if TYPE_CHECKING:
    from .peers import Peer
    from .results import RunWriter
    from .shapes import Workload
    from .steps import Step

OK, FAILED, WRONG_USE = 0, 1, 2
ERROR_LINES = 12  # of a failed case: a report of check mode fits, a compiler's templates do not
T = TypeVar("T")

# Small enough for a minute of emulation, and no length a multiple of a tile: the edges are where kernels break.
CHECK_SHAPES = {
    "prefill": (
        "b1 q40h4 kv97h1 d512 causal bf16",
        "b2 q33h4 kv33h2 d128 causal fp16",
        "b1 q17h2 kv70h2 d256 w32 causal bf16",
        "b1 q5h2 kv45h1 d64 full bf16",
        "b1 q20h2 kv3h1 d128 causal bf16",
    ),
    "prefill_ring": (
        "b1 q70h2 kv97h1 d256 w32 causal bf16",
        "b2 q33h4 kv33h2 d128 w16 causal fp16",
        "b1 q9h2 kv75h2 d64 w20 causal bf16",
    ),
    "decode": (
        "b1 q1h16 kv129h1 d512 bf16 kvbf16 page64",
        "b2 q1h8 kv65h4 d512 bf16 kvbf16 page64",
        "b1 q3h4 kv40h2 d128 fp16 kvfp16 page16",
        "b9 q1h16 kv65h8 d64 bf16 kvbf16 page16",  # more heads than half of the multiprocessors: few pieces each
        "b40 q1h16 kv33h1 d64 bf16 kvbf16 page16",
    ),
    "matvec_fp4": ("n70 k256 m1 bf16", "n33 k384 m3 fp16"),
    "matvec_fp8": ("n70 k256 m1 bf16", "n33 k384 m3 fp16"),
    "gemm_w4a8": ("n192 k384 m70 bf16", "n208 k256 m3 bf16", "n64 k128 m300 fp16"),
}

# What kernels of this kind have got wrong: chunks with an offset, tiles and pages filled to one more or one less,
# windows of the text's length and beyond, more queries than keys, nothing at all.
EDGE_SHAPES = {
    "prefill": (
        "b1 q3h1 kv8h1 d512 causal bf16",
        "b1 q72h1 kv200h1 d64 causal bf16",
        "b1 q72h1 kv200h1 d256 causal bf16",
        "b1 q1h1 kv200h1 d256 causal bf16",
        "b1 q10h1 kv10h1 d256 w4 causal bf16",
        "b1 q200h1 kv200h1 d64 causal bf16",
        "b1 q200h1 kv200h1 d512 causal bf16",
        "b1 q2h1 kv5h1 d64 w1024 causal bf16",
        "b1 q2h1 kv1023h1 d64 w1024 causal bf16",
        "b1 q2h1 kv1024h1 d64 w1024 causal bf16",
        "b1 q2h1 kv1025h1 d64 w1024 causal bf16",
        "b1 q2h1 kv1025h1 d512 w1024 causal bf16",
        "b1 q20h2 kv90h1 d128 w16 causal bf16",
        "b1 q20h2 kv90h1 d512 w16 causal fp16",
        "b2 q33h4 kv33h2 d64 causal fp16",
        "b1 q33h1 kv33h1 d64 w33 causal bf16",
        "b1 q20h1 kv33h1 d64 w1000000000 causal bf16",
        "b1 q4h1 kv2h1 d512 causal bf16",
        "b1 q200h1 kv3h1 d64 causal bf16",
        "b1 q200h1 kv3h1 d512 causal bf16",
        "b1 q20h1 kv0h1 d512 causal bf16",
        "b1 q20h1 kv0h1 d128 causal bf16",
        "b1 q0h1 kv20h1 d128 causal bf16",
    ),
    "prefill_ring": (
        "b1 q72h1 kv200h1 d256 w200 causal bf16",
        "b1 q40h1 kv200h1 d128 w70 causal bf16",
        "b1 q10h1 kv10h1 d256 w4 causal bf16",
        "b1 q10h1 kv10h1 d512 w4 causal fp16",
        "b1 q20h2 kv90h1 d64 w16 causal fp16",
        "b1 q2h1 kv1023h1 d64 w1024 causal bf16",
        "b1 q2h1 kv1024h1 d64 w1024 causal bf16",
        "b1 q2h1 kv1025h1 d64 w1024 causal bf16",
        "b1 q2h1 kv1025h1 d256 w1024 causal bf16",
        "b1 q1h1 kv5h1 d128 w1024 causal bf16",
        "b1 q4h1 kv2h1 d256 w16 causal bf16",
        "b1 q200h1 kv3h1 d64 w200 causal bf16",
        "b1 q20h1 kv0h1 d128 w16 causal bf16",
        "b1 q0h1 kv20h1 d128 w16 causal bf16",
    ),
    "decode": (
        "b1 q1h16 kv1h1 d512 bf16 page64",
        "b1 q1h16 kv63h1 d512 bf16 page64",
        "b1 q1h16 kv64h1 d512 bf16 page64",
        "b1 q1h16 kv65h1 d512 bf16 kvfp8 page64",
        "b1 q1h2 kv10h1 d256 w4 bf16",
        "b1 q1h8 kv1025h4 d256 w1024 bf16",
        "b1 q4h2 kv2h1 d64 bf16",
        "b2 q1h2 kv0h1 d128 bf16 page16",
    ),
    "matvec_fp4": ("n3 k256 m1 bf16", "n64 k512 m16 bf16", "n1 k128 m16 fp16"),
    "matvec_fp8": ("n3 k256 m1 bf16", "n1 k128 m16 fp16"),
    "gemm_w4a8": ("n256 k256 m0 bf16", "n64 k512 m1 bf16", "n256 k4096 m2 bf16", "n128 k384 m257 bf16"),
}

EXAMPLES = """\
examples:
  python -m mila_kernels list                               what steps there are
  python -m mila_kernels check prefill/02                   is this step right, here and now?
  python -m mila_kernels check prefill --check-mode         every prefill step, looking for races and bad reads
  python -m mila_kernels bench prefill --peers --workload prefill/d512-16x1-n8192
  python -m mila_kernels reproduce --only 01,02             run notebooks in batch, with or without a GPU
  python -m mila_kernels record RUN_ID --as h200            keep a run as the figures of record
"""


@dataclass(frozen=True)
class Command:
    """One subcommand: one line about it, its options, what it does, and examples or exit codes below the options."""

    about: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    more: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; argparse itself exits with 2 on wrong use."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = build_parser(words[0] if words else "")
    args = parser.parse_args(words)
    if args.command is None:
        parser.print_help()
        return WRONG_USE
    try:
        return COMMANDS[args.command].run(args)
    except (ValueError, TypeError, FileNotFoundError) as error:
        print(f"mila_kernels {args.command}: {error}", file=sys.stderr)
        return WRONG_USE
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains at exit
        return FAILED
    except OSError as error:  # a folder that cannot be written, a full disk
        print(f"mila_kernels {args.command}: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print(f"mila_kernels {args.command}: interrupted", file=sys.stderr)
        return 130


def build_parser(wanted: str = "") -> argparse.ArgumentParser:
    """The parser; only the command ``wanted`` gets its options, so that no other's modules are imported."""
    parser = argparse.ArgumentParser(
        prog="python -m mila_kernels",
        description="GPU kernels one optimisation step at a time: list, prove, time and reproduce them.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, command in COMMANDS.items():
        described = commands.add_parser(
            name,
            help=command.about,
            description=textwrap.fill(command.about[0].upper() + command.about[1:] + ".", 100),
            epilog=command.more or None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name == wanted:
            command.add_arguments(described)
    return parser


def _add_device(parser: argparse.ArgumentParser) -> None:
    from .reproduce import ALLOWED

    choices = ALLOWED["device"]
    parser.add_argument("--device", choices=choices, default="auto", help="auto: the GPU if there is one (default)")


# ---------------------------------------------------------------------------------------------- list


def _list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", nargs="?", help="only this operation, e.g. prefill")


def _list(args: argparse.Namespace) -> int:
    from . import steps

    for step in steps.steps(args.op):
        print(step.id)
        notes = {"change": step.change, "verdict": step.verdict, "runs on": " ".join(step.architectures)}
        for word, text in notes.items():
            print(textwrap.fill(text, 100, initial_indent=f"  {word:8} ", subsequent_indent=" " * 11))
    return OK


# ---------------------------------------------------------------------------------------------- build


def _build_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("steps", nargs="*", metavar="STEP|OP", help="steps or operations (default: all)")
    _add_device(parser)
    parser.add_argument("--jobs", type=_positive, default=os.cpu_count(), metavar="N", help="at once (default: cores)")


def _build(args: argparse.Namespace) -> int:
    """One step is built here, several in a process each: within one, builds wait for each other."""
    import subprocess
    from concurrent.futures import ThreadPoolExecutor

    from . import build, steps

    chosen = steps.select(args.steps)  # before a device is looked for, which may say that kernels run in emulation
    backend = "emulation" if _in_emulation(args.device) else "cuda"
    if len(chosen) == 1:
        try:
            build.load(chosen[0], backend)  # type: ignore[arg-type]
        except build.BuildError as error:
            print(f"FAILED  {chosen[0].id}: {error}", file=sys.stderr)
            return FAILED
        print(f"built   {chosen[0].id}")
        return OK

    def attempt(step: Step) -> bool:
        command = [sys.executable, "-m", "mila_kernels", "build", step.id, "--device", backend]
        env = {**os.environ, "PYTHONPATH": paths.python_path()}
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=env)
        print(done.stdout + done.stderr, end="", flush=True)
        return done.returncode == OK

    with ThreadPoolExecutor(args.jobs) as pool:
        built = list(pool.map(attempt, chosen))
    print(f"{sum(built)} of {len(built)} steps built for {backend}")
    return OK if all(built) else FAILED


# ---------------------------------------------------------------------------------------------- check


def _check_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("steps", nargs="*", metavar="STEP|OP", help="steps or operations (default: all)")
    parser.add_argument("--workload", action="append", default=[], metavar="NAME", help="a name of data/workloads.csv")
    parser.add_argument("--shape", action="append", default=[], metavar="TEXT", help="a shape, as in the last example")
    parser.add_argument("--edges", action="store_true", help="shapes that kernels get wrong, and probes of them")
    _add_device(parser)
    parser.add_argument("--check-mode", action="store_true", help="emulation that reports races and bad accesses")
    parser.add_argument(
        "--seeds", type=_positive, default=1, metavar="N", help="seeds to run, from --seed on (default 1)"
    )
    parser.add_argument("--seed", type=_seed, default=0, metavar="S", help="first seed (default 0)")
    parser.add_argument("--save", action="store_true", help="keep the rows, in a new run under results/local/")


def _check(args: argparse.Namespace) -> int:
    from . import results, steps

    seeds = range(args.seed, args.seed + args.seeds)
    chosen = steps.select(args.steps)
    _check_names(chosen, args.workload)
    cases = [(step, w, seed) for step in chosen for w in _check_workloads(step, args) for seed in seeds]
    if not _in_emulation(args.device) and args.check_mode:
        raise ValueError("--check-mode is a mode of emulation; add --device emulation")
    with results.RunWriter() if args.save else nullcontext() as run:
        failures = sum(_check_one(step, workload, seed, args, run) for step, workload, seed in _progress(cases))
    print(f"{len(cases) - failures} of {len(cases)} cases passed" + (f", {failures} FAILED" if failures else ""))
    return FAILED if failures else OK


def _check_one(step: Step, workload: Workload, seed: int, args: argparse.Namespace, run: RunWriter | None) -> bool:
    """Check one case and print its lines; True when it failed."""
    from . import build, parity, probes

    begun = time.monotonic()
    try:
        # The seed also shuffles the emulated warps; None leaves the mode to MILA_EMULATION_CHECK.
        with build.emulation(check=args.check_mode or None, seed=seed):
            rows = parity.check(step, workload, seed, args.device, run)
            if args.edges and seed == args.seed:
                rows += probes.check(step, workload, args.device, run)
    except Exception as error:  # one broken case must not hide the others
        first, *rest = f"{type(error).__name__}: {error}".splitlines()
        more = [*rest[:ERROR_LINES], f"... {len(rest) - ERROR_LINES} more lines"] if len(rest) > ERROR_LINES else rest
        print(f"FAILED  {step.id}  {workload.name or workload.shape}  seed {seed}: {first}", *more, sep="\n        ")
        return True
    took = f", {time.monotonic() - begun:.1f} s"
    for row in rows:
        verdict = "ok    " if row.passed else "FAILED"
        figures = f"rel_l2 {row.rel_l2:.2e} (bound {row.bound:.2e})"
        if row.nonfinite:
            figures += f", {row.nonfinite} elements NaN or Inf"
        print(f"{verdict}  {step.id}  {row.shape}  seed {row.seed}  {figures}  {row.backend}{took}", flush=True)
        took = ""
    return not all(row.passed for row in rows)


def _check_workloads(step: Step, args: argparse.Namespace) -> list[Workload]:
    from . import shapes

    named = [w for w in map(shapes.workload, args.workload) if w.op == step.op]
    chosen = named + [shapes.parse_shape(step.op, text) for text in args.shape]
    if chosen or args.workload:
        return chosen
    if step.op not in CHECK_SHAPES:
        raise ValueError(f"{step.id}: {step.op} has no default shapes; give --shape or --workload")
    texts = (EDGE_SHAPES if args.edges else CHECK_SHAPES)[step.op]
    everything = [shapes.parse_shape(step.op, text) for text in texts]
    fitting = [w for w in everything if w.fits(step)]
    if not fitting:
        raise ValueError(f"{step.id}: none of the default shapes fits it; give --shape or --workload")
    return fitting


# ---------------------------------------------------------------------------------------------- bench


def _bench_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("steps", nargs="*", metavar="STEP|OP", help="steps or operations (default: all)")
    parser.add_argument("--workload", action="append", default=[], metavar="NAME", help="a name of data/workloads.csv")
    parser.add_argument("--shape", action="append", default=[], metavar="TEXT", help="a shape outside that table")
    parser.add_argument("--all", action="store_true", help="every named workload of each operation")
    parser.add_argument("--peers", action="store_true", help="also what a user would call instead, after the steps")
    parser.add_argument("--cache", choices=("cold", "hot"), default="cold", help="L2 before each launch (default cold)")
    parser.add_argument("--seed", type=_seed, default=0, metavar="S", help="seed of the inputs (default 0)")


def _bench(args: argparse.Namespace) -> int:
    from . import bench, peers, results

    cases = _bench_cases(args)
    try:
        bench.need_cuda()
    except bench.NoDevice as error:
        print(f"bench: {error}", file=sys.stderr)
        return WRONG_USE
    failures = 0
    with results.RunWriter() as run:
        print(f"run {run.run_id}: {bench.run_ceilings(run)}", flush=True)
        for timed, workload in _progress(cases):
            if isinstance(timed, peers.Peer):
                row = bench.bench_peer(timed, workload, cache=args.cache, seed=args.seed, run=run)
            else:
                row = bench.bench(timed, workload, cache=args.cache, seed=args.seed, run=run)
            failures += row.status != "ok"
            print(bench.line(row), flush=True)
        print(f"rows in {run.folder}; keep them: python -m mila_kernels record {run.run_id} --as GPU")
    return FAILED if failures else OK


def _bench_cases(args: argparse.Namespace) -> list[tuple[Step | Peer, Workload]]:
    """Steps with their workloads; with --peers, then each peer with those of the workloads that it takes."""
    from . import peers, steps

    chosen = steps.select(args.steps)
    _check_names(chosen, args.workload)
    ours = [(step, workload) for step in chosen for workload in _bench_workloads(step, args)]
    workloads = dict.fromkeys(workload for _, workload in ours) if args.peers else {}
    return [*ours, *((peer, workload) for workload in workloads for peer in peers.peers(workload.op, workload))]


def _bench_workloads(step: Step, args: argparse.Namespace) -> list[Workload]:
    from . import shapes

    named = [w for w in map(shapes.workload, args.workload) if w.op == step.op]
    chosen = named + [shapes.parse_shape(step.op, text) for text in args.shape]
    if chosen or args.workload:
        return chosen
    table = shapes.workloads(step.op)
    return table if args.all else table[:1]


# ---------------------------------------------------------------------------------------------- static, profile


def _static_arguments(parser: argparse.ArgumentParser) -> None:
    from . import static

    static.add_arguments(parser)


def _static(args: argparse.Namespace) -> int:
    from . import static

    return static.main(args)


def _profile_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("step", metavar="STEP")
    parser.add_argument(
        "--workload", action="append", default=[], metavar="NAME", help="default: the op's first workload"
    )
    parser.add_argument("--seed", type=_seed, default=0, metavar="S", help="seed of the inputs (default 0)")


def _profile(args: argparse.Namespace) -> int:
    from . import counters, results, shapes, steps

    step = steps.step(args.step)
    _check_names([step], args.workload)
    workloads = [shapes.workload(name) for name in args.workload] or shapes.workloads(step.op)[:1]
    try:
        counters.find_ncu()
        with results.RunWriter() as run:
            for workload in _progress(workloads):
                (found,) = counters.profile([(step, workload)], args.seed)
                for row in counters.rows_of(step, workload, found):
                    run.add(row)
                    print(f"{counters.label(row.metric):32} {row.value:14,.4g} {row.unit}")
    except counters.ProfileError as error:
        print(f"profile: {error}", file=sys.stderr)
        return FAILED
    return OK


# ---------------------------------------------------------------------------------------------- reproduce


def _reproduce_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default="", metavar="01,02", help="numbers or names of notebooks (default: all)")
    from .reproduce import ALLOWED

    for name, what in (("preset", "how much to run"), ("device", "where to run")):
        parser.add_argument(f"--{name}", choices=ALLOWED[name], help=f"{what} (default: the notebook's)")
    parser.add_argument("--gpu", metavar="NAME", help="whose recorded figures to show (default: the notebook's)")
    parser.add_argument(
        "-p", "--parameter", action="append", default=[], metavar="KEY=VALUE", help="any other parameter"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="the run's folder, made if missing")
    parser.add_argument("--notebooks", type=Path, default=paths.NOTEBOOKS, metavar="DIR", help="where they are")
    parser.add_argument("--timeout", type=_positive, metavar="SECONDS", help="longest time of one cell (default: none)")


def _reproduce(args: argparse.Namespace) -> int:
    from . import reproduce

    given: dict[str, str] = {}
    for pair in args.parameter:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ValueError(f"-p {pair}: write KEY=VALUE")
        given[key] = value
    given |= {name: value for name in ("preset", "device", "gpu") if (value := getattr(args, name)) is not None}
    if given.get("device") == "cuda":
        _in_emulation("cuda")  # refuse here what every notebook would fail of
    report = reproduce.reproduce(
        [name.strip() for name in args.only.split(",") if name.strip()],
        given=given,
        out=args.out,
        notebooks=args.notebooks,
        timeout=args.timeout,
        say=lambda line: print(line, flush=True),
        progress=sys.stderr.isatty(),
    )
    print(f"\n{report}\n\n{report.folder / 'index.html'}")
    if report.interrupted:
        return 130
    return OK if report.ok else FAILED


# ---------------------------------------------------------------------------------------------- record, report


def _record_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_id", metavar="RUN_ID", help="a folder of results/local/, or the path of a run's folder")
    parser.add_argument("--as", dest="gpu", required=True, metavar="GPU", help="e.g. h200; two of them: h200-x2")


def _record(args: argparse.Namespace) -> int:
    from . import results

    gained = results.record(args.run_id, as_=args.gpu)
    print(f"{paths.RESULTS / args.gpu}: " + ", ".join(f"{count} new in {name}" for name, count in gained.items()))
    return OK


def _report_arguments(parser: argparse.ArgumentParser) -> None:
    from . import report

    report.add_arguments(parser)


def _report(args: argparse.Namespace) -> int:
    from . import report

    return report.main(args)


# ---------------------------------------------------------------------------------------------- shared


def _progress(cases: Sequence[T]) -> Iterable[T]:
    """The cases, with a bar on a terminal; elsewhere the lines that each case prints are the progress."""
    if not sys.stderr.isatty() or len(cases) < 2:
        return cases
    from tqdm import tqdm

    return tqdm(cases, unit="case", leave=False)


def _check_names(chosen: Sequence[Step], names: Sequence[str]) -> None:
    """ValueError where a workload is named whose operation none of the steps is of."""
    from . import shapes

    ops = sorted({step.op for step in chosen})
    for name in names:
        op = shapes.workload(name).op
        if op not in ops:
            raise ValueError(f"--workload {name} is of {op}, and the steps are of {', '.join(ops)}")


def _in_emulation(device: str) -> bool:
    """Whether kernels would run in emulation; ValueError where the device asked for is not there."""
    from . import build

    try:
        return build.resolve_device(device).type == "cpu"
    except RuntimeError as error:
        raise ValueError(str(error)) from None


def _positive(text: str) -> int:
    return _number(text, 1)


def _seed(text: str) -> int:
    return _number(text, 0)


def _number(text: str, least: int) -> int:
    """A whole number from ``least`` to what torch and the emulation take as a seed."""
    from .arguments import MAX_SEED

    if not text.strip().removeprefix("-").isdecimal() or len(text) > 40:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number")
    if not least <= int(text) <= MAX_SEED:
        raise argparse.ArgumentTypeError(f"{text} is not from {least} to {MAX_SEED}")
    return int(text)


CHECK_MORE = """\
examples:
  check prefill/01                                          every default shape, one seed
  check prefill --seeds 3                                   all steps of an op, three seeds
  check decode --edges                                      lengths and windows at which kernels of this kind broke
  check prefill/02 --shape "b1 q64h2 kv256h1 d512 causal bf16" --check-mode
"""
BENCH_MORE = """\
examples:
  bench prefill/02 --workload prefill/published-instance    one step on one workload
  bench prefill                                             every step of an op on its first workload
  bench prefill --all --cache hot                           on all of them, L2 left warm
"""
REPRODUCE_MORE = """\
examples:
  reproduce                              all notebooks, quick, into results/local/<run id>
  reproduce --only 01,02 --preset full
  reproduce -p seed=7 --out ~/my-run     any parameter that the notebooks declare
Exit code 0: every notebook ran to its end; 1: one failed (the others still ran); 2: wrong use, and nothing was run.
"""

COMMANDS = {
    "list": Command(
        "list the steps: what each changed and how it ended",
        _list_arguments, _list,
    ),
    "build": Command(
        "compile steps ahead, several at a time; whatever needs one compiles it otherwise",
        _build_arguments, _build,
    ),
    "check": Command(
        "compare steps with the float64 truth, on plain and on poisoned, guarded memory",
        _check_arguments, _check, CHECK_MORE,
    ),
    "bench": Command(
        "time steps on a GPU and write rows to a new run; times on other machines are in results/",
        _bench_arguments, _bench, BENCH_MORE,
    ),
    "static": Command(
        "registers, shared memory, spills and instruction counts of every step (nvcc, no GPU needed)",
        _static_arguments, _static,
    ),
    "profile": Command(
        "hardware counters of a step by ncu: occupancy, stalls, DRAM, L2 and shared throughput, instructions",
        _profile_arguments, _profile,
    ),
    "reproduce": Command(
        "run the notebooks in batch and leave tables, charts and executed notebooks in one folder",
        _reproduce_arguments, _reproduce, REPRODUCE_MORE,
    ),
    "record": Command(
        "merge a run of this machine, tables, notebooks and figures, into the tracked results/<gpu>/",
        _record_arguments, _record,
    ),
    "report": Command(
        "the recorded results as a table, or into the README",
        _report_arguments, _report,
    ),
}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
