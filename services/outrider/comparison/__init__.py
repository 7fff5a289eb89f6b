"""`outrider compare drafts`: what drafts are worth to a target, on the target's own texts. Knows no network.

The texts exist before anything is compared (`texts`). A step of the target is then a look into them that takes as long
as a measured step (`step_line`); all else runs as it is served: sources of drafts, scheduler, verification. Begin
with `compare`.
"""

from outrider.comparison.compare import Comparison, compare
from outrider.comparison.loaded import CompareConfig

__all__ = ["CompareConfig", "Comparison", "compare"]
