"""A draft worker with a head beside a bench's target, in one process, with the messages that both exchange."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from outrider.draft.wire import ProposalLimits, events_of, responses_of
from outrider.draft.worker import DraftWorker
from outrider.drafting.pool.sequence import commit_message
from outrider.drafting.pool.validator import DraftValidator, DraftVocabulary
from outrider.protocol.sequences import opening_for_draft
from outrider.rpc.v1 import draft_pb2
from outrider.rpc.v1 import sequence_pb2 as sequence
from outrider.sequence.key import Finish
from outrider.sequence.spec import SequenceSpec
from outrider.target.requests.events import Offered, Paired
from outrider.target.requests.report import TargetReport
from outrider.tree import DraftTree

from tests.unit.target.harness import WorkerBench, key

Change = Callable[[sequence.Commit], list[sequence.Commit]]
_STEPS = 400


@dataclass
class Remote:
    """A draft worker with a head, and what passes between it and a bench's target, as bytes."""

    bench: WorkerBench
    worker: DraftWorker
    stream: int = 1
    """The target's, at the draft worker."""
    peers: dict[int, Remote] = field(default_factory=dict)
    """Others for which the worker drafts, by stream."""
    change: Change = lambda commit: [commit]
    """What becomes of each commit's message."""
    price: float = 0.0
    """Of a row, as the target says it; 0: it does not."""
    dies_at: int = 1 << 30
    """The step at which its process is killed."""
    reads_bits: int = 8
    """Fewest of a number of features, as the worker says them."""
    lag: int = 0
    """Steps that pass before it hears of one."""
    told: list[TargetReport] = field(default_factory=list)
    """What it has not heard yet."""
    validators: dict[int, DraftValidator] = field(default_factory=dict)
    proposed: dict[tuple[int, int], DraftTree] = field(default_factory=dict)
    """By sequence and length: each answer to a commit."""
    errors: list[sequence.SequenceError] = field(default_factory=list)
    num_bytes: int = 0
    """Of features that the target sent."""

    @property
    def _limits(self) -> ProposalLimits:
        return ProposalLimits(self.bench.limits.max_context_len, max_draft_tokens=8)

    def open(self, number: int, what: SequenceSpec) -> None:
        self.bench.open(number, what)
        self.draft(number, what)

    def draft(self, number: int, what: SequenceSpec) -> None:
        """From now on the worker drafts for it."""
        limits = self.bench.limits
        vocabulary = DraftVocabulary(limits.vocab_size, limits.max_context_len)
        self.validators[number] = DraftValidator(what, vocabulary, 4)
        committed = self.bench.tokens[key(number)][len(what.prompt) :]
        message = opening_for_draft(what, number, committed, what.speculation.for_draft(self.price))
        self.bench.apply(Paired(key(number), self.reads_bits))
        self._hear(draft_pb2.DraftRequest(opens=[message]))
        self._work()

    def run(self, steps: int = _STEPS) -> None:
        for number in range(steps):
            if not self.bench.worker.load.num_sequences:
                return
            self.bench.step()
            if number < self.dies_at:
                self._follow()
                self._work()
        assert steps < _STEPS, "still open"

    def _follow(self) -> None:
        self.told.append(self.bench.reports[-1])
        if len(self.told) <= self.lag:
            return
        report = self.told.pop(0)
        messages = [commit_message(one.sequence_id, length, (), each) for one, length, each in report.features]
        for each in report.commits:
            message = commit_message(each.key.sequence_id, each.base_len, each.token_ids)
            if each.finish is not Finish.NONE:
                message.finish_reason = sequence.FINISH_REASON_LENGTH
            messages.append(message)
        for message in messages:
            self.num_bytes += len(message.features)
            for changed in self.change(message):
                self._hear(draft_pb2.DraftRequest(commits=[changed]))

    def _hear(self, request: draft_pb2.DraftRequest) -> None:
        for event in events_of(
            draft_pb2.DraftRequest.FromString(request.SerializeToString()), self.stream, self._limits, 0.0
        ):
            self.worker.apply(event)

    def _work(self) -> None:
        for _ in range(4):
            if self.worker.has_work:
                self.worker.step()
            for stream, response in responses_of(self.worker.take_report(), 0.0).items():
                target = self.peers.get(stream, self)
                target.errors += response.errors
                for draft in response.drafts:
                    target._take(draft)

    def _take(self, draft: sequence.Draft) -> None:
        tree = self.validators[draft.sequence_id].tree(draft)
        self.proposed[draft.sequence_id, draft.base_len] = tree
        self.bench.apply(Offered(key(draft.sequence_id), tree))
