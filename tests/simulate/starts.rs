//! Inference servers that share GPUs and measure free memory while they start. With `start: alone` none fails, and the
//! last is Ready before the last of the servers that start as they come.

use std::time::Duration;

use anyhow::{Result, ensure};
use serde_json::Value;
use tokio::time::{Instant, sleep};

use crate::machine::server;
use crate::net::{NAMESPACE, locked};
use crate::on_paused_time;
use crate::scheduler::name;
use crate::server::Kind;
use crate::story::Story;
use crate::switches::Switches;
use crate::world::{World, key};

/// GPUs of each of two nodes, and servers that fit on all of them together.
const GPUS: usize = 2;
const SERVERS: usize = 20;
const MIB: u64 = 16_000;
const SECOND: Duration = Duration::from_secs(1);
/// After this time the test does not wait for servers that are not Ready.
const PATIENCE: Duration = Duration::from_secs(300);
/// Servers that start alone do so in so many worlds, and the others, which take longer, in one.
const ROUNDS: u64 = 3;

/// The disturbance while the servers start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Meanwhile {
    Nothing,
    AgentRestarts,
    ServersAreKilled,
    OtherReplicaTakesOver,
    NodeReturns,
}

const ALL: [Meanwhile; 5] = [
    Meanwhile::Nothing,
    Meanwhile::AgentRestarts,
    Meanwhile::ServersAreKilled,
    Meanwhile::OtherReplicaTakesOver,
    Meanwhile::NodeReturns,
];

/// Starts that failed, servers that are Ready in the end, and when the last of them was.
#[derive(Clone, Copy, Debug)]
struct Outcome {
    failed: usize,
    ready: usize,
    after: Duration,
}

fn is_ready(pod: &Value) -> bool {
    let conditions = pod["status"]["conditions"].as_array();
    let mut conditions = conditions.into_iter().flatten();
    conditions.any(|it| it["type"] == "Ready" && it["status"] == "True")
}

/// A Deployment is scaled from 0 to 20.
async fn scaled(seed: u64, alone: bool, meanwhile: Meanwhile) -> Result<Outcome> {
    let mut world = World::new(seed, Switches::quiet(), Story::new())?;
    for number in 0..2 {
        world.add_machine(number, GPUS)?;
    }
    world.staff()?;
    for _ in 0..10 {
        world.live(true)?;
        sleep(SECOND).await;
    }
    let create = |world: &World, name: &str| {
        let made = locked(&world.server).create(Kind::Pod, NAMESPACE, server(name, MIB, alone));
        made.map_err(|refusal| anyhow::anyhow!("{refusal:?}"))
    };
    for number in 0..SERVERS {
        create(&world, &format!("server-{number}"))?;
    }
    let began = Instant::now();
    loop {
        world.live(true)?;
        sleep(SECOND).await;
        world.check()?;
        if began.elapsed().as_secs() == 30 {
            happen(&mut world, meanwhile, &create)?;
        }
        let ready = {
            let server = locked(&world.server);
            server.all(Kind::Pod).filter(|pod| is_ready(pod)).count()
        };
        let after = began.elapsed();
        if ready == SERVERS || after >= PATIENCE {
            let failed = world.machines.iter().map(|it| it.failed).sum();
            return Ok(Outcome {
                failed,
                ready,
                after,
            });
        }
    }
}

fn happen(
    world: &mut World,
    what: Meanwhile,
    create: &impl Fn(&World, &str) -> Result<std::sync::Arc<Value>>,
) -> Result<()> {
    match what {
        Meanwhile::Nothing => {}
        Meanwhile::AgentRestarts => world.machines[0].restart()?,
        Meanwhile::ServersAreKilled => world.machines.iter_mut().for_each(|it| it.kill_server()),
        Meanwhile::OtherReplicaTakesOver => {
            world.replicas[0].lead(false);
            world.replicas[1].lead(true);
        }
        Meanwhile::NodeReturns => {
            let gone: Vec<String> = {
                let server = locked(&world.server);
                let here = server
                    .all(Kind::Pod)
                    .filter(|pod| pod["spec"]["nodeName"] == "n1");
                here.map(|pod| name(pod)).collect()
            };
            for name in gone {
                locked(&world.server).end(key(Kind::Pod, &name));
                create(world, &format!("{name}-again"))?;
            }
        }
    }
    Ok(())
}

#[test]
fn of_300_servers_that_start_alone_none_fails_and_the_last_is_ready_before_the_last_of_others()
-> Result<()> {
    println!("| meanwhile | start | failed starts | Ready | last Ready after, in s |");
    println!("|---|---|---|---|---|");
    let mut began = 0;
    for meanwhile in ALL {
        let play =
            |seed, alone| on_paused_time(seed, async || scaled(seed, alone, meanwhile).await);
        let beside = play(0, false)?;
        let row = |start: &str, it: Outcome| {
            let (failed, ready, after) = (it.failed, it.ready, it.after.as_secs());
            println!("| {meanwhile:?} | {start} | {failed} | {ready} of {SERVERS} | {after} |");
        };
        row("beside", beside);
        ensure!(
            beside.failed > 0,
            "{meanwhile:?}: shows nothing that is to be prevented"
        );
        for seed in 0..ROUNDS {
            let alone = play(seed, true)?;
            row("alone", alone);
            began += SERVERS;
            ensure!(
                alone.failed == 0 && alone.ready == SERVERS,
                "{meanwhile:?}: {alone:?}"
            );
            ensure!(
                alone.after <= beside.after,
                "{meanwhile:?}: {alone:?} and {beside:?}"
            );
        }
    }
    println!("{began} servers that start alone");
    Ok(())
}
