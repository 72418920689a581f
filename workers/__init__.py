"""Joins jobs and engine: claims a job, runs it, publishes what it made."""
