"""A request's options for sampling, logits and log probabilities: checked values, for processes without torch."""
