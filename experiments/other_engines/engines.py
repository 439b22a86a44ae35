"""The engines as they run in a process of their own: from settings to a function that answers a prompt.

Each imports what it needs when it is started, so that a peer which is not installed costs nothing. All of them decode
greedily, get token ids, and stop at the same tokens.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LOOKUP = 10
"""Tokens drafted at most by the look-up of other engines: their own examples' setting."""


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
    drafter: str = ""
    tree: dict[str, Any] = field(default_factory=dict)
    compile: bool = False
    weights: str | None = None
    """What opt_tree quantises the weights to; None: they have the dtype."""


@dataclass
class Clock:
    """When an answer began and when its first token was there; a transformers streamer, too."""

    begin: float = field(default_factory=time.perf_counter)
    first: float | None = None
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
    from transformers import AutoModelForCausalLM, GenerationConfig

    torch.set_num_threads(settings.threads)
    dtype = getattr(torch, settings.dtype)
    model: Any = AutoModelForCausalLM.from_pretrained(settings.folder, dtype=dtype)
    model.generation_config = GenerationConfig()  # what a config below leaves open is not the checkpoint's
    more: dict[str, Any] = {"prompt_lookup_num_tokens": LOOKUP} if settings.lookup else {}
    if settings.assistant:
        more["assistant_model"] = AutoModelForCausalLM.from_pretrained(settings.assistant, dtype=torch.float32)

    def answer(prompt: list[int], limit: int, clock: Clock) -> Sequence[int]:
        ids = torch.tensor([prompt])
        stops = settings.stops or None
        config = GenerationConfig(
            max_new_tokens=limit, do_sample=False, eos_token_id=stops, pad_token_id=stops[0] if stops else 0
        )
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=config, streamer=clock, **more
        )
        return output[0, len(prompt) :].tolist()

    return answer


def opt_tree(settings: Settings) -> Answer:
    """This library: plain decoding without a drafter, else OPT-Tree."""
    import torch

    from opt_tree import Decoder, OptTree, Stop, load_pair
    from opt_tree.tools.presets import plain

    torch.set_num_threads(settings.threads)
    how: dict[str, Any] = {"compile": settings.compile, "weights": settings.weights}
    # Plain decoding asks no drafter; the one that is named needs no files.
    pair = load_pair(settings.folder, settings.drafter or "ngram", dtype=settings.dtype, **how)
    tree = OptTree(**settings.tree) if settings.tree else OptTree()
    decoder = Decoder(pair.target, pair.drafter, tree) if settings.drafter else plain(pair.target)
    stop = Stop(frozenset(settings.stops))

    def answer(prompt: list[int], limit: int, clock: Clock) -> Sequence[int]:
        return decoder.generate(prompt, limit, stop=stop, streamer=clock).tokens

    return answer


def llama_cpp(settings: Settings) -> Answer:
    """llama.cpp's server, inside this process: plain, or with its own drafts from the text at hand (ngram-simple)."""
    import xllamacpp
    from transformers import AutoTokenizer

    told = xllamacpp.CommonParams()
    told.model.path, told.n_ctx, told.n_parallel = settings.gguf, settings.context, 1
    told.cpuparams.n_threads = told.cpuparams_batch.n_threads = settings.threads
    told.n_gpu_layers, told.warmup, told.verbosity = 0, False, 0
    if settings.lookup:
        told.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
    server, tokenizer = xllamacpp.Server(told), AutoTokenizer.from_pretrained(settings.folder)

    def answer(prompt: list[int], limit: int, clock: Clock) -> Sequence[int]:
        texts: list[str] = []

        def take(part: Any) -> bool:
            if "choices" not in part:
                raise RuntimeError(f"llama.cpp answers {part}")
            clock.mark()
            texts.append(part["choices"][0]["text"])
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
    """OpenVINO GenAI on a GGUF file, plain or with its prompt look-up."""
    import numpy as np
    import openvino
    import openvino_genai

    more: dict[str, Any] = {"prompt_lookup": True} if settings.lookup else {}
    pipeline = openvino_genai.LLMPipeline(settings.gguf, "CPU", INFERENCE_NUM_THREADS=settings.threads, **more)

    def answer(prompt: list[int], limit: int, clock: Clock) -> Sequence[int]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.do_sample, config.stop_token_ids = limit, False, set(settings.stops)
        if settings.lookup:
            config.num_assistant_tokens, config.max_ngram_size = LOOKUP, 3
        ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
        return pipeline.generate(ids, config, lambda _: clock.mark()).tokens[0]

    return answer


def bf16_gguf(source: Path, target: Path) -> Path:
    """Write a GGUF file with the same weights unpacked to bfloat16: what our own conversion holds."""
    import gguf

    reader = gguf.GGUFReader(source)
    architecture = reader.fields[gguf.Keys.General.ARCHITECTURE].contents()
    writer = gguf.GGUFWriter(target, architecture)
    own = {gguf.Keys.General.ARCHITECTURE, gguf.Keys.General.FILE_TYPE}
    for key, value in reader.fields.items():
        if key not in own and not key.startswith("GGUF."):
            inner = value.types[-1] if value.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, value.contents(), value.types[0], inner)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    packed = gguf.GGMLQuantizationType.BF16
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if values.ndim == 1:  # llama.cpp wants norms in float32
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, packed), raw_dtype=packed)
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
