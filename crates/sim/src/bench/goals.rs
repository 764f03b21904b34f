//! The goals for gpustow's policy, measured with the baselines: a line of the table per measure.

use std::collections::BTreeMap;

use gpustow_pack::PolicyKind;

use super::queue::Outcome;
use crate::baselines::Choice;
use crate::report::Mean;

/// The policy that the goals are set for.
pub(super) const OURS: Choice = Choice::Own(PolicyKind::Tight);
/// The other policies in the comparison, in the order of the table's columns.
pub(super) const BASELINES: [Choice; 4] = [
    Choice::Own(PolicyKind::Binpack),
    Choice::BestFit,
    Choice::Fgd,
    Choice::Own(PolicyKind::FirstFit),
];

/// The least value, or the largest value where less is better.
#[derive(Clone, Copy)]
pub(super) enum Goal {
    /// A number.
    Number(f64),
    /// A multiple of a baseline's value, plus an amount. The policy misses it by more than noise: by the 95 % interval
    /// of the mean difference, seed by seed.
    Of(Choice, f64, f64),
    /// The value of the best baseline, plus an amount; likewise.
    Best(f64),
}

/// The figure of a run, if the run came that far.
type Figure = dyn Fn(&Outcome) -> Option<f64>;

/// A figure of every run, and its goals.
pub(super) struct Measure {
    pub(super) name: String,
    pub(super) of: Box<Figure>,
    pub(super) less_is_better: bool,
    pub(super) goals: Vec<Goal>,
    /// The policy's value up to commit 8a73bf4, as it was recorded then (seeds 42 to 51).
    pub(super) before: Option<f64>,
}

/// Values by seed.
type Values = BTreeMap<u64, f64>;

impl Measure {
    pub(super) fn more(name: &str, of: impl Fn(&Outcome) -> Option<f64> + 'static) -> Self {
        Self {
            name: name.to_owned(),
            of: Box::new(of),
            less_is_better: false,
            goals: vec![Goal::Best(0.0)],
            before: None,
        }
    }

    pub(super) fn less(name: &str, of: impl Fn(&Outcome) -> Option<f64> + 'static) -> Self {
        Self {
            less_is_better: true,
            ..Self::more(name, of)
        }
    }

    pub(super) fn goals(self, goals: &[Goal]) -> Self {
        Self {
            goals: goals.to_vec(),
            ..self
        }
    }

    pub(super) fn before(self, before: f64) -> Self {
        Self {
            before: Some(before),
            ..self
        }
    }

    /// A line of the table, and whether every goal is met.
    pub(super) fn line(
        &self,
        scenario: &str,
        outcomes: &[(Choice, u64, Outcome)],
    ) -> (String, bool) {
        let values = |choice: Choice| -> Values {
            let of = outcomes.iter().filter(|(known, ..)| *known == choice);
            of.filter_map(|(_, seed, outcome)| Some((*seed, (self.of)(outcome)?)))
                .collect()
        };
        let ours = values(OURS);
        let baselines = BASELINES.map(|choice| (choice, values(choice)));
        let mut goals = Vec::new();
        let mut missed = Vec::new();
        for goal in &self.goals {
            let (text, misses) = self.check(*goal, &ours, &baselines);
            goals.push(text);
            missed.extend(misses);
        }
        let mut cells = vec![
            format!(
                "{scenario}{}{}",
                if scenario.is_empty() { "" } else { ", " },
                self.name
            ),
            goals.join(", "),
            format!("**{}**", shown(&ours)),
            self.before
                .map_or(String::new(), |before| format!("{before}")),
        ];
        cells.extend(baselines.iter().map(|(_, values)| shown(values)));
        missed.dedup();
        cells.push(match missed.is_empty() {
            true => String::new(),
            false => format!("missed: {}", missed.join(", ")),
        });
        (format!("| {} |", cells.join(" | ")), missed.is_empty())
    }

    /// The goal in words, and the names of the values against which it is missed.
    fn check(
        &self,
        goal: Goal,
        ours: &Values,
        baselines: &[(Choice, Values)],
    ) -> (String, Vec<&'static str>) {
        let sign = if self.less_is_better { -1.0 } else { 1.0 };
        let relation = if self.less_is_better { "≤" } else { "≥" };
        let extra = |more: f64| match more {
            0.0 => String::new(),
            more if more > 0.0 => format!(" + {more}"),
            less => format!(" − {}", -less),
        };
        let worse = |values: &Values, factor: f64, more: f64| {
            let both = ours.iter().filter_map(|(seed, ours)| {
                let wanted = factor * values.get(seed)? + more;
                Some(sign * (ours - wanted))
            });
            let both: Vec<f64> = both.collect();
            let difference = Mean::of(&both);
            // One seed, which is all that an interrupted run may have, shows nothing.
            both.len() > 1 && difference.mean < -difference.ci95 - 1e-9
        };
        match goal {
            Goal::Number(number) => {
                let mean = Mean::of(&ours.values().copied().collect::<Vec<_>>()).mean;
                let missed = sign * (mean - number) < 0.0;
                let missed = if missed {
                    vec!["the number"]
                } else {
                    Vec::new()
                };
                (format!("{relation} {number:.2}"), missed)
            }
            Goal::Of(choice, factor, more) => {
                let values = baselines.iter().find(|(known, _)| *known == choice);
                let missed = values.is_some_and(|(_, values)| worse(values, factor, more));
                let times = match factor {
                    1.0 => String::new(),
                    factor => format!("{factor} · "),
                };
                let text = format!("{relation} {times}{}{}", choice.name(), extra(more));
                (
                    text,
                    if missed {
                        vec![choice.name()]
                    } else {
                        Vec::new()
                    },
                )
            }
            Goal::Best(more) => {
                let missed = baselines
                    .iter()
                    .filter(|(_, values)| worse(values, 1.0, more));
                let missed = missed.map(|(choice, _)| choice.name()).collect();
                (format!("{relation} best{}", extra(more)), missed)
            }
        }
    }
}

fn shown(values: &Values) -> String {
    let mean = Mean::of(&values.values().copied().collect::<Vec<_>>());
    match values.len() {
        0 => "–".to_owned(),
        _ => format!("{:.2} ± {:.2}", mean.mean, mean.ci95),
    }
}

/// The head of the table.
pub(super) fn head() -> String {
    let mut cells = vec!["measure", "goal", "tight", "before"];
    cells.extend(BASELINES.map(Choice::name));
    cells.push("");
    let rule = "|---".repeat(cells.len());
    format!("| {} |\n{rule}|", cells.join(" | "))
}
