"""The numbers by which the plan decides, with unit and reason. Others would make it decide worse, never wrongly.

Not here: the terms of a rollout (`rollout`) and of an alert (`control/alerts`), which operators are told.
"""

# Evidence
HALF_LIFE_ROUNDS = 300.0  # Rounds, not time, after which evidence counts half: it outlasts an idle night.
# Tokens saved by a round without any evidence: high enough to be tried.
FIRST_SAVING = 0.35
# Rounds that what is known before counts for: FIRST_SAVING at a target, and the mean of its tenants for one of them. A
# mode lasts as many at least, so that a tenant near the crossing does not flap.
FIRST_ROUNDS = 50.0
MIN_VARIANCE = 1.5  # Tokens, squared: rounds that happen to be equal must not make the interval narrow.

# Modes
# Tokens a round: for a smaller saving no tenant's mode becomes or stays ON, and no other draft takes over. A part of
# what a draft costs is not in the evidence: on a target's own machine it slows the steps by some hundredths.
NOTICEABLE = 0.05
WIDER = 0.3  # Tokens a round by which each recent change widens the gap: near the crossing both modes are about equal.
# Seconds that are long for the plan: after them a change of mode counts half, and a fleet shrinks. (It grows at once,
# because a worker takes minutes to start.)
LONG_S = 600.0
LOSS = 0.01  # Largest cost of trials to a tenant, as a share of its time.
# Share of the price at which rows cost more than any drafted token is worth: there a target resumes. Lower, so that it
# does not flap.
WAKE_SHARE = 0.5

# Sizes
# Share of its time for which a worker may be busy: a busier draft answers late, a busier router delays all requests.
# And share of rounds for which drafts have to be in time, however idle they report to be.
WORKER_BUSY = 0.7
