"""The numbers by which a gateway decides, with unit and reason. Others would make it decide worse, never wrongly."""

BUSY = 0.8  # Share of the places that any tenant may take. The rest is for tenants below their weighted shares.
SLICE_S = 0.15  # Seconds of a tenant's whole rate that are taken from the store at once, not to ask for each request.
# Seconds for which what the store said of a quota holds: a slice would allow an extra burst later, and the tenant of a
# refused request may get a larger quota.
KNOWN_S = 0.5
FIRST_MEAN_TOKENS = 128.0  # Tokens of an answer, for a tenant that has none yet.
NEWEST = 0.05  # Weight of the newest answer in means over answers.
CHARS_PER_TOKEN = 4  # Of a prompt that is not tokenised yet; the charge is corrected at the end.
# Seconds between the frames of a paced stream: before any answer, and the bounds that a strange answer cannot pass.
FIRST_BEAT_S, MIN_BEAT_S, LONGEST_BEAT_S = 0.05, 0.005, 0.5
