//! Writes the generated manifests, or checks that they are what would be written.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use gpustow_api::manifests::generated;
use gpustow_api::names;

const MANIFESTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../manifests");
const USAGE: &str = "usage: gpustow-generate [--check | [--resource-name NAME] [--output DIR]]

Writes the GpuNode resource and the admission policies, by default into manifests.
  --check               only tell whether what is in manifests is up to date
  --resource-name NAME  the extended resource that pods ask for, in MiB
  --output DIR          a copy of manifests to write into instead";

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if args == ["--check"] {
        return check(Path::new(MANIFESTS));
    }
    let (mut resource, mut to) = (names::GPU_MEM.to_owned(), PathBuf::from(MANIFESTS));
    let mut args = args.into_iter();
    while let Some(flag) = args.next() {
        let (flag, value) = match flag.split_once('=') {
            Some((flag, value)) => (flag.to_owned(), Some(value.to_owned())),
            None => (flag, args.next()),
        };
        match (flag.as_str(), value) {
            ("--resource-name", Some(name)) => resource = name,
            ("--output", Some(dir)) => to = dir.into(),
            _ => bail!("{USAGE}"),
        }
    }
    write(&to, &resource)
}

fn write(manifests: &Path, resource: &str) -> Result<()> {
    for (file, text) in generated(resource)? {
        let path = manifests.join(file);
        let folder = path.parent().unwrap_or(manifests);
        std::fs::create_dir_all(folder)
            .and_then(|()| std::fs::write(&path, text))
            .with_context(|| format!("write {}", path.display()))?;
    }
    Ok(())
}

fn check(manifests: &Path) -> Result<()> {
    for (file, expected) in generated(names::GPU_MEM)? {
        let text = std::fs::read_to_string(manifests.join(file)).unwrap_or_default();
        let lines = text.lines().zip(expected.lines());
        let line = 1 + lines.take_while(|(old, new)| old == new).count();
        ensure!(
            text == expected,
            "manifests/{file}:{line} is stale: run `make generate`"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_committed_manifests_are_the_generated_ones() {
        check(Path::new(MANIFESTS)).unwrap();
    }

    #[test]
    fn a_stale_tree_is_told_where_and_how_to_mend() {
        let error = check(Path::new("/nonexistent")).unwrap_err().to_string();
        assert_eq!(
            error,
            "manifests/core/crd.yaml:1 is stale: run `make generate`"
        );
    }
}
