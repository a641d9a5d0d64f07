"""The tables of the page in Markdown. Successes are in per cent, differences in points."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, geometric_mean, median
from typing import Any

from experiments import predictions, second, second_analysis, third, third_analysis
from experiments.analysis import Method, Section, lead_shrinks
from experiments.contest import counts_text, range_text, rate_text
from experiments.protocol import BOUNDS, MARGIN, METHODS, REGIMES, SEEDS, TUNING_RATES, letter
from experiments.second_analysis import Contest
from experiments.table import Result
from troll_lab.evaluation.estimators import Interval
from troll_lab.runs.comparison_tables import estimate_text
from troll_lab.runs.statistics import SeedMean, paired_difference, seed_mean
from troll_lab.runs.text import markdown_table

NOTHING = "–"
SHARES = ("right, in brackets or not: before and after", "in brackets, right or not")
MEASURES = ("collapsed", "area under the curve", "rollouts to ½", "KL of sequences", "entropy, first and last rollout")


def status(section: Section) -> str:
    """A sentence on how complete a primary regime is. Added rates are added for all methods."""
    untuned = [METHODS[name] for name in BOUNDS if name not in section.chosen]
    notes = [f" The bounds of {', '.join(untuned)} were not chosen by complete tuning runs."] if untuned else []
    notes += _added(section.added_rates)
    if not section.interim:
        return f"All {section.size} counted runs.{''.join(notes)}"
    total = SEEDS * len(METHODS) * len(section.planned_rates)
    seeds = section.seeds if {method.surrogate for method in section.methods} == METHODS.keys() else 0
    compared = f"{seeds} of {SEEDS} seeds can be compared for all methods."
    return f"Interim: {section.size} of {total} counted runs; {compared}{''.join(notes)}"


def _added(rates: set[float]) -> list[str]:
    """A sentence on the rates that were added; none if there are none."""
    text = " and ".join(map(rate_text, sorted(rates)))
    return [f" A method is best at an end of the planned range, so {text} was added for all."] if rates else []


def contrasts(sections: Sequence[Section]) -> str:
    """TROLL minus each rival at their own rates, with every test."""
    head = ["regime", "TROLL minus", "difference", "over seeds", "over seeds and questions", "p, sign flips", "p, Holm"]
    head += [f"p, ±{100 * MARGIN:g} points", "seeds", "verdict"]
    rows = [
        [
            letter(section.regime),
            found.second.label,
            points(found.estimate.mean),
            interval(found.estimate.interval),
            interval(found.bootstrap),
            *map(p_value, found.p_values),
            str(found.estimate.size),
            "not tested" if found.corrected is None else "interim" if section.interim else found.verdict,
        ]
        for section in sections
        for found in section.contrasts
    ]
    return table(head, rows)


def explored(section: Section) -> str:
    """Success of each method at each rate, and minus TROLL's, paired by seed; other measures if there is one rate."""
    base, one = section.method("troll"), len(section.rates) == 1
    shares = SHARES if any(run.right_after is not None for run in section.every_run) else ()
    head = ["", *map(rate_text, section.rates)]
    if base:
        head += [f"minus {base.label}{'' if one else f' at {rate_text(rate)}'}" for rate in section.rates]
    rows = [
        [
            method.label,
            *_cells(method, section.rates),
            *(_minus(method, base, rate) for rate in section.rates if base),
            *((*_shares(method.every_run)[: len(shares)], *_measures(method)) if one else ()),
        ]
        for method in section.methods
    ]
    return table([*head, *((*shares, *MEASURES) if one else ())], rows)


def kept(section: Section) -> str:
    """Right answers, in brackets or not, in the first rollout and after training, and answers in brackets."""
    rows = []
    for method in section.methods:
        at = [list(method.runs.get(rate, {}).values()) for rate in section.rates]
        right = [_share([run.right_after for run in runs]) for runs in at]
        formatted = [_share([run.formatted_after for run in runs]) for runs in at]
        before = _share([run.right_before for run in method.every_run])
        rows.append([method.label, before, *(f"{one} ({two})" for one, two in zip(right, formatted, strict=True))])
    return table(["", "first rollout", *map(rate_text, section.rates)], rows)


def settings(sections: Sequence[Section]) -> str:
    """Each method's bound, chosen by tuning, and the rate of its best mean over all seeds, by regime."""
    head = ["", *(f"{letter(section.regime)}{section.mark}" for section in sections)]
    rows = []
    for name, label in METHODS.items():
        found = [section.method(name) for section in sections]
        cells = [NOTHING if method is None else _setting(method) for method in found]
        rows.append([f"{label} (`{BOUNDS[name][0]}`)" if name in BOUNDS else label, *cells])
    return table(head, rows)


def by_rate(section: Section) -> str:
    """Success of each method at each rate, and at the rate that its other seeds chose."""
    head = ["", *map(rate_text, section.rates), "at the chosen rate", "rates chosen"]
    rows = [
        [
            method.label,
            *_cells(method, section.rates),
            success(method.success),
            counts_text(run.learning_rate for run in method.tuned.values()) or NOTHING,
        ]
        for method in section.methods
    ]
    return table(head, rows)


def secondary(section: Section) -> str:
    """The range of rates over all runs, and other measures of the runs at the chosen rates."""
    head = ["", "rates within 90 % of the best", "decades", *MEASURES]
    return table(head, [[method.label, *_rates(method), *_measures(method)] for method in section.methods])


def fast(sections: Sequence[Section]) -> str:
    """Each method minus the clip at the rate above the clip's best one, and what replacing groups takes from it."""
    names = ("troll", "kl_penalty", "regression")
    rows = []
    for section in sections:
        rate, clips = section.fast_rate, section.method("clip")
        if rate is None or clips is None:
            continue
        cells = [
            difference(paired_difference(section.finals(name, rate), section.finals("clip", rate))) for name in names
        ]
        rows.append(
            [
                f"{letter(section.regime)}{section.mark}",
                rate_text(rate),
                _cell(list(clips.runs[rate].values())),
                *cells,
            ]
        )
    by_name = {section.regime: section for section in sections}
    if {"sparse-signal", "sparse-signal-resampled"} <= by_name.keys():
        plain, resampled = by_name["sparse-signal"], by_name["sparse-signal-resampled"]
        cells = [difference(paired_difference(plain.lead(name), resampled.lead(name))) for name in names]
        rows.append([f"(a) minus (c){plain.mark or resampled.mark}", "", "", *cells])
    return table(["regime", "learning rate", "clip", *(f"{METHODS[name]} minus clip" for name in names)], rows)


def moved(sections: Sequence[Section]) -> str:
    """The KL of whole completions at the clip's best rate and at the next one, by method and regime."""
    columns = [
        (section, rate)
        for section in sections
        if (clip := section.method("clip")) is not None
        for rate in (clip.best_rate, section.fast_rate)
        if rate is not None
    ]
    head = ["", *(f"{letter(section.regime)} at {rate_text(rate)}{section.mark}" for section, rate in columns)]
    found = [{method.surrogate: method.runs.get(rate, {}) for method in section.methods} for section, rate in columns]
    rows = [
        [label, *(_mean([run.sequence_kl for run in runs.get(name, {}).values()]) for runs in found)]
        for name, label in METHODS.items()
    ]
    return table(head, rows if columns else [])


def changes(sections: Mapping[str, Section]) -> str:
    """What each other regime changes for each method, at its own rates: minus the first regime, paired by seed."""
    first, second, third = (sections[name] for name in REGIMES)
    others = {letter: other for letter, other in (("b", second), ("c", third)) if other.methods and first.methods}
    rows = [
        [label, *(difference(paired_difference(other.finals(name), first.finals(name))) for other in others.values())]
        for name, label in METHODS.items()
    ]
    head = [f"({letter}) minus (a){other.mark}" for letter, other in others.items()]
    return table(["", *head], rows if others else [])


def hypotheses(sections: Mapping[str, Section]) -> str:
    """Which of the protocol's hypotheses hold in which regime; the fourth compares two regimes."""
    head = ["hypothesis", "(a)", "(b)", "(c)"]
    names = (
        "1. Tuned, TROLL and the clip are equal",
        "2. TROLL tolerates faster rates than the clip",
        "3, first half: the pull does it; TROLL and the pull only are equal",
        "3, second half: a KL penalty does as well as TROLL, or better",
    )
    found = [sections[name].hypotheses for name in REGIMES]
    rows = [[name, *(_holds(None if one is None else one[i]) for one in found)] for i, name in enumerate(names)]
    last = "4. TROLL's lead shrinks where groups of equal rewards are replaced"
    return table(head, [*rows, [last, NOTHING, NOTHING, _holds(lead_shrinks(sections))]])


def tuning(section: Section) -> str:
    """How each method's bound was chosen."""
    rows = [
        [
            method.label,
            *_cells(method, TUNING_RATES),
            percent(method.mean),
            "yes" if method in section.chosen.values() else "",
        ]
        for method in section.tuning
    ]
    return table(["tuning", *map(rate_text, TUNING_RATES), "mean", "chosen"], rows)


def second_tuning(table_name: str, rows: Sequence[Result]) -> str:
    """How the configurations of the second part's methods did on the tuning seeds, and which ones are chosen."""
    tried, rates = second_analysis.candidates(table_name, rows), second.REGIMES[table_name].tuning_rates
    best = second_analysis.chosen(tried).values()
    lines = [
        [
            second.METHODS[candidate.method].name,
            " ".join(f"`{name}={value}`" for name, value in candidate.changes.items()),
            *(_cell(runs) for runs in candidate.runs.values()),
            percent(candidate.mean) if candidate.size else NOTHING,
            "yes" if candidate in best else "",
        ]
        for candidate in tried
    ]
    made, planned = sum(candidate.size for candidate in tried), len(tried) * len(rates) * len(second.TUNING_SEEDS)
    name = second.REGIMES[table_name].name
    status = f"{made} of {planned} tuning runs" + (
        "" if made == planned else "; nothing is chosen before all are there"
    )
    head = ["method", "configuration", *map(rate_text, rates), "mean", "chosen"]
    return f"*{name}: {status}.*\n\n{table(head, lines)}"


def second_runs(found: Contest) -> str:
    """Success of each method of the second part at each rate, in the counted runs of a regime."""
    status = f"{found.size} of {found.planned} counted runs" + ("" if found.complete else "; interim")
    notes = "".join(_added(found.added_rates))
    head = ["", *map(rate_text, found.rates)]
    rows = [[method.label, *_cells(method, found.rates)] for method in found.methods.values()]
    return f"*{found.regime.name}: {status}.{notes}*\n\n{table(head, rows)}"


def second_differences(contests: Iterable[Contest]) -> list[tuple[str, str, SeedMean | None]]:
    """The new method minus each rival, each at its best rate: names of the regime and the rival, and the difference."""
    return [
        (found.title, method.label, paired_difference(found.finals(second.NEW), found.finals(key)))
        for found in contests
        for key, method in found.methods.items()
        if second.NEW in found.methods and key != second.NEW
    ]


def second_hypotheses(contests: Mapping[str, Contest]) -> str:
    """The tests of the second part's hypotheses, and their verdicts; one whose runs are missing has no tests."""
    head = ["hypothesis", "regime", "pull everywhere minus", "rates", "difference", "p, one-sided"]
    head += ["p of the hypothesis", "verdict"]
    rows = []
    for one in second_analysis.hypotheses(contests):
        decisive = one.p_value if one.corrected is None else one.corrected
        if not one.tests:
            rows.append([one.name, *[NOTHING] * 6, "open"])
        for number, test in enumerate(one.tests):
            rates = " and ".join(map(rate_text, dict.fromkeys(test.rates)))
            rows.append(
                [
                    one.name,
                    contests[test.table].regime.name.partition(" ")[0],
                    second.METHODS[test.rival].name,
                    rates,
                    difference(test.estimate),
                    p_value(test.p_value),
                    *([NOTHING] * 2 if number else [p_value(decisive), _holds(one.holds)]),
                ]
            )
    return table(head, rows)


def third_hypotheses(contests: Mapping[str, third_analysis.Contest]) -> str:
    """K1 to K3 of the third part: the pooled difference, the methods', and the verdict, in each regime and overall."""
    found = third_analysis.hypotheses(contests.values())
    methods = list(next(iter(contests.values())).regime.methods)
    head = ["hypothesis", "regime", "seeds", "all methods", *(second.METHODS[each].name for each in methods), "p"]
    rows = [
        [
            each.name,
            contests[each.table].regime.name.partition(" ")[0],
            f"{len(contests[each.table].seeds)} of {len(contests[each.table].regime.seeds)}",
            difference(each.estimate),
            *(difference(each.by_method.get(method)) for method in methods),
            p_value(each.p_value),
            each.verdict if contests[each.table].regime.gates else NOTHING,
        ]
        for each in found
    ]
    rows += [
        [name, "(a) and (b)", *[NOTHING] * (len(methods) + 3), third_analysis.overall(name, found)]
        for name in ("K1", "K2")
    ]
    return table([*head, "verdict"], rows)


def third_size(contests: Iterable[third_analysis.Contest]) -> str:
    """How many of the third part's runs there are."""
    found = list(contests)
    return f"{sum(each.size for each in found)} of {sum(each.planned for each in found)} counted runs"


def third_runs(found: third_analysis.Contest, former: Contest | None) -> str:
    """Success of each method from each start and at its constant rate, next to what was predicted, and the rates.

    The last columns have the difference that each start makes to the constant rate, in points.

    Args:
        found: The counted runs of a regime.
        former: The second part's runs of the regime, from which the prediction is; None if it has none.
    """
    wanted = third.TARGET * predictions.LAWS[predictions.LAW](found.regime.last_age)
    lines = []
    for method in found.regime.methods:
        arms = found.at(method)
        *starts, constant = (list(found.runs[arm].values()) for arm in arms)
        line = [second.METHODS[method].name, *map(_cell, starts), _cell(constant), rate_text(arms[-1].rate)]
        if former is not None:
            line.append(_predicted(predictions.predict(found.table, method, wanted, former)))
        lines.append([*line, *map(_late_rates, starts), *map(difference, found.changes(method))])
    names = [f"from {rate_text(start)}" for start in found.regime.starts]
    head = ["", *names, "constant rate", "which", *(["predicted rate and success"] if former is not None else [])]
    status = f"{found.size} of {found.planned} counted runs" + ("" if found.complete else "; interim")
    head += [*(f"rates {each}" for each in names), *(f"{each}, minus constant" for each in names)]
    return f"*{found.regime.name}: {status}.*\n\n{table(head, lines)}"


def third_contrasts(contests: Iterable[third_analysis.Contest]) -> str:
    """TROLL minus each other method in each regime, with the target and at the constant rates, in points."""
    lines = [
        [
            found.regime.name.partition(" ")[0],
            second.METHODS[method].name,
            *(difference(paired_difference(of("troll"), of(method))) for of in (found.targeted, found.finals)),
        ]
        for found in contests
        for method in found.regime.methods
        if method != "troll"
    ]
    return table(["regime", "TROLL minus", "with the target", "at the constant rates"], lines)


#: The rollouts of `third_course`, as far as a run has them.
COURSE = (1, 2, 3, 5, 10, 15, 20, 40)


def third_course(found: third_analysis.Contest) -> str:
    """The rate before the schedule and the success in training in some rollouts, as means over seeds.

    The mean of rates is the geometric one.

    Args:
        found: The counted runs of a regime.
    """
    lines = []
    longest = max((len(run.curve) for runs in found.runs.values() for run in runs.values()), default=COURSE[-1])
    rollouts = [rollout for rollout in COURSE if rollout <= longest]
    for method in found.regime.methods:
        for arm in found.at(method):
            runs = list(found.runs[arm].values())
            name = f"at {rate_text(arm.rate)}" if arm.target is None else f"from {rate_text(arm.rate)}"
            lines.append(
                [second.METHODS[method].name, name, *(_course(found.regime, runs, rollout) for rollout in rollouts)]
            )
    return table(["", "rate", *(f"rollout {rollout}" for rollout in rollouts)], lines)


def _course(regime: third.Regime, runs: Sequence[Result], rollout: int) -> str:
    reached = [run for run in runs if len(run.curve) >= rollout]
    if not reached:
        return NOTHING
    success = percent(fmean(run.curve[rollout - 1] / run.completions for run in reached))
    rates = [run.rates[rollout - 1] / regime.schedule(rollout) for run in reached if run.rates]
    return f"{_short(geometric_mean(rates))}: {success}" if rates else success


def third_rivals(regime: third_analysis.Contest, found: Mapping[third.Arm, Mapping[int, float]]) -> str:
    """Success with our rule and with another one, on the seeds that have both, and the difference."""
    lines = []
    for arm, rival in found.items():
        ours = {seed: run.success_after for seed, run in regime.runs[arm].items()}
        both = sorted(ours.keys() & rival.keys())
        means = [percent(fmean(each[seed] for seed in both)) if both else NOTHING for each in (ours, rival)]
        lines.append(
            [
                second.METHODS[arm.method].name,
                rate_text(arm.rate),
                str(len(both)),
                *means,
                difference(paired_difference(ours, dict(rival))),
            ]
        )
    return table(["", "from", "seeds", "our rule", "the other", "difference"], lines)


def third_dial(dials: Sequence[third_analysis.Dial]) -> str:
    """Success over the target and over the constant rate, for seeds that have all values, and the best value."""
    names = {"kl_target": "T", "learning_rate": "rate"}
    factors = ["× 1/9", "× 1/3", "× 1", "× 3", "× 9"]
    lines = []
    for dial in dials:
        values = list(dial.successes.values())
        lines.append(
            [
                second.METHODS[dial.method].name,
                names[dial.setting],
                str(len(values[0])),
                *(percent(fmean(each)) if each else NOTHING for each in values),
                NOTHING if dial.best is None else f"{dial.best:g}",
            ]
        )
    return table(["", "", "seeds", *factors, "best"], lines)


def third_predictions(former: Mapping[str, Contest]) -> str:
    """Which rate each target leads to, and its success minus that at the best constant rate, from the second part.

    Args:
        former: The second part's runs, by the name of its tables.
    """
    lines = []
    for name, table_before in third.FORMER.items():
        regime, runs = third.REGIMES[name], former[table_before]
        for target in predictions.TARGETS:
            wanted = target * predictions.LAWS[predictions.LAW](regime.last_age)
            losses = predictions.losses(name, wanted, runs)
            lines.append(
                [
                    regime.name.partition(" ")[0],
                    f"{target:g}",
                    f"{wanted:.2g}",
                    *(_predicted(predictions.predict(name, method, wanted, runs)) for method in regime.methods),
                    _mean_loss(losses.values()),
                ]
            )
    methods = next(iter(third.REGIMES.values())).methods
    names = [second.METHODS[method].name for method in methods]
    return table(["regime", "T", "KL of the last update", *names, "mean minus best rate"], lines)


def third_laws(former: Mapping[str, Contest]) -> str:
    """The mean predicted loss of each law of the wanted KL, by regime and target.

    Args:
        former: The second part's runs, by the name of its tables.
    """
    lines = [
        [
            f"T · {law}" if law != "1" else "T",
            f"{target:g}",
            *(
                _mean_loss(
                    predictions.losses(
                        name, target * factor(third.REGIMES[name].last_age), former[table_before]
                    ).values()
                )
                for name, table_before in third.FORMER.items()
            ),
        ]
        for law, factor in predictions.LAWS.items()
        for target in predictions.TARGETS
    ]
    letters = [third.REGIMES[name].name.partition(" ")[0] for name in third.FORMER]
    return table(["KL of the last update", "T", *letters], lines)


def _predicted(found: predictions.Prediction | None) -> str:
    """A rate and the success there; a rate beyond those that were run has none."""
    if found is None:
        return NOTHING
    return f"{_short(found.rate)}: {NOTHING if found.success is None else percent(found.success)}"


def _mean_loss(losses: Iterable[float | None]) -> str:
    """The mean over methods; nothing if one of them has no prediction."""
    known = list(losses)
    return NOTHING if None in known else points(fmean(each for each in known if each is not None))


def _late_rates(runs: Sequence[Result]) -> str:
    """The range of the rates in the second half of training, without the lowest and the highest tenth."""
    late = sorted(rate for run in runs for rate in run.rates[len(run.rates) // 2 :])
    if not late:
        return NOTHING
    tenth = len(late) // 10
    return f"{_short(late[tenth])} to {_short(late[-1 - tenth])}"


def _short(rate: float) -> str:
    """A learning rate with two digits."""
    return f"{rate:.1e}".replace("e-0", "e-")


def tabular(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rollouts until a rare action's probability passes ½, from the rows of `python -m benchmarks tabular`."""
    head = ["p at first", "step of a logit", *METHODS.values(), "1.2 times a rollout", "KL ≤ 0.05 a rollout"]
    return table(
        head,
        [
            [
                *(f"{row['start']:g}", f"{row['step']:g}"),
                *(f"{fmean(row[name]):.1f} ({min(row[name])} to {max(row[name])})" for name in METHODS),
                *(str(row["least_clip"]), str(row["least_kl"])),
            ]
            for row in rows
        ],
    )


def signal(found: Mapping[str, Sequence[float]]) -> str:
    """Success with the pull on some tokens only, from what `python -m experiments.signal` found."""
    seeds = max(map(len, found.values()), default=0)
    head = ["the pull acts", *(f"seed {seed}" for seed in range(seeds)), "mean"]
    return table(head, [[place, *map(percent, each), percent(fmean(each))] for place, each in found.items()])


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; a sentence if it has no rows."""
    if not rows:
        return "Nothing to show yet."
    return markdown_table(head, rows)


def percent(share: float) -> str:
    """A share in per cent, without the sign."""
    return f"{100 * share:.1f}".replace("-", "−")


def points(share: float) -> str:
    """A difference of shares in percentage points."""
    return f"{100 * share:+.1f}".replace("-", "−")


def interval(ends: Interval | None) -> str:
    """An interval of a difference."""
    return NOTHING if ends is None else f"[{points(ends[0])}, {points(ends[1])}]"


def success(estimate: SeedMean | None) -> str:
    """A success with its interval."""
    if estimate is None:
        return NOTHING
    ends = estimate.interval
    return percent(estimate.mean) + (f" [{percent(ends[0])}, {percent(ends[1])}]" if ends else "")


def difference(estimate: SeedMean | None) -> str:
    """A difference in percentage points, with its interval."""
    return NOTHING if estimate is None else f"{points(estimate.mean)} {interval(estimate.interval)}"


def p_value(p: float | None) -> str:
    """A p-value with a sensible number of digits."""
    if p is None:
        return NOTHING
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def _cells(method: Method, rates: Sequence[float]) -> list[str]:
    """`_cell` of a method at each rate."""
    return [_cell(list(method.runs.get(rate, {}).values())) for rate in rates]


def _cell(runs: Sequence[Result]) -> str:
    """Mean ± standard deviation over seeds, their number, and how many of them collapsed."""
    if not runs:
        return NOTHING
    text = estimate_text(seed_mean([run.success_after for run in runs]), "success")
    lost = sum(run.collapsed for run in runs)
    return text + (f", {lost} collapsed" if lost else "")


def _rates(method: Method) -> list[str]:
    """The rates within 90 % of the best, and their range in decades, at least if the data end there; or no success."""
    if method.range is None:
        return [NOTHING, NOTHING]
    low, high = method.range
    open_end = low == min(method.runs) or high == max(method.runs)
    return [range_text((low, high), method.runs), f"{'≥ ' if open_end else ''}{method.decades:.2f}"]


def _setting(method: Method) -> str:
    rate = f"rate {rate_text(method.best_rate)}"
    return f"{method.bound:g}, {rate}" if method.surrogate in BOUNDS else rate


def _shares(runs: Sequence[Result]) -> list[str]:
    """What `SHARES` names, in per cent."""
    before, after = _share([run.right_before for run in runs]), _share([run.right_after for run in runs])
    known = {before, after} != {NOTHING}
    return [f"{before} to {after}" if known else NOTHING, _share([run.formatted_after for run in runs])]


def _share(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return percent(fmean(known)) if known else NOTHING


def _minus(method: Method, base: Method, rate: float) -> str:
    if method is base:
        return ""
    return difference(paired_difference(method.by_rate.get(rate, {}), base.by_rate.get(rate, {})))


def _measures(method: Method) -> list[str]:
    """What `MEASURES` names, of the runs at the chosen rates."""
    runs = list(method.tuned.values())
    if not runs:
        return [NOTHING] * len(MEASURES)
    reached = [count for run in runs if (count := run.rollouts_to_half) is not None]
    half = f"{median(reached):g} ({len(reached)} of {len(runs)})" if reached else f"never (0 of {len(runs)})"
    return [
        f"{sum(run.collapsed for run in runs)} of {len(runs)}",
        percent(fmean(fmean(run.learning) for run in runs)),
        half,
        _mean([run.sequence_kl for run in runs]),
        " to ".join(_mean([run.entropy[end] if run.entropy else None for run in runs]) for end in (0, -1)),
    ]


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{fmean(known):.3g}" if known else NOTHING


def _holds(answer: bool | None) -> str:
    return NOTHING if answer is None else "holds" if answer else "not confirmed"
