"""Small real models, and workers that speak the protocol without one, for our tests and for yours."""
