"""The numbers by which target and draft workers decide, with unit and reason. Others would make an answer slower, and
never another one.
"""

# -- what a draft worker or a head proposes

MIN_CHANCE = 0.02
"""Chance of an alternative below which it is not worth its bytes on any target; no lower price of a row is sent."""
HEAD_MIN_JOINT, HEAD_MIN_CHANCE = 0.25, 0.1
"""Chance that all of a head's draft is right, below which it ends, and that of an alternative."""
BEFORE_RUNNING_AHEAD_S = 0.0005
"""Seconds. On one core the thread that runs ahead could be on it some milliseconds before the one that sends drafts."""
PATIENCE = 1.5
"""Steps to wait for each that a draft saves. A draft that the target does not wait for comes a little late each time,
and its work is lost: where gain and wait are about equal that is worse than waiting, and worse than no draft."""

# -- the chance that a drafted token is accepted

PRIOR = 8.0
"""Verdicts that the draft's own probability counts for."""
BONUS = 0.5
"""Share of the distance to 1 by which a chance without verdicts is raised: a token that is never verified may be
likelier than its draft claims. Shrinks as verdicts come in."""
KEEP, KEEP_STEP = 0.995, 0.9985
"""Decay per verdict (of a tenant per commit), and per step: what is no longer verified returns to its prior."""
PRIOR_OWN, KEEP_OWN = 6.0, 0.97
"""Verdicts that a tenant's factor counts for in a new text, and decay per commit of a text's own, verified or not: one
whose drafts no longer pay tries them again. A tenant forgets more slowly, or each of its texts would try them again."""
MAX_RATIO = 1.25
"""Factor by which a text may do better than all texts."""
SURE = 0.995
"""Chance above which no token is thought to be accepted."""

# -- the time of a step

KEEP_STEPS, KEEP_ALIKE = 0.99, 0.9995
"""Decay per step: about the last 100 count. The slope is forgotten only as steps of other sizes come, else slowly:
while no drafted row pays all steps have one size, and the cost of a row must not be forgotten, but measured in time."""
PRIOR_BASE_ROWS = 19.0
"""Rows that take as long as the fixed part of a step, before steps were measured."""
PRIOR_SPREAD = 40.0
"""Rows, squared: the sum of squared deviations of measured steps that the prior counts for."""
