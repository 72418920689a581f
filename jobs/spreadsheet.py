"""Cells of the CSV files that this program writes."""

from __future__ import annotations

# A spreadsheet takes a cell that begins with one of these for a formula and may run it (OWASP: CSV injection).
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")


def safe_cell(value: object) -> str:
    """The text of a cell that no spreadsheet runs: numbers as they are, formula-like text behind an apostrophe."""
    if value is None:
        return ""
    text = str(value)
    if isinstance(value, str) and text.startswith(_FORMULA):
        return "'" + text
    return text
