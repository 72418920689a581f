"""Computes: torch and triton only, each kernel beside a torch reference of the same signature."""
