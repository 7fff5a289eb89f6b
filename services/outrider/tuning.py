"""The numbers by which gateways and workers decide, with unit and reason; some are routers' too. Others would make
an answer slower, and never another one.
"""

# Who may start now, at a gateway and at a router
BUSY = 0.8  # Share of the places that any tenant may take. The rest is for tenants below their weighted shares.
USUAL_TOKENS = 128  # Tokens of an answer of which nothing is known yet.
# Weight of the newest in running means: over requests, and over the rounds of one, where half is replaced in 17 rounds.
NEWEST = 0.04
CHARS_PER_TOKEN = 4  # Of a prompt that is not tokenised yet; the charge is corrected at the end.
# Seconds of a tenant's whole rate that are taken from the store at once, not to ask for each request. What is left of
# them, and a refusal, hold as long: kept, they would allow an extra burst, and the tenant may get a larger quota.
SLICE_S = 0.15
# Seconds between the frames of a paced stream, before any answer; the mean of strange answers stays within a tenth and
# ten times of it.
FIRST_BEAT_S = 0.05

# What a draft worker or a head proposes
MIN_CHANCE = 0.02  # Of an alternative: below, it is not worth its bytes on any target. No lower price of a row is sent.
HEAD_MIN_JOINT = 0.25  # Chance of a head's whole draft, below which it ends, unless its target has said one.
# Of the time that a draft's accepted tokens save, the share that its answer may take if a step is to wait for it: one
# that is not waited for is verified a step later, and saves about half as much.
WORTH_A_WAIT = 0.5

# The chance that a drafted token is accepted
# Verdicts that what is known before counts for: the draft's own probability, or the factor of a new text's tenant.
PRIOR = 8.0
# Share of the distance to 1 by which a chance without verdicts is raised: a token that is never verified may be
# likelier than its draft claims. Shrinks as verdicts come in.
BONUS = 0.5
# Decay per verdict, per commit of a tenant, and per step that is measured: about the last 140 count, and no chance is
# known better than to one in 140. A text forgets faster (NEWEST): if its drafts no longer pay, it tries them again.
KEEP = 0.993
# Decay per step of what no step measures: a chance that is not verified returns to its prior, and the cost of a row,
# while no drafted row pays and all steps have one size, is measured in time.
KEEP_STEP = 0.9985

# The time of a step
# Rows that take as long as the fixed part of a step, before steps were measured. The prior counts for as many steps
# that have one row more.
PRIOR_ROWS = 19.0
