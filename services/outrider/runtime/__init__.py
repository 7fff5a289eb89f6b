"""What every process does with its own tasks, threads, places, children and garbage.

Nothing here knows what the process serves. Begin with `supervision`.
"""
