"""Drafters that look up what followed before, without a model."""
