"""The numbers by which a router decides, with unit and reason. Others would make it decide worse, never wrongly."""

# -- who may start now

BUSY = 0.8
"""Share of the places that any tenant may take. The rest is for tenants below their weighted shares."""
ACTIVE_S = 10.0
"""Seconds for which a tenant without requests keeps its share."""
USUAL_TOKENS = 128
"""Tokens of an answer of which the client says nothing; the credit of a turn too, so that most serve a request."""
NEWEST = 0.05
"""Weight of the newest request in means over requests."""
ANSWER_S, ANSWER_SHARE = 0.25, 0.2
"""Seconds, and at most this share of a client's time, that are left for a refusal to reach it."""
EXPECTED_WAIT_SHARE = 0.5
"""Share of its time that a request may be expected to wait. The estimate is a mean: with more it is refused at once."""

# -- which worker

SIMILAR_LOAD = 0.125
"""Share of a draft's places by which it may be busier than another and be chosen: for larger batches of one target."""
USUAL_ROW_NS = 200_000
"""Of a row in a step, until a worker has reported how long its steps take."""
ROUNDS_TO_CLEAR = 16
"""Rounds that clear a request. One that breaks a target every few tokens must not be tried on all of them."""

# -- how much a request drafts

KEEP = 0.97
"""Decay per round of what one request has shown: half is replaced in 23 rounds, so that it tries again in time."""
KEEP_SAVED = 0.93
"""Decay per round of what a draft has saved in one request, which its rest follows within a few rounds."""
KNOWN_ROUNDS = 24.0
"""Rounds that earlier requests count for, so that a few bad ones do not stop a draft that has paid."""
MIN_ROUNDS = 3
"""Rounds of a trial before it can fail."""
MAX_LATE_ROUNDS = 8
"""Rounds after which a draft that is never in time counts by what it costs the target, and one that has sent nothing as
missing: until then it prefills."""
FIRST_PAUSE_TOKENS, LONGEST_PAUSE_TOKENS = 128, 512
"""Tokens that a request decodes plainly after a draft has failed: that must prefill them all to come back."""
MEASURING_TOKENS, MEASURE_AFTER_ROUNDS = 8, 6
"""Tokens decoded plainly to measure a plain round, and the rounds before that."""
CLEAR_SAVING = 0.35
"""Plain rounds. A smaller saving is not believed before a plain round was measured with the draft paused: next to a
busy draft a step takes longer, most of all where both share a memory, and the draft would get credit for that."""
PRIOR_STEPS = 4.0
"""Steps that each accept one token: what is known of a request that has drafted nothing yet."""
ALARM = 0.5
"""Acceptance below which a request's own times decide, whatever earlier requests have saved."""
ALONE_AFTER_S = 5.0
"""Seconds without the control plane after which a router plans by itself."""
DECISIONS_PER_STEP = 8
"""Sequences of a target that are decided after one step, the others in turn: a decision costs as much as the rest of a
round, and where many share a target a few rounds' delay matters little to each."""
