//! What a kustomize component below `manifests` adds to an installation: objects, and flags of the extender.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use gpustow_api::names;
use serde_json::Value;

/// What a component adds.
#[derive(Clone, Debug)]
pub struct Component {
    /// The files of its objects.
    pub manifests: Vec<PathBuf>,
    /// Flags of the extender.
    pub args: Vec<String>,
}

impl Component {
    /// Reads the component of this name.
    ///
    /// # Errors
    /// With the names that there are, if it adds no flag to the extender.
    pub fn read(repository: &Path, name: &str) -> Result<Self> {
        let names = Self::names(repository)?;
        if !names.iter().any(|it| it == name) {
            bail!(
                "{name}: no such component of the extender; there are {}",
                names.join(", ")
            );
        }
        Self::of(&repository.join("manifests").join(name))
    }

    /// The names of all components that add flags to the extender and need nothing but RBAC and policies.
    fn names(repository: &Path) -> Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in std::fs::read_dir(repository.join("manifests"))? {
            let folder = entry?.path();
            if !folder.join("kustomization.yaml").exists() {
                continue;
            }
            let component = Self::of(&folder)?;
            let is_served = |arg: &String| arg.contains("tls");
            if !component.args.is_empty() && !component.args.iter().any(is_served) {
                let name = folder.file_name().context("a folder without a name")?;
                names.push(name.to_string_lossy().into_owned());
            }
        }
        names.sort();
        Ok(names)
    }

    fn of(folder: &Path) -> Result<Self> {
        let file = folder.join("kustomization.yaml");
        let text = std::fs::read_to_string(&file).with_context(|| file.display().to_string())?;
        let whole: Value = serde_yaml::from_str(&text)?;
        let list = |key: &str| whole[key].as_array().cloned().unwrap_or_default();
        let mut args = Vec::new();
        for patch in list("patches") {
            if patch["target"]["name"] != names::SCHEDULER {
                continue;
            }
            let text = patch["patch"].as_str().context("a patch without a text")?;
            let changes: Vec<Value> = serde_yaml::from_str(text)?;
            let values = changes.iter().filter_map(|change| change["value"].as_str());
            args.extend(values.filter(|it| it.starts_with("--")).map(str::to_owned));
        }
        let resources = list("resources");
        let resources = resources.iter().filter_map(Value::as_str);
        Ok(Self {
            manifests: resources.map(|it| folder.join(it)).collect(),
            args,
        })
    }
}
