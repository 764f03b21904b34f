//! CDI specifications, by which containers' runtimes find the instances that the agent made.

use std::path::PathBuf;

use gpustow_api::names;
use serde_json::{Value, json};

use super::{Card, Found, Places, Problem, write};

/// The major number of NVIDIA devices, by Linux's Documentation/admin-guide/devices.txt.
const GPUS: u32 = 195;

impl Places {
    /// The file of a pod's instance.
    pub(super) fn specification(&self, uid: &str) -> Option<PathBuf> {
        Some(self.cdi.first()?.join(format!("gpustow-mig-{uid}.json")))
    }

    /// Writes the CDI specification of a pod's instance, unless it is there.
    pub(super) fn show(
        &self,
        card: &Card<'_>,
        uid: &str,
        found: &Found,
        base: &Result<Value, Problem>,
    ) -> Result<(), Problem> {
        let Some(path) = self.specification(uid) else {
            return Ok(());
        };
        let mut nodes = Vec::new();
        let minor = card.minor.unwrap_or_default();
        // With its number: where the driver is in a container, the host lacks such a file.
        nodes.push(json!({
            "path": format!("/dev/nvidia{minor}"), "type": "c", "major": GPUS, "minor": minor,
        }));
        let minors = self.proc.join("driver/nvidia-caps/mig-minors");
        let text = std::fs::read_to_string(&minors).unwrap_or_default();
        let (gi, major) = (found.id, self.major());
        for name in [
            format!("gpu{minor}/gi{gi}/access"),
            format!("gpu{minor}/gi{gi}/ci0/access"),
        ] {
            let line = text.lines().find_map(|line| line.strip_prefix(&name));
            let number: Option<u32> = line.and_then(|it| it.trim().parse().ok());
            let number = number.ok_or_else(|| Problem::NoDevice(minors.clone()))?;
            let mut node = json!({ "path": format!("/dev/nvidia-caps/nvidia-cap{number}") });
            if let Some(major) = major {
                node["type"] = json!("c");
                node["major"] = json!(major);
                node["minor"] = json!(number);
            }
            nodes.push(node);
        }
        let specification = json!({
            "cdiVersion": "0.5.0",
            "kind": names::CDI_MIG,
            "devices": [{ "name": uid, "containerEdits": { "deviceNodes": nodes } }],
            "containerEdits": base.as_ref().map_err(Problem::clone)?,
        });
        let text = std::fs::read_to_string(&path).ok();
        let there: Option<Value> = text.and_then(|text| serde_json::from_str(&text).ok());
        match there == Some(specification.clone()) {
            true => Ok(()),
            false => write(&path, &specification),
        }
    }

    /// The number of the devices through which the driver hands out instances.
    fn major(&self) -> Option<u32> {
        let text = std::fs::read_to_string(self.proc.join("devices")).ok()?;
        let mut pairs = text.lines().filter_map(|line| line.trim().split_once(' '));
        pairs
            .find(|(_, name)| *name == "nvidia-caps")?
            .0
            .parse()
            .ok()
    }

    /// The edits that every container with a GPU of NVIDIA gets, from the toolkit's own file: libraries, control
    /// devices and hooks.
    pub(super) fn base(&self) -> Result<Value, Problem> {
        let folders = self.cdi.iter();
        let files = folders.filter_map(|folder| std::fs::read_dir(folder).ok());
        let files = files.flatten().filter_map(|entry| Some(entry.ok()?.path()));
        let mut found: Vec<(PathBuf, Value)> = files
            .filter_map(|path| {
                let text = std::fs::read_to_string(&path).ok()?;
                let value: Value = serde_yaml::from_str(&text).ok()?;
                (value["kind"] == "nvidia.com/gpu").then_some((path, value))
            })
            .collect();
        found.sort_by(|one, other| one.0.cmp(&other.0));
        let folders = || {
            let folders = self.cdi.iter().map(|it| it.display().to_string());
            folders.collect::<Vec<_>>().join(" and ")
        };
        let first = found.into_iter().next();
        let (_, mut value) = first.ok_or_else(|| Problem::NoBase(folders()))?;
        Ok(value["containerEdits"].take())
    }
}
