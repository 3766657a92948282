"""Loading and stepping bundles. Imports no torch."""
