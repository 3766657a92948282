"""Parts that several targets or drafters are made of."""
