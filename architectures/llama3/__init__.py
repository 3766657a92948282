"""The Llama 3 family."""
