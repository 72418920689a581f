"""The schema's history: numbered, one purpose each."""
