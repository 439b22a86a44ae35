"""What a measurement of forwards and some answer files advise together, in tables and words."""

import statistics
from collections.abc import Sequence
from typing import Any

from evaluation.answers.file import AnswerSet, read_timed
from evaluation.command_line import table
from evaluation.latency.budget import Acceptance, AcceptanceCurve, Advice, Outside, advise
from evaluation.latency.forwards import ForwardTime, curve


def forward_times(measured: dict[str, Any]) -> list[ForwardTime]:
    """The forwards of a measurement as it is written down."""
    return [ForwardTime(**one) for one in measured["cells"]]


def recommend(measured: dict[str, Any], files: Sequence[str]) -> tuple[Advice, list[str]]:
    """Put a measurement and answer files together; also return what the advice assumes."""
    runs = [read_timed(file) for file in files]
    accepted = AcceptanceCurve(tuple(Acceptance.of(run.answers, str(run.path)) for run in runs))
    cells = forward_times(measured)
    usual = statistics.fmean(
        len(prompt) + len(answer) / 2
        for run in runs
        for record in run.answers
        for choice in record["choices"]
        for prompt, answer in zip(choice.get("prompt_ids", []), choice.get("token_ids", []), strict=True)
    )
    context = min({cell.context for cell in cells}, key=lambda context: abs(context - usual))
    apart = sorted({difference for run in runs for difference in elsewhere(run, measured)})
    outside: Outside = "ignored" if apart else "remainder" if measured["environment"]["cuda"] else "timed"
    advice = advise(accepted, curve(cells, "target", context), curve(cells, "drafter", context), outside)
    tried = ", ".join(f"{one.nodes:.0f}" for one in accepted.measured)
    notes = [
        f"latency behind {context} tokens of context (the answers' mean is {usual:.0f})",
        f"tokens a step and draft layers were measured at {tried} nodes; between and beyond, linear in log2(nodes + 1)",
        "a layer that raises E(A) by just the threshold brings what its time is worth at the best budget's speed; one "
        f"unit of E(A) brought {accepted.calibration():.2f} accepted tokens in these answers",
        f"predicted at {accepted.measured[0].nodes:.0f} nodes: {advice.own.rate:.1f} tokens/s, measured "
        f"{accepted.measured[0].rate:.1f}",
        "another threshold changes how many layers are drafted: answer with the flags, then ask again, until they stay",
    ]
    if apart:
        notes.append(
            f"the answers come from elsewhere ({'; '.join(apart)}): only their acceptance is used, and what a step "
            "takes outside the two models' forwards is not counted"
        )
    elif not 0.8 < (drift := advice.own.rate / accepted.measured[0].rate) < 1.25:
        notes.append(
            f"this machine now seems to run at {drift:.2f} times the speed it had when it answered; the advice holds "
            "as far as everything slowed alike: measure again while nothing else runs"
        )
    return advice, notes


def elsewhere(run: AnswerSet, measured: dict[str, Any]) -> list[str]:
    """Name what differs between an answer file's run and the measurement, of all that changes times."""
    if run.header is None:
        return [f"{run.path} has no header"]
    there = {**run.session.get("environment", {}), **run.header["settings"]}
    here = {**measured["environment"], **measured["models"]}
    keys = ("device", "threads", "torch", "target_dtype", "draft_dtype", "inflate", "base_model_path")
    # Both the settings and the environment know a device: the settings' is its kind, the environment's its name.
    there["device"] = run.session.get("environment", {}).get("device")
    here["device"] = measured["environment"]["device"]
    return [f"{key} {there.get(key)} there, {here.get(key)} here" for key in keys if there.get(key) != here.get(key)]


def forwards_table(measured: Sequence[ForwardTime]) -> str:
    """Milliseconds, a line for each number of tokens, a column for each model and context."""
    columns = list(dict.fromkeys((one.model, one.context) for one in measured))
    columns.sort(key=lambda column: (column[0] != "target", column[1]))
    ms = {(one.model, one.context, one.tokens): one.ms for one in measured}
    sizes = sorted({one.tokens for one in measured})
    return table(
        [
            {"tokens": count} | {f"{m} @{context}": ms.get((m, context, count)) for m, context in columns}
            for count in sizes
        ]
    )


def advice_table(advice: Advice) -> str:
    """One line a budget, the best one marked."""
    return table(
        [
            {
                "nodes": choice.nodes,
                "tokens/step": choice.length,
                "draft layers": choice.layers,
                "layer ms": 1000 * choice.layer_seconds,
                "step ms": 1000 * choice.step_seconds,
                "tokens/s": f"{choice.rate:.1f}",
                "x plain": choice.rate / advice.plain_rate,
                "": "best" * (choice == advice.best) + " (beyond the answers)" * choice.extrapolated,
            }
            for choice in advice.choices
        ]
    )
