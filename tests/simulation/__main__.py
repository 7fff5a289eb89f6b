"""python -m tests.simulation"""

from outrider_controller.cli.app import main

from tests.simulation.command import simulation

if __name__ == "__main__":
    main(command=simulation, name="python -m tests.simulation")
