"""What controllers are trained on: draft lengths and values of trees."""
