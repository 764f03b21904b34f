//! A cluster in files.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use gpustow_api::PodGroup;
use k8s_openapi::Resource as _;
use serde::Deserialize as _;
use serde_json::Value;

use super::{Lists, cluster, device_class};
use crate::Error;
use crate::cluster::Cluster;
use crate::system::Seen;

/// Reads a file, or all JSON and YAML files of a folder.
pub(crate) fn read(path: &Path, resource: &str) -> Result<Cluster, Error> {
    Ok(cluster(read_lists(path)?, resource))
}

/// When a file, or the youngest of a folder, was written last.
pub(crate) fn written(path: &Path) -> Option<SystemTime> {
    let files = files(path).ok()?;
    let times = files
        .iter()
        .filter_map(|file| fs::metadata(file).ok()?.modified().ok());
    times.max()
}

/// The file, or all JSON and YAML files of the folder.
fn files(path: &Path) -> Result<Vec<PathBuf>, Error> {
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let known = |path: &PathBuf| {
        path.extension()
            .is_some_and(|it| it == "json" || it == "yaml" || it == "yml")
    };
    let paths = || -> io::Result<Vec<PathBuf>> {
        let entries = fs::read_dir(path)?;
        entries.map(|entry| Ok(entry?.path())).collect()
    };
    let paths = paths().map_err(unreadable(path))?;
    let mut files: Vec<_> = paths.into_iter().filter(known).collect();
    files.sort();
    match files.is_empty() {
        true => Err(Error::Empty(path.to_owned())),
        false => Ok(files),
    }
}

pub(super) fn read_lists(path: &Path) -> Result<Lists, Error> {
    let mut lists = Lists {
        configs: Some(Vec::new()),
        ..Lists::default()
    };
    for file in &files(path)? {
        let text = fs::read_to_string(file).map_err(unreadable(file))?;
        lists
            .add_text(file, &text)
            .map_err(|source| Error::Content {
                path: file.clone(),
                source,
            })?;
    }
    Ok(lists)
}

fn unreadable(path: &Path) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::Read { path, source }
}

/// The error in a file.
type Wrong = Box<dyn std::error::Error + Send + Sync>;

impl Lists {
    fn add_text(&mut self, file: &Path, text: &str) -> Result<(), Wrong> {
        if file.extension().is_some_and(|it| it == "json") {
            return self.add(serde_json::from_str(text)?);
        }
        for document in serde_yaml::Deserializer::from_str(text) {
            self.add(Value::deserialize(document)?)?;
        }
        Ok(())
    }

    fn add(&mut self, mut object: Value) -> Result<(), Wrong> {
        if let Some(Value::Array(items)) = object.get_mut("items").map(Value::take) {
            return items.into_iter().try_for_each(|item| self.add(item));
        }
        let kind = object
            .get("kind")
            .and_then(Value::as_str)
            .unwrap_or_default()
            .to_owned();
        match kind.as_str() {
            "Node" => self.nodes.push(serde_json::from_value(object)?),
            "GpuNode" => self.gpunodes.push(serde_json::from_value(object)?),
            "Pod" => self.pods.push(serde_json::from_value(object)?),
            // The coscheduling plugin's have the same kind.
            "PodGroup" if object["apiVersion"] == PodGroup::API_VERSION => {
                self.pod_groups.push(serde_json::from_value(object)?);
            }
            "ConfigMap" => {
                let config = serde_json::from_value(object)?;
                self.configs.get_or_insert_default().push(config);
            }
            "DeviceClass" => {
                let name = object["metadata"]["name"].as_str().unwrap_or_default();
                let class = device_class(&object, name.to_owned());
                self.device_classes.extend(class);
            }
            "DeviceTaintRule" | "ResourceSlice" => {
                self.fence.get_or_insert_default().push(object);
            }
            "Lease" => self.leases.push(serde_json::from_value(object)?),
            // There are two forms of Events, and an unreadable Event is ignored.
            "Event" => self.events.extend(serde_json::from_value(object).ok()),
            "Namespace" => (self.bounds.namespaces).push(serde_json::from_value(object)?),
            "ResourceQuota" => (self.bounds.quotas).push(serde_json::from_value(object)?),
            "LimitRange" => (self.bounds.ranges).push(serde_json::from_value(object)?),
            "GpuWorkload" => self.workloads.push(serde_json::from_value(object)?),
            "GpustowConfig" => self.config = Seen::Read(serde_json::from_value(object)?),
            "" => return Err("an object without a kind".into()),
            _ => {}
        }
        Ok(())
    }
}
