"""Imported before transformers, which imports torchao if it is installed, which logs at length what it lacks."""

import logging

for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
