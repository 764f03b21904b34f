//! gpustow compared with other schedulers of shared GPUs and kube-scheduler alone, in turn, on equal control planes,
//! nodes and pods.
//!
//! Each turn has a control plane of its own. The program runs and has bound a pod when all pods of the burst are
//! created at once; pods at a steady pace follow. A further part of the nodes then gets more pods than fit. Meanwhile
//! all processes of the program are killed and started again three times. With `--ended`, a part of these pods ends,
//! and waiting pods take their place. A pod's GPUs are read from the fields that its program wrote on it.

mod dra;
mod kai;
mod kubernetes;
mod program;
mod report;
mod sizes;
mod volcano;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use clap::Parser;
use gpustow_testkit::{
    Binds, Case, ControlPlane, Options, at_once, built, node_of, paced, quantile, since,
};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use kube::api::{Api, DeleteParams, ListParams};
use tokio::time::timeout;

use program::{Built, Program, Running};
use report::{Round, report};
use sizes::{Size, sizes};

/// GPUs of a node and their MiB, of which KAI counts hundreds only.
const CARDS: [u64; 8] = [82_000; 8];
/// Clients that create pods at once.
const WIDTH: usize = 64;
/// A program that binds nothing for this long has finished.
const QUIET: Duration = Duration::from_secs(60);
/// The limit once the program has bound nearly all pods that fit.
const NEARLY: Duration = Duration::from_secs(20);
/// Label of nodes: which pods use them.
const PART: &str = "bench/part";

/// Time gpustow beside other schedulers of shared GPUs.
#[derive(Parser)]
struct Args {
    /// Nodes with 8 GPUs each; several sizes are run one after the other
    #[arg(long, value_delimiter = ',', default_value = "100,1000,5000")]
    nodes: Vec<usize>,
    /// Pods of the burst
    #[arg(long, default_value_t = 600)]
    pods: usize,
    /// Pods of the steady part, ten a second
    #[arg(long, default_value_t = 50)]
    paced: usize,
    /// Further nodes, which are filled while the program is restarted
    #[arg(long, default_value_t = 10)]
    filled: usize,
    /// Percentage of the pods on filled nodes that end once no more are bound; pods that wait follow
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u16).range(..=100))]
    ended: u16,
    /// Pod list in the format of the openb trace, from which pods have GPUs, CPU and memory; six round sizes without it
    #[arg(long)]
    openb: Option<PathBuf>,
    /// Rounds of each program
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Run only these programs
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Program>,
    /// The extender's binary
    #[arg(long, default_value = "target/release/gpustow")]
    gpustow: PathBuf,
    /// Folder of manifests, scheduler-config and tests
    #[arg(long, default_value = ".")]
    repository: PathBuf,
}

/// Where a program runs.
struct Site<'a> {
    args: &'a Args,
    /// Of pods, in turn.
    sizes: &'a [Size],
    cluster: ControlPlane,
    case: Case,
}

#[tokio::main]
async fn main() -> Result<()> {
    let args = Args::parse();
    built(&args.gpustow, "cargo build --release --bin gpustow")?;
    let sizes = sizes(args.openb.as_deref())?;
    let began = Instant::now();
    let mut programs = Program::chosen(&args.only);
    let mut failures = BTreeMap::new();
    let mut builds = HashMap::new();
    for &program in &programs {
        match program.build(&args).await {
            Ok(build) => drop(builds.insert(program, build)),
            Err(problem) => {
                eprintln!("{} {}: {problem:#}", since(began), program.name());
                failures.insert(program, format!("not built: {problem:#}"));
            }
        }
    }
    for &nodes in &args.nodes {
        let mut failures = failures.clone();
        let mut results: BTreeMap<Program, Vec<Round>> = BTreeMap::new();
        for round in 1..=args.rounds {
            // Not always the same one first.
            programs.rotate_left(usize::from(round > 1));
            for &program in &programs {
                let Some(build) = builds.get(&program) else {
                    continue;
                };
                if failures.contains_key(&program) {
                    continue;
                }
                let name = program.name();
                let at = format!("{nodes} nodes, round {round} of {}, {name}", args.rounds);
                eprintln!("{} {at}: starts", since(began));
                match turn(&args, &sizes, nodes, program, build).await {
                    Ok(result) => {
                        eprintln!(
                            "{} {at}: {:.1} pods/s, bound after {:.0} ms (p50)",
                            since(began),
                            result.rate,
                            quantile(&result.waits, 0.5),
                        );
                        results.entry(program).or_default().push(result);
                    }
                    Err(problem) => {
                        eprintln!("{} {at}: {problem:#}", since(began));
                        failures.insert(program, format!("{problem:#}"));
                    }
                }
            }
            // Of a run that is stopped, the rounds until then are known.
            eprintln!("{}", report(nodes, &args, &results, &failures));
        }
        println!("\n{}", report(nodes, &args, &results, &failures));
    }
    Ok(())
}

async fn turn(
    args: &Args,
    sizes: &[Size],
    nodes: usize,
    program: Program,
    build: &Built,
) -> Result<Round> {
    let cluster = ControlPlane::start(Options::default()).await?;
    let case = Case::new(&cluster, "bench").await?;
    let site = Site {
        args,
        sizes,
        cluster,
        case,
    };
    program.install(&site, build).await?;
    let parts = (0..nodes).map(|_| "many");
    let parts = parts.chain((0..args.filled).map(|_| "few"));
    at_once(WIDTH, parts.enumerate(), |(node, part)| {
        program.node(&site.case, format!("n{node:05}"), part)
    })
    .await?;
    let running = program.start(&site, build).await?;
    let all = all_of(&site, &running, program).await;
    all.map_err(|problem| running.with_logs(problem))
}

/// All parts of a turn.
async fn all_of(site: &Site<'_>, running: &Running, program: Program) -> Result<Round> {
    let args = site.args;
    bind(site, program, "first", "many", 1, |_| Ok(())).await?;
    program.settle(site).await?;
    let before = running.cpu()?;
    let api = site.cluster.api_server.cpu()? + site.cluster.etcd.cpu()?;
    let took = bind(site, program, "burst", "many", args.pods, |_| Ok(())).await?;
    let per_pod = |seconds: f64| seconds * 1e3 / args.pods as f64;
    let after = running.cpu()?;
    let cpu = after.iter().zip(before);
    let cpu = cpu.map(|(&(name, after), (_, before))| (name, per_pod(after - before)));
    let cpu = cpu.collect();
    let api = site.cluster.api_server.cpu()? + site.cluster.etcd.cpu()? - api;
    let burst = program.books(site, &pods(site, program, "burst").await?);
    let bound = burst.bound;
    let mut binds = Binds::of(site.case.pods(), None).await?;
    let one = async |name: &str, index| create(site, program, name, "many", index).await;
    let waits = paced(args.paced, &mut binds, QUIET, one).await?;
    let memory = running.memory()?;
    let calls = match &running.extender {
        Some(url) => Some(kubernetes::calls(url).await?),
        None => None,
    };

    let fit = site.fit();
    let mut kills = [fit / 4, fit / 2, fit * 3 / 4].into_iter().peekable();
    let restarts = |bound: usize| {
        if kills.next_if(|&at| bound >= at).is_some() {
            running.restart()?;
        }
        Ok(())
    };
    bind(site, program, "filled", "few", fit, restarts).await?;
    let filled = program.books(site, &pods(site, program, "filled").await?);
    let refilled = match args.ended {
        0 => None,
        _ => {
            end(site, program).await?;
            Some(program.books(site, &pods(site, program, "filled").await?))
        }
    };
    Ok(Round {
        rate: bound as f64 / took.as_secs_f64(),
        waits,
        cpu,
        api: per_pod(api),
        memory,
        calls,
        burst,
        filled,
        refilled,
    })
}

impl Site<'_> {
    /// The size of the pod with this number.
    fn size(&self, index: usize) -> Size {
        self.sizes[index % self.sizes.len()]
    }

    /// The size of a pod, of which the name ends in its number.
    fn size_of(&self, pod: &Pod) -> Option<Size> {
        number(pod).map(|number| self.size(number))
    }

    /// So many pods request all memory of the nodes that are filled.
    fn fit(&self) -> usize {
        let all = self.args.filled as u64 * CARDS.iter().sum::<u64>();
        let sums = (0..).scan(0, |sum, index| {
            *sum += self.size(index).all_mib();
            Some(*sum)
        });
        sums.take_while(|sum| *sum <= all).count()
    }
}

fn number(pod: &Pod) -> Option<usize> {
    pod.name_any().rsplit('-').next()?.parse().ok()
}

/// Creates `fit` pods at once. On nodes to be filled it adds a fifth, and one more for each pod that will end. Waits
/// until the program binds no more. Passes the number of bound pods to `seen`. Returns the time from the first creation
/// to the last bind.
async fn bind(
    site: &Site<'_>,
    program: Program,
    name: &str,
    part: &str,
    fit: usize,
    mut seen: impl FnMut(usize) -> Result<()>,
) -> Result<Duration> {
    let mut binds = Binds::of(site.case.pods(), None).await?;
    let at = Instant::now();
    let more = fit * (20 + usize::from(site.args.ended)) / 100;
    let count = fit + if part == "few" { more } else { 0 };
    let names: Vec<String> = (0..count).map(|index| format!("{name}-{index}")).collect();
    let create = at_once(WIDTH, names.iter().enumerate(), |(index, name)| {
        create(site, program, name, part, index)
    });
    let bound = async {
        let mut last = Duration::ZERO;
        let mut bound = HashSet::new();
        while bound.len() < count {
            let quiet = if bound.len() * 20 < fit * 19 {
                QUIET
            } else {
                NEARLY
            };
            let Ok(next) = timeout(quiet, binds.next(name)).await else {
                break;
            };
            if bound.insert(next?.0) {
                last = at.elapsed();
                seen(bound.len())?;
            }
        }
        if bound.is_empty() {
            bail!("no pod of {name} was bound in {} s", QUIET.as_secs());
        }
        Ok(last)
    };
    let ((), last) = futures::try_join!(create, bound)?;
    Ok(last)
}

/// Ends a part of the bound pods that fill nodes, evenly by their numbers. Waits until the program binds no more of the others.
async fn end(site: &Site<'_>, program: Program) -> Result<()> {
    let mut bound = pods(site, program, "filled").await?;
    bound.retain(|pod| node_of(pod).is_some());
    bound.retain(|pod| number(pod).is_some_and(|it| it * 37 % 100 < usize::from(site.args.ended)));
    let mut binds = Binds::of(site.case.pods(), None).await?;
    at_once(WIDTH, bound, |pod| async move {
        let name = pod.name_any();
        let now = DeleteParams::default().grace_period(0);
        site.case.pods().delete(&name, &now).await?;
        match program.claims() {
            true => site.case.release(&name).await,
            false => Ok(()),
        }
    })
    .await?;
    while let Ok(next) = timeout(NEARLY, binds.next("filled")).await {
        next?;
    }
    Ok(())
}

async fn create(
    site: &Site<'_>,
    program: Program,
    name: &str,
    part: &str,
    index: usize,
) -> Result<()> {
    let size = site.size(index);
    let pod = site.case.pod(name);
    let pod = pod.node_selector(PART, part);
    if program.claims() {
        let mib = (size.mib < CARDS[0]).then_some(size.mib);
        site.case.claim(name, size.gpus, mib).await?;
    }
    let pod = program.request(pod, name, size);
    let pod = pod
        .requests("cpu", &format!("{}m", size.cpu_milli))
        .requests("memory", &format!("{}Mi", size.ram_mib));
    pod.create(&site.case.client).await?;
    Ok(())
}

/// The pods of this name.
async fn pods(site: &Site<'_>, program: Program, name: &str) -> Result<Vec<Pod>> {
    let pods: Api<Pod> = site.case.pods();
    let mut pods = pods.list(&ListParams::default()).await?.items;
    pods.retain(|pod| pod.name_any().starts_with(name));
    if program.claims() {
        dra::note(&site.case, &mut pods).await?;
    }
    Ok(pods)
}
