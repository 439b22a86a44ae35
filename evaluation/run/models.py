"""From options to models, methods, and what they are asked.

Loads through `opt_tree.load_pair`, decodes through presets; owns what the GPU options mean for a target's layers.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from evaluation.questions.prompts import Prompter, get_template
from evaluation.questions.sets import Question, QuestionSet, load_set, select
from evaluation.run.baselines import InLoop, assistant_of, transformers_greedy
from evaluation.run.options import Asked, Models, Options
from evaluation.timing import Method, Timed
from opt_tree import Decoder, Pair, Sampling, Static, load_pair, make_canonical
from opt_tree.backends.package_cache import cache_folder
from opt_tree.methods.drafters.around import settings_of
from opt_tree.methods.drafters.registry import DrafterOptions, check_drafter, load_drafter
from opt_tree.methods.drafters.small_models.chain_lm import model_drafter
from opt_tree.methods.own_files import object_of, split_name
from opt_tree.models.canonical import make_exact
from opt_tree.models.checkpoints import CheckpointError, load_causal_lm, load_tokenizer
from opt_tree.models.named import resolve
from opt_tree.models.quantised_layers import weights_of
from opt_tree.tools.ceiling import Ceilings
from opt_tree.tools.presets import controller, opt, plain
from opt_tree.tools.step_costs import auto


def load(options: Models, device: str, bare: bool = False) -> Pair:
    """Load a target and its drafter, changed if asked for; `bare`: without the stored sharpening."""
    return _ready(_load_pair(options, device, bare=bare), options)


def load_several(options: Models, drafters: Sequence[str], device: str) -> dict[str, Pair]:
    """Load one target and several drafters for it, by their specs; they share it, changed, compiled or neither."""
    for spec in drafters:
        check_drafter(spec)
    small = _load_pair(options, device, drafter=drafters[0])
    settings = DrafterOptions(small.tokenizer, device=device)
    pairs: dict[str, Pair] = {}
    for spec in drafters:
        drafter = load_drafter(spec, small.target, settings) if pairs else small.drafter
        large = next((pair.target.model for pair in pairs.values()), None)
        pairs[spec] = _ready(replace(small, drafter=drafter), options, large)
    return pairs


def load_target(options: Models, device: str) -> Pair:
    """Load a target alone, for what drafts nothing: it is its own drafter, which nobody asks."""
    return _ready(_load_alone(options, device), options)


def load_run(options: Options, device: str) -> Pair:
    """Load what a run's method needs, on the GPUs that are this process's."""
    placement = _placement(options, device)
    # Compiled, it takes the pair's package: one that watches other layers may round otherwise.
    alone = options.method == "none" and not options.compile
    pair = _load_alone(options, device, **placement) if alone else _load_pair(options, device, **placement)
    homes = {str(home) for home in (getattr(pair.target.model, "hf_device_map", None) or {}).values()}
    if placement and homes & {"cpu", "disk"}:
        raise ValueError(
            f"{options.base_model_path} does not fit into {options.max_gpu_memory or 'the free memory'} on each of "
            f"{options.num_gpus_per_model} GPUs; raise --max-gpu-memory or --num-gpus-per-model"
        )
    return _ready(pair, options)


def load_assistant(options: Models, path: str | None, pair: Pair) -> PreTrainedModel | None:
    """Return the causal LM that assists transformers' generate: the one at `path`, else the pair's own draft model.

    Where there is neither, the embedded one for the embedded target; else None. One that is loaded has the target's
    dtype, as a draft model.
    """
    own = assistant_of(pair.drafter)
    if path is None and own is not None:
        return own
    path = path or ("demo" if options.base_model_path == "demo" else None)
    if path is None:
        return None
    folder = resolve(path, "draft")
    if load_tokenizer(folder).get_vocab() != pair.tokenizer.get_vocab():
        names = f"{path} and {options.base_model_path}"
        raise CheckpointError(f"different tokenizers: {names} do not name the same tokens by the same ids")
    return load_causal_lm(folder, pair.target.dtype, str(pair.target.device)).model


def _load_pair(options: Models, device: str, **more: Any) -> Pair:
    given = {"dtype": options.dtype, "weights": None if options.through else options.weights}
    given |= {"drafter": options.drafter, "device": device, "exact": False} | more  # it may be changed first
    return load_pair(options.base_model_path, **given)


def _load_alone(options: Models, device: str, **more: Any) -> Pair:
    path = resolve(options.base_model_path, "target")
    target = load_causal_lm(path, options.dtype, device, weights=None if options.through else options.weights, **more)
    return Pair(target, load_tokenizer(path), model_drafter(target))


def _ready(pair: Pair, options: Models, large: PreTrainedModel | None = None) -> Pair:
    """The pair changed and compiled, where that is asked for."""
    if options.through:
        name, argument = split_name(options.through) or ("", "")
        pair = object_of(name)(pair, argument, large, options.weights)
    if options.unpacked:
        pair.pack(False)
    if options.canonical:
        make_canonical(pair.target)
    elif not options.no_exact:
        make_exact(pair.target)
    if options.compile:
        compile_and_say(pair)
    return pair


def made_of(pair: Pair) -> str:
    """What a function of --through made of the target, in its own words; nothing where there is none."""
    return "".join(getattr(one, "made_of", "") for one in (pair.target.model.config, pair.drafter))


def compile_and_say(pair: Pair) -> None:
    """Compile what is not in the cache; on a CPU that takes minutes, so say it before and after."""
    if pair.target.device.type != "cpu":
        pair.compile()
    elif not pair.compile(make=False):
        print("compiling for this CPU, once: minutes", flush=True)
        begin = time.monotonic()
        if pair.compile():
            print(f"compiled in {time.monotonic() - begin:.0f} s; kept in {cache_folder()}", flush=True)


def _placement(options: Options, device: str) -> dict[str, Any]:
    """Options for transformers that put the target on this process's own GPUs and nowhere else."""
    if torch.device(device).type != "cuda" or (options.num_gpus_per_model == 1 and options.max_gpu_memory is None):
        return {}
    first = torch.device(device).index
    mine = range(first, first + options.num_gpus_per_model)
    return {
        "device_map": "auto",
        "max_memory": {i: options.max_gpu_memory or torch.cuda.mem_get_info(i)[0] for i in mine},
    }


def make_method(name: str, options: Options, pair: Pair, prompter: Prompter) -> Method:
    """The method of this name as a function from a prompt to new tokens."""
    sampling = Sampling(options.temperature if options.temperature > 1e-5 else 0.0)
    if name == "transformers":

        def generate(prompt: list[int], limit: int, seed: int) -> Timed:
            timed = transformers_greedy(pair, prompt, limit, seed, sampling)
            # It knows the stop tokens of the pair, not those of a FastChat template.
            return Timed(prompter.trim(timed.tokens), timed.seconds)

        return generate
    decoder = _decoder(name, options, pair)
    if options.ceiling and name != "plain":
        decoder = Decoder(pair.target, decoder.drafter, Ceilings(decoder.policy, sampling), decoder.verifier)
    return InLoop(decoder, sampling, prompter.stop)


def _decoder(name: str, options: Options, pair: Pair) -> Decoder:
    if name == "opt" and isinstance(options.nodes, str):
        policy = auto(pair.target, pair.drafter, max_depth=options.max_depth, lanes=options.batch_size)
        return Decoder(pair.target, pair.drafter, policy)
    if name == "opt":
        tree = options.tree()
        if options.controller is None:
            return opt(pair.target, pair.drafter, tree)
        chosen = controller(options.controller, pair.target, pair.drafter, tree, options.seed)
        return Decoder(pair.target, pair.drafter, chosen)
    if name == "chain":
        return Decoder(pair.target, pair.drafter, Static.chain(min(options.max_depth, options.tree().nodes)))
    return plain(pair.target)


def resolved(pair: Pair) -> dict[str, Any]:
    """What "auto" and a stored calibration came to; of the target no more than what is not as usual."""
    target = pair.target
    unusual = {
        "engine": "" if target.backend.name == "eager" else target.backend.name,
        "canonical": target.canonical,
        "weights": weights_of(target.model),
    }
    known = {"target_dtype": str(target.dtype).removeprefix("torch."), "draft_dtype": None, "sharpening": None}
    return {key: value for key, value in unusual.items() if value} | known | settings_of(pair.drafter)


@dataclass(frozen=True)
class Material:
    """A pair that is loaded, the question set, and those of its questions that were asked for."""

    pair: Pair
    questions: QuestionSet
    chosen: list[Question]
    prompter: Prompter

    def first_prompts(self) -> list[list[int]]:
        """Token ids of the chosen questions' first turns."""
        return [self.prompter.encode(question.turns[:1], []) for question in self.chosen]


def read_questions(options: Asked) -> tuple[QuestionSet, list[Question]]:
    """Read the question set, and choose from it what is asked. Raises ValueError and OSError as `load_set` does."""
    if options.conv_template:
        get_template(options.conv_template)
    questions = load_set(options.bench_name, options.question_file, options.data_dir, options.fetch)
    return questions, select(questions.questions, options.question_begin, options.question_end, options.limit)


def gather(options: Asked, bare: bool = False) -> Material:
    """Read the questions, then load the models; `bare`: without the stored sharpening.

    Raises ValueError and OSError for questions and models that are not there.
    """
    questions, chosen = read_questions(options)
    pair = load(options, options.check_device(), bare)
    return Material(pair, questions, chosen, Prompter(pair.tokenizer, pair.stop, options.conv_template))
