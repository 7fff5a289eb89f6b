"""The numbers by which gateways and workers decide, with unit and reason; some are routers' too. Others would make
an answer slower, and never another one.
"""

# Who may start now, at a gateway and at a router
BUSY = 0.8  # Share of the places that any tenant may take. The rest is for tenants below their weighted shares.
USUAL_TOKENS = 128  # Tokens of an answer of which nothing is known yet.
NEWEST = 0.05  # Weight of the newest request in means over requests.
CHARS_PER_TOKEN = 4  # Of a prompt that is not tokenised yet; the charge is corrected at the end.
SLICE_S = 0.15  # Seconds of a tenant's whole rate that are taken from the store at once, not to ask for each request.
# Seconds for which what the store said of a quota holds: a slice would allow an extra burst later, and the tenant of a
# refused request may get a larger quota.
KNOWN_S = 0.5
# Seconds between the frames of a paced stream, before any answer; the mean of strange answers stays within a tenth and
# ten times of it.
FIRST_BEAT_S = 0.05

# What a draft worker or a head proposes
MIN_CHANCE = 0.02  # Of an alternative: below, it is not worth its bytes on any target. No lower price of a row is sent.
HEAD_MIN_JOINT = 0.25  # Chance of a head's whole draft, below which it ends.
# Steps to wait for each that a draft saves. One that is not waited for comes a little late each time, and its work is
# lost: where gain and wait are about equal that is worse than waiting, and worse than no draft.
PATIENCE = 1.5

# The chance that a drafted token is accepted
PRIOR = 8.0  # Verdicts that the draft's own probability counts for.
# Share of the distance to 1 by which a chance without verdicts is raised: a token that is never verified may be
# likelier than its draft claims. Shrinks as verdicts come in.
BONUS = 0.5
KEEP, KEEP_STEP = 0.995, 0.9985  # Decay per verdict (of a tenant: per commit) and step: the old returns to its prior.
# Verdicts that a tenant's factor counts for in a new text, and decay per commit of a text's own, verified or not: one
# whose drafts no longer pay tries them again. A tenant forgets more slowly, or each of its texts would try them again.
PRIOR_OWN, KEEP_OWN = 6.0, 0.97
MAX_RATIO = 1.25  # Factor by which a text may do better than all texts.
SURE = 0.995  # Chance above which no token is thought to be accepted.

# The time of a step
# Decay per step: about the last 100 count. The slope is forgotten only as steps of other sizes come, else slowly: while
# no drafted row pays all steps have one size, and the cost of a row must not be forgotten, but be measured in time.
KEEP_STEPS, KEEP_ALIKE = 0.99, 0.9995
PRIOR_BASE_ROWS = 19.0  # Rows that take as long as the fixed part of a step, before steps were measured.
PRIOR_SPREAD = 40.0  # Rows, squared: squared deviations of measured steps, in all, that the prior counts for.
