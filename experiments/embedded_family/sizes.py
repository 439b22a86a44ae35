"""How large a run of the recipe is: passes over the corpora, batches, steps, and the options of every stage."""

from dataclasses import dataclass

# Passes over each corpus in one unit of data. Corpora that quote long passages (fairytaleqa, scitldr) or repeat one
# pattern (tldr_pages, wordnet, factbook) count less; prose is a quarter of the tokens.
TARGET_EPOCHS = {
    "chat_creak": 1.0,
    "chat_factbook": 0.7,
    "chat_fairytaleqa": 0.5,
    "chat_gpteacher": 1.3,
    "chat_gsm8k_train": 1.3,
    "chat_oasst_sampled": 1.3,
    "chat_personachat_synth": 1.0,
    "chat_scitldr": 0.5,
    "chat_selfdialogue": 1.0,
    "chat_selfinstruct_seed": 1.5,
    "chat_t0_permissive": 0.7,
    "chat_taskmaster4": 0.7,
    "chat_tldr_pages": 0.6,
    "chat_wordnet": 0.8,
    "text_classic_books": 0.36,
    "text_eltec_novels": 0.36,
    "text_factbook": 1.0,
    "text_fairytales": 0.9,
}


# Chat alone, for the stages that only polish what chat answers look like.
CHAT_EPOCHS = {name: passes * 0.25 for name, passes in TARGET_EPOCHS.items() if name.startswith("chat_")}


@dataclass(frozen=True)
class Round:
    """One round against loops: answers to prompts drawn by `seed`, then unlikelihood training on all rounds' answers.

    Each round finds the loops that the rounds before have left; on its own answers alone a model falls back into loops
    that it had unlearnt. (The second round of the embedded models did read its own alone, and did fall back.)
    """

    seed: int
    order: int
    lr: float
    steps: int


ROUNDS = (
    Round(seed=0, order=6, lr=5e-4, steps=60),
    Round(seed=1, order=6, lr=5e-4, steps=60),
    Round(seed=3, order=5, lr=5e-4, steps=80),
    Round(seed=4, order=5, lr=4e-4, steps=50),
)


@dataclass(frozen=True)
class Size:
    """The size of a run: arguments of the commands, batches in tokens, and how many prompts the target answers."""

    epochs: float  # units of TARGET_EPOCHS for the target
    target: str
    batch: int  # of all later stages
    micro_batch: int
    loop_prompts: int
    own_prompts: int
    answer_batch: int
    own_passes: float
    corpus_passes: float  # units of CHAT_EPOCHS for the drafter
    draft: str
    tokenizer: str = ""
    rounds: tuple[Round, ...] = ROUNDS
    compile: bool = True


CPU = Size(
    epochs=1.0,
    target="--batch 8192 --micro-batch 2048 --lr 4e-3 --warmup 100 --rows 0.62:256,0.34:512,0.04:2048",
    batch=4096,
    micro_batch=2048,
    loop_prompts=900,
    own_prompts=25000,
    answer_batch=96,
    own_passes=4.0,
    corpus_passes=1.0,
    draft="--lr 5e-3 --warmup 30 --hard 0.5 --rows 0.96:256,0.04:1024 --tokens 5400000",
)


TINY = Size(
    epochs=0.02,
    target="--layers 2 --hidden 64 --heads 2 --kv-heads 1 --head-dim 32 --intermediate 128 --batch 4096"
    " --micro-batch 2048 --warmup 10 --rows 0.9:256,0.1:512 --save-steps 20 --eval-blocks 2",
    batch=4096,
    micro_batch=2048,
    loop_prompts=48,
    own_prompts=96,
    answer_batch=48,
    own_passes=2.0,
    corpus_passes=0.05,
    draft="--layers 1 --hidden 32 --heads 1 --kv-heads 1 --head-dim 32 --intermediate 64 --lr 5e-3 --warmup 10"
    " --rows 0.9:256,0.1:512 --save-steps 10 --eval-blocks 2",
    tokenizer="--vocab 1024",
    rounds=(Round(seed=0, order=6, lr=5e-4, steps=4), Round(seed=1, order=5, lr=5e-4, steps=4)),
    compile=False,  # compiling takes longer than all of it
)


SIZES = {"cpu": CPU, "tiny": TINY}
