//! Finds out whether this process itself is under a limit of GPU memory. Then the driver (615 and later) shows it the
//! limit instead of the card's size. The agent must not report figures of such a driver.

use std::path::Path;

/// The variables from which NVIDIA's container toolkit (1.20.1 and later) makes a limit.
const VARIABLES: [&str; 2] = ["NVIDIA_GPU_MEMORY_LIMIT", "NVIDIA_GPU_MEMORY_REQUEST"];

/// The cause of this process's limit, in words; none without a limit.
pub(crate) fn own_limit() -> Option<String> {
    let cgroup = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    limit(
        |name| std::env::var_os(name).is_some(),
        Path::new("/sys/fs/cgroup"),
        &cgroup,
    )
}

/// As above, for a process with these variables and this `/proc/PID/cgroup`, below `root`.
fn limit(is_set: impl Fn(&str) -> bool, root: &Path, cgroup: &str) -> Option<String> {
    if let Some(name) = VARIABLES.into_iter().find(|name| is_set(name)) {
        return Some(format!("its environment has {name}"));
    }
    let path = cgroup.lines().find_map(|line| line.strip_prefix("0::"))?;
    let file = root.join(path.trim_start_matches('/')).join("dmem.max");
    // No such file: no such controller.
    let limits = std::fs::read_to_string(&file).ok()?;
    let limited = |line: &&str| line.starts_with("nvidia/") && !line.trim_end().ends_with(" max");
    let line = limits.lines().find(limited)?;
    Some(format!("{} says {line}", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_found_in_the_environment_and_in_the_cgroup() {
        let dir = tempfile::tempdir().unwrap();
        let own = dir.path().join("kubepods/pod1/c");
        std::fs::create_dir_all(&own).unwrap();
        let unset = |_: &str| false;
        let cgroup = "0::/kubepods/pod1/c\n";
        assert_eq!(limit(unset, dir.path(), cgroup), None, "no such controller");
        let file = own.join("dmem.max");
        for (text, limited) in [
            ("", false),
            ("nvidia/0000:17:00.0/vidmem max\n", false),
            ("drm/0000:03:00.0/vram0 1048576\n", false),
            (
                "nvidia/0000:17:00.0/vidmem max\nnvidia/0000:65:00.0/vidmem 8388608\n",
                true,
            ),
        ] {
            std::fs::write(&file, text).unwrap();
            assert_eq!(
                limit(unset, dir.path(), cgroup).is_some(),
                limited,
                "{text}"
            );
        }
        assert_eq!(limit(unset, dir.path(), "0::/\n"), None, "another cgroup");
        let set = |name: &str| name == "NVIDIA_GPU_MEMORY_LIMIT";
        let found = limit(set, dir.path(), "0::/\n").unwrap();
        assert!(found.contains("NVIDIA_GPU_MEMORY_LIMIT"), "{found}");
    }

    #[test]
    fn tests_run_without_a_limit() {
        assert_eq!(own_limit(), None);
    }
}
