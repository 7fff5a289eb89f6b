"""Small real models, simulated workers and experiments, for our tests and for yours."""
