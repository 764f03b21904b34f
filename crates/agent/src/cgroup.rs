//! Whose a process is, from the text of its `/proc/PID/cgroup`. Knows nothing of the cluster.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The pod and container of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    /// The pod's UID or, for a static pod, the hash of its manifest: 32 hexadecimal digits.
    pub pod: Arc<str>,
    /// The container's id; none for a process of the pod itself.
    pub container: Option<Arc<str>>,
}

/// Reads every form that kubelets, container runtimes and cgroup drivers make; `None` for a
/// process outside of pods.
///
/// The function looks for names segment by segment: a reader in its own cgroup namespace sees the path without its
/// beginning. The outermost pod is the host's. Pods that run inside a container have cgroups below it, which do not
/// matter.
#[must_use]
pub fn owner(cgroup: &str) -> Option<Owner> {
    cgroup.lines().find_map(|line| {
        // `0::<path>` or `4:memory:<path>`.
        let path = line.splitn(3, ':').nth(2)?;
        // `<slice>:cri-containerd:<id>`, where kubelet and containerd use different cgroup drivers by mistake.
        let mut segments = path.split(['/', ':']);
        let pod = segments.find_map(pod_uid)?;
        let container = segments.find_map(container_id).map(Arc::from);
        Some(Owner {
            pod: pod.into(),
            container,
        })
    })
}

/// True if this is the file system of the host's cgroups, version 2, and not a container's view of its own cgroups. The
/// root of all cgroups lacks the file `cgroup.type`. Where the node is itself a container, the folder has the kubelet's
/// cgroups.
#[must_use]
pub fn is_the_hosts(root: &Path) -> bool {
    let kubelets = || {
        let mut entries = std::fs::read_dir(root).into_iter().flatten().flatten();
        entries.any(|entry| entry.file_name().to_string_lossy().starts_with("kube"))
    };
    let has = |file: &str| root.join(file).exists();
    has("cgroup.controllers") && (!has("cgroup.type") || kubelets())
}

/// Entries of directories that are looked at for one container or pod.
const MAX_LOOKED_AT: usize = 50_000;

/// The cgroup of the container with this id: the outermost directory below `root` with the id in its name.
#[must_use]
pub fn find(root: &Path, container: &str) -> Option<PathBuf> {
    look(root, |name| {
        name.split(':').find_map(container_id) == Some(container)
    })
}

/// The cgroup of the pod whose cgroup has this name.
#[must_use]
pub fn find_pod(root: &Path, pod: &str) -> Option<PathBuf> {
    look(root, |name| pod_uid(name).as_deref() == Some(pod))
}

/// The outermost directory below `root` with such a name, outside of containers.
fn look(root: &Path, is: impl Fn(&str) -> bool) -> Option<PathBuf> {
    let mut next = VecDeque::from([root.to_owned()]);
    let mut looked = 0;
    while let Some(folder) = next.pop_front() {
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            looked += 1;
            if looked > MAX_LOOKED_AT {
                return None;
            }
            if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                continue;
            }
            let name = entry.file_name();
            let name = name.to_string_lossy();
            if is(&name) {
                return Some(entry.path());
            }
            // Cgroups that a container creates below its own are not the host's.
            if name.split(':').find_map(container_id).is_none() {
                next.push_back(entry.path());
            }
        }
    }
    None
}

/// `pod<uid>`, `kubepods-burstable-pod<uid with underscores>.slice`, `kubelet-kubepods-pod….slice`.
fn pod_uid(segment: &str) -> Option<String> {
    let name = segment.strip_suffix(".slice").unwrap_or(segment);
    let uid = name
        .strip_prefix("pod")
        .or_else(|| Some(name.rsplit_once("-pod")?.1))?;
    let uid = uid.replace('_', "-");
    let is_hex = |text: &str| text.bytes().all(|byte| byte.is_ascii_hexdigit());
    let is_uuid = uid.len() == 36
        && uid.split('-').map(str::len).eq([8, 4, 4, 4, 12])
        && uid.split('-').all(is_hex);
    (is_uuid || uid.len() == 32 && is_hex(&uid)).then_some(uid)
}

/// `<64 hexadecimal digits>` with whatever before and after: `cri-containerd-….scope`.
fn container_id(segment: &str) -> Option<&str> {
    let name = segment.strip_suffix(".scope").unwrap_or(segment);
    let id = name.rsplit('-').next()?;
    (id.len() == 64 && id.bytes().all(|byte| byte.is_ascii_hexdigit())).then_some(id)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const UID: &str = "0f1a2b3c-4d5e-6f70-8192-a3b4c5d6e7f8";
    const SYSTEMD: &str = "0f1a2b3c_4d5e_6f70_8192_a3b4c5d6e7f8";
    const HASH: &str = "0f1a2b3c4d5e6f708192a3b4c5d6e7f8";
    const ID: &str = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";

    #[test]
    fn every_form_of_a_pods_process_is_known() {
        let table: [(&str, String, &str, bool); 18] = [
            (
                "v2, systemd, containerd",
                format!(
                    "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{SYSTEMD}.slice/cri-containerd-{ID}.scope"
                ),
                UID,
                true,
            ),
            (
                "v2, systemd, guaranteed",
                format!("0::/kubepods.slice/kubepods-pod{SYSTEMD}.slice/cri-containerd-{ID}.scope"),
                UID,
                true,
            ),
            (
                "v2, systemd, CRI-O",
                format!(
                    "0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{SYSTEMD}.slice/crio-{ID}.scope"
                ),
                UID,
                true,
            ),
            (
                "v2, CRI-O with a cgroup below",
                format!("0::/kubepods.slice/kubepods-pod{SYSTEMD}.slice/crio-{ID}.scope/container"),
                UID,
                true,
            ),
            (
                "v2, systemd, docker",
                format!("0::/kubepods.slice/kubepods-pod{SYSTEMD}.slice/docker-{ID}.scope"),
                UID,
                true,
            ),
            (
                "v2, cgroupfs",
                format!("0::/kubepods/burstable/pod{UID}/{ID}"),
                UID,
                true,
            ),
            (
                "v2, cgroupfs, guaranteed",
                format!("0::/kubepods/pod{UID}/{ID}"),
                UID,
                true,
            ),
            (
                "v2, cgroupfs, CRI-O",
                format!("0::/kubepods/besteffort/pod{UID}/crio-{ID}"),
                UID,
                true,
            ),
            (
                "mismatched drivers",
                format!("0::/kubepods-burstable-pod{SYSTEMD}.slice:cri-containerd:{ID}"),
                UID,
                true,
            ),
            (
                "mismatched drivers, v1",
                format!("3:memory:/kubepods-burstable-pod{SYSTEMD}.slice:cri-containerd:{ID}"),
                UID,
                true,
            ),
            (
                "own cgroup root",
                format!(
                    "0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/kubelet-kubepods-besteffort-pod{SYSTEMD}.slice/cri-containerd-{ID}.scope"
                ),
                UID,
                true,
            ),
            (
                "private cgroup namespace",
                format!(
                    "0::/../../../kubepods-burstable.slice/kubepods-burstable-pod{SYSTEMD}.slice/cri-containerd-{ID}.scope"
                ),
                UID,
                true,
            ),
            (
                "private namespace, sibling",
                format!("0::/../../pod{UID}/{ID}"),
                UID,
                true,
            ),
            (
                "v1, cgroupfs",
                format!(
                    "12:pids:/user.slice\n11:memory:/kubepods/burstable/pod{UID}/{ID}\n1:name=systemd:/\n0::/"
                ),
                UID,
                true,
            ),
            (
                "v1, systemd",
                format!(
                    "9:cpu,cpuacct:/kubepods.slice/kubepods-pod{SYSTEMD}.slice/cri-containerd-{ID}.scope"
                ),
                UID,
                true,
            ),
            (
                "static pod",
                format!("0::/kubepods/burstable/pod{HASH}/{ID}"),
                HASH,
                true,
            ),
            (
                "the pod's own cgroup",
                format!("0::/kubepods/pod{UID}"),
                UID,
                false,
            ),
            (
                "pods in a pod",
                format!(
                    "0::/kubepods/pod{UID}/{ID}/kubepods/pod{}/{}",
                    UID.replace('0', "1"),
                    ID.replace('0', "1")
                ),
                UID,
                true,
            ),
        ];
        for (what, text, uid, in_container) in table {
            let expected = Owner {
                pod: uid.into(),
                container: in_container.then(|| Arc::from(ID)),
            };
            assert_eq!(owner(&text), Some(expected), "{what}: {text}");
        }
    }

    #[test]
    fn the_hosts_cgroups_are_told_from_a_containers_own_and_from_version_1() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        assert!(!is_the_hosts(root), "version 1, or nothing");
        std::fs::write(root.join("cgroup.controllers"), "memory\n").unwrap();
        assert!(is_the_hosts(root));
        std::fs::write(root.join("cgroup.type"), "domain\n").unwrap();
        assert!(!is_the_hosts(root), "a container's own");
        std::fs::create_dir(root.join("kubelet.slice")).unwrap();
        assert!(is_the_hosts(root), "a node that is a container");
    }

    #[test]
    fn other_processes_belong_to_no_pod() {
        for text in [
            "",
            "0::/",
            "0::/system.slice/docker.service",
            "0::/user.slice/user-1000.slice/session-1.scope",
            "0::/podman/pod",
            "0::/kubepods/burstable/pod1234/abc",
            "0::/machine.slice/libpod-00112233445566778899aabbccddeeff.scope",
            "0::/kubepods/podzzzzzzzz-4d5e-6f70-8192-a3b4c5d6e7f8/x",
            "not a cgroup",
            "0:",
        ] {
            assert_eq!(owner(text), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn no_text_breaks_it(text in "(\\PC|[\\n:/_.-]|pod|-pod|kubepods|\\.slice|[0-9a-f]{8}){0,60}") {
            let _ = owner(&text);
        }

        #[test]
        fn what_it_finds_is_in_the_text(
            uid in "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
            id in "[0-9a-f]{64}",
            before in "(/[a-z.]{0,12}){0,4}",
        ) {
            let found = owner(&format!("0::{before}/pod{uid}/{id}"));
            prop_assert_eq!(found, Some(Owner { pod: uid.as_str().into(), container: Some(id.as_str().into()) }));
        }
    }
}
