"""Ours and the chosen peers on one core, in one run, with the same prompts: `python -m benchmarks.peers.compare`.

Every subject loads the model once, in its own process, and then waits. For each measure they take turns, in
alternating order, round after round; the table's ratios compare turns that were seconds apart. This module handles the
processes and their lines of JSON, `plan` the requests and `figures` the answers.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from outrider.engine import resolve
from outrider.hardware import hardware
from outrider_controller.cli.output import columns, write_json

from benchmarks.peers import figures, install
from benchmarks.peers.plan import Measure, plan
from benchmarks.peers.subjects import PeerFailed, Subject

# A round in which another process used the core is repeated, up to this many times the given number of rounds.
_MAX_ROUNDS = 1.5


def take_turns(measure: Measure, subjects: Sequence[Subject], rounds: int) -> dict[str, list[list[float]]]:
    """Samples of the undisturbed rounds, by subject."""
    for subject in subjects:
        for request in measure.before:
            subject.ask(request)
    replies: list[dict[str, list[float]]] = []
    shares: list[dict[str, float]] = []
    while len(replies) < rounds * _MAX_ROUNDS and figures.count_undisturbed(shares) < rounds:
        order = subjects if len(replies) % 2 == 0 else subjects[::-1]
        turn = {subject.name: subject.ask(measure.each) for subject in order}
        shares.append({name: reply.pop("core_share") for name, reply in turn.items()})
        replies.append({name: reply["ms"] for name, reply in turn.items()})
    for subject in subjects:
        for request in measure.after:
            subject.ask(request)
    chosen = figures.undisturbed(shares)
    had = ", ".join(f"{name} {min(shares[n][name] for n in chosen):.0%}" for name in shares[0])
    print(f"{measure.name}: {len(chosen)} of {len(shares)} rounds; least share of the core: {had}", file=sys.stderr)
    return {name: [replies[number][name] for number in chosen] for name in replies[0]}


def run(names: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """Runs everything → the content of --json."""
    model = resolve(options.model)
    os.sched_setaffinity(0, {options.core})
    results: dict[str, dict[str, list[list[float]]]] = {}
    with ExitStack() as stack:
        subjects: list[Subject] = []
        for name in names:
            peer = install.PEERS[name]
            install.python_of(peer)
            subjects.append(Subject(name, peer, model, [options.core]))
            stack.callback(subjects[-1].close)
        for measure in plan():
            results[measure.name] = take_turns(measure, subjects, options.rounds)
        about = {subject.name: subject.about for subject in subjects}
    return {**hardware(), "subjects": about, "ms": results}


def report(outcome: Mapping[str, Any], batches: Mapping[str, int]) -> str:
    """The report as text."""
    results: figures.Results = outcome["ms"]
    about = [
        ", ".join([f"{name}: {what['version']}", *(f"{library} preloaded" for library in what["preloaded"])])
        for name, what in outcome["subjects"].items()
    ]
    measured = columns(["measure", "of", "min ms", "median ms", "tokens/s"], figures.figure_rows(results, batches))
    ratios = columns(["measure", "of", "times ours", "of minima"], figures.ratio_rows(results))
    return "\n".join([f"{outcome['cpu']}, one core, {outcome['at']}", *about, "", measured, "", ratios])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    known = [name for name in install.PEERS if name != figures.OURS]
    parser.add_argument("--peers", default="transformers,vllm", help=f"of {', '.join(known)} (default: %(default)s)")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="name or checkpoint directory")
    parser.add_argument("--rounds", type=int, default=7, help="turns each subject has per measure")
    parser.add_argument("--core", type=int, default=min(os.sched_getaffinity(0)), help="that everyone is measured on")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every sample here")
    options = parser.parse_args()
    options.peers = [name for name in options.peers.split(",") if name]
    if unknown := set(options.peers) - set(known):
        parser.error(f"--peers: {', '.join(sorted(unknown))}: not of {', '.join(known)}")
    if options.rounds < 1:
        parser.error("--rounds: must be at least 1")
    return options


def main() -> int:
    options = _options()
    try:
        outcome = run([figures.OURS, *options.peers], options)
    except PeerFailed as failure:
        print(f"compare: {failure}", file=sys.stderr)
        return 1
    batches = {measure.name: measure.batch for measure in plan() if measure.batch}
    print(report(outcome, batches))
    write_json(options.json, "peers", outcome)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
