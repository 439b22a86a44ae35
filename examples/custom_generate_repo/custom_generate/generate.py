"""Decode with an OPT-Tree draft: what `model.generate(custom_generate="<this repository>")` calls.

The library is imported from where pip put it: transformers copies this file, and nothing beside it.
"""

import weakref

import opt_tree

_decoders: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # one a model: a drafter is loaded once


def generate(model, drafter=None, nodes=60, threshold=0.5, max_depth=10, **arguments):
    """Return what `model.generate` would: the same ids at temperature 0, the same distribution above.

    `drafter`: "lm:PATH", "eagle:PATH", a table's name such as "ngram" (no model needed), or a draft model itself.
    `nodes`, `threshold`, `max_depth`: the tree's. `arguments` are those of `generate`, and `seed` of the sampling.
    Raises ValueError for a drafter that is not named and for what a tree cannot give.
    """
    if drafter is None:
        raise ValueError('no drafter named: generate(..., drafter="lm:PATH"), or "eagle:PATH", or "ngram"')
    policy = opt_tree.OptTree(nodes, threshold, max_depth)
    decoders = _decoders.setdefault(model, {})
    key = (drafter if isinstance(drafter, str) else id(drafter), policy)
    if key not in decoders:
        target = opt_tree.CausalLM(model)
        if isinstance(drafter, str):
            chosen = opt_tree.load_drafter(drafter, target)
        else:
            chosen = opt_tree.CausalLMDrafter(opt_tree.CausalLM(drafter), target.vocab)
        decoders[key] = opt_tree.Decoder(target, chosen, policy)
    return model.generate(custom_generate=opt_tree.custom_generate(decoders[key]), **arguments)
