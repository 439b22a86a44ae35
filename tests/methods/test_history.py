"""A text's ids as a tensor that grows with it."""

import torch

from opt_tree.methods.processors import History

CPU = torch.device("cpu")


def test_is_the_text_and_the_branch_below_it_at_every_length():
    text = [7]
    history = History(text)
    for step in range(40):
        for branch in ([], [100 + step], [200, 201, 202]):
            assert history.ids(CPU, branch).tolist() == [[*text, *branch]]
        text += range(step % 4)


def test_what_was_handed_out_of_the_text_stays():
    """A criterion may keep what it was shown."""
    text = [1, 2]
    history = History(text)
    shown = []
    for token in range(3, 30):
        shown.append(history.ids(CPU))
        text.append(token)
    history.ids(CPU, [0, 0])
    assert [ids.tolist()[0] for ids in shown] == [list(range(1, end)) for end in range(3, 30)]


def test_only_what_is_new_is_made_a_tensor(monkeypatch):
    """At 128 thousand tokens the whole took 12 ms, in every step and for every token at the door."""
    made, tensor = [], torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda values, **options: made.append(len(values)) or tensor(values))
    text = list(range(1000))
    history = History(text)
    for _ in range(5):
        history.ids(CPU, [4, 5])
        text += [1, 2]
    assert made == [1002, 4, 4, 4, 4]
