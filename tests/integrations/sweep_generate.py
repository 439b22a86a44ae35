"""Every option of transformers' `generate` through a decoder, on many architectures: equal, refused or failed?

    PYTHONPATH=.:tests python tests/integrations/sweep_generate.py [type ...] [--all] [--seconds 300] [--json FILE]

A script, not a test: it takes minutes. The options are the cases of `test_hf_options.py` and what transformers' own
generation tests do beside them (batches, padding, dicts, caches that go on). Models are tiny, random and float64. Each
call is made plainly and with `custom_generate`. *Equal*: ids, scores, logits, the length of the cache and the
fields of the output. *Equal without padding*: transformers writes another text for a padded row than for the same row
alone (NaN in Bloom), and the decoder the latter. *Refused*: one line, a ValueError of this library. Ends with 1 where a
call failed.
"""

import argparse
import collections
import copy
import json
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from integrations import test_hf_options as options
from models.sweep_architectures import alone, built, noisy
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from opt_tree import Decoder, OptTree, UnsupportedModelError, custom_generate
from opt_tree.methods.drafters.small_models.chain_lm import model_drafter
from opt_tree.models.chain_lm import wrap

TYPES = (
    *("llama", "llama4_text", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_next", "gemma2", "gemma3_text", "phi3"),
    *("gpt2", "gpt_neox", "gpt_oss", "opt", "bloom", "cohere2", "olmo2", "starcoder2", "deepseek_v3", "deepseek_v32"),
    *("falcon_h1", "lfm2", "bart", "roberta"),
)
"""Windows, chunks, sinks, soft caps, experts, latent attention, indexes, ALiBi, states, learned positions."""
NEW_TOKENS = 12
KINDS = ("equal", "equal without padding", "refused", "transformers refuses", "failed")
Found = tuple[str, str, str]
"""The option, one of KINDS, and why."""
Options = dict[str, Any]


def calls(made: Any) -> Iterator[tuple[str, Options, Options]]:
    """Yield the name of each call, its options, and those of a call before it whose cache it goes on from."""
    ids, mask = options.IDS, options.MASK
    usual = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": NEW_TOKENS, "do_sample": False}
    for name, case in (options.FIELDS | options.ARGUMENTS | options.INPUTS).items():
        own = {**usual, **case()[1]}
        if name == "generation_config":
            own.pop("max_new_tokens")
        yield name, {key: value for key, value in own.items() if value is not None}, {}
    told = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    one, two = ids, torch.cat([ids, ids.flip(1)])
    padded = two.clone()
    padded[1, :5] = 0
    masks = {"attention_mask": torch.ones_like(two)}
    yield "greedy, a dict", usual | told, {}
    yield "a batch", usual | {"input_ids": two} | masks, {}
    yield "a batch, a dict", usual | told | {"input_ids": two} | masks, {}
    yield "a padded batch", usual | {"input_ids": padded, "attention_mask": (padded != 0).long()}, {}
    yield "drawn, a dict", usual | told | {"do_sample": True, "top_k": 1}, {}
    yield "drawn, three texts", usual | {"do_sample": True, "top_k": 1, "num_return_sequences": 3}, {}
    yield "one token of prompt", usual | {"input_ids": one[:, :1], "attention_mask": mask[:, :1]}, {}
    yield "one new token", usual | {"max_new_tokens": 1}, {}
    yield "no cache, a dict", usual | told | {"use_cache": False}, {}
    yield "beams drawn", usual | {"num_beams": 2, "do_sample": True}, {}
    yield "a static cache, a dict", usual | told | {"cache_implementation": "static"}, {}
    yield "goes on from its cache", usual, usual | {"return_dict_in_generate": True}
    yield "a batch goes on from its cache", usual | masks, usual | masks | {"input_ids": two} | told


def made_of(model: Any, given: Options, before: Options, **door: Any) -> Any:
    """Call `generate`, behind a call before it where there is one."""
    torch.manual_seed(0)
    if not before:
        return model.generate(**copy.deepcopy(given), **door)
    first = model.generate(**copy.deepcopy(before), **door)
    longer = torch.cat([first.sequences, first.sequences[:, :3]], 1)
    more = {"input_ids": longer, "attention_mask": torch.ones_like(longer)}
    return model.generate(**given | more, past_key_values=first.past_key_values, **door)


def differences(ours: Any, theirs: Any) -> list[str]:
    """Say what two outputs of `generate` do not have in common."""
    mine, its = (out if isinstance(out, torch.Tensor) else out.sequences for out in (ours, theirs))
    if not torch.equal(mine, its):
        return [f"ids {mine.tolist()} are not {its.tolist()}"]
    if isinstance(theirs, torch.Tensor):
        return [] if isinstance(ours, torch.Tensor) else ["a dict, not ids"]
    found = [] if set(ours) - {"finish_reason"} == set(theirs) else [f"fields {sorted(ours)}, not {sorted(theirs)}"]
    for name in ("scores", "logits"):
        mine, its = ours.get(name) or (), theirs.get(name) or ()
        close = (torch.allclose(a.double(), b.double(), 1e-4, 1e-4, True) for a, b in zip(mine, its, strict=False))
        if len(mine) != len(its) or not all(close):
            found.append(name)
    held = [out.get("past_key_values") for out in (ours, theirs)]
    lengths = [None if cache is None else cache.get_seq_length() for cache in held]
    return found if lengths[0] == lengths[1] else [*found, f"a cache of {lengths[0]}, not {lengths[1]}"]


def equal_alone(model: Any, given: Options, ours: Any) -> bool:
    """Whether there is padding, and each answer is that of its row alone, in whole ids."""
    ids, mask = given["input_ids"], given.get("attention_mask")
    if mask is None or bool(mask.all()) or not isinstance(ours, torch.Tensor):
        return False
    rows = [row[keep][None] for row, keep in zip(ids, mask.bool(), strict=True)]
    alone = [given | {"input_ids": row, "attention_mask": torch.ones_like(row)} for row in rows]
    texts = [model.generate(**own)[0, row.shape[1] :] for own, row in zip(alone, rows, strict=True)]
    return all(torch.equal(text, out[ids.shape[1] :]) for text, out in zip(texts, ours, strict=True))


def judged(model: Any, decoder: Decoder, given: Options, before: Options) -> tuple[str, str]:
    """Make one call both ways."""
    try:
        ours = made_of(model, given, before, custom_generate=custom_generate(decoder))
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1].filename
        if isinstance(error, ValueError) and "opt_tree" in Path(last).parts and "\n" not in str(error):
            return "refused", str(error)
        try:
            made_of(model, given, before)
        except Exception:
            return "transformers refuses", type(error).__name__
        return "failed", f"{type(error).__name__}: {str(error)[:200]}"
    try:
        theirs = made_of(model, given, before)
    except Exception as error:  # what transformers cannot do, a decoder may
        return "transformers refuses", f"{type(error).__name__}: {str(error)[:100]}"
    wrong = differences(ours, theirs)
    if wrong and equal_alone(model, given, ours):
        return "equal without padding", "transformers' text changes with padding"
    return ("failed", "; ".join(wrong)) if wrong else ("equal", "")


def of_type(name: str) -> tuple[str, str]:
    """Return "wrapped" and what came of each call of a type, as JSON; or "refused", and why."""
    try:
        model = built(name)
    except Exception as error:
        return "not built", f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
    try:
        target = wrap(model)
        decoder = Decoder(target, model_drafter(wrap(noisy(model)), target.vocab), OptTree(8, 0.0, 4))
    except UnsupportedModelError as error:
        return "refused", str(error)
    plain = model.generate(options.IDS, attention_mask=options.MASK, max_new_tokens=options.NEW, do_sample=False)
    options.TEXT[:] = plain[0, options.IDS.shape[1] :].tolist()  # cases name tokens of it
    found = []
    for call, given, before in calls(model):
        kind, why = judged(model, decoder, given, before)
        found.append((call, kind, why if kind == "failed" else _plainly(model, why)))
    return "wrapped", json.dumps(found)


def _plainly(model: Any, why: str) -> str:
    """Return a reason without the names and numbers of one model, so that equal ones can be counted."""
    return re.sub(r"\b\d[\d,.]*\b", "N", why.replace(type(model).__name__, "the model"))[:160]


def table(rows: dict[str, tuple[str, Any]]) -> str:
    """Markdown: what came of all calls, the refusals by reason, and every call that failed."""
    done = {name: found for name, (kind, found) in rows.items() if kind == "wrapped"}
    every = [(name, *found) for name, some in done.items() for found in some]
    counts = collections.Counter(kind for _, _, kind, _ in every)
    lines = [f"transformers {transformers.__version__}, {len(done)} architectures, {len(every)} calls:", ""]
    lines += [f"- {kind}: {counts[kind]}" for kind in KINDS]
    reasons: dict[tuple[str, str], list[str]] = {}
    for name, call, kind, why in every:
        if kind in KINDS[1:-1]:
            reasons.setdefault((kind, f"{call}: {why}"), []).append(name)
    lines += ["", "| calls | result | option and reason |", "|---|---|---|"]
    lines += [f"| {len(names)} | {kind} | {why} |" for (kind, why), names in sorted(reasons.items())]
    lines += [f"| 1 | failed | {name}, {call}: {why} |" for name, call, kind, why in every if kind == "failed"]
    left = [f"- {name}: {kind}, {found}" for name, (kind, found) in rows.items() if kind != "wrapped"]
    return "\n".join([*lines, *(["", "Not tried:", "", *left] if left else [])])


def main(arguments: list[str] | None = None, each: Callable[..., tuple[str, str]] = alone) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("types", nargs="*", default=TYPES, help="types of model; two dozen where none is named")
    parser.add_argument("--all", action="store_true", help="every causal LM of the installed transformers")
    parser.add_argument("--seconds", type=int, default=300, help="of processor time for each type")
    parser.add_argument("--json", type=Path, help="what came of each call, for a machine")
    given = parser.parse_args(arguments)
    rows: dict[str, tuple[str, Any]] = {}
    for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) if given.all else given.types:
        kind, found = each(name, given.seconds, of_type)
        rows[name] = kind, json.loads(found) if kind == "wrapped" else found
        counts = collections.Counter(kind for _, kind, _ in rows[name][1]) if kind == "wrapped" else found
        print(f"{name:20} {kind:10} {dict(counts) if kind == 'wrapped' else counts}", file=sys.stderr, flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(rows))
    print(table(rows))
    return int(any(each == "failed" for kind, found in rows.values() if kind == "wrapped" for _, each, _ in found))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main())
