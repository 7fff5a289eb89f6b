"""How many routers a controller keeps on a Ray cluster."""

from __future__ import annotations

import threading

from outrider_controller.actors import StartError
from outrider_controller.cluster import follow


class FakeController:
    """Is asked as often as there are answers, and then stops."""

    def __init__(self, wanted: list[int], num_routers: int) -> None:
        self.num_routers = num_routers
        self.stopping = threading.Event()
        self.resized: list[int] = []
        self.failing = False
        self._wanted = wanted

    def num_wanted(self) -> int:
        wanted = self._wanted.pop(0)
        if not self._wanted:
            self.stopping.set()
        return wanted

    def resize(self, num_routers: int) -> None:
        self.resized.append(num_routers)
        if self.failing:
            raise StartError("the actors did not start")
        self.num_routers = num_routers


def test_there_are_as_many_routers_as_the_load_needs_and_at_least_those_asked_for() -> None:
    controller = FakeController([0, 2, 5, 0, 5, 1, 10_000, 0], 2)
    follow(controller, 2, controller.stopping, every_s=0.001)
    # 0: nobody says. All stay.
    assert controller.resized == [5, 2, 64]


def test_routers_that_did_not_start_are_asked_for_again() -> None:
    controller = FakeController([3, 3, 3], 1)
    controller.failing = True
    follow(controller, 1, controller.stopping, every_s=0.001)
    assert controller.resized == [3, 3, 3]


def test_routers_that_an_earlier_controller_left_are_kept_until_the_need_is_known() -> None:
    controller = FakeController([0, 5, 3], 5)
    follow(controller, 2, controller.stopping, every_s=0.001)
    assert controller.resized == [3]
