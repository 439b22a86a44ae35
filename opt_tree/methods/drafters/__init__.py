"""Drafters beside a plain draft model: what may follow."""
