"""From a request to the texts that answer it: which prompt, which drafter and tree, within which limits.

Owns the limits and the defaults. Knows nothing of HTTP but the status of what is refused.
"""

import copy
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

from opt_tree.decoder import check_policies
from opt_tree.drafter import Drafter
from opt_tree.integrations.server.engine import Engine, Job
from opt_tree.integrations.server.requests import BaseRequest, Chat, Completion, Refused, TreeOptions
from opt_tree.methods.policies.registry import POLICIES, make_policy, parameters
from opt_tree.methods.policies.static import Static
from opt_tree.methods.sampling import Sampling
from opt_tree.policy import TreePolicy
from opt_tree.request import check_prompt
from opt_tree.tools.pair import Pair, encode
from opt_tree.verify import match

SHORT = 16
"""New tokens of a completion that does not say how many: the protocol's default."""


@dataclass(frozen=True)
class Limits:
    """What the server takes, and the tree of whoever names none."""

    context: int
    """Tokens of a prompt and its answer together."""
    new_tokens: int
    """Of an answer."""
    nodes: int
    """Drafted nodes of a tree."""
    tree: TreeOptions


class Service:
    """A model under one name, with the drafters that may be asked for.

    Arguments:
        pair: the target, its tokenizer and the drafter of whoever names none.
        drafters: all drafters by their spec; the first is the pair's.
    """

    def __init__(self, name: str, pair: Pair, drafters: Mapping[str, Drafter], engine: Engine, limits: Limits) -> None:
        self.name, self.pair, self.drafters, self.engine, self.limits = name, pair, drafters, engine, limits
        # The engine's thread looks for stop strings with the pair's; nobody else uses this one.
        self.tokenizer = copy.deepcopy(pair.tokenizer)
        self.context = min(limits.context, pair.target.max_context)
        """Tokens of a prompt and its answer together, at most."""
        try:
            self._drafting(None, TreeOptions())
        except Refused as refused:
            raise ValueError(f"the server's own tree: {refused}") from refused

    def jobs(self, asked: BaseRequest) -> list[Job]:
        """The texts that a request asks for, one for each prompt. Raises Refused for what cannot be had."""
        if asked.model != self.name:
            raise Refused(404, f"no model is called {asked.model!r} here; there is {self.name!r}", "model")
        drafter, policy = self._drafting(asked.drafter, asked.tree or TreeOptions())
        temperature, top_p = (1.0 if one is None else one for one in (asked.temperature, asked.top_p))
        stop = replace(self.pair.stop, strings=asked.stops, tokenizer=self.pair.tokenizer)
        seed = random.randrange(2**31) if asked.seed is None else asked.seed
        echo = isinstance(asked, Completion) and bool(asked.echo)
        found = []
        try:
            sampling = Sampling(temperature, top_p)
            for prompt in self._prompts(asked):
                most = self._new_tokens(asked, check_prompt(prompt, self.pair.target))
                found.append(Job(prompt, most, sampling, stop, seed, drafter, policy, asked.likeliest, echo))
        except (ValueError, TypeError) as error:
            raise Refused(400, str(error)) from error
        if len(found) > self.engine.most:
            raise Refused(400, f"{len(found)} prompts are more than the {self.engine.most} that wait at most", "prompt")
        return found

    def _prompts(self, asked: BaseRequest) -> list[list[int]]:
        if isinstance(asked, Chat):
            if not getattr(self.tokenizer, "chat_template", None):
                raise Refused(400, f"{self.name} has no chat template: ask /v1/completions", "messages")
            return [encode(self.tokenizer, [message.plain for message in asked.messages])]
        assert isinstance(asked, Completion)
        given = asked.prompts
        return [self.tokenizer(one).input_ids if isinstance(one, str) else list(one) for one in given]

    def _new_tokens(self, asked: BaseRequest, prompt: list[int]) -> int:
        """How many new tokens a text may have. Raises Refused where there is no room for as many as are asked for."""
        room, most = self.context - len(prompt), asked.most
        if most is None and room > 0:
            return min(room, self.limits.new_tokens if isinstance(asked, Chat) else SHORT)
        if most is not None and most > self.limits.new_tokens:
            raise Refused(400, f"max_tokens is {most}, at most {self.limits.new_tokens} are served", "max_tokens")
        if most is None or most > room:
            wanted = f"a prompt of {len(prompt)} tokens and {most or 1} new ones"
            raise Refused(400, f"{wanted} are more than {self.context}", code="context_length_exceeded")
        return most

    def _drafting(self, named: str | None, tree: TreeOptions) -> tuple[str | None, TreePolicy]:
        """The drafter's name and the tree policy; None: decoded plainly."""
        drafter = next(iter(self.drafters)) if named is None else named
        if drafter not in self.drafters:
            there = ", ".join(map(repr, self.drafters))
            raise Refused(400, f"no drafter {drafter!r} was loaded; there is {there}", "drafter")
        usual = self.limits.tree
        if tree.nodes is not None and tree.nodes > self.limits.nodes:
            raise Refused(400, f"tree.nodes is {tree.nodes}, at most {self.limits.nodes} are served", "tree.nodes")
        nodes = usual.nodes if tree.nodes is None else tree.nodes
        spec = tree.policy or usual.policy or "opt"
        name = spec.partition(":")[0]
        if name not in POLICIES:  # so that no file is run
            raise Refused(400, f"no policy is called {name!r}; there are {', '.join(POLICIES)}", "tree.policy")
        threshold = usual.threshold if spec == usual.policy and tree.threshold is None else tree.threshold
        if threshold is not None:
            if ":" in spec or parameters(name)[:1] != ["threshold"]:
                raise Refused(400, f"the policy {spec} takes no threshold beside its name", "tree.threshold")
            spec = f"{name}:{threshold}"
        try:
            if not nodes:
                return None, Static.empty()
            policy = make_policy(spec, nodes)
            check_policies(policy, self.drafters[drafter], match, lossy=False)
        except (ValueError, TypeError) as error:
            raise Refused(400, str(error), "tree") from error
        return drafter, policy
