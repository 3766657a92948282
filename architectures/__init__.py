"""Torch modules: the fused step, targets, drafters and accept rules."""
