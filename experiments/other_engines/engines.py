"""The engines as they run in a process of their own: from settings to a function that answers a prompt.

Each imports what it needs when it is started, so that a peer which is not installed costs nothing. All of them decode
greedily, get token ids, and stop at the same tokens.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

LOOKUP = 10
"""Tokens drafted at most by the look-up of other engines: their own examples' setting."""
DRAFTED = 3
"""Tokens that a draft model of OpenVINO drafts: it has no default, and this is llama.cpp's."""


@dataclass(frozen=True)
class Settings:
    """What an engine is told. The parent process sends it as JSON."""

    folder: str
    """The model as transformers saves it."""
    threads: int
    context: int
    """Positions that a prompt and its answer take at most."""
    stops: list[int]
    dtype: str = "bfloat16"
    gguf: str = ""
    lookup: bool = False
    """Draft by the engine's own prompt look-up."""
    assistant: str = ""
    """A folder for transformers, a GGUF file for the engines that read those."""
    drafter: str = ""
    tree: dict[str, Any] = field(default_factory=dict)
    compile: bool = False
    weights: str | None = None
    """What opt_tree quantises the weights to; None: they have the dtype."""


@dataclass
class Clock:
    """When an answer began, when its first token was there, how many steps it took; a transformers streamer, too."""

    begin: float = field(default_factory=time.perf_counter)
    first: float | None = None
    steps: int | None = None
    """Forwards of the target, where the engine tells them."""
    _calls: int = 0

    def mark(self) -> None:
        """A token has come."""
        self.first = self.first or time.perf_counter() - self.begin

    def put(self, value: Any) -> None:
        """Take tokens as a streamer does: the first call brings the prompt."""
        self._calls += 1
        if self._calls > 1:
            self.mark()

    def end(self) -> None:
        """Nothing is held back."""


Answer = Callable[[list[int], int, Clock], Sequence[int]]
"""From a prompt, a limit of new tokens and a clock to the new tokens."""


def transformers(settings: Settings) -> Answer:
    """Unmodified `model.generate`: plain, with prompt look-up, or with an assistant."""
    import torch
    from transformers import GenerationConfig

    torch.set_num_threads(settings.threads)
    model = _network(settings.folder, settings.dtype)
    more: dict[str, Any] = {"prompt_lookup_num_tokens": LOOKUP} if settings.lookup else {}
    if settings.assistant:
        more["assistant_model"] = _network(settings.assistant, settings.dtype)

    def answer(prompt: list[int], limit: int, clock: Clock) -> Sequence[int]:
        forwards: list[Any] = []
        ids = torch.tensor([prompt])
        stops = settings.stops or None
        config = GenerationConfig(
            max_new_tokens=limit, do_sample=False, eos_token_id=stops, pad_token_id=stops[0] if stops else 0
        )
        counting = model.register_forward_hook(lambda *_: forwards.append(None))
        try:
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=config, streamer=clock, **more
            )
        finally:
            counting.remove()
        clock.steps = len(forwards)
        return output[0, len(prompt) :].tolist()

    return answer


@cache
def _network(folder: str, dtype: str) -> Any:
    """A model as transformers loads it: once in a process, whoever asks."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    model.generation_config = GenerationConfig()  # what a config leaves open is not the checkpoint's
    return model


def opt_tree(settings: Settings) -> Answer:
    """This library: plain decoding without a drafter, else OPT-Tree."""
    import torch

    from opt_tree import Decoder, OptTree, Stop
    from opt_tree.tools.presets import plain

    torch.set_num_threads(settings.threads)
    # Plain decoding asks no drafter; the one that is named needs no files.
    pair = _pair(settings.folder, settings.drafter or "ngram", settings.dtype, settings.compile, settings.weights)
    tree = OptTree(**settings.tree) if settings.tree else OptTree()
    decoder = Decoder(pair.target, pair.drafter, tree) if settings.drafter else plain(pair.target)
    stop = Stop(frozenset(settings.stops))

    def answer(prompt: list[int], limit: int, clock: Clock) -> Sequence[int]:
        made = decoder.generate(prompt, limit, stop=stop, streamer=clock)
        clock.steps = len(made.steps)
        return made.tokens

    return answer


@cache
def _pair(folder: str, drafter: str, dtype: str, compile: bool, weights: str | None) -> Any:
    """A target and a drafter. In a process that has the target, eager, the drafter alone is loaded."""
    from opt_tree import Pair, load_pair
    from opt_tree.methods.drafters.registry import DrafterOptions, load_drafter

    if compile or drafter == "ngram":
        return load_pair(folder, drafter, dtype=dtype, compile=compile, weights=weights)
    has = _pair(folder, "ngram", dtype, compile, weights)
    options = DrafterOptions(has.tokenizer, weights=weights)
    return Pair(has.target, has.tokenizer, load_drafter(drafter, has.target, options))


def llama_cpp(settings: Settings) -> Answer:
    """llama.cpp's server, inside this process: plain, by a draft model, or by the text at hand (ngram-simple)."""
    import xllamacpp
    from transformers import AutoTokenizer

    told = xllamacpp.CommonParams()
    told.model.path, told.n_ctx, told.n_parallel = settings.gguf, settings.context, 1
    told.cpuparams.n_threads = told.cpuparams_batch.n_threads = settings.threads
    told.n_gpu_layers, told.warmup, told.verbosity = 0, False, 0
    if settings.lookup:
        told.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
    if settings.assistant:
        told.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        draft = told.speculative.draft
        draft.mparams.path, draft.n_gpu_layers = settings.assistant, 0
        draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = settings.threads
    server, tokenizer = xllamacpp.Server(told), AutoTokenizer.from_pretrained(settings.folder)

    def answer(prompt: list[int], limit: int, clock: Clock) -> Sequence[int]:
        texts: list[str] = []

        def take(part: Any) -> bool:
            if "choices" not in part:
                raise RuntimeError(f"llama.cpp answers {part}")
            clock.mark()
            texts.append(part["choices"][0]["text"])
            if "timings" in part:  # with the last part
                clock.steps = part["timings"]["predicted_n"] - part["timings"].get("draft_n_accepted", 0)
            return False  # go on

        # Without the cache: else it keeps what two prompts begin with.
        asked = {"prompt": prompt, "n_predict": limit, "temperature": 0.0, "stream": True, "cache_prompt": False}
        server.handle_completions(asked, take)
        return tokenizer.encode("".join(texts), add_special_tokens=False)  # it tells no tokens

    return answer


def llama_cpp_built_here(settings: Settings) -> Answer:
    """llama.cpp in the build of llama-cpp-python, which its compiler made for this CPU."""
    import llama_cpp

    threads = {"n_threads": settings.threads, "n_threads_batch": settings.threads}
    model = llama_cpp.Llama(settings.gguf, n_ctx=settings.context, verbose=False, **threads)

    def answer(prompt: list[int], limit: int, clock: Clock) -> Sequence[int]:
        tokens: list[int] = []
        model.reset()  # else it keeps what two prompts begin with
        for token in model.generate(prompt, temp=0.0, repeat_penalty=1.0):
            clock.mark()
            tokens.append(token)
            if token in settings.stops or len(tokens) == limit:
                break
        return tokens

    return answer


def openvino(settings: Settings) -> Answer:
    """OpenVINO GenAI on a GGUF file, plain, by a draft model, or with its prompt look-up."""
    import numpy as np
    import openvino
    import openvino_genai

    threads = {"INFERENCE_NUM_THREADS": settings.threads}
    more: dict[str, Any] = {"prompt_lookup": True} if settings.lookup else {}
    with tempfile.TemporaryDirectory(prefix="peers.") as folder:
        if settings.assistant:  # read from a folder alone: one that it saves when it reads the file
            file = readable_gguf(Path(settings.assistant), Path(folder) / "draft.gguf")
            openvino_genai.LLMPipeline(str(file), "CPU", enable_save_ov_model=True, **threads)
            more["draft_model"] = openvino_genai.draft_model(folder, "CPU", **threads)
        pipeline = openvino_genai.LLMPipeline(settings.gguf, "CPU", **threads, **more)

    def answer(prompt: list[int], limit: int, clock: Clock) -> Sequence[int]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.do_sample, config.stop_token_ids = limit, False, set(settings.stops)
        if settings.lookup:
            config.num_assistant_tokens, config.max_ngram_size = LOOKUP, 3
        if settings.assistant:
            config.num_assistant_tokens = DRAFTED
        ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
        return pipeline.generate(ids, config, lambda _: clock.mark()).tokens[0]

    return answer


def bf16_gguf(source: Path, target: Path) -> Path:
    """Write a GGUF file with the same weights unpacked to bfloat16: what our own conversion holds."""
    import gguf

    # llama.cpp wants norms in float32.
    kinds = gguf.GGMLQuantizationType
    return _rewritten(
        source,
        target,
        lambda tensor: kinds.F32 if len(tensor.shape) == 1 else kinds.BF16,
        gguf.LlamaFileType.MOSTLY_BF16,
    )


def readable_gguf(source: Path, target: Path) -> Path:
    """Write a GGUF file for OpenVINO, which reads no Q5_0: such weights get eight bits. All others stay as they are."""
    import gguf

    kinds = gguf.GGMLQuantizationType
    return _rewritten(
        source, target, lambda tensor: kinds.Q8_0 if tensor.tensor_type == kinds.Q5_0 else tensor.tensor_type
    )


def _rewritten(source: Path, target: Path, kind: Callable[[Any], Any], file_type: int | None = None) -> Path:
    """Write a GGUF file anew, each tensor in the form that `kind` wants it in."""
    import gguf

    reader = gguf.GGUFReader(source)
    architecture = reader.fields[gguf.Keys.General.ARCHITECTURE].contents()
    writer = gguf.GGUFWriter(target, architecture)
    own = {gguf.Keys.General.ARCHITECTURE} | ({gguf.Keys.General.FILE_TYPE} if file_type is not None else set())
    for key, value in reader.fields.items():
        if key not in own and not key.startswith("GGUF."):
            inner = value.types[-1] if value.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, value.contents(), value.types[0], inner)
    if file_type is not None:
        writer.add_file_type(file_type)
    for tensor in reader.tensors:
        data, wanted = tensor.data, kind(tensor)
        if wanted != tensor.tensor_type:
            data = gguf.quants.quantize(gguf.quants.dequantize(data, tensor.tensor_type), wanted)
        writer.add_tensor(tensor.name, data, raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


ENGINES: dict[str, Callable[[Settings], Answer]] = {
    "transformers": transformers,
    "opt_tree": opt_tree,
    "xllamacpp": llama_cpp,
    "llama_cpp": llama_cpp_built_here,
    "openvino_genai": openvino,
}
"""Every engine by the module that it needs."""
