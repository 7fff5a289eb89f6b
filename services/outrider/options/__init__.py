"""What a request may ask of sampling, logits and log probabilities. Checked values, for processes without torch."""
