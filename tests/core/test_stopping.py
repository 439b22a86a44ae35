"""Stop rules of the loop: stop tokens."""

import pytest

from opt_tree.request import StopTokens, ends_of, rule_for


def test_any_of_the_stop_tokens_stops() -> None:
    stop = StopTokens([7, 2])
    assert stop.tokens == {2, 7} == ends_of(stop)
    assert [stop(tokens) for tokens in ([1, 3, 2], [7], [1, 3, 4])] == ["stop_token", "stop_token", None]
    assert stop([7, 1]) is None, "an earlier stop token was let pass on purpose, or by another rule"
    assert StopTokens()([1]) is None and ends_of(StopTokens()) == ends_of(None) == frozenset()


def test_a_rule_without_tokens_is_given_those_of_the_target() -> None:
    ends = frozenset({5})
    assert rule_for(StopTokens(), ends) == StopTokens(ends)
    for rule in (StopTokens(()), StopTokens({3}), None, lambda generated: None):
        assert rule_for(rule, ends) is rule
    with pytest.raises(TypeError, match="stop must be a rule"):
        rule_for("stop", ends)
    with pytest.raises(TypeError, match="token must be a whole number"):
        StopTokens(["a"])
