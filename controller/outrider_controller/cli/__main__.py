"""python -m outrider_controller.cli"""

from outrider_controller.cli import main

main()
