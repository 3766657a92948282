"""The OpenAI-compatible HTTP server: asyncio on this side, the scheduler's thread on the other.

routes (app) ─▶ request (schemas) ─▶ prompts (chat, completions) ─▶ Answers ─▶ scheduler's thread
                                   JSON or server-sent events   ◀─ pieces ◀─┘
"""
