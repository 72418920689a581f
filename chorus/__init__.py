"""The engine: decides what to compute for one request, and computes it. Knows no database and no queue."""
