"""What operators call: tenants and keys, workers, speculation, usage, requests under way, events.

Each field is checked here. Not here: how the plan is made (`plan/`), and the page that shows all of it (`console/`).
Begin with `workers`.
"""
