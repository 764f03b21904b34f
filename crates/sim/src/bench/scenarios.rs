//! The workloads of the table: the published lists, and mixes and clusters that no policy was tuned on.

use std::path::Path;

use anyhow::{Context, Result};
use gpustow_pack::PolicyKind;

use super::goals::{Goal, Measure};
use super::queue::{Outcome, Study};
use crate::baselines::Choice;
use crate::churn::{Lifetimes, Plan};
use crate::protocol::{Mode, Wave, Workload};
use crate::random::Random;
use crate::replay::Whole;
use crate::trace::{self, TraceNode, TracePod};

const BINPACK: Choice = Choice::Own(PolicyKind::Binpack);
const DEFAULT: &str = "default";
/// Small clusters differ more from seed to seed: they get so many times the seeds.
const MORE_SEEDS: u64 = 3;

/// The runs for a line of the table.
pub(super) enum Source {
    /// A published list on all nodes.
    List(&'static str),
    Own(Study),
}

/// A workload and its measures.
pub(super) struct Scenario {
    /// A heading in the table.
    pub(super) group: &'static str,
    pub(super) name: String,
    pub(super) source: Source,
    pub(super) seeds_times: u64,
    pub(super) measures: Vec<Measure>,
}

/// The nodes and the pod lists of the trace.
pub(super) struct Openb {
    nodes: Vec<TraceNode>,
    /// The published lists, by name.
    pub(super) lists: Vec<(String, Vec<TracePod>)>,
}

impl Openb {
    pub(super) fn read(folder: &Path, lists: &[(String, std::path::PathBuf)]) -> Result<Self> {
        let read = |(name, path): &(String, std::path::PathBuf)| {
            let pods = trace::pods(&trace::read(path)?);
            Ok((
                name.clone(),
                pods.with_context(|| path.display().to_string())?,
            ))
        };
        Ok(Self {
            nodes: trace::nodes(&trace::read(&folder.join("openb_node_list_gpu_node.csv"))?)?,
            lists: lists.iter().map(read).collect::<Result<_>>()?,
        })
    }

    pub(super) fn list(&self, name: &str) -> Result<&[TracePod]> {
        let found = self.lists.iter().find(|(known, _)| known == name);
        let (_, pods) = found.with_context(|| format!("no list {name:?}"))?;
        Ok(pods)
    }

    pub(super) fn workload(&self, pods: Vec<TracePod>, mode: Mode) -> Result<Workload> {
        Workload::new(self.nodes.clone(), pods, mode)
    }

    /// The default list, on so many nodes, then other pods from so many percent on.
    fn wave(&self, mode: Mode, nodes: usize, at: u32, then: Vec<TracePod>) -> Result<Study> {
        let mut workload = self.workload(self.list(DEFAULT)?.to_vec(), mode)?;
        workload.nodes = nodes;
        let jobs = workload.read(then);
        workload.wave = Some(Wave { at, jobs });
        Ok(Study::Replay(Box::new(workload)))
    }

    /// The default list with this percentage of the GPU pods bound to models. Each of them gets the models of a pod in
    /// the published list with bound pods that wants as many GPUs.
    fn bound(&self, percent: usize) -> Result<Vec<TracePod>> {
        let bound: Vec<&TracePod> = self.list("gpuspec10")?.iter().collect();
        let mut random = Random::new(11);
        let mut pods = self.list(DEFAULT)?.to_vec();
        for pod in pods.iter_mut().filter(|pod| pod.gpus > 0) {
            let like = bound.iter().filter(|like| {
                let as_much_cpu = like.cpu_milli >= pod.cpu_milli;
                like.gpus == pod.gpus && as_much_cpu && !like.models.is_empty()
            });
            let like: Vec<_> = like.collect();
            if random.below(100) < percent && !like.is_empty() {
                pod.models = like[random.below(like.len())].models.clone();
            }
        }
        Ok(pods)
    }

    pub(super) fn churn(&self, list: &str, nodes: usize, load: f64) -> Result<Plan> {
        Ok(Plan {
            workload: self.workload(self.list(list)?.to_vec(), Mode::Units)?,
            standing: None,
            then: None,
            hosts: nodes,
            load,
            lifetimes: Lifetimes::Exponential,
            keep: None,
            moving: None,
            together: None,
        })
    }

    /// Every workload that the policy is held to.
    pub(super) fn scenarios(&self) -> Result<Vec<Scenario>> {
        let mut all = Self::partly_full();
        all.extend(self.full()?);
        all.extend(self.waves()?);
        all.extend(self.bound_pods()?);
        all.extend(self.mixes()?);
        all.extend(self.small()?);
        all.extend(self.departures()?);
        Ok(all)
    }

    fn partly_full() -> Vec<Scenario> {
        let mut measures = Vec::new();
        let before = [(393.0, 130.0), (74.0, 71.0), (57.0, 57.0), (46.0, 46.0)];
        for (level, (empty, large)) in [20, 40, 60, 80].into_iter().zip(before) {
            let mut goals = vec![Goal::Of(Choice::Fgd, 1.0, 0.0)];
            if level >= 40 {
                goals.push(Goal::Of(BINPACK, 0.95, 0.0));
            }
            let of = |of: fn(&Whole) -> f64| {
                move |outcome: &Outcome| outcome.replayed()?.whole.get(&level).map(of)
            };
            measures.extend([
                Measure::more(&format!("empty nodes @{level} %"), of(|whole| whole.empty))
                    .goals(&goals)
                    .before(empty),
                Measure::more(
                    &format!("empty 8-GPU nodes @{level} %"),
                    of(|whole| whole.empty_large),
                )
                .goals(&goals)
                .before(large),
                Measure::less(
                    &format!("GPUs of nodes in use @{level} %"),
                    of(|whole| whole.running_pct),
                ),
            ]);
        }
        vec![Scenario {
            group: "Partly full: default list, 1,213 nodes",
            name: String::new(),
            source: Source::List(DEFAULT),
            seeds_times: 1,
            measures,
        }]
    }

    fn full(&self) -> Result<Vec<Scenario>> {
        let group = "Full: percent allocated at 130 % of arrivals; in MiB, percent turned away";
        let mut all = Vec::new();
        let before = [
            ("cpu100", 96.30),
            (DEFAULT, 96.29),
            ("gpushare100", 88.45),
            ("gpushare40", 94.89),
            ("gpuspec10", 96.24),
            ("multigpu20", 96.78),
        ];
        for (list, before) in before {
            let mut goals = vec![Goal::Of(Choice::Fgd, 1.0, 0.5), Goal::Number(before - 0.15)];
            if list == DEFAULT {
                goals = vec![Goal::Number(96.2)];
            }
            let measures = vec![allocated(130).goals(&goals).before(before)];
            all.push(Scenario {
                group,
                name: list.to_owned(),
                source: Source::List(list),
                seeds_times: 1,
                measures,
            });
        }
        for (mode, before) in [(Mode::MibPaper, 22.64), (Mode::MibGuess, 21.25)] {
            let workload = self.workload(self.list(DEFAULT)?.to_vec(), mode)?;
            let study = Study::Replay(Box::new(workload));
            let measures = vec![turned_away().before(before)];
            all.push(one(group, &format!("MiB {mode}"), study, measures));
        }
        Ok(all)
    }

    fn waves(&self) -> Result<Vec<Scenario>> {
        let group = "Late pods of 8 GPUs: percent turned away";
        let mut all = Vec::new();
        let before = [[59.88, 41.55, 23.46], [48.53, 39.43, 22.60]];
        for (nodes, before) in [usize::MAX, 60].into_iter().zip(before) {
            for (at, before) in [30, 50, 70].into_iter().zip(before) {
                let count = nodes.min(self.nodes.len());
                let study = self.wave(Mode::Units, nodes, at, vec![whole_node()])?;
                let measures = vec![turned_away().goals(&[Goal::Best(1.0)]).before(before)];
                let mut scenario = one(
                    group,
                    &format!("{count} nodes, from {at} %"),
                    study,
                    measures,
                );
                scenario.seeds_times = if nodes == 60 { MORE_SEEDS } else { 1 };
                all.push(scenario);
            }
        }
        // Cards of different size: first whatever comes, then pods that need the large ones.
        let mut large = whole_node();
        (large.gpus, large.cpu_milli, large.ram_mib) = (1, 8000, 65_536);
        large.models = vec!["G3".to_owned(), "V100M32".to_owned()];
        for (name, then) in [
            ("of 8 GPUs", whole_node()),
            ("that need large cards", large),
        ] {
            let study = self.wave(Mode::MibGuess, usize::MAX, 60, vec![then])?;
            let measures = vec![turned_away().goals(&[Goal::Best(1.0)])];
            all.push(one(
                group,
                &format!("MiB r-guess, from 60 % pods {name}"),
                study,
                measures,
            ));
        }
        Ok(all)
    }

    fn bound_pods(&self) -> Result<Vec<Scenario>> {
        let group = "Pods bound to models, as many percent of pods: percent allocated";
        let of = |percent: usize| {
            let workload = self.workload(self.bound(percent)?, Mode::Units)?;
            let measures = [80, 90, 95, 100].map(allocated).into();
            let study = Study::Replay(Box::new(workload));
            Ok(one(group, &format!("{percent} %"), study, measures))
        };
        [5, 10, 20, 33].into_iter().map(of).collect()
    }

    fn mixes(&self) -> Result<Vec<Scenario>> {
        let group = "Other mixes, made of the default list: percent allocated";
        let changed = |change: fn(&mut TracePod)| -> Result<Vec<TracePod>> {
            let mut pods = self.list(DEFAULT)?.to_vec();
            pods.iter_mut().for_each(change);
            Ok(pods)
        };
        let only = |keep: fn(&TracePod) -> bool| -> Result<Vec<TracePod>> {
            let pods = self.list(DEFAULT)?.iter();
            Ok(pods.filter(|pod| keep(pod)).cloned().collect())
        };
        let mixes = [
            (
                "CPU × 1.5",
                changed(|pod| pod.cpu_milli = pod.cpu_milli * 3 / 2)?,
            ),
            ("CPU ÷ 2", changed(|pod| pod.cpu_milli /= 2)?),
            ("host memory × 3", changed(|pod| pod.ram_mib *= 3)?),
            ("whole GPUs only", only(|pod| pod.gpu_milli == 1000)?),
            (
                "shares of 350 and 620 only",
                changed(|pod| {
                    if pod.gpus == 1 && pod.gpu_milli < 1000 {
                        pod.gpu_milli = if pod.gpu_milli > 400 { 620 } else { 350 };
                    }
                })?,
            ),
            (
                "pods of 1 GPU and 16 cores take 4 and 48",
                changed(|pod| {
                    if pod.gpus == 1 && pod.gpu_milli == 1000 && pod.cpu_milli >= 16_000 {
                        (pod.gpus, pod.cpu_milli) = (4, 48_000);
                    }
                })?,
            ),
        ];
        let of = |(name, pods): (&str, Vec<TracePod>)| {
            let workload = self.workload(pods, Mode::Units)?;
            let measures = [90, 100, 130].map(allocated).into();
            Ok(one(
                group,
                name,
                Study::Replay(Box::new(workload)),
                measures,
            ))
        };
        mixes.into_iter().map(of).collect()
    }

    fn small(&self) -> Result<Vec<Scenario>> {
        let group = "Small clusters: percent turned away until 130 % have been asked for";
        let mut all = Vec::new();
        for list in [DEFAULT, "multigpu20"] {
            for nodes in [1, 3, 10, 20, 60] {
                let mut workload = self.workload(self.list(list)?.to_vec(), Mode::Units)?;
                workload.nodes = nodes;
                let study = Study::Replay(Box::new(workload));
                let name = format!("{list}, {nodes} node{}", if nodes == 1 { "" } else { "s" });
                let mut scenario = one(group, &name, study, vec![turned_away()]);
                scenario.seeds_times = MORE_SEEDS;
                all.push(scenario);
            }
        }
        Ok(all)
    }

    fn departures(&self) -> Result<Vec<Scenario>> {
        let group = "With departures: minutes that pods wait, and percent allocated";
        let waits = || vec![waits_8(), waits_all(), held()];
        let mut all = Vec::new();
        for (list, nodes) in [
            (DEFAULT, 60),
            (DEFAULT, 20),
            ("gpuspec10", 60),
            ("multigpu20", 20),
        ] {
            let plan = self.churn(list, nodes, 0.9)?;
            all.push((format!("{list}, {nodes} nodes, load 0.9"), plan, waits()));
        }
        for (then, load) in [
            ("gpushare100", 0.9),
            ("multigpu20", 0.9),
            ("gpuspec10", 1.05),
        ] {
            let mut plan = self.churn(DEFAULT, 60, load)?;
            plan.then = Some(plan.workload.read(self.list(then)?.to_vec()));
            let name = format!("default, then {then}, 60 nodes, load {load}");
            all.push((name, plan, vec![waits_all(), held()]));
        }
        for (percent, nodes) in [(40, 20), (40, 60), (70, 20), (70, 60)] {
            let share = f64::from(percent) / 100.0;
            let large = self
                .nodes
                .iter()
                .filter(|node| node.gpus == 8 && node.model == "G2");
            let workload =
                Workload::new(large.cloned().collect(), vec![whole_node()], Mode::Units)?;
            let mut plan = Plan {
                workload,
                ..self.churn(DEFAULT, nodes, 0.9 - share)?
            };
            plan.standing = Some((plan.workload.read(shares()), share));
            let name =
                format!("shares that stay hold {percent} %, then pods of 8 GPUs, {nodes} nodes");
            all.push((name, plan, vec![waits_8(), held()]));
        }
        let scenario = |(name, plan, measures): (String, Plan, Vec<Measure>)| Scenario {
            seeds_times: MORE_SEEDS,
            ..one(group, &name, Study::Churn(Box::new(plan)), measures)
        };
        Ok(all.into_iter().map(scenario).collect())
    }
}

fn one(group: &'static str, name: &str, study: Study, measures: Vec<Measure>) -> Scenario {
    Scenario {
        group,
        name: name.to_owned(),
        source: Source::Own(study),
        seeds_times: 1,
        measures,
    }
}

fn whole_node() -> TracePod {
    TracePod {
        name: "whole-node".to_owned(),
        cpu_milli: 64_000,
        ram_mib: 262_144,
        gpus: 8,
        gpu_milli: 1000,
        models: Vec::new(),
        lived: None,
    }
}

/// Shares that ask for 12 cores per card.
fn shares() -> Vec<TracePod> {
    let share = |milli: u64| TracePod {
        name: format!("share-{milli}"),
        cpu_milli: 12 * milli,
        ram_mib: 4096,
        gpus: 1,
        gpu_milli: milli,
        models: Vec::new(),
        lived: None,
    };
    [230, 320, 470, 500, 650, 810].map(share).into()
}

fn allocated(level: u32) -> Measure {
    let of = move |outcome: &Outcome| outcome.replayed()?.allocated.get(&level).copied();
    Measure::more(&format!("@{level} %"), of)
}

fn turned_away() -> Measure {
    Measure::less("turned away", |outcome| {
        Some(outcome.replayed()?.unplaced_pct)
    })
}

fn mean(waits: &[f64]) -> Option<f64> {
    (!waits.is_empty()).then(|| waits.iter().sum::<f64>() / waits.len() as f64)
}

fn waits_8() -> Measure {
    Measure::less("wait of 8-GPU pods", |outcome| match outcome {
        Outcome::Churn(run) => mean(run.waits.get("8-gpu")?),
        Outcome::Replay(_) => None,
    })
}

fn waits_all() -> Measure {
    Measure::less("wait", |outcome| match outcome {
        Outcome::Churn(run) => mean(&run.waits.values().flatten().copied().collect::<Vec<_>>()),
        Outcome::Replay(_) => None,
    })
}

fn held() -> Measure {
    Measure::more("allocated", |outcome| match outcome {
        Outcome::Churn(run) => Some(run.allocated),
        Outcome::Replay(_) => None,
    })
}
