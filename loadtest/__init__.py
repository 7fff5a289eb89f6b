"""Load tests of a running stack with Locust: users of several tenants, shapes, faults, goodput. Not in the wheel."""
