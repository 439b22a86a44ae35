"""A model spread over two processes (tensor parallel, gloo): rank 0 decides, whatever the other one thinks."""

import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from process import free_port
from tiny_models import VOCAB, perturbed, prompt, tiny, tiny_head

from opt_tree import custom_generate, generate_batch
from opt_tree.decoder import Decoder
from opt_tree.draft_model import CausalLMDrafter
from opt_tree.errors import UnsupportedModelError
from opt_tree.methods.drafters.heads.eagle import EagleDrafter
from opt_tree.methods.policies.static import Static
from opt_tree.methods.sampling import Sampling
from opt_tree.models.causal_lm import CausalLM
from opt_tree.models.chain_lm import ChainLM
from opt_tree.models.checkpoints import load_causal_lm
from opt_tree.models.split_target import SplitTarget
from opt_tree.models.tensor_parallel import LostRankError
from opt_tree.policy import OptTree
from opt_tree.tools.stop_strings import Stop

TREE = OptTree(12, 0.1, 5)
IDS = prompt(9)


def spread(folder: Path, work: Callable[[CausalLM, int], Any], wait: float = 300) -> list[Any]:
    """What two processes that share a model return, by rank: None for one that hangs, its exit status if it ends."""
    context, port = multiprocessing.get_context("fork"), free_port()
    pipes = [context.Pipe(duplex=False) for _ in range(2)]

    def run(rank: int) -> None:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": port}
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        torch.distributed.init_process_group("gloo")
        torch.manual_seed(rank)
        try:
            found = work(load_causal_lm(str(folder), torch.float64, tp_plan="auto"), rank)
        except BaseException as error:
            found = f"{type(error).__name__}: {error}"
        pipes[rank][1].send(found)
        os._exit(0)

    children = [context.Process(target=run, args=(rank,)) for rank in range(2)]
    end = time.monotonic() + wait
    for child in children:
        child.start()
    for pipe in pipes:
        pipe[1].close()
    found = []
    for child, (reader, _) in zip(children, pipes, strict=True):
        found.append(_received(reader, child) if reader.poll(max(0, end - time.monotonic())) else None)
        child.kill()
    return found


def _received(reader: Any, child: Any) -> Any:
    try:
        return reader.recv()
    except EOFError:
        child.join(30)
        return child.exitcode


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny("llama").save_pretrained(path)
    return path


def drafter_of(rank: int) -> CausalLMDrafter:
    """Each rank has another one: only rank 0's is asked."""
    return CausalLMDrafter(CausalLM(perturbed(tiny("llama"), 0.1, seed=rank + 1)), VOCAB)


def trace(answer: Any) -> tuple:
    return answer.tokens, answer.finish_reason, answer.accept_lengths


def answers(target: CausalLM, rank: int) -> dict[str, Any]:
    """What two ranks that disagree about everything come to."""
    decoder = Decoder(target, drafter_of(rank), TREE)
    head = Decoder(target, EagleDrafter(tiny_head(tiny("llama")), target), TREE)
    sampling, ids = Sampling(0.8), IDS if rank == 0 else prompt(3, seed=4)
    door = {"max_new_tokens": 12, "pad_token_id": 0, "custom_generate": custom_generate(decoder)}
    found = {
        "greedy": trace(decoder.generate(IDS, 16 + rank)),
        "seeds": trace(decoder.generate(ids, 16, sampling, Stop({rank}), seed=5 + rank)),
        "head": trace(head.generate(ids, 16)),
        "batch": [trace(one) for one in generate_batch(decoder, [IDS, IDS[:4]][: 2 - rank], 8, width=2)],
    }
    torch.manual_seed(rank)
    found["door"] = target.model.generate(torch.tensor([ids]), do_sample=True, **door).tolist()
    whole = target.model.generate(torch.tensor([ids]), do_sample=False, return_dict_in_generate=True, **door)
    return found | {"dict": (whole.sequences.tolist(), whole.past_key_values)}


@pytest.mark.filterwarnings("ignore:one sequence after the other")
def test_rank_0_decides_and_all_ranks_have_its_text(folder):
    first, second = spread(folder, answers)
    assert first == second
    target = CausalLM(tiny("llama"))
    decoder, plain = Decoder(target, drafter_of(0), TREE), Decoder(target, None, Static.empty())
    assert first["greedy"] == trace(decoder.generate(IDS, 16)) and max(first["greedy"][2]) > 1
    assert first["seeds"][:2] == trace(plain.generate(IDS, 16, Sampling(0.8), Stop({0}), seed=5))[:2]
    assert first["head"][0] == plain.generate(IDS, 16).tokens and max(first["head"][2]) > 1
    assert first["batch"] == [trace(decoder.generate(ids, 8)) for ids in (IDS, IDS[:4])]
    torch.manual_seed(0)
    options = {"max_new_tokens": 12, "pad_token_id": 0, "custom_generate": custom_generate(decoder)}
    assert first["door"] == tiny("llama").generate(torch.tensor([IDS]), do_sample=True, **options).tolist()
    assert first["dict"] == (tiny("llama").generate(torch.tensor([IDS]), do_sample=False, **options).tolist(), None)


def refusals(target: CausalLM, rank: int) -> list[str]:
    decoder = Decoder(target, drafter_of(rank), TREE)

    def told(action: Callable[[], Any], kind: type[Exception] = ValueError) -> str:
        with pytest.raises(kind) as error:
            action()
        return str(error.value)

    def rule(tokens: list[int]) -> None:
        raise RuntimeError(f"rank {rank} has had enough")

    cache = {
        "custom_generate": custom_generate(decoder),
        "max_new_tokens": 2,
        "past_key_values": __import__("transformers").DynamicCache(),
    }
    return [
        told(lambda: next(decoder.steps(IDS, 3))),
        told(lambda: decoder.generate([])),
        told(lambda: decoder.generate(IDS, stop=rule), RuntimeError),
        told(lambda: target.model.generate(torch.tensor([IDS]), do_sample=False, **cache)),
        told(lambda: SplitTarget(target, 1), UnsupportedModelError),
        told(lambda: ChainLM(target.model), UnsupportedModelError),
        trace(decoder.generate(IDS, 4)),
    ]


@pytest.mark.slow
def test_what_one_rank_would_do_alone_is_refused_and_errors_are_everybody_s(folder):
    first, second = spread(folder, refusals)
    assert first == second
    expected = ("decide together", "prompt is empty", "rank 0 has had", "follow text alone", "a part of", "is spread")
    assert all(part in said for part, said in zip(expected, first, strict=False))
    assert len(first[-1][0]) == 4


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_that_is_lost_ends_the_other_with_an_error(folder, lost):
    """It does not wait: at the time when it is lost the other one may be in a forward, or before one."""

    def work(target: CausalLM, rank: int) -> Any:
        run, forwards = target.run, []

        def dying(*args: Any, **options: Any) -> Any:
            forwards.append(0)
            if rank == lost and len(forwards) == 4:
                os._exit(3)
            return run(*args, **options)

        target.run = dying
        return Decoder(target, drafter_of(rank), TREE).generate(IDS, 40).tokens

    found = spread(folder, work)
    assert found[lost] == 3
    assert "Error" in found[1 - lost] and (lost or LostRankError.__name__ in found[1])


def test_a_follower_that_fails_ends_the_leader(folder):
    def work(target: CausalLM, rank: int) -> Any:
        if rank:
            target.run = lambda *args, **options: 1 / 0
        return Decoder(target, drafter_of(rank), TREE).generate(IDS, 40).tokens

    leader, follower = spread(folder, work)
    assert follower.startswith("ZeroDivisionError") and "Error" in leader
