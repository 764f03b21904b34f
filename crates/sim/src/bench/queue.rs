//! Runs in parallel, in an order that mixes long and short ones: the time left is told truly from
//! early on, and what Ctrl-C leaves has some seeds of everything.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use anyhow::Result;

use crate::baselines::Choice;
use crate::churn::{ChurnRun, Plan, churn};
use crate::progress::Progress;
use crate::protocol::Workload;
use crate::random::Random;
use crate::replay::{Run, replay};

/// What is run.
pub(super) enum Study {
    Replay(Box<Workload>),
    Churn(Box<Plan>),
}

/// What one run showed.
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

/// Runs the tasks, or those that Ctrl-C lets, on all cores; each with what it showed, by study, in the
/// order of policies and seeds.
pub(super) fn run(studies: &[Study], tasks: &[Task]) -> Result<Vec<Vec<(Choice, u64, Outcome)>>> {
    let mut order: Vec<usize> = (0..tasks.len()).collect();
    Random::new(1).shuffle(&mut order);
    let threads = thread::available_parallelism().map_or(1, usize::from);
    eprintln!("{} runs on {threads} cores", tasks.len());
    let mut progress = Progress::new(tasks.len());
    let next = AtomicUsize::new(0);
    let mut done: Vec<Option<Outcome>> = Vec::new();
    done.resize_with(tasks.len(), || None);
    thread::scope(|scope| -> Result<()> {
        let (sender, ended) = channel();
        for _ in 0..threads {
            let (sender, order, next) = (sender.clone(), &order, &next);
            scope.spawn(move || {
                while let Some(&at) = order.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let (study, choice, seed) = tasks[at];
                    let outcome = studies[study].run(choice, seed);
                    // The other end is there until all senders are gone, unless a run failed.
                    if sender.send((at, outcome)).is_err() {
                        return;
                    }
                }
            });
        }
        drop(sender);
        loop {
            match ended.recv_timeout(Duration::from_millis(200)) {
                Ok((at, outcome)) => {
                    done[at] = outcome?;
                    progress.done();
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
            }
            progress.goes_on(|| "all cells".to_owned(), 0.0);
        }
    })?;
    let mut by_study: Vec<Vec<(Choice, u64, Outcome)>> = Vec::new();
    by_study.resize_with(studies.len(), Vec::new);
    for (&(study, choice, seed), outcome) in tasks.iter().zip(done) {
        by_study[study].extend(outcome.map(|outcome| (choice, seed, outcome)));
    }
    Ok(by_study)
}
