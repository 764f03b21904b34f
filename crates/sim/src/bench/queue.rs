//! Runs in parallel, in an order that mixes long and short ones. So the estimate of the remaining time is right from
//! early on, and the runs before Ctrl-C have some seeds of everything.

use std::sync::{Mutex, PoisonError};

use anyhow::Result;
use rayon::prelude::*;

use crate::baselines::Choice;
use crate::churn::{ChurnRun, Plan, churn};
use crate::progress::Progress;
use crate::protocol::Workload;
use crate::random::Random;
use crate::replay::{Run, replay};

/// The subject of a run.
pub(super) enum Study {
    Replay(Box<Workload>),
    Churn(Box<Plan>),
}

/// The result of one run.
pub(super) enum Outcome {
    Replay(Box<Run>),
    Churn(Box<ChurnRun>),
}

impl Outcome {
    pub(super) fn replayed(&self) -> Option<&Run> {
        match self {
            Self::Replay(run) => Some(run),
            Self::Churn(_) => None,
        }
    }
}

impl Study {
    fn run(&self, choice: Choice, seed: u64) -> Result<Option<Outcome>> {
        let mut silent = Progress::silent();
        Ok(match self {
            Self::Replay(workload) => replay(workload, choice, seed, &mut silent)?
                .map(|run| Outcome::Replay(Box::new(run))),
            Self::Churn(plan) => {
                churn(plan, choice, seed, &mut silent)?.map(|run| Outcome::Churn(Box::new(run)))
            }
        })
    }
}

/// One run: the study by its place, the policy, the seed.
pub(super) type Task = (usize, Choice, u64);

/// Runs the tasks, or the tasks before Ctrl-C, on all cores. Returns each with its result, by study, in the order of
/// policies and seeds.
pub(super) fn run(studies: &[Study], tasks: &[Task]) -> Result<Vec<Vec<(Choice, u64, Outcome)>>> {
    let mut order: Vec<usize> = (0..tasks.len()).collect();
    Random::new(1).shuffle(&mut order);
    eprintln!(
        "{} runs on {} cores",
        tasks.len(),
        rayon::current_num_threads()
    );
    let progress = Mutex::new(Progress::new(tasks.len()));
    let run = |&at: &usize| {
        let (study, choice, seed) = tasks[at];
        let outcome = studies[study].run(choice, seed)?;
        let mut progress = progress.lock().unwrap_or_else(PoisonError::into_inner);
        progress.done();
        progress.goes_on(|| "all cells".to_owned(), 0.0);
        Ok((at, outcome))
    };
    // No core is left with a share of the last runs.
    let runs = order.par_iter().with_max_len(1).map(run);
    let mut done = runs.collect::<Result<Vec<_>>>()?;
    done.sort_by_key(|(at, _)| *at);
    let mut by_study: Vec<Vec<(Choice, u64, Outcome)>> = Vec::new();
    by_study.resize_with(studies.len(), Vec::new);
    for (&(study, choice, seed), (_, outcome)) in tasks.iter().zip(done) {
        by_study[study].extend(outcome.map(|outcome| (choice, seed, outcome)));
    }
    Ok(by_study)
}
