"""What runs a model's steps on one kind of device."""
