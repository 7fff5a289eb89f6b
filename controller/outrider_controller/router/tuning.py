"""The numbers by which a router decides, with unit and reason. Others would make it decide worse, never wrongly."""

# Who may start now
ACTIVE_S = 10.0  # Seconds for which a tenant without requests keeps its share.
ANSWER_S = 0.25  # Seconds for a refusal to reach a client, within WAIT_SHARE of the request's time.
WAIT_SHARE = 0.5  # Share of its time that a request may be expected to wait: the estimate is only a mean.

# Which worker
SIMILAR_LOAD = 0.125  # Share of its places by which a draft may be busier and be chosen: for larger batches.
ROUNDS_TO_CLEAR = 16  # A request that breaks a target every few tokens must not be tried on all of them.

# How much a request drafts
KEEP = 0.96  # Decay per round of what one request has shown: half is replaced in 17 rounds, so it tries again in time.
PRIOR_STEPS = 4.0  # Steps that each accept one token: what is known of a request that has drafted nothing yet.
MIN_ROUNDS = 3  # Rounds of a trial before it can fail.
MAX_LATE_ROUNDS = 8  # Rounds to prefill in: then a draft that is late counts by its cost, and a silent one as missing.
MEASURING_TOKENS = 8  # Tokens decoded plainly to measure a plain round.
# Plain rounds. A smaller saving does not count before a plain round was measured with the draft paused: next to a
# busy draft a step takes longer, most of all where both share a memory, and the draft would get credit for that.
CLEAR_SAVING = 0.35
ALARM = 0.5  # Acceptance of a request's last drafted tokens below which operators are told.
ALONE_AFTER_S = 5.0  # Seconds without the control plane after which a router plans by itself.
# Sequences of a target that are decided after one step, the others in turn: a decision costs as much as the rest of a
# round, and where many share a target a few rounds' delay matters little to each.
DECISIONS_PER_STEP = 8
