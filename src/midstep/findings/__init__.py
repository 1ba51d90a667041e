"""Findings: defects at places, which of them are reported, and how they are written."""

from .finding import Finding, exit_code, once
from .rendering import Format, render
from .selection import Selection, Suppressions

__all__ = ["Finding", "Format", "Selection", "Suppressions", "exit_code", "once", "render"]
