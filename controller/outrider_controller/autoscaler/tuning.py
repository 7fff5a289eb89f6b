"""The numbers by which the plan decides, with unit and reason. Others would make it decide worse, never wrongly.

Not here: the terms of a rollout (`rollout`) and of an alert (`control/alerts`), which operators are told.
"""

# Evidence
HALF_LIFE_ROUNDS = 300.0  # Rounds, not time, after which evidence counts half: it outlasts an idle night.
MIN_KEPT = 0.93  # Share of the old evidence that one report leaves at least: a busy tenant has 300 rounds in a second.
USUAL_ROUNDS = 20.0  # Rounds of a tenant's own that the mean of all tenants at a target counts for.
FIRST_SAVING = 0.5  # Plain rounds saved by a round without any evidence: high enough to be tried.
FIRST_ROUNDS = 50.0  # Rounds that FIRST_SAVING counts for.
MIN_VARIANCE = 1.5  # Plain rounds, squared: rounds that happen to be equal must not make the interval narrow.
# Standard errors, as of independent rounds; those of one request are alike. New evidence so far from the estimate is of
# another text or machine than the old.
SURPRISE = 6.0
KEPT_AFTER_A_SURPRISE = 0.25  # Share of the old evidence that is kept then.

# Modes
NOTICEABLE = 0.05  # Plain rounds: for a smaller saving no tenant's mode becomes ON, and no other draft takes over.
DWELL_S, DWELL_ROUNDS = 5.0, 100.0  # That a mode lasts at least, so that a tenant near the crossing does not flap.
WIDER = 0.2  # Plain rounds by which each recent change widens the gap: near the crossing both modes are about equal.
LATELY_S = 600.0  # Seconds after which a change of mode counts half.
LOSS = 0.01  # Largest cost of trials to a tenant, as a share of its time.
MAX_TRIALS = 0.1  # Largest share of requests that try.
LOAD_S = 1.0  # Seconds for which rows cost more than any drafted token is worth before nobody speculates at a target.
WAKE_SHARE = 0.5  # Share of that price at which the target resumes: lower, so that it does not flap.

# Sizes
DRAFT_BUSY, ROUTER_BUSY = 0.7, 0.6  # Shares of time. A busier draft answers late, a busier router delays all requests.
SHRINK_AFTER_S = 300.0  # Seconds before a fleet shrinks; it grows at once, because a worker takes minutes to start.
LATE = 0.2  # Share of late rounds above which more drafts are needed, however idle the present ones report to be.
