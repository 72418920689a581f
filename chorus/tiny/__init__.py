"""The built-in model: weights, loading, and the world and training they come from."""
