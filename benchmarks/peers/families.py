"""A step of each family's shape, in each variant of our kernels, beside vLLM's: `python -m benchmarks.peers.families`.

On one core. A step and reading as many bytes as it reads weights take turns, so do steps of one token and of five, and
so do ours and vLLM's, in a process of its own. Ratios are of the fastest of each.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from outrider.engine.backends.cpu import runnable_variants
from outrider_controller.cli.output import write_json

from benchmarks.peers import install, shapes
from benchmarks.peers.compare import take_turns
from benchmarks.peers.figures import Results, Rounds, best
from benchmarks.peers.plan import decode, limit, verify
from benchmarks.peers.subjects import PeerFailed, Subject
from benchmarks.report import Row, table
from benchmarks.support.fma_peak import fma_peak

_VERIFIED = 5
_NUM_BLOCKS = "64"
_MAX_OF_READING, _MAX_OF_A_STEP, _MAX_OF_ARITHMETIC, _MAX_OF_PEER = 1.3, 1.15, 1.25, 0.95


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one shape in one variant; milliseconds."""

    step: float
    reading: float
    one: float
    several: float
    arithmetic: float | None = None
    """Least time of the multiplications of five tokens, where it is known."""
    ours: float | None = None
    peer: float | None = None

    @classmethod
    def of(cls, results: Results, peak: float | None, parameters: int) -> Figures:
        """`peak`: operations a second."""
        read, checked = results["limit"], results[f"verify {_VERIFIED}"]
        decode = {name: best(rounds) for name, rounds in results.get("decode 1", {}).items()}
        return cls(
            best(read["step"]),
            best(read["read"]),
            best(checked["one"]),
            best(checked["many"]),
            None if peak is None else 1e3 * 2 * parameters * _VERIFIED / peak,
            decode.get("ours"),
            decode.get("peer"),
        )

    @property
    def bound_by_arithmetic(self) -> bool:
        return self.arithmetic is not None and self.arithmetic > self.one

    @property
    def of_peer(self) -> float | None:
        return None if self.ours is None or self.peer is None else self.ours / self.peer

    @property
    def misses(self) -> list[str]:
        """The bars that are not reached."""
        if self.bound_by_arithmetic:
            assert self.arithmetic
            verified = self.several <= _MAX_OF_ARITHMETIC * self.arithmetic
        else:
            verified = self.several <= _MAX_OF_A_STEP * self.one
        kept = {
            "reading": self.step <= _MAX_OF_READING * self.reading,
            "verify": verified,
            "peer": self.of_peer is None or self.of_peer <= _MAX_OF_PEER,
        }
        return [name for name, holds in kept.items() if not holds]

    def row(self) -> dict[str, object]:
        arithmetic = None if self.arithmetic is None else round(self.several / self.arithmetic, 2)
        return {
            "step ms": round(self.step, 1),
            "step / reading": round(self.step / self.reading, 2),
            f"verify {_VERIFIED} / step": round(self.several / self.one, 2),
            f"verify {_VERIFIED} / its arithmetic": arithmetic,
            "ours / peer": None if self.of_peer is None else round(self.of_peer, 2),
            "misses": ", ".join(self.misses),
        }


def measured(options: argparse.Namespace) -> Iterator[Row]:
    """A row for each shape and variant, as soon as it is known."""
    peaks = {variant: fma_peak(variant) for variant in options.variants}
    for name in options.shapes:
        with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
            made = shapes.write(name, options.gigabytes * 1e9, Path(scratch) / name)
            about = {"shape": name, "layers": f"{made.layers} of {made.whole}", "MB": made.weight_bytes // 10**6}
            for number, variant in enumerate(options.variants):
                peer = options.peer if number == 0 else ""
                found = Figures.of(_results(made, variant, peer, options), peaks[variant], made.parameters)
                rate = round(made.weight_bytes / 1e6 / found.reading, 1)
                yield {**about, "variant": variant, "GB/s read": rate, **found.row()}


def _results(made: shapes.Checkpoint, variant: str, peer: str, options: argparse.Namespace) -> Results:
    native = replace(install.PEERS["ours"], arguments=(variant, _NUM_BLOCKS))
    alone = [limit(made.weight_bytes, options.steps), verify(_VERIFIED, options.steps)]
    with _subject("ours", native, made.path, options.core) as ours:
        results: dict[str, Mapping[str, Rounds]] = {
            measure.name: take_turns(measure, [ours], options.rounds) for measure in alone
        }
        if peer:
            try:
                results |= _compared(ours, peer, made.path, options)
            except PeerFailed as failure:
                print(f"families: {failure}", file=sys.stderr)
    return results


def _compared(ours: Subject, name: str, model: Path, options: argparse.Namespace) -> Results:
    peer = install.PEERS[name]
    # One sequence needs little, and vLLM takes all that it is given.
    little = replace(peer, variables={**peer.variables, "VLLM_CPU_KVCACHE_SPACE": "1"})
    measure = decode(1, options.steps)
    with _subject("peer", little, model, options.core) as theirs:
        return {measure.name: take_turns(measure, [ours, theirs], options.rounds)}


@contextmanager
def _subject(name: str, peer: install.Peer, model: Path, core: int) -> Iterator[Subject]:
    subject = Subject(name, peer, model, [core])
    try:
        yield subject
    finally:
        subject.close()


def _options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    variants = [variant for variant in runnable_variants() if variant != "portable"]
    parser.add_argument("--shapes", nargs="+", default=list(shapes.SHAPES), choices=shapes.SHAPES, metavar="NAME")
    parser.add_argument("--variants", nargs="+", default=variants, choices=runnable_variants())
    parser.add_argument("--peer", default="vllm", choices=["", *install.PEERS], help="beside the first variant")
    parser.add_argument("--gigabytes", type=float, default=1.2, help="of weights; larger models get fewer layers")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6, help="of each kind in a round")
    parser.add_argument("--core", type=int, default=min(os.sched_getaffinity(0)), help="that everyone is measured on")
    parser.add_argument("--scratch", type=Path, help="a directory for the checkpoints")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args(arguments)


def main() -> int:
    options = _options()
    os.sched_setaffinity(0, {options.core})
    stolen, began, rows = psutil.cpu_times().steal, time.monotonic(), list[Row]()
    try:
        for row in measured(options):
            rows.append(row)
            print("  ".join(f"{name}: {value}" for name, value in row.items()), file=sys.stderr, flush=True)
    except PeerFailed as failure:
        print(f"families: {failure}", file=sys.stderr)
        return 1
    took_s = time.monotonic() - began
    share = (psutil.cpu_times().steal - stolen) / took_s / (psutil.cpu_count() or 1)
    print(table(rows), f"\nOne core, bfloat16, {options.peer}; {took_s:.0f} s; the host took {share:.1%} of the time.")
    write_json(options.json, "families", {"rows": rows, "stolen": share})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
