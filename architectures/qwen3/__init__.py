"""The Qwen3 family."""
