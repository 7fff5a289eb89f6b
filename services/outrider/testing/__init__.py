"""Small real models, for our tests and for yours."""
