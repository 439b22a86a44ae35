"""The server of `opt-tree serve`, asked over HTTP: its answers are the decoder's, and what it refuses it names."""

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from opt_tree import Decoder, OptTree, Recorder, Sampling, Static, Stop
from opt_tree.backends.batch import shared_forwards
from opt_tree.integrations.serve import ServeOptions, service_of
from opt_tree.integrations.server.answer_text import AnswerText, decoded
from opt_tree.methods.policies.eagle2 import Eagle2

NEEDS = "no server here: pip install -r requirements/serve.txt"
uvicorn = pytest.importorskip("uvicorn", reason=NEEDS)
app = pytest.importorskip("opt_tree.integrations.server.app", reason=NEEDS)
LONG = {"prompt": "Once upon a time", "max_tokens": 600, "temperature": 1.0, "seed": 4, "tree": {"nodes": 0}}
"""Hundreds of steps: with this seed the text does not end before."""


class Running:
    """A server in a thread, and a client of it."""

    def __init__(self) -> None:
        options = ServeOptions(dtype="float32", lanes=3, queue=2, nodes=10, threshold=0.2, served_name="small")
        self.service = service_of("demo", ["eagle:demo", "ngram"], options)
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.server = uvicorn.Server(uvicorn.Config(app.new_app(self.service), log_level="error"))
        self.thread = threading.Thread(target=self.server.run, args=([self.socket],))
        self.thread.start()
        address = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.client = httpx.Client(base_url=address, timeout=60)
        self.address = f"{address}/v1"

    def ask(self, **fields):
        path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
        return self.client.post(path, json={"model": "small"} | fields)

    def stream(self, **fields):
        """The events of a stream, each as it comes."""
        path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
        with self.client.stream("POST", path, json={"model": "small", "stream": True} | fields) as answer:
            for line in answer.iter_lines():
                if line:
                    assert line.startswith("data: ")
                    yield line.removeprefix("data: ")

    def wait(self, least: int, most: int) -> None:
        """Until so many texts are under way or wait."""
        end = time.monotonic() + 300
        while not least <= self.service.engine.open <= most:
            assert time.monotonic() < end
            time.sleep(0.005)

    def stop(self) -> None:
        self.server.should_exit = True  # what uvicorn's handler of SIGTERM does
        self.thread.join(60)
        assert not self.thread.is_alive()


@pytest.fixture(scope="module")
def running():
    found = Running()
    yield found
    found.stop()


QUESTIONS = ("What is a lantern?", "Who wrote Hamlet?", "Why is the sky blue?", "How do I list files?", "Hello!")
TREES = (
    (None, "eagle:demo", OptTree(10, 0.2)),
    ({"nodes": 4}, "ngram", OptTree(4, 0.2)),
    ({"policy": "eagle2", "nodes": 12}, "eagle:demo", Eagle2(12)),
    ({"nodes": 0}, "eagle:demo", None),
    ({"policy": "opt", "nodes": 6, "threshold": 0.4}, "eagle:demo", OptTree(6, 0.4)),
)


def test_requests_side_by_side_are_answered_as_the_decoder_does(running):
    """Token by token, each with its own drafter, tree, temperature and seed; and their steps are the decoder's."""
    pair, drafters = running.service.pair, running.service.drafters

    def both(number):
        tree, drafter, policy = TREES[number]
        sampling = {"temperature": 0.7 * (number % 2), "top_p": 0.9}
        fields = {"drafter": drafter, "max_tokens": 12, "seed": number, "logprobs": True, "top_logprobs": 3, **sampling}
        fields |= {"tree": tree} if tree else {}
        found = running.ask(messages=[{"role": "user", "content": QUESTIONS[number]}], **fields).json()
        return found, sampling, drafters[drafter], policy

    with ThreadPoolExecutor(len(TREES)) as pool:
        answers = list(pool.map(both, range(len(TREES))))
    for number, (found, sampling, drafter, policy) in enumerate(answers):
        decoder = Decoder(pair.target, drafter if policy else None, policy or Static.empty())
        given = (pair.encode(QUESTIONS[number]), 12, Sampling(**sampling))
        alone = decoder.generate(*given, stop=pair.stop, seed=number, recorder=Recorder(3))
        [choice] = found["choices"]
        places = choice["logprobs"]["content"]
        assert [place["token"] for place in places] == [pair.tokenizer.decode([token]) for token in alone.tokens]
        assert [place["logprob"] for place in places] == pytest.approx(alone.log_probs, abs=1e-4)
        assert [len(place["top_logprobs"]) for place in places] == [len(place) for place in alone.top_log_probs]
        assert choice["message"]["content"] == decoded(pair.tokenizer, alone.tokens)
        assert choice["finish_reason"] == {"length": "length", "stop_token": "stop"}[alone.finish_reason]
        usage = found["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(alone.prompt), len(alone.tokens))
        assert usage["steps"] == len(alone.steps) and found["seed"] == number
        assert usage["tokens_per_step"] == pytest.approx(alone.mean_acceptance_length, abs=1e-4)


@pytest.mark.slow
def test_a_stream_has_the_answer_in_pieces_and_a_stop_string_is_never_shown(running):
    fields = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0}
    text = running.ask(**fields).json()["choices"][0]["text"]
    assert len(text.split()) > 6
    stop = text[len(text) // 2 : len(text) // 2 + 5]
    whole = running.ask(**fields, stop=[stop, "~~~"]).json()
    assert whole["choices"][0] == {
        "index": 0,
        "text": text[: text.index(stop)],
        "logprobs": None,
        "finish_reason": "stop",
    }
    events = [*running.stream(**fields, stop=stop, logprobs=1, stream_options={"include_usage": True})]
    assert events.pop() == "[DONE]"
    *pieces, last = map(json.loads, events)
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == text[: text.index(stop)]
    assert [piece["choices"][0]["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + ["stop"]
    told = [piece["choices"][0]["logprobs"] for piece in pieces if piece["choices"][0]["logprobs"]]
    tokens = [token for one in told for token in one["tokens"]]
    assert len(tokens) == whole["usage"]["completion_tokens"] > len(told) > 1
    offsets = [offset for one in told for offset in one["text_offset"]]
    assert offsets == [len("".join(tokens[:place])) for place in range(len(tokens))]
    chat = [*running.stream(messages=[{"role": "user", "content": [{"type": "text", "text": "Hello!"}]}], max_tokens=4)]
    assert json.loads(chat[0])["choices"][0]["delta"] == {"role": "assistant", "content": ""}


@pytest.mark.slow
def test_several_prompts_as_texts_or_tokens_are_choices_of_one_answer(running):
    texts, tokenizer = ["Once upon a time", "The king went"], running.service.pair.tokenizer
    fields = {"max_tokens": 8, "temperature": 0}
    one, other = (running.ask(prompt=text, **fields).json() for text in texts)
    for prompt in (texts, [tokenizer(text).input_ids for text in texts]):
        both = running.ask(prompt=prompt, **fields).json()
        assert [choice | {"index": 0} for choice in both["choices"]] == [one["choices"][0], other["choices"][0]]
        assert both["usage"]["steps"] == one["usage"]["steps"] + other["usage"]["steps"]


@pytest.mark.slow
def test_an_echo_has_what_the_model_says_of_the_prompt(running):
    pair, text = running.service.pair, "The king went to the"
    ids = pair.tokenizer(text).input_ids
    with torch.inference_mode():
        logits = pair.target.model(torch.tensor([ids])).logits[0, :-1]
    expected = logits.log_softmax(-1)
    [choice] = running.ask(prompt=text, max_tokens=2, temperature=0, echo=True, logprobs=1).json()["choices"]
    told = choice["logprobs"]
    assert choice["text"].startswith(text) and len(told["tokens"]) == len(ids) + 2 == len(told["text_offset"])
    assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
    places = torch.arange(len(ids) - 1)
    own = expected[places, torch.tensor(ids[1:])].tolist()
    assert told["token_logprobs"][1 : len(ids)] == pytest.approx(own, abs=1e-4)
    best = [max(top.values()) for top in told["top_logprobs"][1 : len(ids)]]
    assert best == pytest.approx(expected.amax(-1).tolist(), abs=1e-4)
    plain = running.ask(prompt=text, max_tokens=2, temperature=0).json()["choices"][0]["text"]
    for more in ({}, {"logprobs": 0}):
        assert (
            running.ask(prompt=text, max_tokens=2, temperature=0, echo=True, **more).json()["choices"][0]["text"]
            == text + plain
        )


@pytest.mark.slow
def test_without_a_seed_each_answer_has_one_that_gives_it_again(running):
    fields = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 1.2}
    first, second = (running.ask(**fields).json() for _ in range(2))
    assert first["seed"] != second["seed"]
    assert running.ask(**fields, seed=first["seed"]).json()["choices"] == first["choices"]


REFUSED = {
    "n": ({"n": 2}, 400, "n: not served here, except as 1, got 2"),
    "tools": ({"tools": [{"type": "function"}]}, 400, "tools: not served here"),
    "response_format": ({"response_format": {"type": "json_object"}}, 400, "response_format: not served here"),
    "logit_bias": ({"logit_bias": {"3": 1}}, 400, "logit_bias: not served here"),
    "presence_penalty": ({"presence_penalty": 0.5}, 400, "presence_penalty: not served here, except as 0, got 0.5"),
    "metadata": ({"metadata": {}}, 400, "metadata: no such field is served here"),
    "temperature": ({"temperature": -1}, 400, "temperature: Input should be greater than or equal to 0, got -1"),
    "model": ({"model": "gpt"}, 404, "no model is called 'gpt' here; there is 'small'"),
    "max_tokens": ({"max_tokens": 5000}, 400, "max_tokens is 5000, at most 1024 are served"),
    "drafter": ({"drafter": "lm:demo"}, 400, "no drafter 'lm:demo' was loaded; there is 'eagle:demo', 'ngram'"),
    "tree.policy": ({"tree": {"policy": "own.py:Tree"}}, 400, "no policy is called 'own.py'; there are binary,"),
    "tree.nodes": ({"tree": {"nodes": 500}}, 400, "tree.nodes is 500, at most 128 are served"),
    "tree.threshold": ({"tree": {"policy": "chain", "threshold": 1}}, 400, "the policy chain takes no threshold"),
    "tree": ({"drafter": "ngram", "tree": {"policy": "rheo"}}, 400, "NGramDrafter names a few tokens of each node"),
    "messages.0.role": ({"messages": [{"role": "tool", "content": ""}]}, 400, "messages.0.role: Input should be"),
    None: ({"top_logprobs": 2}, 400, "top_logprobs goes with logprobs: true"),
}


@pytest.mark.parametrize("field", REFUSED)
def test_what_cannot_be_had_is_refused_by_its_name(running, field):
    wrong, status, why = REFUSED[field]
    answer = running.ask(**{"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4} | wrong)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, field)
    assert error["message"].startswith(why) and "\n" not in error["message"]


@pytest.mark.slow
def test_a_tree_that_there_is_not_is_told_before_anybody_asks():
    with pytest.raises(ValueError, match="the server's own tree: no policy is called 'opd'; there are binary,"):
        service_of("demo", ["ngram"], ServeOptions(dtype="float32", lanes=1, policy="opd"))


def test_what_is_too_long_is_refused(running):
    room = running.service.pair.target.max_context
    answer = running.ask(prompt=[5] * (room - 10), max_tokens=20)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert f"{room - 10} tokens and 20 new ones are more than {room}" in answer.json()["error"]["message"]
    assert running.ask(prompt=[5, 1 << 20]).status_code == 400
    assert "6 prompts are more than the 5 that" in running.ask(prompt=["Hello!"] * 6).json()["error"]["message"]
    assert running.ask(prompt="x" * app.BODY).status_code == 413
    assert running.client.post("/v1/completions", content=b"{").status_code == 400
    assert running.client.get("/v1/engines").json()["error"]["message"] == "Not Found"


@pytest.mark.slow
def test_a_client_that_goes_away_ends_its_work_and_a_full_queue_says_so(running, monkeypatch):
    """Five are under way or wait: the sixth is refused. Then all clients leave, the streams and the others.

    No forward is computed meanwhile: on a slow machine the texts would come to their ends.
    """
    may_run, run, forwards = threading.Event(), shared_forwards.SharedModel.run, []

    def counted(*given):
        assert may_run.wait(300)
        forwards.append(1)
        return run(*given)

    monkeypatch.setattr(shared_forwards.SharedModel, "run", counted)
    may_run.set()
    streams = [running.stream(**LONG) for _ in range(2)]
    for stream in streams:
        next(stream)
    may_run.clear()
    clients = [socket.create_connection(running.socket.getsockname()) for _ in range(3)]
    body = json.dumps({"model": "small"} | LONG).encode()
    for client in clients:
        head = ("POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json")
        client.sendall("\r\n".join((*head, f"Content-Length: {len(body)}", "", "")).encode() + body)
    running.wait(5, 5)
    answer = running.ask(**LONG)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert answer.json()["error"]["message"].startswith("the queue is full: 5 texts under way or waiting of 5 at")
    before = len(forwards)
    for stream in streams:
        stream.close()
    for client in clients:
        client.close()
    running.wait(0, 3)  # those that wait are let go at once
    may_run.set()
    running.wait(0, 0)
    assert len(forwards) - before < 300, "less than half of one of the five texts"
    assert running.ask(**LONG | {"max_tokens": 3}).status_code == 200


def test_a_forward_that_fails_is_told_and_the_server_goes_on(running, monkeypatch, caplog):
    def fail(*_):
        monkeypatch.undo()
        raise RuntimeError("no memory")

    monkeypatch.setattr(shared_forwards.SharedModel, "run", fail)
    answer = running.ask(prompt="Once", max_tokens=4)
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
    assert running.ask(prompt="Once", max_tokens=4).status_code == 200
    assert "no memory" in caplog.text  # written before the thread takes the next request, not before it answers


def test_the_openai_package_reads_its_answers(running):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=running.address, api_key="none", max_retries=0)
    assert client.models.list().data[0].id == "small"
    asked = {"model": "small", "messages": [{"role": "user", "content": "Hello!"}], "temperature": 0, "max_tokens": 8}
    whole = client.chat.completions.create(**asked, extra_body={"tree": {"nodes": 3}})
    pieces = client.chat.completions.create(**asked, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole.choices[0].message.content
    assert whole.usage.tokens_per_step >= 1
    with pytest.raises(openai.BadRequestError, match="n: not served here"):
        client.chat.completions.create(**asked, n=2)


@pytest.mark.slow
def test_a_server_that_is_told_to_stop_lets_streams_end():
    found = Running()
    stream = found.stream(**LONG | {"max_tokens": 40})
    next(stream)
    found.server.should_exit = True
    events = [*stream]
    assert events[-1] == "[DONE]" and json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
    found.stop()
    assert not found.service.engine.open
    with pytest.raises(httpx.ConnectError):
        found.ask(**LONG)


@given(st.lists(st.sampled_from(["é", "🙂", "ab", "a", "b", "\ufffd", " "]), max_size=12), st.randoms())
def test_the_pieces_of_a_text_are_the_text_up_to_its_stop_string(words, random):
    """However the tokens come, here a byte each, and inside a character."""

    class Bytes:
        def decode(self, tokens, **_):
            return bytes(tokens).decode(errors="replace")

    tokens, stops = [*"".join(words).encode()], ("aab", "🙂 ")
    rule, text = Stop((), stops, Bytes()), AnswerText(Bytes(), stops, ())
    stopped = next((count for count in range(1, len(tokens) + 1) if rule(tokens[:count])), None)
    tokens, pieces = tokens[:stopped], []
    while tokens:
        count = random.randint(1, 5)
        pieces.append(text.add(tokens[:count]))
        tokens = tokens[count:]
    pieces.append(text.end(stopped is not None))
    whole = "".join(words)
    expected = whole[: min((whole.find(stop) for stop in stops if stop in whole), default=len(whole))]
    assert "".join(pieces) == text.text == expected
