"""Load on a running stack, with Locust: users of several tenants, shapes of load, faults, goodput. Not in the wheel."""
