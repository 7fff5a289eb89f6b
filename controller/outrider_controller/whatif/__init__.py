"""What another draft, a slower link or more load would cost or save, computed before anybody pays for it.

`stack` runs the shipped target worker, draft workers, router policy and plan in virtual time: models are replaced by
texts that are known (`texts`, `engine`), steps take the time that they are given. `recorded` makes texts and times of
exported rounds. Knows no network. Begin with `stack`.
"""
