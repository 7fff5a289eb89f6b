"""Distillation of drafts: the target writes a corpus, and a small student learns its distribution. Knows no network."""

from outrider.training.corpus import CorpusConfig, write_corpus
from outrider.training.distill import DistillConfig, DistillReport, run
from outrider.training.student import StudentConfig

__all__ = ["CorpusConfig", "DistillConfig", "DistillReport", "StudentConfig", "run", "write_corpus"]
