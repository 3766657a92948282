"""How a made-up user begins: the target goes on from there, so that every kind of task is in the data.

A category is drawn first, then one of its openings, then a topic where the opening has room for one. The model
may end the message at once or add to it.
"""

from __future__ import annotations

from random import Random

FREE = "free"
"""The category whose message is the model's own from its first word."""

TOPICS = (
    "the water cycle", "a small bakery", "the Roman Empire", "electric cars", "honey bees", "time zones",
    "learning the guitar", "the human heart", "a trip to Japan", "black holes", "household budgets", "chess",
    "the French Revolution", "growing tomatoes", "machine learning", "volcanoes", "a lost dog", "public libraries",
    "sleep", "the stock market", "running a marathon", "coral reefs", "job interviews", "bread and yeast",
    "vaccines", "the moon landing", "remote work", "recycling", "a haunted lighthouse", "the Silk Road",
    "databases", "train travel", "wind power", "old friends", "writing a novel", "stress", "penguins", "democracy",
    "the printing press", "coffee", "street photography", "a school project", "cooking for one", "climate change",
    "the ocean at night", "board games", "teamwork", "renting a flat", "solar eclipses", "the history of maths",
    "birdsong", "first aid", "a robot who paints", "rivers", "antibiotics", "moving to a new city", "kites",
    "the alphabet", "patience", "fairy tales",
)  # fmt: skip

OPENINGS: dict[str, tuple[str, ...]] = {
    "chat": (
        "What", "How", "Why", "Can you", "Tell me about {topic}", "Explain {topic}",
        "What should I know about {topic}",
        "I'm thinking about {topic}.", "Give me five tips about {topic}", "What are the pros and cons of {topic}",
        "Write a short story about {topic}", "Write a poem about {topic}", "How does {topic} relate to",
        "I need advice on {topic}.", "Compare {topic} and", "What is the difference between",
    ),
    "code": (
        "Write a Python function that", "Write a function to", "How do I", "Write a JavaScript function that",
        "Write a SQL query that", "Explain what this code does:\n\ndef ", "Fix this code:\n\ndef ",
        "Write a class that",
        "Write a Python script that", "Write a bash command to", "Add comments to this code:\n\n",
    ),
    "summarise": (
        "Summarize the following text:\n\n", "Summarize this in one sentence:\n\n",
        "Give me the main points of this article about {topic}:\n\n", "Write a short summary of this passage:\n\n",
        "Summarize the following email:\n\nHi ", "What is the key idea of this paragraph on {topic}?\n\n",
    ),
    "rewrite": (
        "Rewrite this sentence in a formal tone: ", "Correct the grammar: ", "Make this text shorter:\n\n",
        "Rewrite the following paragraph about {topic} for children:\n\n", "Improve this email:\n\nDear ",
        "Paraphrase this sentence: ", "Turn these notes on {topic} into a paragraph:\n\n- ", "Make this friendlier: ",
    ),
    "maths": (
        "Solve for x: ", "What is", "A train", "If a shop sells", "Calculate", "Sarah has", "Solve this step by step: ",
        "A rectangle has", "Find the average of", "How many", "Explain how to add", "What percentage of",
    ),
    "extraction": (
        "Extract all names and dates from this text:\n\n",
        "List the key facts in the following text about {topic}:\n\n",
        "What is the sentiment of this review?\n\n", "Extract the email addresses from:\n\n",
        "Classify the following text:\n\n", "Answer the question from the text.\n\nText: ", "Make a JSON object of: ",
    ),
    FREE: ("",),
}  # fmt: skip

SYSTEMS = (
    "You are a helpful assistant.",
    "Answer briefly.",
    "You are a careful teacher who explains step by step.",
    "You are an expert programmer.",
)
_OWN_SYSTEM = 0.15
"""Share of conversations with one of these system messages; the others have the chat template's own, or none."""


def draw_opening(random: Random) -> tuple[str, str, str | None]:
    """→ category, the first words of the user's message, system message."""
    category = random.choice(list(OPENINGS))
    opening = random.choice(OPENINGS[category]).format(topic=random.choice(TOPICS))
    system = random.choice(SYSTEMS) if random.random() < _OWN_SYSTEM else None
    return category, opening, system
