"""`graphspec bench`: what speculation gains on a bundle, by width and batch size, and what it rests on."""
