//! Hours of real faults: a real control plane, two machines of ours, nodes and pods that come and go, while processes are
//! killed and frozen, networks cut, stores filled and clocks stepped, by a seed. Cards are looked at throughout.

mod faults;
mod features;
mod load;
mod machine;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use clap::Parser;
use gpustow_testkit::{
    Binds, Case, ControlPlane, Options, Webhook, at_once, built, kubernetes_minor, quantiles,
    since, sorted,
};
use tokio::time::sleep;

use faults::{Builds, Happened, Ours, Theirs};
use load::{CARDS, Story};
use machine::Machine;

/// A process that ended by itself is started again after about so long, and the sizes of ours are taken as often.
const TEND_EVERY: Duration = Duration::from_secs(5);
/// Requests at once.
const WIDTH: usize = 16;

/// Torture gpustow on a real control plane.
#[derive(Clone, Parser)]
struct Args {
    /// Minutes of faults
    #[arg(long, default_value_t = 60.0)]
    minutes: f64,
    /// Draws faults and pods
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Nodes with two cards each
    #[arg(long, default_value_t = 200)]
    nodes: usize,
    /// Pods created per second, each for 20 s to 4 min
    #[arg(long, default_value_t = 4.0)]
    rate: f64,
    /// Most pods at a time
    #[arg(long, default_value_t = 700)]
    pods: usize,
    /// Set a field of the GpustowConfig, as --config 'queue: {mode: Auto}', instead of features drawn by the seed
    #[arg(long, value_name = "FIELD")]
    config: Vec<String>,
    /// No change to the earlier version and back, but features
    #[arg(long)]
    one_version: bool,
    /// The extender's binary
    #[arg(long, default_value = "target/debug/gpustow")]
    gpustow: PathBuf,
}

#[tokio::main]
async fn main() -> Result<()> {
    let mut args = Args::parse();
    built(&args.gpustow, "cargo build --bin gpustow")?;
    ensure!(
        args.rate > 0.0 && args.nodes > 0,
        "give a rate and a number of nodes above 0"
    );
    args.one_version |= !features::changes_version(args.seed);
    if args.one_version && args.config.is_empty() {
        args.config = features::draw(args.seed);
    }
    eprintln!("the configuration has {:?}", args.config);
    let builds = match args.one_version {
        true => Builds::one(&args.gpustow),
        false => Builds::both(&args.gpustow).await?,
    };
    eprintln!("starting the control plane and {} nodes", args.nodes);
    let cluster = ControlPlane::start(Options::default()).await?;
    cluster
        .kubectl(&["apply", "-k", "manifests/overlays/queue"])
        .await?;
    Webhook::keep(&cluster, &args.gpustow).await?;
    let clock = machine::clock(cluster.dir())?;
    let mut machines = Vec::new();
    for name in ["left", "right"] {
        let machine = Machine::start(&cluster, name, &args.gpustow, &args.config, &clock);
        machines.push(machine.await?);
    }
    let case = Case::new(&cluster, "torture").await?;
    let nodes = (0..args.nodes).map(|node| case.node(&format!("n{node:04}"), &CARDS));
    let nodes: Arc<Vec<_>> = Arc::new(nodes.collect());
    at_once(WIDTH, nodes.iter(), |node| node.create(&case.client)).await?;

    let story = Arc::new(Story::default());
    let mut sizes = Vec::new();
    let mut happened = Vec::new();
    let began = Instant::now();
    let end = began + Duration::from_secs_f64(args.minutes * 60.0);
    let binds = Binds::of(case.pods(), None).await?;
    let watching = tokio::spawn(load::watch(binds, story.clone()));
    let reporting = tokio::spawn(load::heartbeats(case.clone(), nodes.clone()));
    let looking = tokio::spawn(load::looks(case.clone(), story.clone()));
    let has_pod_groups = kubernetes_minor().await? >= 37;
    let coming = load::traffic(case.clone(), story.clone(), args.clone(), has_pod_groups);
    let coming = tokio::spawn(coming);
    {
        let ours = torture_ours(&args, &machines, &builds, began, end);
        let theirs = torture_theirs(&args, &cluster, began, end);
        let tended = tend(&machines, &mut sizes);
        tokio::select! {
            tortured = async { tokio::try_join!(ours, theirs) } => {
                let (mut ours, theirs) = tortured?;
                ours.extend(theirs);
                happened = ours;
            }
            ended = tended => ended?,
        }
    }
    eprintln!("no more faults: waiting until all that fits is bound");
    coming.abort();
    let ended = load::settle(&case).await;
    for task in [watching, reporting, looking] {
        task.abort();
    }
    report(&args, &story, &happened, &sizes, began);
    let wrong = story.wrong();
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    ended
}

/// A time between these, in seconds.
fn seconds(dice: &mut fastrand::Rng, from: f64, to: f64) -> Duration {
    Duration::from_secs_f64(from + dice.f64() * (to - from))
}

/// Prints a fault, and lets it happen.
async fn fault(
    began: Instant,
    what: &'static str,
    last: Duration,
    done: impl Future<Output = Result<()>>,
) -> Result<Happened> {
    eprintln!("{} {what}, {:.0} s", since(began), last.as_secs_f64());
    let from = Instant::now();
    done.await?;
    let to = Instant::now();
    Ok(Happened { what, from, to })
}

async fn torture_ours(
    args: &Args,
    machines: &[Machine],
    builds: &Builds,
    began: Instant,
    end: Instant,
) -> Result<Vec<Happened>> {
    let mut dice = fastrand::Rng::with_seed(args.seed ^ 0x6f75_7273);
    let mut happened = Vec::new();
    while Instant::now() < end {
        sleep(seconds(&mut dice, 2.0, 15.0)).await;
        let (what, name) = Ours::ALL[dice.usize(..Ours::ALL.len())];
        let machine = &machines[dice.usize(..machines.len())];
        let last = seconds(&mut dice, 1.0, 30.0);
        if args.one_version && what == Ours::OtherVersion {
            continue;
        }
        let _held = machine.busy.lock().await;
        let done = what.happen(machine, last, builds);
        happened.push(fault(began, name, last, done).await?);
    }
    Ok(happened)
}

async fn torture_theirs(
    args: &Args,
    cluster: &ControlPlane,
    began: Instant,
    end: Instant,
) -> Result<Vec<Happened>> {
    let mut dice = fastrand::Rng::with_seed(args.seed ^ 0x7468_6569_7273);
    let mut happened = Vec::new();
    while Instant::now() < end {
        sleep(seconds(&mut dice, 20.0, 60.0)).await;
        let (what, name) = Theirs::ALL[dice.usize(..Theirs::ALL.len())];
        let last = seconds(&mut dice, 1.0, 20.0);
        let done = what.happen(cluster, last);
        happened.push(fault(began, name, last, done).await?);
    }
    Ok(happened)
}

/// Restarts processes that ended by themselves, as a kubelet does (kube-scheduler ends when it cannot renew its Lease).
/// Records the extenders' sizes, for as long as it is polled.
async fn tend(machines: &[Machine], sizes: &mut Vec<(f64, usize)>) -> Result<()> {
    loop {
        sleep(TEND_EVERY).await;
        for machine in machines {
            if let Ok(_held) = machine.busy.try_lock() {
                machine.restart()?;
                sizes.extend(machine.size());
            }
        }
    }
}

fn report(
    args: &Args,
    story: &Story,
    happened: &[Happened],
    sizes: &[(f64, usize)],
    began: Instant,
) {
    let (created, bound, looks) = story.counts();
    println!(
        "\nseed {}, {} nodes, {:.0} min: {created} pods created, {bound} bound, {} faults; {looks} looks at all cards, \
         {} of them wrong",
        args.seed,
        args.nodes,
        args.minutes,
        happened.len(),
        story.wrong().len()
    );
    let mut kinds: BTreeMap<&str, [Vec<f64>; 3]> = BTreeMap::new();
    for one in happened {
        let (pause, next) = story.pauses(one.from, one.to);
        let lasted = one.to.duration_since(one.from);
        let next = next.unwrap_or_default();
        for (figures, figure) in kinds
            .entry(one.what)
            .or_default()
            .iter_mut()
            .zip([lasted, pause, next])
        {
            figures.push(figure.as_secs_f64());
        }
    }
    println!(
        "\nSeconds, median / worst; faults overlap, and a pause counts for each that it has part in.\n\n\
         | what | times | lasted | longest time without a bind | its end → the next bind |\n|---|---|---|---|---|"
    );
    for (what, figures) in kinds {
        let times = figures[0].len();
        let [lasted, pause, next] =
            figures.map(|it| quantiles(&sorted(it.into_iter()), [0.5, 1.0], 1));
        println!("| {what} | {times} | {lasted} | {pause} | {next} |");
    }
    let quarter = sizes.len() / 4;
    let part = |part: &[(f64, usize)]| {
        let memory = sorted(part.iter().map(|size| size.0));
        let open = sorted(part.iter().map(|size| size.1 as f64));
        let [memory, open] = [memory, open].map(|it| quantiles(&it, [0.5, 1.0], 0));
        format!("{memory} MiB, {open} descriptors")
    };
    println!(
        "\nextenders, median / most: {} in the first quarter, {} in the last; {:.0} min in all",
        part(&sizes[..quarter]),
        part(&sizes[sizes.len() - quarter..]),
        began.elapsed().as_secs_f64() / 60.0
    );
}
