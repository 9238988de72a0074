"""Time GEMMs of ours beside their peers, on this GPU, and write a result file.

    python -m perf.sweep llama8b locdit square
    python -m perf.sweep -M 1-64*2 -N 4096 -K 4096,14336 --epilogues none bias+silu
    python -m perf.sweep --dry-run

Run again after an interruption, the same command goes on where it was. A shape is measured as a
whole, so that those who are compared took turns; ``perf/schema.json`` describes the file.

What 46 shapes (llama8b, locdit, square) are expected to cost on an H200, in seconds: start and
roofs 15, data (drawn on the CPU) 10, compiling the stand-in's tiles 30, graphs 25 (45 different
shapes x 10 implementations x 17 replays of 2-6 ms), checks 15; with QuACK installed, its tuning:
compiling 25, and 45 shapes x 44 configurations x 10-100 ms, 60 more. A peer is out of the shapes
that are left once its first calls took ``--peer-seconds``; ``--budget`` drops shapes that do not
fit. The last line says what it did cost, and the result's ``first_calls`` what compiling and tuning
took of it.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
import time
from collections.abc import Iterable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from cute_fp8.build import cache
from cute_fp8.environment import ROOT, commit, environment
from perf import peers, quack_peer, report, roofs, shapes
from perf.gemm_problem import Wanted, check_epilogue, groups
from perf.measure import Bench, ours, variants_here
from perf.results_io import Key, Partial, Row, key_of, save

DRY = "dry run"


def main(arguments: list[str] | None = None) -> int:
    """0; 1 if a result of ours is wrong or the GPU failed; 2 if nothing can be measured so."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["producers"]:
        from perf import producers

        return producers.main(arguments[1:])
    begun = time.perf_counter()
    args = parser().parse_args(arguments)
    try:
        return Sweep(args, begun).run()
    except ValueError as error:
        print(f"perf.sweep: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("perf.sweep: interrupted; the same command goes on from here", file=sys.stderr)
        return 130


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser("python -m perf.sweep", description=(__doc__ or "").split("\n")[0])
    p.add_argument("sets", nargs="*", help=f"named sets: {', '.join(shapes.SETS)}")
    for size in "MNK":
        p.add_argument(f"-{size}", help="sizes: 16,64 or 64-512:64 or 1-64*2")
    p.add_argument("--variants", nargs="+", choices=("per_token", "mxfp8"))
    p.add_argument("--epilogues", nargs="+", default=["none"], help="e.g. none bias+silu+residual")
    p.add_argument("--impls", nargs="+", choices=report.NAMES, metavar="IMPL", help="only these")
    p.add_argument("--stand-in", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument("--eager", action="store_true", help="also the host time of eager calls")
    p.add_argument("--out", type=Path, help="by default perf/results/<gpu>/<sets>-<date>.json")
    p.add_argument("--plot", action="store_true", help="also draw the result, as perf.plot does")
    p.add_argument("--fresh", action="store_true", help="forget an interrupted sweep")
    p.add_argument("--budget", type=float, help="seconds, after which the other shapes are dropped")
    p.add_argument(
        "--peer-seconds", type=float, default=120.0, help="for a peer's first calls, in all"
    )
    p.add_argument(
        "--dry-run",
        action="store_true",
        help="all paths on the CPU, shapes made small, times made up",
    )
    return p


class Sweep:
    """One run."""

    def __init__(self, args: argparse.Namespace, begun: float):
        """Raises ValueError, in one line, for what cannot be measured."""
        self.args, self.begun = args, begun
        self.device = "cpu" if args.dry_run else "cuda"
        if args.dry_run and not (args.sets or args.M or args.N or args.K):
            self.shapes = list(shapes.DRY)
        else:
            self.shapes = shapes.shapes_of(args.sets, args.M, args.N, args.K)
        if args.dry_run:
            self.shapes = shapes.small(self.shapes)
        for epilogue in args.epilogues:
            check_epilogue(epilogue)
        for package in ("jsonschema", *(["matplotlib"] if args.plot else [])):
            if importlib.util.find_spec(package) is None:  # before, not after the measuring
                raise ValueError(f"got no {package}, must be installed: pip install -e '.[perf]'")
        if not args.dry_run and (torch.version.cuda is None or not torch.cuda.is_available()):
            raise ValueError("got no CUDA GPU, must run on the one to measure, or with --dry-run")
        self.notes: list[str] = []

    def run(self) -> int:
        """Measure under the lock of this GPU, report, write."""
        lock = lock_path(self.device)
        lock.parent.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(lock, timeout=0):
                return self._run()
        except Timeout:
            raise ValueError(f"another sweep runs on this GPU; it holds {lock}") from None

    def _run(self) -> int:
        meta = self._meta()
        out = self.args.out or default_out(meta, self.args.sets)
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = Partial(out)
        if partial.warning:
            _say(f"warning: {partial.warning}")
        meta = self._begin(partial, meta)
        bench = Bench(self.device, meta, self.args.eager, self.args.peer_seconds)
        alive = self._measure(bench, partial)
        meta = {**meta, "notes": self.notes} if self.notes else meta
        meta["seconds"] = round(time.perf_counter() - self.begun, 1)
        meta["first_calls"] = {impl: round(s, 1) for impl, s in bench.spent.items()}
        rows = list(partial.rows.values())
        if rows:
            report.print_result(meta, rows)
            save(out, meta, rows)
            print(f"wrote {out}: {len(rows)} rows, {meta['seconds']:.0f} s in all")
            if self.args.plot:
                from perf import plot

                plot.main([str(out)])
            if self.args.dry_run:
                print("This was a dry run: every time above is made up.")
        if self.notes or not alive:
            _say(f"{partial.path} is kept: the same command goes on from there")
        else:
            partial.end()
        if not alive:
            _say("the GPU failed and answers no more calls of this process")
        wrong = any("failed" in row and row["impl"].startswith("cute_fp8") for row in rows)
        return 1 if wrong or not alive or not rows else 0

    def _begin(self, partial: Partial, meta: dict[str, Any]) -> dict[str, Any]:
        """Go on from what is there, or start it: the meta to go by, with the roofs."""
        if partial.meta is not None and not self.args.fresh:
            if (how := partial.other(meta)) is not None:
                text = f"{partial.path}: of another sweep ({how}), must be removed"
                raise ValueError(f"{text}, or begun anew with --fresh")
            _say(f"going on from {partial.path}: {len(partial.rows)} rows are there")
            return partial.meta
        if not self.args.dry_run:
            meta |= roofs.measure()
        partial.begin(meta)
        return meta

    def _meta(self) -> dict[str, Any]:
        meta: dict[str, Any] = {**environment(), "commit": commit()}
        meta |= {"date": date.today().isoformat(), "quack": quack_peer.version()}
        if self.args.dry_run:
            meta["gpu"] = DRY
        return {**meta, "sets": self.args.sets}

    def _measure(self, bench: Bench, partial: Partial) -> bool:
        """Fill ``partial``; False if the GPU failed."""
        steps = list(self._steps())
        latest = 0.0  # seconds of the last shape without compiling and tuning
        cached: tuple[Any, Any] = (None, None)
        for number, (variant, epilogue, most, m) in enumerate(self._progress(steps)):
            start = time.perf_counter()
            shape = (m, *most[1:])
            wanted = self._wanted(variant)
            head: Row = {"op": "gemm", "variant": variant, "epilogue": epilogue}
            head |= dict(zip("MNK", shape, strict=True))
            if done(head, wanted, partial):
                continue
            budget, tuned = self.args.budget, bench.tuning
            if budget is not None and start - self.begun + latest > budget:
                left = len(steps) - number
                self.notes.append(f"{left} of {len(steps)} shapes dropped: {budget:g} s are over")
                break
            try:
                if cached[0] != (variant, epilogue, most):
                    cached = (None, None)  # room for the next
                    _release(bench)
                    cached = ((variant, epilogue, most), bench.weight(variant, epilogue, most))
                rows = list(bench.rows(cached[1], m, wanted))
            except Exception as error:
                why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
                rows = [{**head, "impl": impl, "failed": why} for impl in expected(variant, wanted)]
                cached = (None, None)
            partial.add(rows)
            seconds = time.perf_counter() - start
            latest = seconds - (bench.tuning - tuned)
            _progress_line(number, len(steps), rows, seconds)
            try:
                bench.synchronize()
            except RuntimeError:
                return False
        return True

    def _progress(self, steps: list[Any]) -> Iterable[Any]:
        if not sys.stderr.isatty():
            return steps
        from cute_fp8.tables import track

        return track(steps, "shapes", len(steps))

    def _steps(self) -> Iterator[tuple[str, str, shapes.Shape, int]]:
        """Variant, epilogue, the weight with the most tokens, tokens."""
        for variant in self.args.variants or variants_here(self.device):
            for epilogue in self.args.epilogues:
                for (n, k), ms in groups(self.shapes).items():
                    if variant == "mxfp8" and k % 32:
                        self.notes.append(f"mxfp8 needs K of whole blocks of 32: left out K={k}")
                        continue
                    for m in ms:
                        yield variant, epilogue, (max(ms), n, k), m

    def _wanted(self, variant: str) -> Wanted:
        impls = None if self.args.impls is None else frozenset(self.args.impls)
        hopper = self.device == "cuda" and torch.cuda.get_device_capability() == (9, 0)
        fast = variant == "per_token" and (hopper or self.args.dry_run)
        return Wanted(ours(self.device, variant, self.args.stand_in), fast, impls)


def expected(variant: str, wanted: Wanted) -> list[str]:
    """The implementations that have a row of each shape."""
    found = ["cute_fp8_stand_in" if b == "stand-in" else "cute_fp8" for b in wanted.backends]
    found += ["cute_fp8_fast"] if wanted.fast and "auto" in wanted.backends else []
    found += [impl for impl in peers.names(variant)]
    return [impl for impl in found if wanted.has(impl)]


def done(head: Row, wanted: Wanted, partial: Partial) -> bool:
    """Whether all rows of a shape are there."""
    keys: list[Key] = [key_of({**head, "impl": i}) for i in expected(head["variant"], wanted)]
    return all(key in partial.rows for key in keys)


def lock_path(device: str) -> Path:
    """The file whose lock makes sure of one sweep on a GPU."""
    place = cache.location() or Path.home() / ".cache" / "cute_fp8"
    name = "dry-run"
    if device == "cuda":
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        name = str(getattr(properties, "uuid", torch.cuda.current_device()))
    return place / f"perf-{name}.lock"


def default_out(meta: dict[str, Any], sets: list[str]) -> Path:
    """Where results are kept; a dry run's with what is not."""
    file = f"{shapes.names_of(sets)}-{meta['date']}.json"
    if meta["gpu"] == DRY:
        return ROOT / "perf" / "out" / f"dry-run-{file}"
    slug = re.sub(r"[^a-z0-9]+", "_", meta["gpu"].removeprefix("NVIDIA ").lower()).strip("_")
    return ROOT / "perf" / "results" / slug / file


def _release(bench: Bench) -> None:
    if not bench.dry:
        torch.cuda.empty_cache()


def _progress_line(number: int, total: int, rows: list[Row], seconds: float) -> None:
    """For logs, in place of a bar."""
    if sys.stderr.isatty() or not rows:
        return
    row = rows[0]
    times = ", ".join(f"{r['impl']} {r['us']:.1f}" if "us" in r else f"{r['impl']} -" for r in rows)
    shape = f"{row['variant']} {row['epilogue']} {row['M']}x{row['N']}x{row['K']}"
    _say(f"[{number + 1}/{total}] {shape}: {times} ({seconds:.1f} s)")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
