"""Controllers: which policy for the next step."""
