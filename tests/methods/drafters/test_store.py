"""Stores: what is counted, what a file must be, and what is drafted from one."""

import json
import lzma

import numpy as np
import pytest
import torch
from asking import begin, root_of
from methods.drafters.test_ngram import outcome_of, probs_of
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch_file
from table_models import TableTarget, hashed_laws
from tiny_models import VOCAB, prompt, tiny_tokenizer

from opt_tree import Decoder, OptTree
from opt_tree.methods.drafters.tables import file_format
from opt_tree.methods.drafters.tables.file_format import Table, fingerprint, load_table, save_table
from opt_tree.methods.drafters.tables.ngram import Counts, Text, interpolate
from opt_tree.methods.drafters.tables.store import FILE, FOLLOWERS, Store, StoreDrafter, hashes
from opt_tree.models.checkpoints import CheckpointError
from opt_tree.training.answers import join, opening, read_answers
from opt_tree.training.fitting.store import Recipe, build, main
from opt_tree.training.outputs import save_documents


def documents(*rows: list[int]):
    return join(np.array(row) for row in rows)


def counted(rows: list[list[int]], run: tuple[int, ...]) -> dict[int, int]:
    """What follows a run in documents, by looking."""
    found: dict[int, int] = {}
    for row in rows:
        for at in range(len(run), len(row)):
            if tuple(row[at - len(run) : at]) == run:
                found[row[at]] = found.get(row[at], 0) + 1
    return found


class TestBuilding:
    @pytest.mark.parametrize("vocab", [5, 300_000], ids=["small", "wider than 16 bits"])
    def test_counts_are_those_of_the_documents(self, vocab):
        """Runs of every length, none across two documents, the most frequent follower first."""
        random = np.random.default_rng(0)
        rows = [(random.integers(0, 5, length) + vocab - 5).tolist() for length in (0, 1, 2, 40, 90)]
        store = Store(build(documents(*rows), Recipe(vocab, order=3)))
        runs = {tuple(row[at : at + n]) for row in rows for n in (1, 2, 3) for at in range(len(row))}
        for run in sorted(runs):
            total, followers = store.rows(run)[len(run) - 1]
            assert dict(followers) == counted(rows, run), run
            assert total == sum(counted(rows, run).values())
            assert [count for _, count in followers] == sorted((count for _, count in followers), reverse=True)
        store = Store(build(documents([1, 2, 3]), Recipe(5, order=2)))
        assert [store.rows(tail) for tail in ((9, 4), (3,))] == [[(0, []), (0, [])], [(0, [])]], "what is not there"

    def test_hashes_read_a_tail_from_its_end(self):
        assert hashes((1, 2, 3), 32)[:2] == hashes((7, 2, 3), 32)[:2]
        assert len({*hashes((1, 2, 3), 32), *hashes((3, 2, 1), 32)}) == 6
        assert all(0 <= key < 1 << 32 for key in hashes((299_999, 5), 32))

    @pytest.mark.parametrize("kib", [8, 16, 24])
    def test_pruned_to_a_size_by_what_entries_are_worth(self, kib):
        random = np.random.default_rng(1)
        text = random.zipf(1.5, 4000).clip(max=200).tolist() + [201, 202, 203] * 50
        store = Store(build(documents(text), Recipe(256, order=3, max_bytes=kib * 1024)))
        assert 0.6 * kib * 1024 < store.nbytes <= kib * 1024 - 2000
        # Fifty times the same is worth more than any of the noise.
        assert store.rows((201, 202))[1].followers == [(203, 50)]

    def test_a_token_outside_the_vocabulary_and_an_impossible_order_are_named(self):
        for order in (0, 6):
            with pytest.raises(ValueError, match=rf"must lie in 1..5 .*got {order}"):
                Recipe(5, order=order)
        with pytest.raises(ValueError, match="token 9 is outside the vocabulary of 5"):
            build(documents([1, 9]), Recipe(5))


@pytest.fixture
def folder(tmp_path):
    """A store of a little text, by the tiny tokenizer."""
    recipe = Recipe(VOCAB, fingerprint(tiny_tokenizer()), order=3)
    save_table(tmp_path / FILE, "store", build(documents(prompt(500), prompt(60, seed=1)), recipe))
    return tmp_path


class TestFile:
    def test_comes_back_as_it_was(self, folder):
        store = Store.load(folder, VOCAB, fingerprint(tiny_tokenizer()))
        again = Store(build(documents(prompt(500), prompt(60, seed=1)), Recipe(VOCAB, order=3)))
        tails = [tuple(prompt(500)[at : at + 3]) for at in range(100)]
        assert [store.rows(tail) for tail in tails] == [again.rows(tail) for tail in tails]
        assert [path.name for path in folder.iterdir()] == [FILE]
        assert store.header["text_tokens"] == 560 and store.header["documents"] == 2

    def test_a_torn_and_an_altered_one_are_refused(self, folder):
        data = (folder / FILE).read_bytes()
        (folder / FILE).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(CheckpointError, match="do not add up"):
            Store.load(folder, VOCAB)
        for length in (0, 4, 100, len(data) // 2, len(data) - 1):
            (folder / FILE).write_bytes(data[:length])
            with pytest.raises(CheckpointError, match="is corrupt") as refusal:
                Store.load(folder, VOCAB)
            assert "\n" not in str(refusal.value)

    @pytest.mark.parametrize("kind", [torch.bfloat16, torch.float8_e4m3fn])
    def test_numbers_that_numpy_has_not_are_refused(self, kind, folder):
        header = load_table(folder / FILE, "store", VOCAB).header
        save_torch_file({"keys": torch.zeros(3, dtype=kind)}, folder / FILE, {"opt_tree": json.dumps(header)})
        with pytest.raises(CheckpointError, match="is corrupt"):
            Store.load(folder, VOCAB)

    def test_what_is_no_store_of_this_target_is_refused(self, folder, monkeypatch):
        def refused(complaint, *given):
            with pytest.raises(CheckpointError, match=complaint):
                Store.load(folder, *given)

        refused(r"was made with another tokenizer .*the target's is beef", VOCAB, "beef")
        refused(f"has {VOCAB} tokens, this target 7", 7)
        table = load_table(folder / FILE, "store", VOCAB)
        with monkeypatch.context() as later:
            later.setattr(file_format, "VERSION", 3)
            save_table(folder / FILE, "store", table)
        refused("has version 3, this library reads 2", VOCAB)
        save_table(folder / FILE, "recycling", Table({"vocab": 3, "tokenizer": None}, {"a": np.zeros(1, np.uint8)}))
        refused("is not a store of this library but recycling", VOCAB)
        save_file({"weight": np.zeros(3, np.float32)}, folder / FILE)
        refused("is not a store of this library but something else", VOCAB)
        (folder / FILE).unlink()
        refused(f"no store at {folder}", VOCAB)

    @pytest.mark.parametrize(
        "field, value, complaint",
        [
            ("vocab", None, "vocab is 'missing'"),
            ("vocab", "x", "vocab is 'x'"),
            ("vocab", float("nan"), "vocab is nan"),
            ("sum", None, "sum is 'missing'"),
            ("tokenizer", 5, "tokenizer is 5"),
            ("order", None, "order is 'missing'"),
            ("order", 10**12, "order is 1000000000000"),
            ("bits", "32", "bits is '32'"),
            ("beta", [float("nan")] * 3, r"beta is \[nan, nan, nan\], not 3 numbers"),
            ("beta", [10**400] * 3, r"beta is \[1000"),
            ("beta", 5, "beta is 5, not 3 numbers"),
        ],
    )
    def test_a_wrong_header_is_refused_before_the_contents_are_read(self, field, value, complaint, folder, monkeypatch):
        header, arrays = load_table(folder / FILE, "store", VOCAB)
        header = {**header, field: value} if value is not None else {n: v for n, v in header.items() if n != field}
        save_file(
            {name: np.array(one) for name, one in arrays.items()}, folder / FILE, {"opt_tree": json.dumps(header)}
        )
        if field in ("vocab", "sum", "tokenizer"):
            monkeypatch.setattr(file_format, "load_file", lambda path: pytest.fail("the contents were read"))
        with pytest.raises(CheckpointError, match=f"is corrupt: its {complaint}"):
            Store.load(folder, VOCAB)

    @pytest.mark.parametrize("header", ["[]", "3", "[" * 10**5], ids=["a list", "a number", "deep"])
    def test_a_header_that_is_no_object_is_refused(self, header, folder):
        save_file({"keys": np.zeros(1, np.uint32)}, folder / FILE, {"opt_tree": header})
        with pytest.raises(CheckpointError, match=r"is not a store|is corrupt"):
            Store.load(folder, VOCAB)

    def test_a_run_that_claims_all_entries_is_read_as_far_as_one_of_this_library(self):
        """A file of 1 MiB held up each node by a sixth of a second, and gave probabilities above 1."""
        count, (key,) = 2**17, hashes((7,), 32)
        arrays = {
            "keys": np.array([key], np.uint32),
            "sizes": np.array([count], np.uint32),
            "totals": np.array([1], np.uint32),
            "tokens": np.arange(count, dtype=np.uint32),
            "counts": np.full(count, 1000, np.uint32),
        }
        store = Store(Table({"order": 1, "bits": 32, "vocab": count}, arrays))
        (row,) = store.rows((7,))
        assert row == (FOLLOWERS * 1000, [(token, 1000) for token in range(FOLLOWERS)])
        assert sum(interpolate((7,), Text(Counts(0)), (0.0,), [row]).values()) == pytest.approx(1)

    @pytest.mark.parametrize(
        "change, complaint",
        [
            ({"sizes": np.zeros(1, np.uint32)}, "do not fit each other"),
            ({"sizes": np.full(1, 2**64 - 1, np.uint64)}, "do not fit each other"),
            ({"counts": np.zeros(3, np.float32)}, "array counts is of float32"),
            ({"keys": None}, "array keys is missing"),
        ],
    )
    def test_arrays_that_are_no_stores_are_refused(self, change, complaint):
        header, arrays = build(documents([1, 2, 3]), Recipe(5, order=2))
        arrays = {name: array for name, array in (arrays | change).items() if array is not None}
        with pytest.raises(CheckpointError, match=complaint):
            Store(Table(header, arrays))

    def test_writing_is_all_or_nothing(self, folder, monkeypatch):
        """A death while writing leaves the file that was there."""
        before = (folder / FILE).read_bytes()
        monkeypatch.setattr("os.replace", lambda *names: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            save_table(folder / FILE, "store", build(documents([1, 2]), Recipe(VOCAB)))
        assert (folder / FILE).read_bytes() == before
        assert [path.name for path in folder.iterdir()] == [FILE]


class TestDrafter:
    def test_joins_store_and_text(self):
        """p_1(7) = (4 + 8) / (10 + 8 + 30): four times of ten in the store, once in the text."""
        store = Store(build(documents(*[[6, 7]] * 4, *[[6, 8]] * 6), Recipe(9, order=1)))
        drafter = StoreDrafter(store)
        begin(drafter, [6, 7, 6], None)
        expected = {7: pytest.approx(12 / 48), 8: pytest.approx(6 / 48)}
        assert probs_of(root_of(drafter, [6, 7, 6])) == [expected]
        drafter.accept(outcome_of([8]))
        assert probs_of(drafter.look_up([(6,)])) == [{7: pytest.approx(12 / 56), 8: pytest.approx(14 / 56)}]
        begin(drafter, [6, 7, 6], None)
        assert probs_of(root_of(drafter, [6, 7, 6])) == [expected]
        begin(drafter, [6], None)  # a text in which nothing followed
        assert probs_of(root_of(drafter, [6])) == [{7: pytest.approx(4 / 40), 8: pytest.approx(6 / 40)}]

    def test_the_longest_match_drafts_whole_continuations(self):
        """As REST does: of the places where the longest match occurs, all continuations with their frequencies."""
        rows = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 4], [9, 2, 7, 7]]
        store = Store(build(documents(*rows), Recipe(10, order=3)))
        drafter = StoreDrafter(store, longest=True)
        begin(drafter, [0, 1, 2], None)
        target = TableTarget(hashed_laws(1, 10), 10)
        step = next(Decoder(target, drafter, OptTree(9, 0.0, 3)).steps([0, 1, 2], 9))
        tree = step.tree
        branches = {tuple(tree.tokens[tree.path_to(row)[1:]]): np.exp(tree.path_log_probs[row]) for row in range(1, 4)}
        # The 2 before [7, 7] is a shorter match and does not count.
        assert tree.nodes == 3
        assert branches == {(3,): 1.0, (3, 4): pytest.approx(2 / 3), (3, 5): pytest.approx(1 / 3)}

    def test_a_wrong_number_of_beta_is_refused(self, folder):
        with pytest.raises(ValueError, match="a store of order 3 needs as many beta, got 2"):
            StoreDrafter(Store.load(folder, VOCAB), (1.0, 2.0))


class TestCommand:
    def test_rows_of_prompt_and_answer_and_given_constants(self, tmp_path, capsys):
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = "{{ messages[0].content }}"
        tokenizer.save_pretrained(tmp_path / "target")
        row = {"prompt": "aaab", "answer": "acadaeaf" * 8, "finished": True}
        with lzma.open(tmp_path / "rows.jsonl.xz", "wt") as file:
            file.write(json.dumps(row) + "\n")
        args = ["--target", str(tmp_path / "target"), "--answers", str(tmp_path), "--output", str(tmp_path / "s")]
        assert main([*args, "--order", "2", "--beta", "7,3"]) == 0
        store = Store.load(tmp_path / "s", VOCAB)
        assert store.header["beta"] == [7.0, 3.0] and store.header["text_tokens"] == 33
        assert store.rows((5,))[0].followers == [(2, 7), (tokenizer.eos_token_id, 1)]
        assert main([*args, "--order", "2", "--beta", "7,0"]) == 2
        assert "--beta takes 2 positive numbers, one a length up to --order, got 7,0" in capsys.readouterr().err

    def test_from_answers_and_from_text(self, tmp_path, capsys):
        tokenizer = tiny_tokenizer()
        tokenizer.save_pretrained(tmp_path / "target")
        (tmp_path / "a.jsonl").write_text(json.dumps({"choices": [{"turns": ["aaabac", "adae"]}]}) + "\n")
        (tmp_path / "a.txt").write_text("aaabacadae")
        np.savez(tmp_path / "b.npz", tokens=np.array([0, 1, 2, 3, 4], np.uint32), starts=np.array([0, 3, 5]))
        args = ["--target", str(tmp_path / "target"), "--output", str(tmp_path / "store")]
        for source, files, documents in (
            ("--answers", ["a.jsonl", "b.npz"], "4 documents"),
            ("--text", ["a.txt"], "1 document"),
        ):
            assert main([*args, source, *(str(tmp_path / file) for file in files)]) == 0
            assert f"in {documents}, " in capsys.readouterr().out
            store = Store.load(tmp_path / "store", VOCAB, fingerprint(tokenizer))
            assert store.rows((0,))[0].followers == [(1, 2 if source == "--answers" else 1)]

    def test_answers_begin_where_the_template_opens_them(self, tmp_path):
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = (
            "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}hahb{% endif %}"
        )
        try:
            opened = opening(tokenizer)
            assert len(opened) == 2
            save_documents([[5, *opened, 6, 5, *opened, 7, 8], [5], [5, 6, 7]], tmp_path / "own.npz")
            found = [document.tolist() for document in read_answers([tmp_path], tokenizer)]
            assert found == [[*opened, 7, 8], [5], [5, 6, 7]]
        finally:
            tokenizer.chat_template = None
        assert opening(tokenizer) == [] and list(read_answers([], tokenizer)) == []
