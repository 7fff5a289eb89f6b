"""The protocol in virtual time: the shipped gateway, router, target and draft, between simulated clocks and links.

A schedule is drawn from a seed: requests, workers, and what befalls them. It is run, and what came of it is judged.
"""

from tests.simulation.run import Outcome, run_schedule
from tests.simulation.schedule import Schedule, draw

__all__ = ["Outcome", "Schedule", "draw", "run_schedule"]
