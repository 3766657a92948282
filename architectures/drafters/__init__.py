"""Drafters: each proposes K tokens from what the target has just verified."""
