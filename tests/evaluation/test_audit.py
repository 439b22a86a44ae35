"""Texts of another engine beside plain decoding in float32: a planted defect, rounding ties, and ends."""

import copy
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import ClassVar

import pytest
import torch
from tiny_models import VOCAB, prompt, tiny
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

import opt_tree
from evaluation import audit
from opt_tree.tools import presets

pytestmark = pytest.mark.slow

LENGTH, END = 24, VOCAB - 1
SEEDS = range(3)


@pytest.fixture(scope="module")
def pair():
    """A target in bfloat16, and words for tokens."""
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=f"w{END}")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    target = opt_tree.CausalLM(copy.deepcopy(tiny("llama")).to(torch.bfloat16))
    target.model.generation_config.eos_token_id = END
    return opt_tree.Pair(target, tokenizer, opt_tree.load_drafter("ngram", target))


@pytest.fixture(scope="module")
def auditor(pair):
    return audit.Auditor(pair)


@pytest.fixture(scope="module")
def plain(pair):
    """What plain decoding in float32 writes, with the prompt."""
    target = opt_tree.CausalLM(copy.deepcopy(pair.target.model).float())
    prompts = [prompt(7, seed) for seed in SEEDS]
    return [(ids, presets.plain(target).generate(ids, LENGTH, stop=pair.stop).tokens) for ids in prompts]


def other(pair, tokens, place):
    """The text with another token at a place."""
    return [*tokens[:place], (tokens[place] + 1) % pair.target.vocab, *tokens[place + 1 :]]


def test_a_planted_token_is_a_defect_and_its_place_is_told(pair, auditor, plain, capsys):
    texts = [
        audit.Written(n, ids, other(pair, tokens, 9) if n == 1 else tokens) for n, (ids, tokens) in enumerate(plain)
    ]
    figures = auditor.audit("theirs", texts)
    assert (figures["turns"], figures["equal"], figures["verdicts"]) == (len(plain), len(plain) - 1, {"defect": 1})
    [found] = figures["divergences"]
    assert (found["question_id"], found["position"]) == (1, 9)
    assert found["tokens"] == ((plain[1][1][9] + 1) % pair.target.vocab, plain[1][1][9])
    assert "theirs (a), and plain decoding in float32 here (b)" in capsys.readouterr().out


def test_a_text_in_bfloat16_parts_by_a_tie(pair, auditor):
    """transformers' own `generate`, whose forwards round as bfloat16 does."""
    for n in range(12):
        ids = torch.tensor([prompt(5, n)])
        found = pair.target.model.generate(ids, max_new_tokens=32, do_sample=False, pad_token_id=0)
        text = audit.Written(n, ids[0].tolist(), found[0, ids.shape[1] :].tolist())
        if verdicts := auditor.audit("transformers", [text])["verdicts"]:
            assert verdicts == {"rounding tie": 1}
            return
    pytest.fail("no divergence to judge: the test has lost its subject")


def test_an_end_may_be_left_out_and_an_early_one_is_found(pair, auditor, plain):
    ids, tokens = plain[0]
    end = pair.tokenizer.eos_token_id
    assert auditor.audit("cut", [audit.Written(0, ids, tokens[:7])])["equal"] == 1
    assert auditor.audit("a limit of none", [audit.Written(0, ids, [])])["equal"] == 1
    figures = auditor.audit("ended", [audit.Written(0, ids, tokens[:7], ended=True)])
    assert figures["divergences"][0]["position"] == 7 and figures["divergences"][0]["tokens"] == (end, tokens[7])
    with pytest.raises(ValueError, match="shows a token as 99, which no token is here"):
        auditor.audit("of another model", [audit.Written(0, ids, [99])])
    whole = [text for text in plain if text[1][-1] in pair.stop.tokens]
    for ids, tokens in whole:
        assert auditor.audit("no end told", [audit.Written(0, ids, tokens[:-1], ended=True)])["equal"] == 1


class Engine(BaseHTTPRequestHandler):
    """An engine that shows each token as a text, or as an id."""

    show = staticmethod(str)
    answers: ClassVar[list] = []

    def do_GET(self):
        self.reply({"data": [{"id": "other"}]})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert (asked["model"], asked["temperature"], asked["more"]) == ("other", 0, 1)
        tokens = self.answers.pop(0)
        self.reply({"choices": [{"logprobs": {"tokens": [*map(self.show, tokens)]}, "finish_reason": "length"}]})

    def reply(self, what):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(what).encode())

    def log_message(self, *_):
        pass


def test_an_engine_is_asked_and_its_defect_is_the_exit_status(pair, plain, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(audit.models, "load_target", lambda *_: pair)
    asks = [" ".join(pair.tokenizer.convert_ids_to_tokens(ids)) for ids, _ in plain]
    questions = tmp_path / "q.jsonl"
    questions.write_text("".join(json.dumps({"question_id": n, "turns": [q]}) + "\n" for n, q in enumerate(asks)))
    monkeypatch.setattr(Engine, "show", staticmethod(lambda token: pair.tokenizer.decode([token])))
    server = HTTPServer(("127.0.0.1", 0), Engine)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/v1"
    asked = ["--engine", url, "--question-file", str(questions), "--fields", '{"more": 1}', "--limit", "2", "--json"]
    try:
        Engine.answers = [tokens for _, tokens in plain[:2]]
        assert audit.main(asked) == 0
        wrong = other(pair, plain[0][1], 4)
        Engine.answers = [wrong, plain[1][1]]
        assert audit.main(asked) == 1
        figures = json.loads(capsys.readouterr().out.strip().rpartition("\n")[2])
        [[found]] = [one["divergences"] for one in figures.values()]
        assert pair.tokenizer.decode([found["tokens"][0]]) == pair.tokenizer.decode([wrong[4]])
        Engine.answers = [["no such token here"]]
        monkeypatch.setattr(Engine, "show", staticmethod(str))
        assert audit.main([*asked[:-3], "--limit", "1"]) == 2
        monkeypatch.setattr(Engine, "show", staticmethod(lambda token: f"token_id:{token}"))
        Engine.answers = [plain[0][1]]
        assert audit.main([*asked[:-3], "--limit", "1"]) == 0
    finally:
        server.shutdown()
        server.server_close()
    assert audit.main(["--engine", f"{url}/nothing"]) == 2
    assert audit.main([]) == 2


def test_files_of_answers_and_of_peers_are_read(plain, tmp_path):
    (ids, tokens), *_ = plain
    lines = [{"peer": name, "texts": "chat", "prompt": 0, "prompt_ids": ids, "limit": 30, "tokens": tokens[:count]}
             for name, count in (("llama.cpp", 24), ("openvino", 9))]  # fmt: skip
    file = tmp_path / "peers.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = audit.from_file(str(file))
    assert {name: [(one.tokens, one.ended) for one in texts] for name, texts in found.items()} == {
        "llama.cpp": [(tokens[:24], True)],
        "openvino": [(tokens[:9], True)],
    }
    own = tmp_path / "own.jsonl"
    choice = {"turns": ["", ""], "prompt_ids": [ids, ids], "token_ids": [tokens, tokens[:3]]}
    own.write_text(json.dumps({"question_id": 5, "choices": [choice]}) + "\n")
    [texts] = audit.from_file(str(own)).values()
    assert [(one.key, one.prompt, one.tokens) for one in texts] == [("5/0/0", ids, tokens), ("5/0/1", ids, tokens[:3])]
    lines[0].pop("prompt_ids")
    file.write_text(json.dumps(lines[0]))
    with pytest.raises(ValueError, match=r"an answer of llama\.cpp has no prompt_ids"):
        audit.from_file(str(file))
