"""A batch's results as files on a person's disk. `delivery` is the way in."""
