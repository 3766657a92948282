"""Training a draft for a target: the target's own answers, then the drafter unrolled on them.

synthesis (graphspec.runtime) and training (graphspec.architectures) meet in files of conversations only.
"""
