//! The faults of a world: in machines, replicas, the way to the API server, and the API server itself.

use std::time::Duration;

use anyhow::Result;
use rand::RngExt as _;
use tokio::time::sleep;

use crate::net::{Lags, Mode, Odds, locked};
use crate::server::Kind;
use crate::world::World;

/// kube-scheduler's Lease.
const LEASE: Duration = Duration::from_secs(15);
/// How far a watch may be behind, in milliseconds.
const BEHIND: std::ops::Range<u64> = 200..10_000;

impl World {
    /// The odds of faults on a way that begins now.
    pub(crate) fn odds(&mut self) -> Odds {
        Odds {
            refused: self.random.random_range(0..300),
            broken: self.random.random_range(0..300),
            late: self.random.random_range(0..200),
            unwatched: self.random.random_range(0..300),
            ..Odds::default()
        }
    }

    /// The same on an extender's.
    pub(crate) fn odds_of_extender(&mut self) -> Odds {
        match self.on.slow {
            true => Odds {
                slow: true,
                ..Odds::default()
            },
            false => self.odds(),
        }
    }

    /// How far each watch of an extender is behind.
    pub(crate) fn lags(&mut self) -> Lags {
        let kinds = [Kind::Pod, Kind::Node, Kind::GpuNode];
        let lags = kinds.map(|kind| {
            let behind = self.on.lags && self.random.random_bool(0.3);
            behind.then(|| {
                (
                    kind,
                    Duration::from_millis(self.random.random_range(BEHIND)),
                )
            })
        });
        lags.into_iter().flatten().collect()
    }

    /// Something happens.
    pub(crate) fn act(&mut self) -> Result<()> {
        match self.random.random_range(0..100) {
            0..45 => self.create(),
            45..60 => self.end(true),
            60..64 => self.end(false),
            64..67 => self.annotate(),
            67..70 => self.ungate(),
            70..76 => self.strangers()?,
            76..80 => self.lose(),
            80..83 => self.silence()?,
            // Where a view is to be prompt no process is cut off, and plans end by other means.
            83..97 if self.on.slow => self.give_up(),
            83..89 => self.lead(),
            89..91 => self.lag(),
            91..93 => self.mute(),
            93..95 => self.disturb(),
            95..97 => self.kill()?,
            97 if self.random.random_bool(0.2) => self.restore()?,
            97 => self.ungate(),
            _ => {
                let mut server = locked(&self.server);
                server.compact();
                drop(server);
                self.tell("the API server forgets its history");
            }
        }
        Ok(())
    }

    /// The watches of one replica are behind, or catch up.
    fn lag(&mut self) {
        let (number, lags) = (
            self.random.random_range(0..self.replicas.len()),
            self.lags(),
        );
        self.tell(format!(
            "the watches of replica {number} are behind: {lags:?}"
        ));
        *locked(&self.replicas[number].link.lags) = lags;
    }

    /// For a while the API server refuses every write of a pod's status by one replica.
    fn mute(&mut self) {
        let number = self.random.random_range(0..self.replicas.len());
        let lasts = Duration::from_secs(self.random.random_range(1..90));
        self.tell(format!("replica {number} writes no status for {lasts:?}"));
        let link = self.replicas[number].link.clone();
        let before = link.odds();
        link.set_odds(Odds {
            mute: true,
            ..before
        });
        tokio::spawn(async move {
            sleep(lasts).await;
            link.set_odds(Odds {
                mute: false,
                ..link.odds()
            });
        });
    }

    fn strangers(&mut self) -> Result<()> {
        let mib = [0, 0, 3_000, 30_000][self.random.random_range(0..4)];
        let machine = self.machine();
        let text = format!("strangers use {mib} MiB of a card of {}", machine.name);
        machine.strangers(mib)?;
        self.tell(text);
        Ok(())
    }

    fn lose(&mut self) {
        let gone = self.random.random_bool(0.3);
        let machine = self.machine();
        machine.lose(gone);
        let text = match gone {
            true => format!("a card of {} is gone", machine.name),
            false => format!("{} has all its cards", machine.name),
        };
        self.tell(text);
    }

    /// An agent is cut off, frozen, or restarted.
    fn silence(&mut self) -> Result<()> {
        let seconds = self.random.random_range(10..400);
        let mode = [Mode::Held, Mode::Cut, Mode::Up][self.random.random_range(0..3)];
        let odds = self.odds();
        let machine = self.machine();
        let name = machine.name.clone();
        if mode == Mode::Up {
            machine.restart()?;
            machine.link.set_odds(odds);
            self.tell(format!("the agent of {name} restarts"));
            return Ok(());
        }
        let link = machine.link.clone();
        self.tell(format!("the agent of {name} is {mode:?} for {seconds} s"));
        link.set(mode);
        tokio::spawn(async move {
            sleep(Duration::from_secs(seconds)).await;
            link.set(Mode::Up);
        });
        Ok(())
    }

    /// Another replica's scheduler leads; the one before need not know it yet.
    fn lead(&mut self) {
        for kind in 0..self.on.profiles.len() {
            let next = self.random.random_range(0..self.replicas.len());
            let both = self.random.random_bool(0.3);
            self.tell(format!(
                "replica {next} leads{}{}",
                if both { " too" } else { "" },
                if kind > 0 { " in the other's pods" } else { "" },
            ));
            for (number, replica) in self.replicas.iter().enumerate() {
                let leads = &replica.schedulers[kind].leads;
                leads.send_modify(|leads| *leads = number == next || both && *leads);
            }
        }
    }

    /// One replica is frozen or cut off for a while. If it leads and does not renew its Lease, the other leads,
    /// and it hears of that later.
    fn disturb(&mut self) {
        let number = self.random.random_range(0..self.replicas.len());
        let mode = [Mode::Held, Mode::Cut][self.random.random_range(0..2)];
        let lasts = Duration::from_millis(self.random.random_range(100..90_000));
        let hears = Duration::from_millis(self.random.random_range(0..10_000));
        let (one, other) = (&self.replicas[number], &self.replicas[1 - number]);
        let link = one.link.clone();
        if link.mode() != Mode::Up {
            return;
        }
        let pairs = one.schedulers.iter().cloned();
        let pairs = pairs.zip(other.schedulers.iter().cloned());
        let mut relieved: Vec<_> = pairs.filter(|(it, _)| *it.leads.borrow()).collect();
        self.tell(format!("replica {number} is {mode:?} for {lasts:?}"));
        link.set(mode);
        let story = self.story.clone();
        tokio::spawn(async move {
            sleep(lasts.min(LEASE)).await;
            relieved.retain(|_| lasts > LEASE);
            if !relieved.is_empty() {
                story.tell(format!("replica {} leads", 1 - number));
            }
            for (_, successor) in &relieved {
                successor.leads.send_replace(true);
            }
            sleep(lasts.saturating_sub(LEASE)).await;
            if link.mode() == mode {
                link.set(Mode::Up);
            }
            sleep(hears).await;
            if !relieved.is_empty() {
                story.tell(format!("replica {number} hears that it leads no more"));
            }
            for (leader, _) in &relieved {
                leader.leads.send_replace(false);
            }
        });
    }

    /// One replica is killed and comes back.
    fn kill(&mut self) -> Result<()> {
        let number = self.random.random_range(0..self.replicas.len());
        self.replicas[number].link.set(Mode::Dead);
        if self.random.random_bool(0.3) {
            self.tell(format!("the extender of replica {number} is killed alone"));
            let (beside, health) = self.extender(number)?;
            self.replicas[number].health = health;
            self.replicas[number].link = beside.link.clone();
            for scheduler in &self.replicas[number].schedulers {
                scheduler.put_beside(beside.clone());
            }
            return Ok(());
        }
        self.tell(format!("replica {number} is killed"));
        let replica = self.replica(number)?;
        for (before, after) in self.replicas[number]
            .schedulers
            .iter()
            .zip(&replica.schedulers)
        {
            after.leads.send_replace(*before.leads.borrow());
        }
        self.replicas[number] = replica;
        Ok(())
    }

    /// etcd is restored from a backup, and the control plane restarted.
    fn restore(&mut self) -> Result<()> {
        let version = locked(&self.server).version();
        // Of machines without a Node nothing is expected, and no kubelet here creates one again.
        if version == self.built {
            return Ok(());
        }
        let back = self
            .random
            .random_range(1..200.min(version - self.built).max(2));
        self.tell(format!("etcd is restored to what it was {back} writes ago"));
        locked(&self.server).restore(version.saturating_sub(back), true);
        for number in 0..self.replicas.len() {
            self.replicas[number].link.set(Mode::Dead);
            self.replicas[number] = self.replica(number)?;
        }
        self.replicas[0].lead(true);
        Ok(())
    }
}
