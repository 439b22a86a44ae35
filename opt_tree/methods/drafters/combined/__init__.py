"""Drafters built around other drafters."""
