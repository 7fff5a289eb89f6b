"""One model on several processes: rank 0 decides, followers run the same forward on their share of the heads.

Knows the group's processes and what they tell one another; not who serves the model, nor who starts the processes.
"""
