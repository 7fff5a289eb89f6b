"""Target and draft in one process, on one clock: the shipped workers without a network.

`pair` takes turns of both, with a real model or a known text. `worker` runs each beside the others in virtual time,
whose clock is `clock`; `stack` makes the workers, and the ways between them. In `engine` a step is looked up in a text,
and takes as long as it is told to. On these stand `outrider.local`, `outrider compare drafts`, `outrider plan
--what-if`, the benchmarks and the fault schedules of tests.

Begin with `pair`.
"""
