"""A drafter for a target: the target's answers, stores and heads made of them, temperatures, controllers, the verdict.

Owns one command for each step, and `train_drafter`, which runs them. Nothing that decodes imports this package.
"""
