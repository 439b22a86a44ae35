"""Whether the tokens that each verifier emits have the target's distribution: draws from the embedded pair, tested.

    PYTHONPATH=.:tests python -m statistical.draws                     # 2,000 draws each
    PYTHONPATH=.:tests python -m statistical.draws --verifiers block,traversal --draws 20000

Draw i is the first two tokens of the generation with seed i, by the loop, trees, verifiers and randomness of the
library. The models are asked once for each path, by plain causal forwards. A chi-square test compares the draws with
the target's own probabilities. Two pairs that are wrong on purpose are drawn from as well, to show that the test would
have noticed.

Exit status 1 if a lossless verifier's p-value is below 0.001 / (number of lossless verifiers), or a wrong pair's is
not. Divided (Bonferroni), because many tests are many chances of bad luck.
"""

import argparse
import functools
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from enumeration import target_law, unchecked, warped
from scipy.stats import chisquare
from table_models import Laws, TableDrafter, TableTarget
from tiny_models import causal_logits
from tqdm import tqdm
from transformers import PreTrainedModel

from opt_tree import Decoder, OptTree, Random, Sampling, Static, TreePolicy, load_pair
from opt_tree.children import LogProbs, TopK
from opt_tree.methods.children.drawn import DrawnChildren, DrawnLayer
from opt_tree.methods.children.iid import IID
from opt_tree.methods.policies.dyspec import DySpec
from opt_tree.methods.policies.rheo import Rheo
from opt_tree.methods.policies.sampled import Sampled
from opt_tree.methods.verifiers.registry import VERIFIERS
from opt_tree.verify import Verifier

Text = tuple[int, ...]

PROMPT = "Explain the `tar` command on Linux with examples."
"""One behind which the embedded drafters have none, one, two and three tokens accepted."""
SAMPLING = Sampling(1.0, top_k=8)
LEVEL = 0.001
"""How often a run in which every verifier is exact may say otherwise."""
LEAST = 5.0
"""Draws that a cell must expect: fewer are too coarse for the chi-square distribution. Rarer texts share a cell."""


class BestAsDrawn(IID):
    """The most probable tokens passed off as independent draws, which `verifiers.check` cannot see."""

    def pick(self, layer: DrawnLayer, random: Random) -> DrawnChildren:
        """See `Drawn.pick`."""
        assert isinstance(self.per_node, int)
        picked = TopK(self.per_node).pick(LogProbs(layer.log_probs), layer.above, layer.floor)
        return DrawnChildren(*picked, layer.above[picked.rows])


@dataclass(frozen=True)
class Case:
    """A verifier on a tree, two layers deep or more; `lossless`: whether the tree's children are of its kind."""

    verifier: Verifier
    policy: TreePolicy
    lossless: bool = True


CASES: dict[str, Case] = {
    "match": Case(VERIFIERS["match"].make, OptTree(nodes=8, threshold=0.0, max_depth=3)),
    "naive": Case(VERIFIERS["naive"].make, Sampled.kary(2, 2)),
    "k_seq": Case(VERIFIERS["k_seq"].make, Sampled.chains(3, 2)),
    "multi_round": Case(VERIFIERS["multi_round"].make, Sampled.kary(2, 2)),
    "khisti": Case(VERIFIERS["khisti"].make, Sampled.kary(2, 2)),
    "without_replacement": Case(VERIFIERS["without_replacement"].make, DySpec(nodes=8, max_depth=3)),
    "traversal": Case(VERIFIERS["traversal"].make, Sampled.chains(2, 3)),
    "block": Case(VERIFIERS["block"].make, Sampled.chain(3)),
    "rheo": Case(VERIFIERS["rheo"].make, Rheo(nodes=8, threshold=0.0, max_depth=3)),
    "typical": Case(VERIFIERS["typical"].make, OptTree(nodes=8, threshold=0.0, max_depth=3), lossless=False),
    "mismatched": Case(VERIFIERS["multi_round"].make, Static(Static.kary(2, 2).paths, BestAsDrawn), lossless=False),
}


def draw(case: Case, laws: tuple[Laws, Laws], prompt: list[int], draws: int, sampling: Sampling) -> Counter[Text]:
    """Begin a generation for each seed, as `Decoder.generate` would, and stop it behind its second token."""
    target = TableTarget(laws[0], len(laws[0](tuple(prompt))))
    decoder = Decoder(target, TableDrafter(laws[1]), case.policy, case.verifier, lossy=not case.lossless)
    drawn: Counter[Text] = Counter()
    with unchecked():
        for seed in tqdm(range(draws), unit="draw", leave=False, disable=None):
            tokens: list[int] = []
            steps = decoder.steps(prompt, None, sampling, Random(seed))
            while len(tokens) < 2:
                tokens += next(steps).tokens
            drawn[tokens[0], tokens[1]] += 1
    return drawn


def laws_of(model: PreTrainedModel) -> Laws:
    """What a model says behind a path: no tree, no cache, no loop."""
    return functools.cache(lambda path: causal_logits(model, list(path))[-1].double().softmax(-1).numpy())


def p_value(drawn: Counter[Text], probs: Mapping[Text, float]) -> float:
    """How often chance alone strays as far from `probs`: Pearson's test. A draw of probability 0 refutes them."""
    if drawn.keys() - probs.keys():
        return 0.0
    draws = drawn.total()
    common = [text for text, prob in probs.items() if draws * prob >= LEAST]
    seen, expected = [drawn[text] for text in common], [draws * probs[text] for text in common]
    seen, expected = [*seen, draws - sum(seen)], [*expected, draws - sum(expected)]
    if expected[-1] < LEAST:  # too rare even together
        seen[-2:], expected[-2:] = [sum(seen[-2:])], [sum(expected[-2:])]
    if len(seen) < 2:
        raise ValueError(
            f"{draws} draws over {len(probs)} texts make fewer than two cells that expect {LEAST:g} of them"
        )
    return float(chisquare(seen, expected).pvalue)


def main(arguments: list[str] | None = None) -> int:
    """Print a line for every verifier; return 0 if every case is as it should be, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--verifiers", default=",".join(CASES))
    options = parser.parse_args(arguments)
    cases = {name: CASES[name] for name in options.verifiers.split(",")}
    pair = load_pair("demo", dtype="float32")
    laws = laws_of(pair.target.model), laws_of(pair.drafter.models[0].model)
    prompt = pair.encode(PROMPT)
    probs = target_law(warped(laws[0], SAMPLING), tuple(prompt), 2)
    level, failed = LEVEL / max(sum(case.lossless for case in cases.values()), 1), False
    for name, case in cases.items():
        found = p_value(draw(case, laws, prompt, options.draws, SAMPLING), probs)
        expected = (found >= level) == case.lossless
        failed |= not expected
        said = "as it should be" if expected else "BIASED" if case.lossless else "NOT NOTICED"
        print(f"{name:20} p = {found:.2g}: {said}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
