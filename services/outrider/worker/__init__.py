"""What draft and target workers share: how their process starts and ends, and how its threads communicate.

Knows no drafts and no verification: the packages of the two workers define a step.

Begin with `process`, then `loop`.
"""
