"""The numbers by which the plan decides, with unit and reason. Others would make it decide worse, never wrongly.

Not here: the terms of a rollout (`rollout`) and of an alert (`control/alerts`), which operators are told.
"""

# -- evidence

HALF_LIFE_ROUNDS = 300.0
"""Rounds after which a tenant's evidence counts half. It decays with them and not with time: it outlasts a night."""
MIN_KEPT = 0.93
"""Share. A busy tenant has as many rounds in a second: one report makes the old evidence decay to no less than this."""
USUAL_ROUNDS = 20.0
"""Rounds of a tenant's own that the mean of all tenants at a target counts for."""
FIRST_SAVING = 0.5
"""Plain rounds. The saving of a round with a target and draft that have no evidence: high enough to be tried."""
FIRST_ROUNDS = 50.0
"""Rounds that FIRST_SAVING counts for."""
FIRST_TOKENS = 2.0
"""Tokens of a round without evidence."""
MIN_VARIANCE = 1.5
"""Plain rounds, squared. A few rounds that happen to be equal must not make the interval narrow."""
ALIKE_ROUNDS = 4.0
"""Rounds of one request are alike: this many of them tell as much as an independent one."""
SURPRISE = 4.0
"""Standard errors. New evidence this far from the estimate comes from another text or machine than the old one."""
KEPT_AFTER_A_SURPRISE = 0.25
"""Share of the old evidence that is kept then."""

# -- modes

NOTICEABLE = 0.05
"""Plain rounds. For a smaller saving no tenant's mode becomes ON, and no other draft takes over."""
DWELL_S, DWELL_ROUNDS = 5.0, 100.0
"""Seconds and rounds that a mode lasts at least, so that a tenant near the crossing does not flap."""
WIDER = 0.2
"""Plain rounds by which each recent change of mode widens the gap: near the crossing both modes are about equal."""
LATELY_S = 600.0
"""Seconds after which a change of mode counts half."""
LOSS = 0.01
"""Largest cost of trials to a tenant, as a share of its time."""
MIN_TRIALS, MAX_TRIALS = 0.005, 0.1
"""Shares of requests that try: enough to notice that drafts pay again, and few enough to be no mode of their own."""
MOVED = 0.1
"""Plain rounds by which a saving has to move before it is sent again: a new request starts from it, no more."""
LOAD_S = 1.0
"""Seconds for which rows cost more than any drafted token is worth before nobody speculates at a target."""
WAKE_SHARE = 0.5
"""Share of that price at which the target resumes, lower so that it does not flap."""

# -- sizes

DRAFT_BUSY, ROUTER_BUSY = 0.7, 0.6
"""Shares of time. A busier draft answers late, and late proposals are lost; a busier router delays every request."""
SHRINK_AFTER_S = 300.0
"""Seconds before a fleet shrinks: it grows at once, because a worker takes minutes to start."""
LATE = 0.2
"""Share of late rounds above which more drafts are needed, however idle the present ones report to be."""
