//! The memory that the pods' programs use of the simulated cards: processes in the files that the agents read, and in a
//! /proc of their own that maps each process to its pod. No program runs.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Result;
use fake_nvml::{Machine, Process};
use gpustow_api::Assignment;

/// Per cent of its request that a pod's program takes, in turn: below, at and above it, and nothing.
const USES: [u64; 5] = [60, 100, 35, 115, 0];
/// The memory that a program outside of pods uses, MiB.
const STRANGER: u64 = 3072;

pub(crate) struct Programs {
    /// A folder for each node, with the file that describes its cards.
    folder: PathBuf,
    pids: u32,
    begun: usize,
    /// By the pod's UID: the file of its node, and its processes.
    of: HashMap<String, (PathBuf, Vec<u32>)>,
}

impl Programs {
    pub(crate) fn new(folder: &Path) -> Self {
        Self {
            folder: folder.to_owned(),
            pids: 0,
            begun: 0,
            of: HashMap::new(),
        }
    }

    /// Where a node's agent finds its NVML, and the file that describes its cards.
    pub(crate) fn folder(&self, node: &str) -> PathBuf {
        self.folder.join(node)
    }

    /// The folder that the agents use as the host's /proc.
    pub(crate) fn proc(&self) -> PathBuf {
        self.folder.join("proc")
    }

    /// A process that belongs to no pod.
    pub(crate) fn stranger(&mut self) -> Result<Process> {
        self.process("0::/system.slice/stranger.service", STRANGER)
    }

    /// The pod's program begins on its cards.
    pub(crate) fn begin(&mut self, uid: &str, node: &str, assignment: &Assignment) -> Result<()> {
        let share = USES[self.begun % USES.len()];
        self.begun += 1;
        if share == 0 {
            return Ok(());
        }
        let file = self.folder(node).join(fake_nvml::FILE);
        let mut machine = Machine::read(&file)?;
        let mut pids = Vec::new();
        for (uuid, mib) in &assignment.charges {
            if let Some(at) = machine.gpus.iter().position(|gpu| *gpu.uuid == **uuid) {
                let cgroup = format!("0::/kubepods/pod{uid}/main");
                let process = self.process(&cgroup, mib.0 * share / 100)?;
                pids.push(process.pid);
                machine.gpus[at].processes.push(process);
            }
        }
        machine.write(&file)?;
        self.of.insert(uid.to_owned(), (file, pids));
        Ok(())
    }

    /// The pod's program has ended.
    pub(crate) fn end(&mut self, uid: &str) -> Result<()> {
        let Some((file, pids)) = self.of.remove(uid) else {
            return Ok(());
        };
        let mut machine = Machine::read(&file)?;
        for gpu in &mut machine.gpus {
            gpu.processes.retain(|process| !pids.contains(&process.pid));
        }
        machine.write(&file)?;
        for pid in pids {
            fs::remove_dir_all(self.proc().join(pid.to_string()))?;
        }
        Ok(())
    }

    fn process(&mut self, cgroup: &str, mib: u64) -> Result<Process> {
        self.pids += 1;
        let folder = self.proc().join(self.pids.to_string());
        fs::create_dir_all(&folder)?;
        // Field 22 is the time at which it began.
        let stat = format!(
            "{} (program) S {}{} 0",
            self.pids,
            "0 ".repeat(18),
            self.pids
        );
        fs::write(folder.join("stat"), stat)?;
        fs::write(folder.join("cgroup"), cgroup)?;
        Ok(Process {
            pid: self.pids,
            used_mib: Some(mib),
            ..Process::default()
        })
    }
}
