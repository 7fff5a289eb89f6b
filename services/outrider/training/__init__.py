"""Distillation of drafts: the target writes a corpus, and a small student learns its distribution. Knows no network.

Not here: the command and its options (`outrider_controller.cli.drafts`). Begin with `distill`.
"""

from outrider.training.corpus import CorpusConfig
from outrider.training.distill import DistillConfig, run
from outrider.training.loop import LoopConfig
from outrider.training.student import StudentConfig

__all__ = ["CorpusConfig", "DistillConfig", "LoopConfig", "StudentConfig", "run"]
