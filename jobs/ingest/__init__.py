"""Files of prompts become validated rows. `rows` is the way in."""
