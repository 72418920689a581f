"""What the program knows of each model before any of its weights is loaded. `card` is the way in."""
