"""The protocol in virtual time: the shipped gateway, router, target and draft on simulated clocks and links.

A seed gives a schedule of requests, workers and faults. The schedule is run, and its outcome is checked.
"""

from tests.simulation.run import Outcome, run_schedule
from tests.simulation.schedule import Schedule, draw

__all__ = ["Outcome", "Schedule", "draw", "run_schedule"]
