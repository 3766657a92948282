"""From a torch module to a bundle: trace, lower, quantise, compile, write."""
