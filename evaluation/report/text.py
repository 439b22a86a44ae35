"""The report in words and tables, from its figures."""

import json
from collections.abc import Sequence
from typing import Any

from evaluation.answers.file import AnswerSet
from evaluation.answers.metrics import number, percent, row
from evaluation.answers.steps import alone
from evaluation.command_line import table

_SHOWN_DIVERGENCES = 5
_LEAST_STEPS = 20


def print_heads(runs: Sequence[AnswerSet]) -> None:
    """Say once what was measured where."""
    seen = set()
    for run in runs:
        if not run.session:
            continue
        place = run.session["environment"]
        dtype = run.settings.get("target_dtype")
        head = f"{run.session['target']}, {dtype}; {place['device']}, {place['threads']} threads"
        if head not in seen:
            seen.add(head)
            print(head)


def print_overview(named: Sequence[tuple[str, dict[str, Any]]], head: str = "") -> None:
    """A line for each of some summaries."""
    print(table([row(name, figures, head) for name, figures in named]))


def print_details(run: AnswerSet, figures: dict[str, Any], base: AnswerSet | None) -> None:
    """Categories, failures, divergences, acceptance, calibration and time of one file."""
    print()
    if not alone(run.answers):
        print(f"{run.name}: questions were decoded side by side; its times are a batch's, hence no speed is shown")
    if len(figures["categories"]) > 1:
        print_overview([*figures["categories"].items(), ("all", figures["overall"])], run.name)
    if run.failed:
        failed = ", ".join(str(record["question_id"]) for record in run.failed)
        print(f"{len(run.failed)} questions failed and are in no figure: {failed}")
    if base is not None:
        _print_match(figures["overall"]["exact_match"], base)
    depths = figures["acceptance_by_depth"]
    if depths:
        print("acceptance by depth (of the steps that drafted it): " + _by_depth(depths))
    _print_positions(figures["by_position"])
    _print_calibration(figures["calibration"], run)
    times = figures["step_milliseconds"]
    if times:
        parts = ", ".join(f"{name} {value:.2f}" for name, value in times.items() if value >= 0.005)
        print(f"a step takes {sum(times.values()):.2f} ms: {parts}")


def _by_depth(depths: Sequence[dict[str, Any]]) -> str:
    return "  ".join(
        f"{row['depth']}: {percent(row['rate'] if row['drafted'] is not None else row['reach'])}" for row in depths
    )


def _print_positions(blocks: Sequence[dict[str, Any]]) -> None:
    """Say how steps change as the context grows, where it grows far enough to tell."""
    blocks = [block for block in blocks if block["steps"] >= _LEAST_STEPS]
    if len(blocks) > 1:
        told = (
            f"{block['context_up_to']}: {number(2)(block['tokens_per_step'])}"
            + (f" ({number(1)(block['tokens_per_second'])}/s)" if block["tokens_per_second"] else "")
            for block in blocks
        )
        print("tokens a step (a second) while the context is up to so many tokens: " + "  ".join(told))


def _print_match(match: dict[str, Any], base: AnswerSet) -> None:
    if match["rate"] is None:
        return
    line = f"exact match with {base.name}: {match['equal']} of {match['compared']} turns ({percent(match['rate'])})"
    if match["other_prompt"]:
        line += f"; {match['other_prompt']} more had another prompt, because an earlier turn differed"
    print(line)
    for where in match["divergences"][:_SHOWN_DIVERGENCES]:
        ours, theirs = (json.dumps(text, ensure_ascii=False) for text in where["texts"])
        print(
            f"  question {where['question_id']}, choice {where['choice']}, turn {where['turn'] + 1}: first differs at "
            f"{where['unit']} {where['position']}: {ours} here, {theirs} there"
        )
    if len(match["divergences"]) > _SHOWN_DIVERGENCES:
        print(f"  and {len(match['divergences']) - _SHOWN_DIVERGENCES} more (all of them with --json)")


def _print_calibration(figures: dict[str, Any] | None, run: AnswerSet) -> None:
    if figures is None:
        return
    print(
        f"E(A) + 1 was {figures['expected_length']:.2f}, A + 1 came to {figures['accepted_length']:.2f}: slope "
        f"{figures['slope']:.2f} (standard error {figures['slope_error']:.2f}), Pearson "
        f"{number(2)(figures['pearson'])}, Spearman {number(2)(figures['spearman'])}, "
        f"over {figures['steps']} untrimmed steps"
    )
    if not figures["miscalibrated"]:
        return
    what = {"slope": "the slope is far from 1", "mean": "the means are far apart"}
    settings = run.settings
    stored = settings.get("sharpening")
    if settings.get("temperature", 0) > 0:
        advice = "above temperature 0 it is used as it is, a fitted temperature serves greedy decoding only"
    elif stored:
        advice = (
            f"its stored temperature {stored:.3g} was fitted elsewhere, fit it on prompts like these: {_fit(settings)}"
        )
    else:
        advice = f"fit it, and trees are chosen by what the target will say: {_fit(settings)}"
    print(f"the drafter is miscalibrated: {' and '.join(what[name] for name in figures['miscalibrated'])}; {advice}")


def _fit(settings: dict[str, Any]) -> str:
    """The command that fits the drafter of a run."""
    command = "python -m opt_tree.training.fitting.calibrate"
    for option, key in (("target", "base_model_path"), ("drafter", "draft_model_path"), ("eagle", "ea_model_path")):
        if settings.get(key, "demo") != "demo" or (option == "eagle" and key in settings):
            command += f" --{option} {settings[key]}"
    return command
