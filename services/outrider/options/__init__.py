"""A request's options for sampling, logits and log probabilities: checked values, for processes without torch.

Not here: what a client may send, which the gateway checks. Begin with `sampling`.
"""
