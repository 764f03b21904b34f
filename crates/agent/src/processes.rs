//! Processes of this host, as `/proc` shows them.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use crate::cgroup::{Owner, owner};

/// Whose a process is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Who {
    /// A pod's.
    Pod(Owner),
    /// The host's own.
    Host,
    /// There is no such process: it has ended, or this agent does not see the host's processes.
    Gone,
}

/// The known processes by their ids.
#[derive(Debug)]
pub struct Processes {
    proc: PathBuf,
    known: HashMap<u32, (u64, Who)>,
}

impl Processes {
    /// Looks into `proc`, the host's `/proc`.
    #[must_use]
    pub fn new(proc: PathBuf) -> Self {
        Self {
            proc,
            known: HashMap::new(),
        }
    }

    /// The owner of the process now. The start time shows whether another process has taken over the id.
    pub fn who(&mut self, pid: u32) -> Who {
        let dir = self.proc.join(pid.to_string());
        let Some(started) = started(&dir) else {
            self.known.remove(&pid);
            return Who::Gone;
        };
        if let Some((known, who)) = self.known.get(&pid)
            && *known == started
        {
            return who.clone();
        }
        let who = match std::fs::read(dir.join("cgroup")) {
            Ok(cgroup) => owner(&String::from_utf8_lossy(&cgroup)).map_or(Who::Host, Who::Pod),
            Err(_) => return Who::Gone,
        };
        self.known.insert(pid, (started, who.clone()));
        who
    }

    /// The start time, in the kernel's ticks, of the process that [`Processes::who`] last found with this id.
    #[must_use]
    pub fn started(&self, pid: u32) -> Option<u64> {
        self.known.get(&pid).map(|(started, _)| *started)
    }

    /// Forgets all other processes.
    pub fn keep(&mut self, pids: &HashSet<u32>) {
        self.known.retain(|pid, _| pids.contains(pid));
    }
}

/// When the process with this folder below `/proc` started.
pub(crate) fn started(dir: &Path) -> Option<u64> {
    let stat = std::fs::read(dir.join("stat")).ok()?;
    start_time(&String::from_utf8_lossy(&stat))
}

/// Field 22 of `/proc/PID/stat`. The second field is the program's name in parentheses, which may
/// hold anything.
fn start_time(stat: &str) -> Option<u64> {
    let (_, after_name) = stat.rsplit_once(')')?;
    after_name.split_ascii_whitespace().nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const UID: &str = "0f1a2b3c-4d5e-6f70-8192-a3b4c5d6e7f8";

    #[test]
    fn the_own_process_is_found() {
        let mut processes = Processes::new("/proc".into());
        assert_ne!(processes.who(std::process::id()), Who::Gone);
        assert_eq!(processes.who(u32::MAX), Who::Gone);
    }

    #[test]
    fn a_reused_id_is_another_process() {
        let dir = tempfile::tempdir().unwrap();
        let mut processes = Processes::new(dir.path().to_owned());
        let write = |started: u64, cgroup: &str| {
            let process = dir.path().join("7");
            std::fs::create_dir_all(&process).unwrap();
            let stat = format!("7 (a) b) 1 2) S {}{started} 0", "0 ".repeat(18));
            std::fs::write(process.join("stat"), stat).unwrap();
            std::fs::write(process.join("cgroup"), cgroup).unwrap();
        };
        assert_eq!(processes.who(7), Who::Gone);
        write(100, "0::/system.slice/x.service");
        assert_eq!(processes.who(7), Who::Host);
        write(100, &format!("0::/kubepods/pod{UID}/x"));
        assert_eq!(processes.who(7), Who::Host, "known by its start time");
        write(200, &format!("0::/kubepods/pod{UID}/x"));
        assert!(matches!(processes.who(7), Who::Pod(owner) if *owner.pod == *UID));
        processes.keep(&HashSet::new());
        std::fs::remove_dir_all(dir.path().join("7")).unwrap();
        assert_eq!(processes.who(7), Who::Gone);
    }

    #[test]
    fn a_broken_stat_is_no_process() {
        for stat in [
            "",
            ")",
            "1 (x",
            "1 (x) S",
            &format!("1 (x) S {}x", "0 ".repeat(18)),
        ] {
            assert_eq!(start_time(stat), None, "{stat}");
        }
    }
}
