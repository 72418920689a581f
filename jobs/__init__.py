"""The producer's side and the memory: what was asked for, what was made, what can be reused."""
