"""The local profile: real servers from the program's own dependencies. `profile` is the way in."""
