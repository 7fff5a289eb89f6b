"""One model on several processes: rank 0 decides, followers run the same forward on their share of the heads.

Knows the group's processes and their messages; not the service, nor the process that starts the group.
"""
