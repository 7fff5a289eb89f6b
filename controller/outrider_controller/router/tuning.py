"""The numbers by which a router decides, with unit and reason. Others would make it decide worse, never wrongly."""

# Who may start now
ACTIVE_S = 10.0  # Seconds for which a tenant without requests keeps its share.
# Share of its deadline that a request may wait, so that the rest is for its answer; and share of that wait that may be
# expected when it comes: the estimate is only a mean.
WAIT_SHARE = 0.5

# How much a request drafts
# Steps that each accept one token: what is known of a request that has drafted nothing yet.
PRIOR_STEPS = 4
# Rounds in which something begins: a draft prefills (then it counts as late, or as missed while it has sent nothing),
# and a target shows that a request does not break it.
BEGINNING = 8
ALARM = 0.5  # Acceptance of a request's last drafted tokens below which operators are told.
# Sequences of a target that are decided after one step, the others in turn: a decision costs as much as the rest of a
# round, and where many share a target a few rounds' delay matters little to each.
DECISIONS_PER_STEP = 8
